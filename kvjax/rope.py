"""Rotary position embedding: inverse frequencies, angles of integer positions, rotate and unrotate.

Layout is half-split ("rotate_half", NeoX): features i and i + H/2 of a head turn together.

Formulas: rotary embedding (arXiv 2104.09864, eq. 34); `linear` is position interpolation (arXiv
2306.15595); `yarn` is arXiv 2309.00071, sections 3.2 to 3.4; `llama3` is the ramp published with
Llama 3.1. All equal the functions transformers uses, up to the float32 rounding those carry.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each feature pair: float64 [H/2], on the host.

    Raises:
      ValueError: odd `head_dim`.
    """
    if head_dim % 2 or head_dim <= 0:
        raise ValueError(f"head_dim must be even and positive, got {head_dim}")
    inv = float(rope.theta) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return inv / rope.factor
    if rope.kind == "llama3":
        # Turns made within the original context decide: many turns stay, few are stretched by `factor`.
        turns = rope.original_max * inv / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return _blend(inv, rope.factor, np.clip(keep, 0.0, 1.0))
    if rope.kind == "yarn":
        low, high = (_yarn_pair(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
        return _blend(inv, rope.factor, 1.0 - stretch)
    return inv


def _blend(inv: np.ndarray, factor: float, keep: np.ndarray) -> np.ndarray:
    return inv * keep + inv / factor * (1.0 - keep)


def _yarn_pair(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The (fractional) feature pair that makes `turns` turns within the original context."""
    return head_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def cos_sin(pos: Array, rope: RopeConfig, head_dim: int) -> tuple[Array, Array]:
    """Cosine and sine of the angles at integer positions.

    Angles are exact to float32 at any int32 position: the phase is an int32 in units of 2^-32 turns,
    so that multiplying by a position drops whole turns without rounding, and a small float32 term
    carries what the 32 bits leave out. A float32 product of position and frequency, as transformers
    computes it, is off by up to 6e-3 at position 131,071 (3e-6 at 100).

    Args:
      pos: [...] integer (usually [B, T]).
      rope: its `attention_factor` multiplies both results.
      head_dim: H.

    Returns:
      cos, sin: float32 [..., H/2].

    Raises:
      TypeError: `pos` is not an integer array.
    """
    if not jnp.issubdtype(pos.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, got {pos.dtype}")
    turns = inverse_frequencies(rope, head_dim) / (2 * math.pi) % 1.0
    phase = np.round(turns * 2**32)
    rest = ((turns * 2**32 - phase) * (2 * math.pi / 2**32)).astype(np.float32)
    step = (phase.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    pos = pos.astype(jnp.int32)[..., None]
    angle = (pos * step).astype(jnp.float32) * np.float32(2 * math.pi / 2**32) + pos.astype(
        jnp.float32
    ) * rest
    scale = np.float32(rope.attention_factor)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the features of `x` by the angles of `cos_sin`, in float32.

    Args:
      x: [..., H], heads and positions on any leading axes.
      cos, sin: broadcastable to [..., H/2]; the caller inserts axes of size 1 for heads, e.g.
        `cos[:, :, None]` for x [B, T, K, H] and `cos[:, None]` for x [B, K, T, H].

    Returns:
      The shape and dtype of `x`.
    """
    a, b = _halves(x)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def unrotate(x: Array, cos: Array, sin: Array) -> Array:
    """The inverse of `rotate`, an attention factor in `cos` and `sin` included."""
    a, b = _halves(x)
    norm = cos * cos + sin * sin
    cos, sin = cos / norm, sin / norm
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1).astype(x.dtype)


def _halves(x: Array) -> tuple[Array, Array]:
    x = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
