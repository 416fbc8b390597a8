"""`linear` keeps the weights as the left operand on CPU, and is a product whatever the operands' order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Choice
from kvjax.config import ModelConfig, RopeConfig
from kvjax.models import build
from kvjax.models.layers import Setting, linear
from kvjax.sharding import Rules

CONFIG = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, RopeConfig(), 1e-5, 128)
SETTING = Setting(Rules.create(CONFIG, None), "float32", Choice("cpu"))
ROWS, OUT, IN = 8, 384, 128


def left_operand(function) -> tuple[int, ...]:
    """Shape of the left operand of the one product in `function`'s compiled program."""
    x, w = jax.ShapeDtypeStruct((1, ROWS, IN), jnp.float32), jax.ShapeDtypeStruct((OUT, IN), jnp.float32)
    text = jax.jit(function).lower(x, w).compile().as_text()
    shapes = dict(re.findall(r"%?([\w.-]+)(?: = |: )f32\[([\d,]*)\]", text))
    (operand,) = set(re.findall(r"= \S+ dot\((?:f32\[[\d,]*\]\S* )?%?([\w.-]+),", text))
    return tuple(int(n) for n in shapes[operand].split(",") if n)


def test_weights_are_the_left_operand():
    assert left_operand(lambda x, w: linear(x, w, SETTING)) == (OUT, IN)


def test_training_puts_the_rows_left():
    """With many rows and gradients, the rows' side leads: both directions are then plain products."""
    train = Setting(SETTING.rules, "float32", Choice("cpu"), train=True)
    assert left_operand(lambda x, w: linear(x, w, train)) == (ROWS, IN)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("inner", "outer"), [((12,), (7,)), ((3, 4), (7,)), ((12,), (2, 5)), ((12,), (3, 2, 5))]
)
def test_product(platform, inner, outer, train):
    setting = Setting(SETTING.rules, "float32", Choice(platform), train)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, *inner)), rng.normal(size=(*outer, *inner))
    y = linear(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), setting)
    flat = x.reshape(6, 12) @ w.reshape(-1, 12).T
    np.testing.assert_allclose(y, flat.reshape(2, 3, *outer), atol=1e-5)


def test_the_same_model_is_built_once():
    """A model loaded twice is one static argument to jit: it compiles once."""
    assert build(CONFIG) is build(CONFIG)
    assert build(CONFIG) is not build(CONFIG, None, "bfloat16")
