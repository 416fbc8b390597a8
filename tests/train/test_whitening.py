"""Coordinates of a map's training: inputs white, outputs of one scale, the optimizer's step carried back."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.transfer import calibrate, select
from kvjax.transfer.fit import FitConfig, fit
from kvjax.transfer.mapper import Mapper
from kvjax.transfer.moments import Statistics
from train import step, whitening

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module", params=["joint", "separate", "local"])
def fitted(request) -> tuple[Mapper, Statistics]:
    source, target = kvjax.load(GOLDEN / "qwen3-untied"), kvjax.load(GOLDEN / "qwen3-tied")
    texts = ["".join(chr(97 + (i * j * j + i) % 26) for j in range(160)) for i in range(40)]
    how = {"length": 64, "sequences": 40, "joint": request.param != "separate"}
    stats = calibrate.collect(source, target, texts, **how)
    depths = stats.source.layers, stats.target.layers
    return fit(stats, select.matching(*depths, 1), FitConfig(local=request.param == "local")), stats


def parameters(mapper: Mapper) -> tuple[dict[str, jax.Array], ...]:
    names = ("key", "value", "key_bias", "value_bias")
    return tuple({name: getattr(m, name) for name in names} for m in mapper.maps)


def test_inputs_are_white_and_outputs_of_one_scale(fitted: tuple[Mapper, Statistics]) -> None:
    mapper, stats = fitted
    for part, chosen, layer in zip(mapper.maps, mapper.layers, whitening.basis(mapper, stats), strict=True):
        for channel, name in enumerate(whitening.NAMES):
            group, index = stats.inputs(chosen, channel)
            grid = index.reshape(-1, stats.source.kv_heads, stats.source.head_dim)
            whiten = np.asarray(layer["whiten"][min(channel, len(layer["whiten"]) - 1)], np.float64)
            weight = np.asarray(getattr(part, name), np.float64)
            for head, kernel in enumerate(weight):
                read = grid if part.heads is None else grid[:, int(part.heads[head])]
                xx = stats.xx[group][np.ix_(read.reshape(-1), read.reshape(-1))]
                u = whiten[min(head, len(whiten) - 1)]
                xx += whitening.FLOOR * np.trace(xx) / len(xx) * np.eye(len(xx))
                np.testing.assert_allclose(u.T @ xx @ u, np.eye(len(xx)), atol=1e-3)
                v = np.linalg.solve(u, kernel.T).T / np.asarray(layer["scale"][name])[head][:, None]
                size = (v**2).sum(-1)  # the variance of its outputs, in units of the scale
                assert size.max() < 1.5 and np.median(size) > 0.9


def test_a_step_is_the_gradient_there_carried_back(fitted: tuple[Mapper, Statistics]) -> None:
    """Of a loss f(A v), plain descent in v moves the parameters by -rate * A A^T grad f."""
    mapper, stats = fitted
    coordinates = step.Coordinates(whitening.basis(mapper, stats), whitening.affine)
    params = parameters(mapper)
    transform = step.within(coordinates, optax.sgd(0.5))
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)
    updates, state = transform.update(grads, transform.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, state[0], coordinates.arrays)  # saved with the run
    for layer, change, gradient in zip(coordinates.arrays, updates, grads, strict=True):
        for channel, name in enumerate(whitening.NAMES):
            whiten = layer["whiten"][min(channel, len(layer["whiten"]) - 1)]
            scale = layer["scale"][name]
            inverse = jnp.einsum("gpq,grq->gpr", whiten, whiten)
            expected = -0.5 * scale[..., None] ** 2 * (gradient[name] @ inverse)
            np.testing.assert_allclose(
                change[name], expected, rtol=1e-3, atol=1e-3 * float(abs(expected).max())
            )
            np.testing.assert_allclose(
                change[f"{name}_bias"], -0.5 * scale**2 * gradient[f"{name}_bias"], rtol=1e-5
            )


def test_directions_of_small_variance_are_learned_too() -> None:
    """Adam on least squares with inputs of unlike variance: in the weights it is slow where inputs are small."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 16)) * np.logspace(0, -2, 16) @ np.linalg.qr(rng.normal(size=(16, 16)))[0]
    truth = rng.normal(size=(4, 16)) @ np.linalg.inv(np.linalg.cholesky(x.T @ x / len(x)))
    y = x @ truth.T
    whiten = jnp.asarray(whitening._whiten(x.T @ x / len(x)), jnp.float32)
    arrays = ({"whiten": (whiten[None],), "scale": {n: jnp.ones((1, 4)) for n in whitening.NAMES}},)

    def loss(params: tuple[dict[str, jax.Array], ...]) -> jax.Array:
        return jnp.mean((x @ params[0]["key"][0].T - y) ** 2) / np.var(y)

    def trained(transform: optax.GradientTransformation) -> float:
        zero = {name: jnp.zeros((1, 4, 16)) for name in whitening.NAMES}
        params = (zero | {f"{name}_bias": jnp.zeros((1, 4)) for name in whitening.NAMES},)
        state = transform.init(params)

        @jax.jit
        def one(params, state):
            updates, state = transform.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(150):
            params, state = one(params, state)
        return float(loss(params))

    plain = min(trained(optax.adam(rate)) for rate in (0.01, 0.1, 1.0))
    white = trained(step.within(step.Coordinates(arrays, whitening.affine), optax.adam(0.03)))
    assert white < 0.01 < plain
