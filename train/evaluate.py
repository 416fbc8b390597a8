"""Bits per byte of a language model over whole documents, with what documents alone could have moved the figure by,
and of what it is compared with on the same bytes.

Every document begins with the bos its tokenizer adds, which is not scored; nor is the end of a document. A document
longer than the context is scored in windows that move on by half of it: each token is scored once, behind the whole
document before it or behind at least half a context.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.documents import Documents
from kvjax.lm import LM
from kvjax.models import Model
from kvjax.stats import bootstrap
from kvjax.tokenizer import Tokenizer
from kvjax.typing import Array, Float, Int, Params, Texts
from train.compress import Compressed, compress
from train.head import ROWS
from train.kneser_ney import KneserNey

CONTEXT = 2048  # tokens of a window


class EvaluateError(ValueError):
    """A model, tokenizer or document that cannot be scored; the message names it."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """What documents cost under some code. bits, bytes: [N] float64 and int64, of every document."""

    bits: np.ndarray
    bytes: np.ndarray

    def __post_init__(self) -> None:
        if self.bits.shape != self.bytes.shape or self.bits.ndim != 1 or not len(self.bits):
            raise EvaluateError(
                f"bits {self.bits.shape} and bytes {self.bytes.shape} are not of the same documents"
            )

    @property
    def bits_per_byte(self) -> float:
        return float(self.bits.sum() / self.bytes.sum())

    def interval(self, *, seed: int = 0) -> tuple[float, float]:
        """95 % interval of `bits_per_byte` by drawing documents with replacement."""
        _, low, high = self._ratio(self.bits, seed)
        return low, high

    def minus(self, other: Scores, *, seed: int = 0) -> tuple[float, float, float]:
        """(difference in bits per byte, its 95 % interval): the same documents are drawn for both.

        Raises:
          EvaluateError: the two are not of the same documents.
        """
        if not np.array_equal(self.bytes, other.bytes):
            raise EvaluateError("a difference needs scores of the same documents in the same order")
        return self._ratio(self.bits - other.bits, seed)

    def _ratio(self, bits: np.ndarray, seed: int) -> tuple[float, float, float]:
        return bootstrap({"bits": bits, "bytes": self.bytes}, lambda m: m["bits"] / m["bytes"], seed=seed)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A split as one tokenizer sees it. ids: per document, int32, beginning with bos. bytes: [N] int64, in UTF-8."""

    ids: tuple[np.ndarray, ...]
    bytes: np.ndarray

    def scores(self, nats: Sequence[float]) -> Scores:
        """The scores of documents that cost `nats`."""
        return Scores(np.asarray(nats, np.float64) / math.log(2), self.bytes)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One model on the confirmation split, beside the 5-gram over its own tokens and the compressors (by name)."""

    model: Scores
    ngram: Scores
    compressed: Mapping[str, Compressed]

    def of(self, codec: str) -> Scores:
        """A compressor's result document by document."""
        return Scores(self.compressed[codec].each, self.model.bytes)


class Confirmation:
    """The confirmation split of a corpus; what several models share is computed once."""

    def __init__(self, corpus: str | Path) -> None:
        """Raises DocumentsError: the corpus has no such split, or a damaged one."""
        self.train, self.documents = (Documents(Path(corpus) / split) for split in ("train", "confirmation"))
        self._by_tokenizer: dict[str, tuple[Encoded, Scores]] = {}

    def measure(self, lm: LM, *, context: int = CONTEXT) -> Measured:
        """
        Raises:
          EvaluateError: see `encode` and `score`; or a model without a tokenizer.
        """
        if lm.tokenizer is None:
            raise EvaluateError(f"{lm.id}: has no tokenizer")
        key = lm.tokenizer.hash
        if key not in self._by_tokenizer:
            encoded = encode(self.documents, lm.tokenizer)
            model = KneserNey.fit(encode(self.train, lm.tokenizer).ids, lm.tokenizer.vocab)
            nats = [float(model.nats(ids).sum()) for ids in encoded.ids]
            self._by_tokenizer[key] = encoded, encoded.scores(nats)
        encoded, ngram = self._by_tokenizer[key]
        return Measured(score(lm, encoded, context=context), ngram, self.compressed)

    @functools.cached_property
    def compressed(self) -> dict[str, Compressed]:
        return compress(self.documents)


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows start:end of a document's inputs; those of them before `first` were scored in the window before."""

    start: int
    first: int
    end: int


