"""Token windows to judge on: from the beginning of documents, or spread over them."""

from __future__ import annotations

import numpy as np

from kvjax.lm import LM
from kvjax.transfer.moments import CalibrationError
from kvjax.typing import Texts


def beginnings(texts: Texts, lm: LM, length: int, count: int) -> np.ndarray:
    """[N, length] int32: the first tokens of the first `count` documents that have as many.

    Raises:
      CalibrationError: there are none.
    """
    rows: list[np.ndarray] = []
    for i in range(len(texts)):
        if len(rows) == count:
            break
        ids = _encode(lm, texts[i])
        if len(ids) >= length:
            rows.append(ids[:length])
    if not rows:
        raise CalibrationError(f"none of {len(texts)} documents has {length} tokens")
    return np.stack(rows)


def spread(texts: Texts, lm: LM, length: int, count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """([N, length] int32, [N] document of each): windows that do not overlap, `count` drawn from all there are, in
    random order. Each begins with what the tokenizer puts before a text, as a text of its own would.

    Raises:
      CalibrationError: fewer than `count` windows.
    """
    lead = np.asarray(lm.tokenizer.encode("") if lm.tokenizer else [], np.int32)
    step = length - len(lead)
    rows, origin = [], []
    for i in range(len(texts)):
        ids = _encode(lm, texts[i])[len(lead) :]
        for at in range(0, len(ids) - step + 1, step):
            rows.append(np.concatenate([lead, ids[at : at + step]]))
            origin.append(i)
    if len(rows) < count:
        raise CalibrationError(
            f"{len(rows)} windows of {length} tokens in {len(texts)} documents, {count} are wanted"
        )
    chosen = np.random.default_rng(seed).permutation(len(rows))[:count]
    return np.stack([rows[i] for i in chosen]), np.asarray([origin[i] for i in chosen])


def _encode(lm: LM, text: str) -> np.ndarray:
    if lm.tokenizer is None:
        raise CalibrationError(f"{lm.id} has no tokenizer")
    return np.asarray(lm.tokenizer.encode(text), np.int32)
