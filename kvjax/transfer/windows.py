"""Token windows to judge on: from the beginning of documents, or spread over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.lm import LM
from kvjax.transfer.moments import CalibrationError
from kvjax.typing import Texts


def encoded(texts: Texts, lm: LM) -> list[np.ndarray]:
    """The tokens of each document, int32, with what the tokenizer puts before a text."""
    if lm.tokenizer is None:
        raise CalibrationError(f"{lm.id} has no tokenizer")
    return [np.asarray(lm.tokenizer.encode(texts[i]), np.int32) for i in range(len(texts))]


def beginnings(documents: Sequence[np.ndarray], length: int, count: int) -> np.ndarray:
    """[N, length] int32: the first tokens of the first `count` documents that have as many.

    Raises:
      CalibrationError: there are none.
    """
    rows = [ids[:length] for ids in documents if len(ids) >= length][:count]
    if not rows:
        raise CalibrationError(f"none of {len(documents)} documents has {length} tokens")
    return np.stack(rows)


def spread(
    documents: Sequence[np.ndarray], lead: np.ndarray, length: int, count: int, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """([N, length] int32, [N] document of each): windows that do not overlap, `count` drawn from all there are, in
    random order. Each begins with `lead`, what the tokenizer puts before a text, as a text of its own would.

    Raises:
      CalibrationError: fewer than `count` windows.
    """
    step = length - len(lead)
    rows, origin = [], []
    for i, ids in enumerate(documents):
        ids = ids[len(lead) :]
        for at in range(0, len(ids) - step + 1, step):
            rows.append(np.concatenate([lead, ids[at : at + step]]))
            origin.append(i)
    if len(rows) < count:
        raise CalibrationError(
            f"{len(rows)} windows of {length} tokens in {len(documents)} documents, {count} are wanted"
        )
    chosen = np.random.default_rng(seed).permutation(len(rows))[:count]
    return np.stack([rows[i] for i in chosen]), np.asarray([origin[i] for i in chosen])