def encode(documents: Texts, tokenizer: Tokenizer) -> Encoded:
    """All documents, checked: the ids after bos decode to the text again, so every byte is scored exactly once.

    Raises:
      EvaluateError: the tokenizer adds anything but one bos, does not give a text back, or bytes are missing.
    """
    bos = tokenizer.encode("")
    if len(bos) != 1:
        raise EvaluateError(f"the tokenizer puts {bos} around a text; scoring needs one bos before it")
    ids, sizes = [], []
    for i in tqdm(range(len(documents)), "tokens", unit="document", disable=None):
        text = documents[i]
        row = tokenizer.encode(text)
        if row[0] != bos[0]:
            raise EvaluateError(f"document {i}: begins with id {row[0]}, not with bos, {bos[0]}")
        if tokenizer.decode(row[1:], skip_special=False) != text:
            raise EvaluateError(f"document {i}: decoding its tokens does not give its text back")
        ids.append(np.asarray(row, np.int32))
        sizes.append(len(text.encode()))
    total = getattr(documents, "bytes", sum(sizes))
    if sum(sizes) != total:
        raise EvaluateError(f"the documents hold {sum(sizes)} bytes of the split's {total}")
    return Encoded(tuple(ids), np.asarray(sizes, np.int64))


def windows(rows: int, context: int) -> list[Window]:
    """Windows of at most `context` inputs over a document of `rows` inputs (and as many tokens to predict)."""
    found, first = [], 0
    while first < rows:
        start = max(0, first - context // 2)
        end = min(rows, start + context)
        found.append(Window(start, first, end))
        first = end
    return found


def score(lm: LM, encoded: Encoded, *, context: int = CONTEXT) -> Scores:
    """Bits of every document under `lm`, by the model it was loaded as (its dtype included).

    context: tokens of a window, at most the model's positions; windows are padded to whole quarters of it and
      batched up to two contexts of tokens, so at most four programs are compiled.

    Raises:
      EvaluateError: a context the model has no positions for, or that cannot be divided; a model on a mesh; an id
        outside its vocabulary; a loss that is not finite.
    """
    if context < 4 or context % 4 or context > (lm.config.max_positions or context):
        raise EvaluateError(
            f"context {context} is not a multiple of 4 up to the model's max_position_embeddings, "
            f"{lm.config.max_positions}"
        )
    if lm.model.rules.mesh is not None:
        raise EvaluateError(f"{lm.id} is spread over a mesh; load it on one device to score documents")
    if max(int(ids.max()) for ids in encoded.ids) >= lm.config.vocab:
        raise EvaluateError(f"{lm.id}: the documents hold ids beyond its vocabulary of {lm.config.vocab}")
    sizes = [context * quarters // 4 for quarters in (1, 2, 3, 4)]
    work: dict[int, list[tuple[int, Window]]] = {size: [] for size in sizes}
    for i, ids in enumerate(encoded.ids):
        for window in windows(len(ids) - 1, context):
            work[next(s for s in sizes if s >= window.end - window.start)].append((i, window))
    nats = np.zeros(len(encoded.ids))
    scored = np.zeros(len(encoded.ids), np.int64)
    total = sum(len(ids) - 1 for ids in encoded.ids)
    with tqdm(total=total, desc="score", unit="token", disable=None) as bar:
        for size, items in work.items():
            rows = 2 * context // size
            for at in range(0, len(items), rows):
                batch = items[at : at + rows]
                losses = _batch(lm, encoded, batch, (rows, size))
                for (i, window), loss in zip(batch, losses):
                    kept = loss[window.first - window.start : window.end - window.start]
                    nats[i] += kept.sum(dtype=np.float64)
                    scored[i] += len(kept)
                    bar.update(len(kept))
    assert scored.tolist() == [len(ids) - 1 for ids in encoded.ids], "a token was left out or scored twice"
    if not np.isfinite(nats).all():
        raise EvaluateError(
            f"{lm.id}: the loss of document {int(np.argmin(np.isfinite(nats)))} is not finite"
        )
    return encoded.scores(list(nats))


def _batch(
    lm: LM, encoded: Encoded, batch: Sequence[tuple[int, Window]], shape: tuple[int, int]
) -> np.ndarray:
    """Losses [rows, size]; what is padded is computed and not looked at: no row sees what follows it."""
    tokens, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, (i, window) in enumerate(batch):
        ids = encoded.ids[i]
        tokens[row, : window.end - window.start] = ids[window.start : window.end]
        labels[row, : window.end - window.start] = ids[window.start + 1 : window.end + 1]
    return np.asarray(_losses(lm.model, lm.params, tokens, labels))


@functools.partial(jax.jit, static_argnums=0)
def _losses(
    model: Model, params: Params, tokens: Int[Array, "B T"], labels: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """-log P(label) in nats of every row, float32; logits are made a few rows at a time."""
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, head = model.hidden(params, tokens, pos)

    def some(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = inputs
        logits = jax.lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]

    count = max(1, labels.size // ROWS)
    while labels.size % count:
        count -= 1
    parts = hidden.reshape(count, -1, hidden.shape[-1]), labels.reshape(count, -1)
    return jax.lax.map(some, parts).reshape(labels.shape)
