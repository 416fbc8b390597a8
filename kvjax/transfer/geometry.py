"""What of a model matters to its cache, and cached rows as position-free features.

Keys are compared and mapped without their rotation ("content" keys): a linear map of rotated keys would hold at one
distance only. Values are taken as they are. A token's features are laid out `[L, 2, K, H]`, key before value.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache import Rows
from kvjax.config import ModelConfig, RopeConfig
from kvjax.rope import cos_sin, rotate, unrotate
from kvjax.typing import Array, Float, Int

KEY, VALUE = 0, 1
CHANNELS = ("key", "value")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shape of a model's cache (L layers of K heads of width H) and the rotation its keys carry."""

    layers: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig

    @classmethod
    def of(cls, config: ModelConfig) -> Geometry:
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, config.rope)

    @property
    def width(self) -> int:
        """K * H: features of one token in one layer and channel."""
        return self.kv_heads * self.head_dim


def content(rows: Rows, pos: Int[Array, "B T"], geometry: Geometry) -> Float[Array, "B T L 2 K H"]:
    """Rows of all layers ((k, v) each [B, K, T, H], keys rotated for `pos`) as float32 features."""
    cos, sin = cos_sin(pos, geometry.rope, geometry.head_dim)
    keys = jnp.stack([k for k, _ in rows], 2).astype(jnp.float32)  # [B, K, L, T, H]
    keys = unrotate(keys, cos[:, None, None], sin[:, None, None])
    values = jnp.stack([v for _, v in rows], 2).astype(jnp.float32)
    return jnp.stack([keys, values], 3).transpose(0, 4, 2, 3, 1, 5)


def rotated(
    keys: Float[Array, "B T K H"], pos: Int[Array, "B T"], geometry: Geometry
) -> Float[Array, "B K T H"]:
    """Content keys as the cache of a model of this geometry holds them at `pos`."""
    cos, sin = cos_sin(pos, geometry.rope, geometry.head_dim)
    return jax.lax.transpose(rotate(keys, cos[:, :, None], sin[:, :, None]), (0, 2, 1, 3))
