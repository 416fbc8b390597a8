"""Attention-weighted fitting: the weights against their definition, the fit against weighted least squares."""

from __future__ import annotations

import random
import string
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.config import RopeConfig
from kvjax.transfer import calibrate, fit, moments, select, weighted
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.moments import CalibrationError

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE, TARGET = Geometry(3, 2, 4, RopeConfig()), Geometry(2, 2, 6, RopeConfig())
SELECTION = ((0, 2), (1, 2))


def test_the_weights_are_what_they_are_said_to_be() -> None:
    lm = kvjax.load(GOLDEN / "qwen3-tied")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, lm.config.vocab, (2, 20)), jnp.int32)
    pos = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), ids.shape)
    found = np.asarray(weighted.attention_weights(lm.model, lm.params, ids))
    queries = lm.model.bind(lm.params).queries(ids, pos)
    rows = lm.model.forward(lm.params, ids, pos, logits=False).rows
    at = np.unique(np.round(np.geomspace(1, 20, weighted.QUERIES)).astype(int) - 1)
    for layer, (q, (k, v)) in enumerate(zip(queries, rows, strict=True)):
        q, k, v = (np.asarray(z, np.float64) for z in (q, k, v))
        for head in range(k.shape[1]):
            key, value = np.zeros((2, 20)), np.zeros((2, 20))
            for b in range(2):
                for u in at:
                    for g in range(q.shape[3]):
                        scores = k[b, head, : u + 1] @ q[b, u, head, g] * q.shape[-1] ** -0.5
                        a = np.exp(scores - scores.max())
                        a /= a.sum()
                        out = a @ v[b, head, : u + 1]
                        far = ((v[b, head, : u + 1] - out) ** 2).sum(-1)
                        value[b, : u + 1] += a**2
                        key[b, : u + 1] += a**2 * far * (q[b, u, head, g] ** 2).sum() / q.shape[-1]
            np.testing.assert_allclose(found[layer, head, 0], key, rtol=2e-3, atol=1e-5)
            np.testing.assert_allclose(found[layer, head, 1], value, rtol=2e-3, atol=1e-6)


def drawn(seed: int, rows: int = 400):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, rows, SOURCE.layers, 2, SOURCE.kv_heads, SOURCE.head_dim)) + 2
    y = rng.normal(size=(1, rows, TARGET.layers, 2, TARGET.kv_heads, TARGET.head_dim)) - 1
    y += x.reshape(1, rows, -1)[..., :1, None, None, None] * 0.7
    r = rng.gamma(1.0, size=(TARGET.layers, TARGET.kv_heads, 2, 1, rows))
    return tuple(jnp.asarray(z, jnp.float32) for z in (x, y, r))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_a_fit_is_weighted_least_squares(local: bool, joint: bool) -> None:
    x, y, r = drawn(0)
    heads = np.asarray([[1, 0], [0, 0]]) if local else None
    tuples = None if heads is None else tuple(map(tuple, heads.tolist()))
    shift = jnp.mean(x, (0, 1)), jnp.mean(y, (0, 1))
    sums = weighted.empty(SELECTION, heads, SOURCE, TARGET, joint)
    for part in (slice(0, 150), slice(150, 400)):  # texts of their own: r is scaled in each
        sums = weighted.update(sums, SELECTION, tuples, joint, shift, x[:, part], y[:, part], r[..., part])
    mapper, alpha = weighted.fit(sums, SELECTION, heads, SOURCE, TARGET, joint, shift, fit.FitConfig(ridge=0))
    scaled = np.concatenate(
        [
            np.asarray(r[..., p]) / np.asarray(r[..., p]).mean((3, 4), keepdims=True)
            for p in (slice(0, 150), slice(150, 400))
        ],
        -1,
    )
    for layer, head, channel in ((0, 1, 0), (1, 0, 1)):
        w = 1 + alpha[layer, head, channel] * (scaled[layer, head, channel, 0] - 1)
        p = sums.x.shape[-1]
        assert w.sum() ** 2 / (w**2).sum() >= min(400, 2 * p) * 0.999
        assert 0 < alpha[layer, head, channel] <= 1
        picked = np.asarray(x[0][:, list(SELECTION[layer])], np.float64)
        picked = picked.reshape(400, -1, *picked.shape[3:]) if joint else picked[:, :, channel]
        if heads is not None:
            picked = picked[:, :, heads[layer][head]]
        inputs = np.concatenate([picked.reshape(400, -1), np.ones((400, 1))], 1)
        outputs = np.asarray(y[0, :, layer, channel, head], np.float64)
        root = np.sqrt(w)[:, None]
        solution, *_ = np.linalg.lstsq(inputs * root, outputs * root, rcond=None)
        part = mapper.maps[layer]
        weight = np.asarray((part.key, part.value)[channel][head]).reshape(TARGET.head_dim, -1)
        np.testing.assert_allclose(weight.T, solution[:-1], atol=2e-4)
        mean = np.asarray((part.key_mean, part.value_mean)[channel], np.float64)
        mean = mean[:, heads[layer][head]] if heads is not None else mean
        bias = np.asarray((part.key_bias, part.value_bias)[channel][head])
        np.testing.assert_allclose(bias - weight @ mean.reshape(-1), solution[-1], atol=1e-3)


