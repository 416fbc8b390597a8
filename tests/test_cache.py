"""The cache against a list per row; donation of what the loop passes on."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import CacheFull, KVCache, check_room, commit
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Junk
from kvjax.sharding import Rules
from tests.decode import tinylm

LAYERS, K, S, H = 2, 2, 12, 2
RULES = Rules(None, K, ())


@functools.partial(jax.jit, static_argnames="how")
def write(cache, rows, count, path, at, how):
    return commit(cache, rows, count, rules=RULES, path=path if "path" in how else None, at=at)


class Lists:
    """What a cache should hold. Every stored row is a number that never occurs twice."""

    def __init__(self, batch: int) -> None:
        self.batch, self.serial = batch, 0
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        slabs = [np.zeros((batch, K, S, H), np.float32) for _ in range(2 * LAYERS)]
        self.cache = KVCache(tuple(slabs[:LAYERS]), tuple(slabs[LAYERS:]), np.zeros(batch, np.int32))

    def fresh(self, t: int) -> np.ndarray:
        """[B, t] names of new rows."""
        names = 1 + self.serial + np.arange(self.batch * t).reshape(self.batch, t)
        self.serial += self.batch * t
        return names

    @staticmethod
    def values(names: np.ndarray, layer: int, value: bool) -> np.ndarray:
        """The vectors of named rows, [B, K, t, H]: different for every layer, head and entry."""
        place = (2 * layer + value) * 100 + np.arange(K)[:, None, None] * 10 + np.arange(H)
        return (names[:, None, :, None] * 1000 + place).astype(np.float32)

    def commit(
        self, t: int, count: list[int], path: list[list[int]] | None, at: int | list[int] | None
    ) -> None:
        """One write to both, then every check."""
        names = self.fresh(t)
        rows = tuple((self.values(names, i, False), self.values(names, i, True)) for i in range(LAYERS))
        before = jax.tree.map(np.asarray, self.cache)
        order = np.zeros((self.batch, t), np.int32) if path is None else np.array(path, np.int32)
        where = None if at is None else np.asarray(at, np.int32)
        how = "path" if path is not None else "chain"
        self.cache = write(self.cache, rows, np.array(count, np.int32), order, where, how)
        first = (
            [len(r) for r in self.rows]
            if at is None
            else np.broadcast_to(np.asarray(at), self.batch).tolist()
        )
        for b in range(self.batch):
            taken = names[b] if path is None else names[b][path[b]]
            if count[b]:
                self.rows[b] = self.rows[b][: first[b]] + taken[: count[b]].tolist()
        self.check(before, [range(a, a + t if c else S) for a, c in zip(first, count)])

    def check(self, before: KVCache, free: list[range]) -> None:
        """free: the slots of each row that the write may have changed."""
        assert np.asarray(self.cache.filled).tolist() == [len(r) for r in self.rows]
        for layer in range(LAYERS):
            view = self.cache.view(layer)
            for value, slab, old in ((False, view.k, before.k[layer]), (True, view.v, before.v[layer])):
                slab = np.asarray(slab)
                assert np.isfinite(slab).all()
                for b, names in enumerate(self.rows):
                    want = self.values(np.array([names]), layer, value)[0]
                    np.testing.assert_array_equal(slab[b, :, : len(names)], want)
                    outside = np.setdiff1d(np.arange(S), free[b])
                    np.testing.assert_array_equal(slab[b][:, outside], old[b][:, outside])


@st.composite
def writes(draw, lists: Lists, data) -> tuple:
    """A write that keeps the contract: it fits, and `at` lies below `filled` only where rows are kept."""
    filled = [len(r) for r in lists.rows]
    t = draw(st.sampled_from([n for n in (1, 4, S) if max(filled) + n <= S] or [1]))
    kind = draw(st.sampled_from(["here", "everywhere", "each"]))
    count = [draw(st.integers(0, t)) for _ in filled]
    path = None
    if kind == "here" and draw(st.booleans()):
        path = [draw(st.lists(st.integers(0, t - 1), min_size=t, max_size=t)) for _ in filled]
    if kind == "here":
        return t, count, path, None
    if kind == "each":  # behind the filled slots, or a rewrite of the last few
        at = [draw(st.integers(max(0, n - 3), n)) if c else n for n, c in zip(filled, count)]
        return t, count, path, at
    # One place for all rows, as in prefill: rows that cannot take part keep nothing.
    at = draw(st.integers(0, S - t))
    count = [c if n >= at else 0 for n, c in zip(filled, count)]
    if any(n > at and not c for n, c in zip(filled, count)):
        at = max(filled)
        count = [c if n == at else 0 for n, c in zip(filled, count)]
    return t, count, path, at


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("batch", [1, 3])
def test_any_sequence_of_commits_is_a_list(batch: int, data) -> None:
    lists = Lists(batch)
    for _ in range(data.draw(st.integers(1, 6))):
        if max(len(r) for r in lists.rows) == S:
            break
        lists.commit(*data.draw(writes(lists, data)))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_last_slots_take_a_whole_block(batch: int) -> None:
    """A block that ends exactly at the edge, once kept and once rejected: nothing moves down."""
    lists = Lists(batch)
    lists.commit(4, [4] * batch, None, None)
    lists.commit(4, [4] * batch, None, None)
    lists.commit(4, [0] * batch, None, None)
    lists.commit(4, [4] * batch, None, S - 4)
    assert {len(r) for r in lists.rows} == {S}


def test_the_list_model_notices_a_clamped_write() -> None:
    """Beyond the edge the device would overwrite earlier slots: the check above sees that."""
    lists = Lists(3)
    lists.commit(4, [4] * 3, None, None)
    lists.commit(4, [4] * 3, None, None)
    lists.commit(1, [1] * 3, None, None)
    with pytest.raises(AssertionError):
        lists.commit(4, [1] * 3, None, None)


def test_room_is_checked_on_the_host() -> None:
    check_room(size=16, length=12, rows=4)
    with pytest.raises(CacheFull, match=r"prompt of 12 tokens plus 5 rows needs 17 cache slots; size is 16"):
        check_room(size=16, length=12, rows=5)
    with pytest.raises(ValueError, match="row 3 of 16 tokens"):
        check_room(size=16, length=16, rows=1, what="row 3")


def test_the_cache_is_created_finite_and_empty() -> None:
    lm = tinylm.language_model()
    cache = jax.jit(lambda: lm.model.cache(3, 16))()
    c = lm.config
    assert (cache.batch, cache.size, len(cache.k), len(cache.v)) == (3, 16, c.num_layers, c.num_layers)
    for slab in (*cache.k, *cache.v):
        assert slab.shape == (3, c.num_kv_heads, 16, c.head_dim)
        assert not np.asarray(slab).any()
    assert np.asarray(cache.filled).tolist() == [0, 0, 0]


def _arguments(lm, source, program, batch, size):
    tokens = np.ones((batch, size), np.int32)
    length = np.full(batch, 5, np.int32)
    sampling = Sampling.create(batch, max_new=4)
    state = loop.start(lm.model, source, program, (), tokens, length, length < 0)
    return state, sampling, np.zeros(2, np.uint32), np.int32(1), np.full(batch, -1, np.int32)


def test_the_loop_donates_the_whole_cache() -> None:
    """Prefill and rounds write in place: the compiled programs alias at least the cache's bytes, and a state
    that was passed on is gone."""
    lm = tinylm.language_model(num_layers=1)
    source, program = Junk(width=2, vocab=lm.config.vocab), SamplerProgram()
    state, sampling, key, limit, cut = _arguments(lm, source, program, 2, 512)
    bytes_of_cache = sum(x.nbytes for x in (*state.cache.k, *state.cache.v))
    prefill = loop.prefill.lower(lm.model, source, 16, lm.params, (), state, np.int32(0)).compile()
    rounds = loop.rounds.lower(
        lm.model, source, program, lm.params, (), state, sampling, key, limit, cut
    ).compile()
    for compiled in (prefill, rounds):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= bytes_of_cache
        # In place means no second cache among the temporaries either.
        assert memory.temp_size_in_bytes < bytes_of_cache / 2
    after = loop.prefill(lm.model, source, 16, lm.params, (), state, np.int32(0))
    assert all(x.is_deleted() for x in (*state.cache.k, *state.cache.v))
    assert np.asarray(after.cache.filled).tolist() == [4, 4]
