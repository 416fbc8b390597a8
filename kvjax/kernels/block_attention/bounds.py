"""How far the rows of a block see: what lets a kernel skip tiles, or skip masking them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def of_row_blocks(upper: jax.Array, stair: int, *, R: int, rows: int, S: int) -> tuple[jax.Array, jax.Array]:
    """Returns (sure, reach), each [B, blocks] int32, for R rows cut into blocks of `rows`.

    upper: [B] int32; row r sees the slots s < upper[b] + r // stair, or s < upper[b] when stair is 0.
    Every row of a block sees the slots below `sure` (windows aside), none sees a slot at or beyond `reach`.
    Neither exceeds S.
    """
    begin = jnp.arange(0, R, rows, dtype=jnp.int32)
    end = jnp.minimum(begin + rows, R) - 1

    def bound(row: jax.Array) -> jax.Array:
        steps = row // stair if stair else jnp.zeros_like(row)
        return jnp.minimum(upper.astype(jnp.int32)[:, None] + steps, S)

    return bound(begin), bound(end)
