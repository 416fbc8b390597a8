"""A layer group computed from a mapped hidden state: native where that is exact, and found where it is linear."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import KVCache
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram
from kvjax.decode.sources import Plain
from kvjax.transfer import artifact, calibrate, fit, moments
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.hidden import HiddenMap, map_hidden
from kvjax.transfer.mapper import LayerMap, Mapper
from kvjax.transfer.repair import Repair, hand_over
from tests.decode import tinylm

LAYERS, ENTERING, CHUNK, SIZE = 5, 2, 16, 64
LENGTH = np.asarray([37, 50], np.int32)


@pytest.fixture(scope="module")
def lm():
    return tinylm.language_model(num_layers=LAYERS)


@pytest.fixture(scope="module")
def native(lm):
    """(tokens, the state after reading them, hidden state entering layer ENTERING [B, S, D])."""
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab, (2, SIZE)).astype(np.int32)
    state = begin(lm, tokens)
    for i in range(SIZE // CHUNK):
        state = loop.prefill(lm.model, Plain(), CHUNK, lm.params, (), state, np.int32(i))
    pos = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), tokens.shape)
    hidden = lm.model.forward(lm.params, tokens, pos, logits=False, taps=(ENTERING - 1,)).taps
    return tokens, state, hidden


def begin(lm, tokens):
    return loop.start(lm.model, Plain(), SamplerProgram(), (), tokens, LENGTH, np.zeros(2, bool))


@pytest.fixture(scope="module")
def exact(lm, native):
    """(source cache, map): layer 0 of the source is the target's own, its layer 1 holds the hidden state as values. The
    map takes layers 0 and 1 of the target from layer 0, the hidden state as it is, and makes nothing of the others."""
    _, state, hidden = native
    g = Geometry.of(lm.config)
    k, h, width = g.kv_heads, g.head_dim, lm.config.hidden
    assert k * h == width
    stored = hidden.reshape(2, SIZE, k, h).transpose(0, 2, 1, 3)
    keys, values = state.cache.k, state.cache.v
    cache = KVCache(
        (keys[0], keys[1], jnp.zeros_like(stored)), (values[0], values[1], stored), state.cache.filled
    )
    same = jnp.eye(k * h).reshape(k, h, k * h)
    zero = jnp.zeros((1, k, h)), jnp.zeros((1, k, h)), jnp.zeros((k, h)), jnp.zeros((k, h))
    maps = tuple(LayerMap(same * (i < 2), same * (i < 2), *zero) for i in range(LAYERS))
    part = HiddenMap(
        jnp.eye(width).reshape(width, 1, k, h) * jnp.asarray([0.0, 1.0])[:, None, None],
        jnp.zeros((2, k, h)),
        jnp.zeros(width),
        ENTERING,
        (2,),
    )
    layers = ((0,), (1,), *((0,),) * (LAYERS - 2))
    source = dataclasses.replace(g, layers=3)
    return cache, Mapper(maps, source, g, layers, False, part)


def native_layers(lm, made, state, first: int, end) -> list[bool]:
    """Per layer whether rows [first, end(b)) are those of native prefill."""
    found = []
    for layer in range(LAYERS):
        gaps = [
            float(jnp.abs(a[layer][b, :, first : end(b)] - z[layer][b, :, first : end(b)]).max())
            for b in range(2)
            for a, z in ((made.cache.k, state.cache.k), (made.cache.v, state.cache.v))
        ]
        found.append(max(gaps) < 2e-5)
    return found


def test_from_an_exact_hidden_state_the_groups_rows_are_native(lm, native, exact) -> None:
    """Two layers of it, then all that are left: with exact rows before the group everything is, and the tail is native
    prefill itself."""
    tokens, state, _ = native
    cache, mapper = exact
    for repair, expected in (
        (Repair(), [True, True, False, False, False]),
        (Repair(group=2), [True, True, True, True, False]),
        (Repair(layers=1, group=3), [True] * 5),
    ):
        made = hand_over(
            lm.model, repair, CHUNK, lm.params, mapper, cache, begin(lm, tokens), int(LENGTH.max())
        )
        np.testing.assert_array_equal(made.cache.filled, LENGTH - 1)
        assert native_layers(lm, made, state, 0, lambda b: int(LENGTH[b]) - 1) == expected, repair
    repair = Repair(tail=9, head=3, group=3)
    made = hand_over(lm.model, repair, CHUNK, lm.params, mapper, cache, begin(lm, tokens), int(LENGTH.max()))
    np.testing.assert_array_equal(made.cache.filled, LENGTH - 1)
    assert native_layers(lm, made, state, 0, lambda b: int(LENGTH[b]) - 1) == [True] * 5


def test_a_group_goes_with_head_and_tail(lm, native, exact) -> None:
    """Layers 2 and 3 native for all mapped tokens, the head in all layers, layer 4 spoiled behind it."""
    tokens, state, _ = native
    cache, mapper = exact
    repair = Repair(tail=6, head=4, group=2)
    made = hand_over(lm.model, repair, CHUNK, lm.params, mapper, cache, begin(lm, tokens), int(LENGTH.max()))
    np.testing.assert_array_equal(made.cache.filled, LENGTH - 1)
    assert native_layers(lm, made, state, 0, lambda b: 4) == [True] * 5
    mapped = native_layers(lm, made, state, 4, lambda b: int(LENGTH[b]) - 6)
    assert mapped == [True, True, True, True, False]
    # The tail is read over all of that: its rows are native up to the first layer that is fed by layer 4's cache.
    assert native_layers(lm, made, state, 0, lambda b: int(LENGTH[b]) - 1)[:4] == [True] * 4


def test_what_cannot_be_is_refused(lm, exact) -> None:
    _, mapper = exact
    for repair, words in (
        (Repair(group=4), "group = 4 from layer 2: .* end within the target's 5"),
        (Repair(layers=2, group=1), "must begin behind the 2 first layers"),
        (Repair(layers=6), "repair.layers = 6: the target has 5 layers"),
    ):
        with pytest.raises(ValueError, match=words):
            repair.check(mapper, lm.config)
    with pytest.raises(ValueError, match="the map has no hidden state"):
        Repair(group=1).check(dataclasses.replace(mapper, hidden=None), lm.config)
    with pytest.raises(ValueError, match="32 wide, the target's 48"):
        Repair(group=1).check(mapper, tinylm.config(hidden=48, num_layers=LAYERS))
    with pytest.raises(ValueError, match=r"repair.group must not be negative, got -1"):
        Repair(group=-1)
    Repair(layers=1, group=3).check(mapper, lm.config)


def test_the_share_counts_the_group() -> None:
    assert Repair(tail=10, group=2).share(100, 8) == pytest.approx((10 * 8 + 90 * 2) / 800)
    assert Repair(tail=10, layers=1, group=2).share(100, 8) == pytest.approx((10 * 8 + 90 * 3) / 800)


# --- fitting ------------------------------------------------------------------------------------------------------

SOURCE, TARGET = Geometry(3, 2, 4, tinylm.TINY.rope), Geometry(4, 3, 6, tinylm.TINY.rope)
WIDTH = 10


def planted(seed: int, rows: int = 2000, offset: float = 50.0):
    """(x, y, hidden): the hidden state is linear in keys and values of source layers 0 and 2."""
    rng, plan = np.random.default_rng(seed), np.random.default_rng(7)
    x = rng.normal(size=(2, rows // 2, SOURCE.layers, 2, SOURCE.kv_heads, SOURCE.head_dim)) + offset
    y = rng.normal(size=(2, rows // 2, TARGET.layers, 2, TARGET.kv_heads, TARGET.head_dim))
    weight = plan.normal(size=(2 * 2 * SOURCE.width, WIDTH))
    hidden = x[:, :, [0, 2]].reshape(2, rows // 2, -1) @ weight + 3
    return tuple(jnp.asarray(z, jnp.float32) for z in (x, y, hidden))


def taken_in(parts) -> moments.Statistics:
    total = moments.empty(SOURCE, TARGET, joint=True, hidden=(2, WIDTH))
    for x, y, hidden in parts:
        total = moments.update(total, x, y, jnp.ones(x.shape[:2]), hidden)
    return moments.statistics(total, SOURCE, TARGET)


def test_a_planted_linear_hidden_state_is_recovered() -> None:
    stats = taken_in([planted(1), planted(2)])
    part = fit.fit_hidden(stats, (0, 2), ridge=0)
    x, _, hidden = planted(3)
    rows = tuple(
        (x[:, :, i, 0].transpose(0, 2, 1, 3), x[:, :, i, 1].transpose(0, 2, 1, 3)) for i in part.layers
    )
    pos = jnp.zeros(x.shape[:2], jnp.int32)
    np.testing.assert_allclose(map_hidden(part, rows, pos, SOURCE), hidden, rtol=1e-4, atol=2e-2)
    other = taken_in([planted(4)])
    assert fit.held_out_hidden(part, other) > 0.99999
    assert fit.held_out_hidden(fit.fit_hidden(stats, (0,)), other) < 0.7  # half of it is in the other layer
    assert part.entering == 2 and part.layers == (0, 2)
    whole = np.asarray(planted(1)[2], np.float64).reshape(-1, WIDTH)
    one = taken_in([planted(1)])
    np.testing.assert_allclose(one.hidden.mean, whole.mean(0), rtol=1e-5)
    np.testing.assert_allclose(one.hidden.variance, whole.var(0), rtol=1e-3)


def test_rows_that_are_not_finite_in_the_hidden_state_are_left_out() -> None:
    x, y, hidden = planted(1)
    stats = taken_in([(x, y, hidden.at[0, :3].set(jnp.nan))])
    assert stats.skipped == 3 and stats.rows == 1997
    assert np.isfinite(stats.hidden.xh).all() and np.isfinite(stats.xy).all()


def test_a_hidden_state_is_paid_for_only_when_asked() -> None:
    plain = moments.memory(SOURCE, TARGET, joint=True)
    more = moments.memory(SOURCE, TARGET, joint=True, hidden=(2, WIDTH)) - plain
    assert more == 4 * WIDTH * (3 + 2 * SOURCE.layers * SOURCE.width)
    with pytest.raises(moments.CalibrationError, match="moments must be joint"):
        moments.empty(SOURCE, TARGET, joint=False, hidden=(2, WIDTH))
    for layer in (0, 4):
        with pytest.raises(moments.CalibrationError, match=f"entering layer {layer}: .* layers 0..3"):
            moments.empty(SOURCE, TARGET, joint=True, hidden=(layer, WIDTH))
    total = moments.update(moments.empty(SOURCE, TARGET, joint=True), *planted(1)[:2], jnp.ones((2, 1000)))
    with pytest.raises(moments.CalibrationError, match="hold no hidden state"):
        fit.fit_hidden(moments.statistics(total, SOURCE, TARGET), (0,))


def test_a_fitted_hidden_state_is_stored_and_serves(tmp_path, golden_dirs) -> None:
    """A model into itself, as `kvjax fit` does it: the hidden state is nearly linear in the cache, and a group repairs
    a map that is spoiled in its layer."""
    import random
    import string

    import kvjax
    import serve
    from kvjax.transfer.pairs import FitOptions, fit_pair
    from serve.handoff import Transfer, handoff

    lm = kvjax.load(next(d for d in golden_dirs if d.name == "qwen3-tied"))
    rng = random.Random(0)
    texts = ["".join(rng.choices(string.printable, k=300)) for _ in range(24)]
    options = FitOptions(k=1, length=64, sequences=20, held=4, hidden=1, layers="matching")
    report = fit_pair(lm, lm, texts[:20], texts[20:], tmp_path / "map", options, progress=False)
    assert 0.5 < report.facts["r2_hidden"] < 1
    transfer = Transfer.load(tmp_path / "map", lm, lm)
    part = transfer.mapper.hidden
    assert part is not None and (part.entering, part.layers, part.weight.shape) == (1, (1,), (64, 2, 2, 32))
    again = artifact.load(tmp_path / "map", dtype="bfloat16")[0].hidden
    assert again.weight.dtype == jnp.bfloat16 and again.mean.dtype == jnp.float32
    first, second = transfer.mapper.maps
    spoiled = dataclasses.replace(
        transfer.mapper, maps=(first, dataclasses.replace(second, key=second.key * 0, value=second.value * 0))
    )
    how = dict(max_new_tokens=1, logprobs=True, size=128)
    prompts = [texts[20][:60], texts[21][:50]]
    native, without, with_group = (
        np.asarray([g.logprobs[0] for g in result])
        for result in (
            serve.generate(lm, prompts, **how),
            handoff(lm, spoiled, lm, prompts, repair=Repair(), **how),
            handoff(lm, spoiled, lm, prompts, repair=Repair(group=1), **how),
        )
    )
    assert np.abs(with_group - native).max() < np.abs(without - native).max() / 2


def test_moments_with_a_hidden_state_are_their_own(tmp_path, golden_dirs) -> None:
    """A file of moments without it is refused when it is asked for, by name."""
    import kvjax

    lm = kvjax.load(next(d for d in golden_dirs if d.name == "qwen3-tied"))
    texts = ["some words of text, long enough to be cut" * 3] * 4
    how = dict(length=16, batch=2, sequences=2, keep=tmp_path / "m.npz", progress=False)
    calibrate.collect(lm, lm, texts, **how)
    with pytest.raises(calibrate.CalibrationError, match="made with other hidden"):
        calibrate.collect(lm, lm, texts, hidden=1, **how)
