"""`kv_map` in plain XLA: the reference for the kernels, and what runs on CPU and on older GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels.kv_map import Affine
from kvjax.rope import rotate
from kvjax.typing import Array, Float


def is_supported(
    sources: Sequence[Any], affine: Affine, *, rows: int, platform: str, device_kind: str = ""
) -> str | None:
    """XLA runs everywhere: always None (= supported)."""
    return None


def kv_map(
    sources: Sequence[jax.Array],
    affine: Affine,
    start: jax.Array,
    unturn: jax.Array,
    turn: jax.Array | None,
    *,
    keys: tuple[bool, ...],
) -> jax.Array:
    """Rows [start, start + T) of J source arrays as rows of one target layer.

    Args:
      sources: J arrays [B, k, S, h], layers of a source cache (keys or values).
      affine: the map; its J blocks in the order of `sources`.
      start: [] int32, first slot, a multiple of T as a prompt chunk's is; start + T <= S.
      unturn: [B, 2, T, h/2] float32, the cosine and sine that undo the source's rotation of these rows.
      turn: [B, 2, T, H/2] float32, those of the target's rotation, or None for values.
      keys: per source array whether it holds rotated keys.

    Returns: [B, K, T, H] float32. Products run in the weight's dtype, or in the cache's where weights are int8, and
    accumulate in float32.
    """
    picked = []
    for source, is_key in zip(sources, keys, strict=True):
        x = jax.lax.dynamic_slice_in_dim(source, start, unturn.shape[2], axis=2).astype(jnp.float32)
        if is_key:
            x = rotate(x, unturn[:, :1], unturn[:, 1:])
        picked.append(x.transpose(0, 2, 1, 3))
    out = project(jnp.stack(picked, 2), affine, sources[0].dtype)
    return out if turn is None else rotate(out, turn[:, :1], turn[:, 1:])


def project(
    x: Float[Array, "B T J k h"], affine: Affine, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "B K T H"]:
    """The affine map alone, of float32 rows that carry no rotation; `dtype`: of products with int8 weights."""
    weight, mean, bias, scale, heads = affine
    kv, width, _ = weight.shape
    dtype = dtype if scale is not None else weight.dtype
    x = (x - mean).astype(dtype)
    if heads is None:
        x = x.reshape(*x.shape[:2], weight.shape[-1])
        out = jnp.einsum("btp,mnp->bmtn", x, weight.astype(dtype), preferred_element_type=jnp.float32)
    else:
        blocks = weight.reshape(kv, width, x.shape[2], x.shape[4]).astype(dtype)
        out = jnp.einsum("btjmh,mnjh->bmtn", x[:, :, :, heads], blocks, preferred_element_type=jnp.float32)
    if scale is not None:
        out = out * scale[:, None]
    return out + bias[:, None]
