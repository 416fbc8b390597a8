"""`attend` against dense float64 attention over [cache | new rows], with junk in everything unused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.attention import Choice, MaskSpec, attend
from kvjax.cache import View
from kvjax.kernels.block_attention import ref
from kvjax.sharding import Rules

B, T, K, G, H, S = 2, 5, 2, 3, 8, 24
RULES, CPU = Rules(None, K, ()), Choice("cpu")
KINDS = ("causal", "block", "tree")


@functools.partial(jax.jit, static_argnames=("kind", "window", "empty"))
def attended(q, k, v, view, pos, ancestors, *, kind, window, empty=False, at=None):
    mask = MaskSpec(kind, ancestors if kind == "tree" else None)
    return attend(q, k, v, None if empty else view, pos, mask, window=window, choice=CPU, rules=RULES, at=at)


def run(*args, **kwargs):
    return attended(*args, **kwargs)[0]


def draws(seed: int, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (B, T, K, G, H), (B, K, T, H), (B, K, T, H), (B, K, S, H), (B, K, S, H)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def parents_to_ancestors(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ancestors [B, T, T] (itself included) and depth [B, T] of trees given by parent[b, j] < j (root: -1)."""
    ancestors, depth = np.zeros((B, T, T), bool), np.zeros((B, T), int)
    for b in range(B):
        for j in range(T):
            i = j
            while i >= 0:
                ancestors[b, j, i] = True
                depth[b, j] += i != j
                i = parent[b, i]
    return ancestors, depth


def seen_by(kind: str, pos, filled, ancestors, window) -> tuple[np.ndarray, np.ndarray]:
    """Who sees whom, said pair by pair: [B, T, S] of the cache and [B, T, T] of the new rows."""
    cache, rows = np.zeros((B, T, S), bool), np.zeros((B, T, T), bool)
    for b in range(B):
        for i in range(T):
            near = lambda p, b=b, i=i: window is None or abs(pos[b, i] - p) < window  # noqa: E731
            for s in range(S):  # slot s holds position s
                cache[b, i, s] = s < filled[b] and near(s)
            for j in range(T):
                allowed = {"causal": j <= i, "block": True, "tree": ancestors[b, i, j]}[kind]
                rows[b, i, j] = allowed and near(pos[b, j])
    return cache, rows


def dense(q, k, v, ck, cv, cache, rows) -> np.ndarray:
    """One softmax over the visible keys alone, in float64: [B, T, K, G, H]."""
    q, k, v, ck, cv = (np.asarray(x, np.float64) for x in (q, k, v, ck, cv))
    out = np.zeros((B, T, K, G, H))
    for b in range(B):
        for i in range(T):
            for h in range(K):
                keys = np.concatenate([ck[b, h][cache[b, i]], k[b, h][rows[b, i]]])
                values = np.concatenate([cv[b, h][cache[b, i]], v[b, h][rows[b, i]]])
                scores = q[b, i, h] @ keys.T / H**0.5
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out[b, i, h] = weights / weights.sum(-1, keepdims=True) @ values
    return out


def case(kind: str, filled, parent, seed: int, dtype=np.float32):
    filled = np.array(filled, np.int32)
    ancestors, depth = parents_to_ancestors(np.array(parent))
    step = depth if kind == "tree" else np.broadcast_to(np.arange(T), (B, T))
    return *draws(seed, dtype), filled, (filled[:, None] + step).astype(np.int32), ancestors


