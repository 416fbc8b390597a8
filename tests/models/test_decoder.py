"""The decoder: chunks and caches against one call, windows, taps, embeddings, trees, bfloat16, training."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax.attention import MaskSpec
from kvjax.cache import commit
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Oracle
from kvjax.models import build
from kvjax.models.layers import rms_norm
from tests.decode import tinylm

B, T, S = 2, 21, 32
QWEN3 = {"model_type": "qwen3", "qk_norm": True, "num_layers": 3}
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie": False, "num_kv_heads": 1}
VARIANTS = {
    "llama": {},
    "biases": BIASED,
    "windows": QWEN3 | {"windows": (5, None, 9)},
    "window of one chunk": {"windows": (4, 4)},
}


@functools.cache
def model_of(name: str):
    return tinylm.language_model(seed=1, **VARIANTS[name])


def some_ids(lm) -> np.ndarray:
    return np.random.default_rng(0).integers(0, lm.config.vocab, (B, T)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def forward(model, params, inputs, pos, taps=(), logits=True):
    return model.forward(params, inputs, pos, taps=taps, logits=logits)


@functools.partial(jax.jit, static_argnums=0)
def step(model, params, cache, ids, count):
    """T tokens behind the cache, of which count[b] are kept."""
    pos = cache.filled[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
    out = model.forward(params, ids, pos, cache)
    return out.logits, commit(out.cache, None, count, rules=model.rules)


def positions() -> np.ndarray:
    return np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_through_the_cache_are_one_call(name: str) -> None:
    """Whatever the portions and however unequal the rows: the logits of every token are those of one call."""
    lm = model_of(name)
    ids, want = some_ids(lm), None
    want = tinylm.one_shot(lm, ids)
    cache = jax.jit(lambda: lm.model.cache(B, S))()
    got, at = np.full_like(want, np.nan), np.zeros(B, int)
    # Blocks of 4 of which some rows keep only a part (what verification does), to the last token.
    for counts in ([4, 4], [4, 1], [0, 4], [3, 2], [4, 4], [4, 4], [2, 2]):
        block = np.zeros((B, 4), np.int32)
        for b in range(B):
            part = ids[b, at[b] : at[b] + 4]
            block[b, : len(part)] = part
        logits, cache = step(lm.model, lm.params, cache, block, np.array(counts, np.int32))
        for b, n in enumerate(counts):
            got[b, at[b] : at[b] + n] = np.asarray(logits)[b, :n]
        at += counts
    assert at.tolist() == [T, T]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", ["windows", "window of one chunk"])
def test_windows_limit_what_is_seen(name: str) -> None:
    """Changing the first token moves exactly the tokens it can reach: windows add up over the layers."""
    lm = model_of(name)
    ids = some_ids(lm)
    other = ids.copy()
    other[:, 0] = (other[:, 0] + 1) % lm.config.vocab
    moved = np.abs(tinylm.one_shot(lm, ids) - tinylm.one_shot(lm, other)).max(-1) > 1e-6
    reach = T if None in lm.config.windows else 1 + sum(w - 1 for w in lm.config.windows)
    assert moved[:, :reach].all() and not moved[:, reach:].any()
    wide = build(dataclasses.replace(lm.config, windows=(None,) * lm.config.num_layers))
    free = np.asarray(forward(wide, lm.params, ids, positions()).logits)
    narrow = min(w for w in lm.config.windows if w)
    differs = np.abs(free - tinylm.one_shot(lm, ids)).max(-1) > 1e-6
    assert not differs[:, :narrow].any() and differs[:, narrow:].all()


def test_taps_are_the_outputs_of_the_named_layers() -> None:
    lm = model_of("windows")
    c, ids = lm.config, some_ids(lm)
    out = forward(lm.model, lm.params, ids, positions(), (2, 0, 1), False)
    assert out.logits is None and out.taps.shape == (B, T, 3 * c.hidden)
    tapped = np.asarray(out.taps)
    tap = dict(zip((2, 0, 1), np.split(tapped, 3, axis=-1)))
    params = dict(zip(lm.model.names, lm.params))
    for layer in (0, 2):
        # A model that ends after this layer; norm and head, which follow, written out in numpy.
        short = build(dataclasses.replace(c, num_layers=layer + 1, windows=c.windows[: layer + 1]))
        kept = tuple(params[n] for n in short.names)
        x = tap[layer].astype(np.float64)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.eps) * np.asarray(params["norm"])
        want = x @ np.asarray(params["embed"], np.float64).T
        got = forward(short, kept, ids, positions(), (layer,))
        np.testing.assert_allclose(got.logits, want, atol=1e-4)
        np.testing.assert_allclose(got.taps, tap[layer], atol=1e-5)
    for bad in (-1, c.num_layers):
        with pytest.raises(ValueError, match=rf"tap {bad} is not a layer of this model \(0..2\)"):
            lm.model.forward(lm.params, ids, positions(), taps=(0, bad))


def test_embeddings_may_be_given_instead_of_ids() -> None:
    lm = model_of("biases")
    ids = some_ids(lm)
    embed = np.asarray(lm.params[lm.model.names.index("embed")])
    by_ids = forward(lm.model, lm.params, ids, positions()).logits
    np.testing.assert_allclose(
        forward(lm.model, lm.params, embed[ids], positions()).logits, by_ids, atol=1e-6
    )


def test_masks_reach_the_attention() -> None:
    """A block whose rows see each other, and a tree that is a chain."""
    lm = model_of("llama")
    ids = some_ids(lm)
    run = jax.jit(lambda p, i, q, m: lm.model.forward(p, i, q, None, m).logits)
    causal = tinylm.one_shot(lm, ids)
    chain = MaskSpec("tree", np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T)))
    np.testing.assert_allclose(run(lm.params, ids, positions(), chain), causal, atol=1e-5)
    block = np.asarray(run(lm.params, ids, positions(), MaskSpec("block")))
    assert (np.abs(block - causal).max(-1) > 1e-3).all()
    turned = np.asarray(run(lm.params, ids[:, ::-1].copy(), positions()[:, ::-1].copy(), MaskSpec("block")))
    np.testing.assert_allclose(turned[:, ::-1], block, atol=1e-5)  # the order of rows says nothing then


def test_a_tree_of_drafts_is_its_paths() -> None:
    """Two branches behind one cache in one call: each branch gets the logits of its own text."""
    lm = model_of("windows")
    ids = some_ids(lm)
    cache = jax.jit(lambda: lm.model.cache(B, S))()
    for at in (0, 4):
        _, cache = step(lm.model, lm.params, cache, ids[:, at : at + 4], np.full(B, 4, np.int32))

    def want(nodes: np.ndarray) -> np.ndarray:
        """Logits of the tokens `nodes` behind the first eight."""
        text = ids.copy()
        text[:, 8 : 8 + nodes.shape[1]] = nodes
        return tinylm.one_shot(lm, text)[:, 8 : 8 + nodes.shape[1]]

    nodes, parent = ids[:, 8:13], [-1, 0, 1, 0, 3]  # 8 -> 9 -> 10, and 8 -> 11 -> 12
    seen, depth = np.zeros((5, 5), bool), np.zeros(5, np.int32)
    for j in range(5):
        i = j
        while i >= 0:
            seen[j, i], depth[j], i = True, depth[j] + (i != j), parent[i]
    mask = MaskSpec("tree", np.broadcast_to(seen, (B, 5, 5)))
    run = jax.jit(lambda p, i, q, c, m: lm.model.forward(p, i, q, c, m))
    out = run(lm.params, nodes, np.broadcast_to(8 + depth, (B, 5)), cache, mask)
    for path in ([0, 1, 2], [0, 3, 4]):
        text = np.concatenate([ids[:, :8], nodes[:, path]], axis=1)
        np.testing.assert_allclose(
            np.asarray(out.logits)[:, path], tinylm.one_shot(lm, text)[:, 8:], atol=1e-5
        )
    # The second branch, kept, is what the next token sees.
    path = np.broadcast_to(np.array([0, 3, 4, 4, 4], np.int32), (B, 5))
    kept = jax.jit(lambda c, r, n, p: commit(c, r, n, rules=lm.model.rules, path=p))(
        cache, out.rows, np.full(B, 3, np.int32), path
    )
    logits, _ = step(lm.model, lm.params, kept, np.tile(ids[:, 13:14], 4), np.ones(B, np.int32))
    text = np.concatenate([nodes[:, [0, 3, 4]], ids[:, 13:14]], axis=1)
    np.testing.assert_allclose(np.asarray(logits)[:, 0], want(text)[:, -1], atol=1e-5)


# --- bfloat16 -----------------------------------------------------------------------------------------------------


def test_bfloat16_stays_near_float32() -> None:
    wide = model_of("windows")
    model = build(wide.config, dtype="bfloat16")
    params = tuple(x.astype(jnp.bfloat16) for x in wide.params)
    rounded = dataclasses.replace(wide, params=tuple(x.astype(jnp.float32) for x in params))
    ids = some_ids(wide)
    out = forward(model, params, ids, positions(), (0,))
    assert out.logits.dtype == jnp.float32 and out.taps.dtype == jnp.bfloat16
    assert {x.dtype for pair in out.rows for x in pair} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.eval_shape(lambda: model.cache(1, 8)).k} == {jnp.dtype(jnp.bfloat16)}
    want = tinylm.one_shot(rounded, ids)
    error = np.abs(np.asarray(out.logits) - want)
    assert 1e-4 < error.max() < 0.25 and np.sqrt((error**2).mean()) < 0.03 * want.std()


def test_bfloat16_decodes_the_same_whatever_is_drafted() -> None:
    model = build(tinylm.config(num_layers=1), dtype="bfloat16")
    params, source = tinylm.weights(model, seed=3), Oracle(width=4)
    how = Sampling.create(4, temperature=[0.0, 1.0, 0.7, 0.0], seed=[1, 2, 3, 4], max_new=24)
    run = jax.jit(
        lambda p, t, length, table: loop.generate(
            model, p, t, length, jax.random.key(0), sampling=how, source=source, draft_params=table,
            program=SamplerProgram(greedy=False, logprobs=True), chunk=16,
        )
    )  # fmt: skip
    tokens = np.random.default_rng(1).integers(0, 48, (4, 64)).astype(np.int32)
    length = np.array([5, 1, 20, 30], np.int32)
    junk = run(params, tokens, length, tokens[::-1].copy())
    right = run(params, tokens, length, np.asarray(junk.tokens))
    assert np.asarray(right.accepted).sum() == 4 * 18 and np.asarray(junk.accepted).sum() < 10
    for b, n in enumerate(length):
        for x, y in ((junk.tokens, right.tokens), (junk.logprobs, right.logprobs)):
            np.testing.assert_array_equal(np.asarray(x)[b, n : n + 24], np.asarray(y)[b, n : n + 24])


# --- building blocks ----------------------------------------------------------------------------------------------


def test_rms_norm_is_computed_in_float32() -> None:
    """The square of a bfloat16 row may not fit bfloat16's precision; the scale comes after the cast."""
    rng = np.random.default_rng(0)
    x = (100 * rng.standard_normal((3, 64))).astype(jnp.bfloat16)
    w = rng.standard_normal(64).astype(jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    normed = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)
    got = jax.jit(rms_norm, static_argnums=2)(x, w, 1e-5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(w * normed, np.float32), rtol=2**-7)


