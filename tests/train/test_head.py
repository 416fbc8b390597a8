"""The head's loss against optax on float32: values, gradients, weights, a split vocabulary, rows of any number."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.config import ModelConfig, RopeConfig
from kvjax.sharding import Rules, make_mesh
from train import head
from train.head import cross_entropy

CONFIG = ModelConfig("llama", 64, 32, 1, 4, 4, 8, 48, RopeConfig(), 1e-5, 128)
WIDTH, VOCAB = 24, 64


def inputs(batch: int, t: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((batch, t, WIDTH)).astype(np.float32)
    weight = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    labels = rng.integers(0, VOCAB, (batch, t)).astype(np.int32)
    labels[0, :2] = 0, VOCAB - 1
    return hidden, weight, labels, rng.integers(0, 3, (batch, t)).astype(np.float32)


def reference(hidden: jax.Array, weight: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    logits = jnp.einsum("btd,vd->btv", hidden, weight, precision="highest")
    return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights).sum()


def both(rules: Rules, *args: np.ndarray) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Value and gradients of 3 * loss: a cotangent that is not one."""
    specs = (("batch", None, None), ("vocab", None), ("batch", None), ("batch", None))
    with rules.context():
        placed = [jax.device_put(x, rules.sharding(*spec)) for x, spec in zip(args, specs, strict=True)]
        run = functools.partial(cross_entropy, rules=rules)
        return jax.jit(jax.value_and_grad(lambda h, w, y, s: 3 * run(h, w, y, s), argnums=(0, 1)))(*placed)


def check(got: tuple, want: tuple) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def want(args: tuple[np.ndarray, ...]) -> tuple:
    return jax.value_and_grad(lambda *a: 3 * reference(*a), argnums=(0, 1))(*args)


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize(("batch", "t"), [(2, 8), (1, 13), (3, 7)])
def test_rows_of_any_number(monkeypatch: pytest.MonkeyPatch, rows: int, batch: int, t: int) -> None:
    """Also more chunks than one, and counts that no chunk divides."""
    monkeypatch.setattr(head, "ROWS", rows)
    args = inputs(batch, t)
    check(both(Rules.create(CONFIG, None), *args), want(args))


@pytest.mark.parametrize(("data", "model"), [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)])
def test_a_vocabulary_split_over_devices(monkeypatch: pytest.MonkeyPatch, data: int, model: int) -> None:
    monkeypatch.setattr(head, "ROWS", 5)
    args = inputs(4, 6)
    rules = Rules.create(CONFIG, make_mesh(data, model))
    value, (by_hidden, by_weight) = both(rules, *args)
    assert by_weight.sharding.spec[0] == "model" and by_hidden.sharding.spec[0] == "data"
    check((value, (by_hidden, by_weight)), want(args))


def test_value_alone_is_the_value_with_gradients() -> None:
    args = inputs(2, 8)
    rules = Rules.create(CONFIG, None)
    alone = jax.jit(lambda *a: cross_entropy(*a, rules))(*args)
    np.testing.assert_array_equal(3 * alone, both(rules, *args)[0])


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels, weights = inputs(2, 8)
    args = (1000 * hidden, weight, labels, weights)
    value, grads = both(Rules.create(CONFIG, None), *args)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
    np.testing.assert_allclose(value, want(args)[0], rtol=1e-5)


def test_rows_of_weight_zero_are_nothing() -> None:
    hidden, weight, labels, weights = inputs(2, 8)
    rules = Rules.create(CONFIG, None)
    value, (by_hidden, _) = both(rules, hidden, weight, labels, weights)
    changed = np.where(weights[..., None] == 0, 9.0, hidden).astype(np.float32)
    assert (np.asarray(by_hidden)[weights == 0] == 0).all() and (weights == 0).any()
    np.testing.assert_array_equal(both(rules, changed, weight, labels, weights)[0], value)


def test_bfloat16_sums_in_float32() -> None:
    """Gradients come in the inputs' dtype; the loss of many rows keeps float32's digits."""
    hidden, weight, labels, _ = inputs(8, 64)
    args = (hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), labels, np.ones((8, 64), np.float32))
    value, grads = both(Rules.create(CONFIG, None), *args)
    assert value.dtype == jnp.float32 and {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
    wide = tuple(np.asarray(x, np.float32) for x in args[:2])
    exact = want((*wide, *args[2:]))
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    for a, b in zip(grads, exact[1], strict=True):
        error = np.asarray(a, np.float32) - b
        assert np.abs(error).max() < 0.02 * np.abs(b).max()


def test_logits_are_never_held_for_all_rows() -> None:
    """No array of the program is as large as all rows times the vocabulary."""
    args = inputs(8, 512)
    rules = Rules.create(CONFIG, None)
    program = jax.jit(jax.grad(lambda h, w: cross_entropy(h, w, *args[2:], rules), argnums=(0, 1)))
    memory = program.lower(*args[:2]).compile().memory_analysis()
    assert 8 * 512 > 4 * head.ROWS
    assert memory.temp_size_in_bytes < 8 * 512 * VOCAB * 4