def test_equal_weights_are_the_plain_fit() -> None:
    x, y, r = drawn(1)
    shift = jnp.mean(x, (0, 1)), jnp.mean(y, (0, 1))
    sums = weighted.empty(SELECTION, None, SOURCE, TARGET, True)
    sums = weighted.update(sums, SELECTION, None, True, shift, x, y, jnp.ones_like(r))
    mapper, _ = weighted.fit(sums, SELECTION, None, SOURCE, TARGET, True, shift, fit.FitConfig(ridge=1e-3))
    total = moments.update(moments.empty(SOURCE, TARGET, joint=True), x, y, jnp.ones((1, 400)))
    plain = fit.fit(moments.statistics(total, SOURCE, TARGET), SELECTION, fit.FitConfig(ridge=1e-3))
    for a, b in zip(mapper.maps, plain.maps, strict=True):
        for name in ("key", "value", "key_bias", "value_mean"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_the_second_pass_with_equal_weights_is_the_first(
    joint: bool, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = kvjax.load(GOLDEN / "qwen3-tied")
    rng = random.Random(0)
    texts = ["".join(rng.choices(string.printable, k=200)) for _ in range(12)]
    read = dict(length=40, batch=4, sequences=12)
    stats = calibrate.collect(lm, lm, texts, joint=joint, **read)
    selection = tuple((layer,) for layer in reversed(range(lm.config.num_layers)))  # not the identity
    config = fit.FitConfig(1e-2, local=local)
    plain = fit.fit(stats, selection, config)
    found = weighted.fit_pair(lm, lm, texts, stats, selection, config, **read)
    apart = [np.abs(a.value - b.value).max() for a, b in zip(found.maps, plain.maps, strict=True)]
    assert min(apart) > 1e-3
    ones = lambda model, params, ids: jnp.ones_like(attention(model, params, ids))  # noqa: E731
    attention = weighted.attention_weights
    monkeypatch.setattr(weighted, "attention_weights", ones)
    found = weighted.fit_pair(lm, lm, texts, stats, selection, config, **read)
    for a, b in zip(found.maps, plain.maps, strict=True):
        for name in ("key", "value", "key_bias", "value_bias", "key_mean"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=2e-4)


def test_moments_larger_than_the_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = kvjax.load(GOLDEN / "qwen3-tied")
    texts = [string.printable] * 4
    stats = calibrate.collect(lm, lm, texts, length=40, batch=4, sequences=4)
    selection = select.matching(lm.config.num_layers, lm.config.num_layers, 1)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    with pytest.raises(CalibrationError, match="fewer source layers"):
        weighted.fit_pair(lm, lm, texts, stats, selection, fit.FitConfig(), length=40, batch=4, sequences=4)