def test_random_parameters_have_the_shapes_and_spreads_they_should() -> None:
    model = build(tinylm.config(num_layers=1, **BIASED))
    drawn = dict(zip(model.names, map(np.asarray, model.init(0))))
    assert [(x.shape, x.dtype) for x in drawn.values()] == [(s.shape, s.dtype) for s in model.abstract()]
    for name, x in drawn.items():
        assert (x == 1).all() if "norm" in name else 0.01 < x.std() < 0.04
    assert (drawn["embed"] != drawn["lm_head"]).any()


def test_unknown_dtypes_and_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'float16' is not supported; use float32 or bfloat16"):
        build(tinylm.TINY, dtype="float16")
    with pytest.raises(ValueError, match="unknown attention backend 'cudnn'"):
        build(tinylm.TINY, attention="cudnn")
    with pytest.raises(ValueError, match="'tpu' cannot be used: .*cpu"):
        build(tinylm.TINY, attention="tpu")


# --- training -----------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = sorted(p.parent.name for p in GOLDEN.glob("*/config.json"))


def train_logits(model, params, ids, pos, remat=False):
    hidden, head = model.hidden(params, ids, pos, remat=remat)
    return jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_model_is_the_serving_model(kind: str) -> None:
    """Every golden kind, biases and windows included: the same parameters, the same logits as transformers."""
    lm = kvjax.load(GOLDEN / kind, dtype="float32")
    expected = load_file(GOLDEN / kind / "expected.safetensors")
    model = build(lm.config, train=True)
    assert model.names == lm.model.names and model.abstract() == lm.model.abstract()
    ids = expected["input_ids"]
    pos = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    got = jax.jit(functools.partial(train_logits, model))(lm.params, ids, pos)
    np.testing.assert_allclose(got, expected["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["biases", "windows"])
def test_gradients_are_the_serving_models_and_recomputed_ones_the_same(name: str) -> None:
    lm = model_of(name)
    ids, pos = jnp.asarray(some_ids(lm)), jnp.asarray(positions())
    model = build(lm.config, train=True)
    direction = np.random.default_rng(1).standard_normal((B, T, lm.config.vocab)).astype(np.float32)

    def gradients(logits):
        return jax.jit(jax.grad(lambda params: (logits(params) * direction).sum()))(lm.params)

    plain = gradients(lambda p: train_logits(model, p, ids, pos))
    again = gradients(lambda p: train_logits(model, p, ids, pos, remat=True))
    served = gradients(lambda p: lm.model.forward(p, ids, pos).logits)
    for leaf, a, b, c in zip(model.names, plain, again, served, strict=True):
        scale = float(np.abs(c).max())
        assert scale > 0, leaf
        np.testing.assert_allclose(a, b, atol=1e-6 * scale, err_msg=leaf)
        np.testing.assert_allclose(a, c, atol=2e-5 * scale, err_msg=leaf)


def test_recomputation_keeps_less() -> None:
    """What the forward pass saves for the backward one: with `remat` about a layer's input each."""
    model = build(tinylm.config(num_layers=4), train=True)
    params = model.abstract()
    ids = jax.ShapeDtypeStruct((4, 64), jnp.int32)

    def saved(remat: bool) -> int:
        def run(params, ids, pos):
            return jax.vjp(lambda p: model.hidden(p, ids, pos, remat=remat)[0], params)

        _, backward = jax.eval_shape(run, params, ids, ids)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))

    assert saved(True) < saved(False) / 4
