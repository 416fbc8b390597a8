"""An interpolated 5-gram model over token ids, the baseline a language model has to beat.

Modified Kneser-Ney smoothing with three discounts an order (Chen & Goodman, "An empirical study of smoothing
techniques for language modeling", Computer Speech & Language 13, 1999; lower orders count distinct left neighbours, as
in Kneser & Ney, "Improved backing-off for m-gram language modeling", ICASSP 1995). The unigrams are interpolated with
the uniform distribution, so every token of the vocabulary has a probability under every context.

An n-gram is one integer, its tokens packed with the last in the lowest bits: sorting brings n-grams with the same
context together, shifting drops the last token and masking the first. Every document is preceded by order - 1 times
the token it begins with (bos), so its first tokens have contexts of full length too; bos itself is not predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

ORDER = 5
FALLBACK = (0.5, 1.0, 1.5)  # discounts where counts of counts say nothing


class NgramError(ValueError):
    """Tokens or an order this model cannot be fitted to; the message says which."""


@dataclasses.dataclass(frozen=True)
class Level:
    """All n-grams of one order. Both arrays of keys are sorted; contexts are keys without their last token.

    own: [N] discounted share of the n-gram among its context's. rest: [C] what the discounts leave for lower orders.
    discounts: subtracted from counts of 1, of 2, and of 3 or more.
    """

    keys: np.ndarray
    own: np.ndarray
    contexts: np.ndarray
    rest: np.ndarray
    discounts: tuple[float, float, float]


class KneserNey:
    """A fitted model: `levels[n - 1]` holds the n-grams. Probabilities are float64."""

    def __init__(self, levels: Sequence[Level], vocab: int) -> None:
        self.levels, self.vocab = tuple(levels), vocab

    @property
    def order(self) -> int:
        return len(self.levels)

    @classmethod
    def fit(
        cls, documents: Iterable[Sequence[int] | np.ndarray], vocab: int, order: int = ORDER
    ) -> KneserNey:
        """The model of `documents`, each an array of ids that begins with bos.

        20 million tokens take about a gigabyte and less than a minute.

        Raises:
          NgramError: nothing to predict, an id outside 0..vocab - 1, or n-grams that do not fit 64 bits.
        """
        width = _width(vocab)
        if order < 1 or order * width > 64:
            raise NgramError(
                f"order {order} over {vocab} tokens: 1 to {64 // width} of them fit a 64-bit integer"
            )
        keys = np.concatenate([np.empty(0, np.uint64), *(pack(d, vocab, order) for d in documents)])
        if not len(keys):
            raise NgramError("no document has a token after its first one")
        keys.sort()
        keys, counts = _runs(keys)
        levels = [_level(keys, counts, width)]
        for n in range(order - 1, 0, -1):
            shorter = keys & _mask(n * width)  # without the first token: once for each distinct one
            shorter.sort()
            keys, counts = _runs(shorter)
            levels.append(_level(keys, counts, width))
        return cls(levels[::-1], vocab)

    def probabilities(self, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[N]: P(tokens[i] | contexts[i]) of tokens [N] after contexts [N, order - 1], the nearest token last.

        Raises:
          NgramError: an id outside the vocabulary, or contexts of another length.
        """
        grams = np.concatenate([np.asarray(contexts), np.asarray(tokens)[:, None]], axis=1)
        if grams.shape[1] != self.order:
            raise NgramError(f"contexts of {grams.shape[1] - 1} tokens; the model's have {self.order - 1}")
        _check(grams, self.vocab)
        return self._probabilities(_join(grams.T, _width(self.vocab)))

    def nats(self, document: Sequence[int] | np.ndarray) -> np.ndarray:
        """[n] of a document of n + 1 ids, the first of which is bos: -log P of each id after the first.

        Raises:
          NgramError: an id outside the vocabulary.
        """
        return -np.log(self._probabilities(pack(document, self.vocab, self.order)))

    def _probabilities(self, keys: np.ndarray) -> np.ndarray:
        width = _width(self.vocab)
        p = np.full(len(keys), 1 / self.vocab)
        for n, level in enumerate(self.levels, 1):
            gram = keys & _mask(n * width)
            own, _ = _look_up(level.keys, level.own, gram)
            rest, seen = _look_up(level.contexts, level.rest, gram >> np.uint64(width))
            p = np.where(seen, own + rest * p, p)
        return p


def pack(document: Sequence[int] | np.ndarray, vocab: int, order: int = ORDER) -> np.ndarray:
    """[n] uint64 of a document of n + 1 ids: for every id after the first, the n-gram that ends with it.

    Raises:
      NgramError: an id outside the vocabulary.
    """
    ids = np.asarray(document)
    if len(ids) < 2:
        return np.empty(0, np.uint64)
    _check(ids, vocab)
    padded = np.concatenate([np.repeat(ids[:1], max(order - 2, 0)), ids[max(0, 2 - order) :]])
    count = len(ids) - 1
    return _join([padded[i : i + count] for i in range(order)], _width(vocab))


def discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Chen and Goodman's estimates from how many n-grams occur once, twice, three and four times; `FALLBACK` where
    one of these numbers is zero or an estimate is no discount (few n-grams, or unigrams that are all frequent)."""
    once, twice, thrice, four = (int((counts == i).sum()) for i in (1, 2, 3, 4))
    if not (once and twice and thrice and four):
        return FALLBACK
    y = once / (once + 2 * twice)
    found = (1 - 2 * y * twice / once, 2 - 3 * y * thrice / twice, 3 - 4 * y * four / thrice)
    return found if all(0 < d < i for i, d in enumerate(found, 1)) else FALLBACK


def _level(keys: np.ndarray, counts: np.ndarray, width: int) -> Level:
    found = discounts(counts)
    taken = np.asarray((0.0, *found))[np.minimum(counts, 3)]
    contexts, sizes = _runs(keys >> np.uint64(width))
    starts = np.cumsum(sizes) - sizes
    totals = np.add.reduceat(counts, starts)
    rest = np.add.reduceat(taken, starts) / totals
    return Level(keys, (counts - taken) / np.repeat(totals, sizes), contexts, rest, found)


def _runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of a sorted array and how often each occurs."""
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return ordered[starts], np.diff(starts, append=len(ordered))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values where a key is `wanted`, else 0; whether it is there)."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    there = keys[at] == wanted
    return np.where(there, values[at], 0.0), there


def _join(columns: Sequence[np.ndarray] | np.ndarray, width: int) -> np.ndarray:
    key = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        key = (key << np.uint64(width)) | column.astype(np.uint64)
    return key


def _width(vocab: int) -> int:
    return max(1, (vocab - 1).bit_length())


def _mask(bits: int) -> np.uint64:
    return np.uint64(2**bits - 1)


def _check(ids: np.ndarray, vocab: int) -> None:
    if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < vocab):
        raise NgramError(f"ids {int(ids.min())} to {int(ids.max())} are not all in 0..{vocab - 1}")
