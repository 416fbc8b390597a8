"""The step against numpy: AdamW, decay mask, clipping, schedules, accumulation, and the latch against NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import OptimizerConfig
from train.step import create, make_step, optimizer, schedule

STEPS = 30
PARAMS = {
    "w": np.array([[0.5, -1.0], [2.0, 0.25], [-0.75, 1.5]], np.float32),
    "b": np.array([0.1, -0.2], np.float32),
}
DECAYED = {"w": True, "b": False}


def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Least squares; rows have weights."""
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    weight = batch["weight"].sum()
    return (error**2 * batch["weight"][:, None]).sum(), weight, {"bias": jnp.abs(params["b"]).sum() * weight}


def batch_of(seed: int, rows: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, 3), "y": (rows, 2)}
    drawn = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    return drawn | {"weight": rng.integers(1, 4, rows).astype(np.float32)}


def start(config: OptimizerConfig, accumulate: int = 1) -> tuple[Any, Any]:
    transform = optimizer(config, STEPS, DECAYED)
    state = create(jax.tree.map(jnp.asarray, PARAMS), transform, 0)
    return state, make_step(loss, transform, schedule(config, STEPS), accumulate)


# --- schedules ------------------------------------------------------------------------------------------------------


def rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    return np.array([float(schedule(config, steps)(i)) for i in range(steps + 1)])


def test_cosine() -> None:
    config = OptimizerConfig(2.0, warmup=10, schedule="cosine", floor=0.1)
    at = np.arange(101)
    share = (at - 10) / 90
    want = np.where(at < 10, 2.0 * at / 10, 2.0 * (0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2))
    np.testing.assert_allclose(rates(config, 100), want, rtol=1e-5, atol=1e-6)


def test_warm_up_stable_decay() -> None:
    config = OptimizerConfig(2.0, warmup=10, schedule="wsd", decay=0.25, floor=0.1)
    at = np.arange(101)
    want = np.interp(at, [0, 10, 75, 100], [0, 2.0, 2.0, 0.2])
    np.testing.assert_allclose(rates(config, 100), want, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 60), warmup=st.integers(0, 80), kind=st.sampled_from(["cosine", "wsd"]),
    decay=st.floats(0, 1), floor=st.floats(0, 1),
)  # fmt: skip
def test_every_schedule_climbs_falls_and_ends_at_the_floor(
    steps: int, warmup: int, kind: str, decay: float, floor: float
) -> None:
    got = rates(OptimizerConfig(3.0, warmup=warmup, schedule=kind, decay=decay, floor=floor), steps)
    up = min(warmup, steps)
    assert (np.diff(got[: up + 1]) >= 0).all() and (np.diff(got[up:]) <= 1e-6).all()
    assert got.max() <= 3.0 + 1e-6 and got[up] == pytest.approx(3.0)
    if up < steps:
        assert got[-1] == pytest.approx(3.0 * floor, abs=1e-5)


# --- one optimizer --------------------------------------------------------------------------------------------------


def reference(config: OptimizerConfig, count: int) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """Loshchilov & Hutter's AdamW, with the gradient clipped as one vector, in float64."""
    params = {k: v.astype(np.float64) for k, v in PARAMS.items()}
    first, second = ({k: np.zeros_like(v) for k, v in params.items()} for _ in range(2))
    told = []
    for t in range(count):
        batch = {k: v.astype(np.float64) for k, v in batch_of(t).items()}
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        weighted = 2 * error * batch["weight"][:, None] / batch["weight"].sum()
        grads = {"w": batch["x"].T @ weighted, "b": weighted.sum(0)}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        rate = float(schedule(config, STEPS)(t))
        told.append({"loss": (error**2 * batch["weight"][:, None]).sum() / batch["weight"].sum(),
                     "grad_norm": norm, "rate": rate, "bias": np.abs(params["b"]).sum()})  # fmt: skip
        for k in params:
            g = grads[k] * min(1, config.clip / norm)
            first[k] = config.b1 * first[k] + (1 - config.b1) * g
            second[k] = config.b2 * second[k] + (1 - config.b2) * g**2
            m, v = first[k] / (1 - config.b1 ** (t + 1)), second[k] / (1 - config.b2 ** (t + 1))
            decay = config.weight_decay * params[k] if DECAYED[k] else 0
            params[k] = params[k] - rate * (m / (np.sqrt(v) + config.eps) + decay)
    return params, told


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_steps_are_adamw(clip: float) -> None:
    config = OptimizerConfig(0.05, warmup=3, weight_decay=0.3, clip=clip)
    state, step = start(config)
    want, told = reference(config, 12)
    assert clip > 1 or min(t["grad_norm"] for t in told) > clip
    for t in range(12):
        state, metrics = step(state, batch_of(t))
        assert metrics.keys() == {"loss", "grad_norm", "rate", "healthy", "bias"} and bool(metrics["healthy"])
        for name, value in told[t].items():
            np.testing.assert_allclose(float(metrics[name]), value, rtol=2e-5)
    assert int(state.step) == 12
    for k in want:
        np.testing.assert_allclose(state.params[k], want[k], rtol=2e-5, atol=1e-6)