def trees(draw) -> list[list[int]]:
    return [[-1, *(draw(st.integers(0, j - 1)) for j in range(1, T))] for _ in range(B)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_attend_is_dense_attention(kind: str, window: int | None, data) -> None:
    filled = data.draw(st.lists(st.sampled_from([0, 1, 3, 4, 11, S - T]), min_size=B, max_size=B))
    q, k, v, ck, cv, filled, pos, ancestors = case(
        kind, filled, trees(data.draw), data.draw(st.integers(0, 99))
    )
    cache, rows = seen_by(kind, pos, filled, ancestors, window)
    want = dense(q, k, v, ck, cv, cache, rows)
    # The masks themselves, then the result with junk in every slot that no row of the sequence sees.
    spec = MaskSpec(kind, jnp.asarray(ancestors) if kind == "tree" else None)
    np.testing.assert_array_equal(spec.of_cache(pos, filled, S, window), cache)
    np.testing.assert_array_equal(spec.among_rows(jnp.asarray(pos), window), rows)
    unused = ~cache.any(1)[:, None, :, None]
    junk = View(np.where(unused, np.float32(np.nan), ck), np.where(unused, np.float32(1e30), cv), filled)
    clean = View(np.where(unused, np.float32(0), ck), np.where(unused, np.float32(0), cv), filled)
    out = run(q, k, v, junk, pos, ancestors, kind=kind, window=window)
    np.testing.assert_allclose(out, want, atol=2e-6)
    assert (
        np.asarray(out) == np.asarray(run(q, k, v, clean, pos, ancestors, kind=kind, window=window))
    ).all()


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_bounds_of_the_kernel_are_the_mask(window: int | None) -> None:
    """`block_attention` with the bounds `attend` gives it is attention under `MaskSpec.of_cache`."""
    filled, pos = (
        np.array([17, 3], np.int32),
        np.array([17, 3], np.int32)[:, None] + np.arange(T, dtype=np.int32),
    )
    q, _, _, ck, cv = draws(5)
    seen = np.asarray(MaskSpec().of_cache(jnp.asarray(pos), jnp.asarray(filled), S, window))
    folded = np.moveaxis(q, 1, 2).reshape(B, K, T * G, H)
    lower = None if window is None else np.repeat(np.maximum(pos - window + 1, 0), G, axis=1).astype(np.int32)
    out, lse = ref.block_attention(*map(jnp.asarray, (folded, ck, cv, filled)), lower, scale=H**-0.5)
    scores = np.einsum("bkrh,bksh->bkrs", folded.astype(np.float64), ck) * H**-0.5
    scores = np.where(np.repeat(seen, G, axis=1)[:, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        want = np.log(np.exp(scores).sum(-1))
    np.testing.assert_allclose(lse, want, atol=2e-6)
    assert (np.asarray(out)[np.isneginf(want)] == 0).all()
    if window == 1:  # nothing but itself
        assert np.isneginf(want).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_is_no_cache(kind: str) -> None:
    parent = [[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3]]
    q, k, v, ck, cv, filled, pos, ancestors = case(kind, (0, 0), parent, 1)
    view = View(np.full_like(ck, np.nan), np.full_like(cv, 1e30), filled)
    with_view = run(q, k, v, view, pos, ancestors, kind=kind, window=None)
    without = run(q, k, v, None, pos, ancestors, kind=kind, window=None, empty=True)
    np.testing.assert_allclose(with_view, without, atol=1e-6)
    np.testing.assert_allclose(
        without, dense(q, k, v, ck, cv, *seen_by(kind, pos, filled, ancestors, None)), atol=2e-6
    )


def test_a_chain_leaves_its_rows_behind_the_filled_slots() -> None:
    """The view that comes back holds the new rows at their positions, and every other slot as it was."""
    q, k, v, ck, cv, _, _, ancestors = case("causal", (7, 7), [[-1, 0, 1, 2, 3]] * 2, 6)
    results = []
    for filled, at in (((7, 7), None), ((7, 7), 7), ((0, S - T), None)):
        filled = np.array(filled, np.int32)
        pos, view = filled[:, None] + np.arange(T, dtype=np.int32), View(ck, cv, filled)
        at = None if at is None else np.int32(at)
        out, after = attended(q, k, v, view, pos, ancestors, kind="causal", window=None, at=at)
        np.testing.assert_array_equal(after.filled, filled)
        for got, old, new in ((after.k, ck, k), (after.v, cv, v)):
            want = old.copy()
            for b, n in enumerate(filled):
                want[b, :, n : n + T] = new[b]
            np.testing.assert_array_equal(got, want)
        results.append(np.asarray(out))
    np.testing.assert_allclose(results[0], results[1], atol=1e-6)  # `at` says where, and nothing else
    for kind in ("block", "tree"):
        view, pos = View(ck, cv, np.array([7, 7], np.int32)), np.full((B, T), 7, np.int32)
        assert attended(q, k, v, view, pos, ancestors, kind=kind, window=None)[1] is None


def test_large_scores_do_not_overflow() -> None:
    """Either part may hold by far the largest score: the merge is relative to it."""
    q, k, v, ck, cv, filled, pos, ancestors = case("causal", (9, 19), [[-1, 0, 1, 2, 3]] * 2, 2)
    for factor, parts in ((300.0, "cache"), (300.0, "rows")):
        scaled = (k * factor, ck) if parts == "rows" else (k, ck * factor)
        out = run(q, scaled[0], v, View(scaled[1], cv, filled), pos, ancestors, kind="causal", window=None)
        want = dense(q, scaled[0], v, scaled[1], cv, *seen_by("causal", pos, filled, ancestors, None))
        np.testing.assert_allclose(out, want, atol=3e-4)  # float32 scores of a thousand


def test_bfloat16_accumulates_in_float32() -> None:
    q, k, v, ck, cv, filled, pos, ancestors = case(
        "causal", (13, 19), [[-1, 0, 1, 2, 3]] * 2, 3, jnp.bfloat16
    )
    out = run(q, k, v, View(ck, cv, filled), pos, ancestors, kind="causal", window=None)
    assert out.dtype == jnp.bfloat16
    want = dense(q, k, v, ck, cv, *seen_by("causal", pos, filled, ancestors, None))
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2)


def test_other_sequences_change_no_bit() -> None:
    q, k, v, ck, cv, filled, pos, ancestors = case("causal", (13, 19), [[-1, 0, 1, 2, 3]] * 2, 4)
    alone = run(q, k, v, View(ck, cv, filled), pos, ancestors, kind="causal", window=None)
    other = [x.copy() for x in draws(9)]
    for new, old in zip(other, (q, k, v, ck, cv)):
        new[0] = old[0]
    q2, k2, v2, ck2, cv2 = other
    pos2, filled2 = np.stack([pos[0], 3 + np.arange(T, dtype=np.int32)]), np.array([13, 3], np.int32)
    mixed = run(q2, k2, v2, View(ck2, cv2, filled2), pos2, ancestors, kind="causal", window=None)
    assert (np.asarray(alone)[0] == np.asarray(mixed)[0]).all()


def test_masks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown mask kind 'prefix'; known: causal, block, tree"):
        MaskSpec("prefix")
    with pytest.raises(ValueError, match="has `ancestors`"):
        MaskSpec("tree")
    with pytest.raises(ValueError, match="has `ancestors`"):
        MaskSpec("causal", jnp.ones((1, 2, 2), bool))


def test_a_named_backend_is_used_or_refused() -> None:
    q, k = (jax.ShapeDtypeStruct((1, 2, 4, H), jnp.float32), jax.ShapeDtypeStruct((1, 2, S, H), jnp.float32))
    assert Choice("cpu").backend(q, k).name == "xla"
    assert Choice("cpu", name="xla").backend(q, k).name == "xla"
    with pytest.raises(ValueError, match="'tpu' cannot be used: .*device is a cpu"):
        Choice("cpu", name="tpu").backend(q, k)
    with pytest.raises(ValueError, match="unknown attention backend 'flash'; known: tpu, gpu, xla"):
        Choice("cpu", name="flash").backend(q, k)
    # A device whose kernel refuses the dtype takes the next backend, unless the kernel was named.
    hopper = Choice("gpu", "NVIDIA H100 80GB HBM3")
    assert hopper.backend(q, k).name == "xla"
    with pytest.raises(ValueError, match="'gpu' cannot be used: .*float32"):
        Choice("gpu", "NVIDIA H100 80GB HBM3", "gpu").backend(q, k)


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_those_of_a_plain_softmax(window):
    """Training goes through both: rows with nothing before them, and a chain over a cache."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, K, G, H), (B, K, S, H), (B, K, S, H))
    )
    way = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    start = 6
    for first in (0, start):  # position of the first new row
        pos = first + jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        new = (slice(None), slice(None), slice(first, first + T))

        def ours(q, k, v, first=first, pos=pos, new=new):
            view = View(k, v, jnp.full((B,), first, jnp.int32)) if first else None
            out, _ = attend(q, k[new], v[new], view, pos, MaskSpec(), window=window, choice=CPU, rules=RULES)
            return (out * way).sum()

        def plain(q, k, v, pos=pos):
            scores = jnp.einsum("btkgh,bksh->bkgts", q, k) * H**-0.5
            slot = jnp.arange(S)
            seen = (slot <= pos[0][:, None]) & (pos[0][:, None] - slot < (window or S))
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
            return (jnp.einsum("bkgts,bksh->btkgh", weights, v) * way).sum()

        for a, b in zip(jax.grad(ours, (0, 1, 2))(q, k, v), jax.grad(plain, (0, 1, 2))(q, k, v), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_log_sum_exp_has_its_gradient():
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, K, 4, H), (B, K, S, H), (B, K, S, H))
    )
    upper = jnp.asarray([3, 7], jnp.int32)

    def ours(q, k):
        return (ref.block_attention(q, k, v, upper, scale=0.4, stair=2)[1] ** 2).sum()

    def plain(q, k):
        scores = jnp.einsum("bkrh,bksh->bkrs", q, k) * 0.4
        seen = jnp.arange(S) < (upper[:, None] + jnp.arange(4) // 2)[:, :, None]
        return (jax.nn.logsumexp(jnp.where(seen[:, None], scores, -jnp.inf), -1) ** 2).sum()

    for a, b in zip(jax.grad(ours, (0, 1))(q, k), jax.grad(plain, (0, 1))(q, k), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
