"""`kv_map` in plain XLA: the reference for the kernels, and what runs on CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.rope import rotate


def kv_map(
    sources: Sequence[jax.Array],
    weight: jax.Array,
    mean: jax.Array,
    bias: jax.Array,
    start: jax.Array,
    unturn: jax.Array | None,
    turn: jax.Array | None,
    *,
    rows: int,
    keys: tuple[bool, ...],
) -> jax.Array:
    """Rows [start, start + rows) of J source arrays as rows of one target layer.

    Args:
      sources: J arrays [B, k, S, h], layers of a source cache (keys or values).
      weight: [K, H, J, k, h]; mean: [J, k, h] float32; bias: [K, H] float32.
      start: [] int32, first slot.
      unturn: [B, rows, 2, h/2] float32, the cosine and sine that undo the source's rotation of these rows.
      turn: [B, rows, 2, H/2] float32, those of the target's rotation, or None for values.
      keys: per source array whether it holds rotated keys.

    Returns: [B, K, rows, H] float32. Products run in weight's dtype and accumulate in float32.
    """
    picked = []
    for source, is_key, centre in zip(sources, keys, mean, strict=True):
        x = jax.lax.dynamic_slice_in_dim(source, start, rows, axis=2).astype(jnp.float32)
        if is_key:
            assert unturn is not None
            x = rotate(x, unturn[:, None, :, 0], -unturn[:, None, :, 1])
        picked.append((x - centre[:, None]).astype(weight.dtype))
    x = jnp.stack(picked, 1)  # [B, J, k, rows, h]
    out = jnp.einsum("bjkth,mnjkh->bmtn", x, weight, preferred_element_type=jnp.float32) + bias[:, None]
    return out if turn is None else rotate(out, turn[:, None, :, 0], turn[:, None, :, 1])