def test_only_marked_leaves_decay() -> None:
    """Where nothing is to be learnt, marked leaves shrink by rate * weight_decay and the others stay."""
    config = OptimizerConfig(0.1, warmup=0, schedule="wsd", weight_decay=0.5)
    state, step = start(config)
    still = {**batch_of(0), "weight": np.ones(8, np.float32)}
    still["y"] = still["x"] @ PARAMS["w"] + PARAMS["b"]
    still["x"], still["y"] = np.zeros_like(still["x"]), np.broadcast_to(PARAMS["b"], still["y"].shape)
    state, _ = step(state, still)
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] * (1 - 0.1 * 0.5), rtol=1e-6)
    np.testing.assert_array_equal(state.params["b"], PARAMS["b"])


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_unequal_weight_are_one_batch(parts: int) -> None:
    """Loss and gradient are means over the whole weight, not means of the parts' means."""
    config = OptimizerConfig(0.05, warmup=0)
    (one, step), (many, step_many) = start(config), start(config, parts)
    for t in range(5):
        batch = batch_of(t)
        one, a = step(one, batch)
        many, b = step_many(many, {k: v.reshape(parts, -1, *v.shape[1:]) for k, v in batch.items()})
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_every_step_and_part_draws_its_own_key() -> None:
    seen: list[float] = []

    def noisy(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        jax.debug.callback(lambda x: seen.append(float(x)), jax.random.uniform(key))
        return (params["w"] ** 2).sum(), jnp.float32(1), {}

    config = OptimizerConfig(0.05)
    for accumulate in (1, 3):
        transform = optimizer(config, STEPS, DECAYED)
        state = create(jax.tree.map(jnp.asarray, PARAMS), transform, 5)
        step = make_step(noisy, transform, schedule(config, STEPS), accumulate)
        batch = np.zeros((3, 2)) if accumulate == 3 else np.zeros(2)
        for _ in range(4):
            state, _ = step(state, batch)
    jax.effects_barrier()
    assert len(set(seen[:4])) == 4 and len(set(seen[4:])) == 12


# --- the latch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "gradient", "inf"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(where: str, accumulate: int) -> None:
    """Nor does any later one, with sound batches: what is there is the state the step started from, bit for bit."""
    config = OptimizerConfig(0.05, warmup=0)

    def treacherous(
        params: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        value, weight, more = loss(params, batch, key)
        x = params["b"][0] - jax.lax.stop_gradient(params["b"][0])  # zero, with an infinite slope of its root
        bad = batch["x"][0, 0] > 100
        return value + (jnp.where(bad, jnp.sqrt(x), 0) if where == "gradient" else 0), weight, more

    transform = optimizer(config, STEPS, DECAYED)
    state = create(jax.tree.map(jnp.asarray, PARAMS), transform, 0)
    step = make_step(treacherous, transform, schedule(config, STEPS), accumulate)

    def parts(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return batch if accumulate == 1 else {k: v.reshape(2, 4, *v.shape[1:]) for k, v in batch.items()}

    sound = [parts(batch_of(t)) for t in range(5)]
    bad = batch_of(9)
    bad["x"][0 if where != "inf" else -1, 0] = {"loss": np.nan, "gradient": 101.0, "inf": np.inf}[where]
    for batch in sound[:3]:
        state, metrics = step(state, batch)
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, parts(bad))
    if where == "gradient":
        assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    for batch in [None, *sound[3:]]:
        if batch is not None:
            state, metrics = step(state, batch)
        assert not bool(metrics["healthy"]) and not bool(state.healthy)
        kept = dataclasses.replace(before, healthy=np.array(False))
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_state_is_donated() -> None:
    state, step = start(OptimizerConfig(0.05))
    step(state, batch_of(0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
