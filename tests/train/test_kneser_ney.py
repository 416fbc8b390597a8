"""The 5-gram baseline: a distribution under every context, equal to the textbook's sums, with the textbook's
discounts."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from train.kneser_ney import FALLBACK, KneserNey, NgramError, discounts, pack


class Dictionaries:
    """The same model, one n-gram at a time, as the papers write it."""

    def __init__(self, documents: list[list[int]], vocab: int, order: int) -> None:
        self.vocab = vocab
        events = Counter[tuple[int, ...]]()
        for ids in documents:
            padded = [ids[0]] * (order - 1) + ids[1:]
            events.update(tuple(padded[i : i + order]) for i in range(len(ids) - 1))
        self.counts = {order: events}
        for n in range(order - 1, 0, -1):
            self.counts[n] = Counter(gram[1:] for gram in self.counts[n + 1])  # distinct left neighbours
        self.discounts = {n: discounts(np.array(list(c.values()))) for n, c in self.counts.items()}
        self.after: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for counts in self.counts.values():
            for gram, count in counts.items():
                self.after[gram[:-1]][gram[-1]] = count

    def probability(self, context: tuple[int, ...], token: int) -> float:
        lower = self.probability(context[1:], token) if context else 1 / self.vocab
        seen = self.after.get(context)
        if not seen:
            return lower
        d = (0.0, *self.discounts[len(context) + 1])
        total = sum(seen.values())
        count = seen.get(token, 0)
        return (count - d[min(count, 3)] + sum(d[min(c, 3)] for c in seen.values()) * lower) / total


def text(seed: int, vocab: int, documents: int, length: int) -> list[list[int]]:
    """Documents with bos 0 whose next id depends on the two before it: n-grams of all counts recur."""
    rng = np.random.default_rng(seed)
    likely = rng.integers(1, vocab, (vocab, vocab, 3))
    found = []
    for _ in range(documents):
        ids = [0, 0]
        for _ in range(int(rng.integers(0, length))):
            free = rng.random() < 0.2
            ids.append(int(rng.integers(0, vocab) if free else rng.choice(likely[ids[-2], ids[-1]])))
        found.append(ids[1:])
    return found


@pytest.mark.parametrize(
    "vocab, order, documents", [(13, 5, 40), (3, 5, 60), (40, 3, 30), (9, 2, 5), (6, 1, 3)]
)
def test_equals_the_slow_one(vocab: int, order: int, documents: int):
    train, other = text(1, vocab, documents, 60), text(2, vocab, 10, 40)
    model, slow = KneserNey.fit(train, vocab, order), Dictionaries(train, vocab, order)
    assert [level.discounts for level in model.levels] == [slow.discounts[n] for n in range(1, order + 1)]
    for ids in train[:5] + other:
        padded = [ids[0]] * (order - 1) + ids[1:]
        expected = [
            slow.probability(tuple(padded[i : i + order - 1]), padded[i + order - 1])
            for i in range(len(ids) - 1)
        ]
        np.testing.assert_allclose(np.exp(-model.nats(ids)), expected, rtol=1e-12)


def test_the_estimated_discounts_are_in_use():
    """The comparison above would mean little if every order fell back to fixed ones."""
    model = KneserNey.fit(text(1, 13, 40, 60), 13)
    assert FALLBACK not in [level.discounts for level in model.levels[2:]]


def test_probabilities_sum_to_one():
    vocab = 13
    train = text(3, vocab, 40, 60)
    model = KneserNey.fit(train, vocab)
    rng = np.random.default_rng(0)
    seen = [train[i][1:5] for i in range(20) if len(train[i]) > 5] + [[0, 0, 0, 0], [0, 0, 0, train[0][1]]]
    contexts = np.concatenate([np.array(seen), rng.integers(0, vocab, (300, 4))])
    packed = model.levels[-1].contexts
    known = sum(int("".join(f"{t:04b}" for t in c), 2) in set(packed.tolist()) for c in contexts.tolist())
    assert 20 < known < 300, "both seen and unseen contexts are tested"
    every = np.tile(np.arange(vocab), len(contexts))
    p = model.probabilities(np.repeat(contexts, vocab, axis=0), every).reshape(-1, vocab)
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-12)


def test_a_worked_example():
    """bos a b a b: three bigrams, of which (a, b) occurs twice. a has two left neighbours, b one. Counts of counts
    say too little here, so the discounts are 1/2 and 1."""
    bos, a, b = 0, 1, 2
    model = KneserNey.fit([[bos, a, b, a, b]], vocab=3, order=2)
    unigram = {a: 1 / 3 + 1 / 2 / 3, b: 1 / 2 / 3 + 1 / 2 / 3, bos: 1 / 2 / 3}
    assert unigram == pytest.approx({a: 1 / 2, b: 1 / 3, bos: 1 / 6})
    expected = {(a, b): 1 / 2 + unigram[b] / 2, (a, a): unigram[a] / 2, (b, a): 1 / 2 + unigram[a] / 2,
                (bos, a): 1 / 2 + unigram[a] / 2, (bos, bos): unigram[bos] / 2}  # fmt: skip
    got = model.probabilities(np.array([[c] for c, _ in expected]), np.array([t for _, t in expected]))
    np.testing.assert_allclose(got, list(expected.values()), rtol=1e-14)
    assert got[0] == pytest.approx(2 / 3)


def test_a_frequent_token_of_one_context_is_rare_elsewhere():
    """What the continuation counts are for: after an unknown context the token with many left neighbours leads."""
    francisco, glasses, san = 1, 2, 3
    documents = [[0, san, francisco] * 1 for _ in range(50)] + [[0, left, glasses] for left in range(4, 14)]
    model = KneserNey.fit(documents, vocab=16)
    p = model.probabilities(np.full((2, 4), 15), np.array([francisco, glasses]))
    assert p[1] > 3 * p[0]


def test_discounts():
    counts = np.repeat([1, 2, 3, 4, 9], [40, 20, 10, 5, 1])
    y = 40 / (40 + 2 * 20)
    assert discounts(counts) == pytest.approx((1 - 2 * y * 20 / 40, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10))
    assert discounts(np.repeat([1, 2, 3], [40, 20, 10])) == FALLBACK
    assert discounts(np.repeat([1, 2, 3, 4], [1, 1, 9, 1])) == FALLBACK, "the estimate for 2 is negative"


def test_a_document_begins_with_bos_alone_before_it():
    np.testing.assert_array_equal(pack([0, 1, 2, 3], vocab=4, order=3), [0b00_00_01, 0b00_01_10, 0b01_10_11])
    np.testing.assert_array_equal(pack([3, 1], vocab=4, order=4), [0b11_11_11_01])
    np.testing.assert_array_equal(pack([0, 1, 2], vocab=4, order=1), [1, 2])
    assert len(pack([0], vocab=4)) == 0


def test_sixty_bits_of_a_key_are_told_apart():
    """The sizes of mini: keys of the largest ids stay apart in all five places."""
    rows = [[0, 4095, 4095, 4095, 4095, 4095], [0, 4094, 4095, 4095, 4095, 4094]]
    model = KneserNey.fit(rows * 3, vocab=4096)
    p = np.exp(-np.concatenate([model.nats(r) for r in rows]))
    assert p.min() > 0.3 and len(model.levels[-1].keys) == 10
    assert np.exp(-model.nats([0, 4094, 4095, 4095, 4095, 4095]))[-1] < p[4] / 2


def test_faults_are_named():
    with pytest.raises(NgramError, match="no document"):
        KneserNey.fit([[0], []], vocab=4)
    with pytest.raises(NgramError, match=r"0 to 4 .*0\.\.3"):
        KneserNey.fit([[0, 4]], vocab=4)
    with pytest.raises(NgramError, match="order 6 over 4096 tokens: 1 to 5"):
        KneserNey.fit([[0, 1]], vocab=4096, order=6)
    model = KneserNey.fit([[0, 1]], vocab=4)
    with pytest.raises(NgramError, match=r"0\.\.3"):
        model.nats([0, -1])
    with pytest.raises(NgramError, match="contexts of 3 tokens; the model's have 4"):
        model.probabilities(np.zeros((1, 3), int), np.zeros(1, int))
