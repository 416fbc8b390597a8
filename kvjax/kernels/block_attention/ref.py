"""`block_attention` in plain XLA: the reference for the kernels, and what runs on CPU and on older GPUs.

Keys in unused slots may hold anything: their scores are replaced, not scaled. Values in unused slots
must be finite, because a zero weight times NaN is NaN; the cache guarantees that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def is_supported(
    q: jax.ShapeDtypeStruct | jax.Array,
    k: jax.ShapeDtypeStruct | jax.Array,
    *,
    platform: str,
    device_kind: str = "",
) -> str | None:
    """XLA runs everywhere: always None (= supported)."""
    return None


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    upper: jax.Array,
    lower: jax.Array | None = None,
    *,
    scale: float,
    stair: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention of R rows per KV head over the slots lower <= s < upper, with its log-sum-exp.

    q: [B,K,R,H], k and v: [B,K,S,H] of q's dtype, upper: [B] int32, lower: [B,R] int32 or None.
    stair: every `stair` rows see one slot more (a causal block of `stair` heads); 0: all rows the same.
    Returns out [B,K,R,H] float32 and lse [B,K,R] float32. A row that sees nothing gets out 0, lse -inf.
    Products accumulate in float32; the softmax weights are rounded to v's dtype before they meet v.
    """
    scores = jnp.einsum("bkrh,bksh->bkrs", q, k, preferred_element_type=jnp.float32) * scale
    slot = jnp.arange(k.shape[2], dtype=jnp.int32)
    bound = upper[:, None]
    if stair:
        bound = bound + jnp.arange(q.shape[2], dtype=jnp.int32) // stair
    visible = (slot < bound[:, :, None])[:, None]
    if lower is not None:
        visible = visible & (slot >= lower[:, None, :, None])
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))  # cancels: gradients need not pass
    # A row that sees nothing has top = -inf, and -inf - -inf is NaN: shift such a row by 0 instead.
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bkrs,bksh->bkrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out / jnp.where(total == 0.0, 1.0, total)
    return out, (top + jnp.log(total))[..., 0]
