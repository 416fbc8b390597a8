"""The few building blocks every decoder here is made of."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.attention import Choice
from kvjax.sharding import Rules
from kvjax.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the layers of one model share: where it runs and how. Static."""

    rules: Rules
    dtype: str
    attention: Choice
    train: bool = False
    """Gradients are wanted: products in the order that is fast for many rows and both directions."""


def linear(
    x: Float[Array, "B T *I"], weight: Float[Array, "*O *I"], setting: Setting, *, reduced: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "B T *O"]:  # fmt: skip
    """x times a weight stored as published, [out..., in...]; `dtype` is the result's (default x's).

    reduced: the contracted axis is sharded, so the result is summed over `model` (o_proj, down_proj).

    XLA:CPU is fast only with the weights as the left operand (a step of one row: 23 against 37 ms, a chunk of 128:
    196 against 325). The barrier keeps XLA from turning it round again or fusing into it (5 % of a step).
    For training the rows are on the left, and on one device both operands are made matrices first: the gradient by
    the weight is then one plain product, without a transposed copy of the rows (7 % of a step).
    """
    inner = x.ndim - 2
    outer = weight.ndim - inner
    if setting.train and setting.rules.mesh is None:
        rows, matrix = (
            x.reshape(-1, math.prod(x.shape[2:])),
            weight.reshape(math.prod(weight.shape[:outer]), -1),
        )
        y = jax.lax.dot_general(
            rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=dtype or x.dtype
        )
        return y.reshape(*x.shape[:2], *weight.shape[:outer])
    contract_x, contract_w = tuple(range(2, x.ndim)), tuple(range(outer, weight.ndim))
    left = setting.attention.platform == "cpu" and not setting.train
    sharding = None
    if reduced and setting.rules.mesh is not None:
        batch = setting.rules.spec("batch")[0]  # type: ignore[index]
        free = (None,) * outer
        sharding = jax.P(*free, batch, None) if left else jax.P(batch, None, *free)
    kind = dtype or x.dtype
    if not left:
        dims = ((contract_x, contract_w), ((), ()))
        return jax.lax.dot_general(x, weight, dims, preferred_element_type=kind, out_sharding=sharding)
    dims = ((contract_w, contract_x), ((), ()))
    y = jax.lax.dot_general(weight, x, dims, preferred_element_type=kind, out_sharding=sharding)
    y = jax.lax.optimization_barrier(y)
    return jnp.moveaxis(y, (-2, -1), (0, 1))


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Root-mean-square norm in float32, cast back before the scale, as transformers does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def param(rngs: nnx.Rngs, shape: tuple[int, ...], setting: Setting, *, scale: float = 0.02) -> nnx.Param:
    """A weight drawn from normal(0, scale); scale 0 gives ones (norms)."""
    dtype = jnp.dtype(setting.dtype)
    if scale == 0:
        return nnx.Param(jnp.ones(shape, dtype))
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))
