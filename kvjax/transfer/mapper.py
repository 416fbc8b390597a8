"""`Mapper`: one affine map per target layer and channel, from chosen source layers; and its application.

Keys are un-rotated at their source positions, centred, projected, and rotated at their target positions (arXiv
2608.03893). Inputs are centred before the product instead of folding the means into a bias: with means of several
hundred a folded bias costs five times the error in bfloat16.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import KVCache, Rows
from kvjax.transfer.geometry import Geometry, content, rotated
from kvjax.transfer.hidden import HiddenMap
from kvjax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerMap:
    """One target layer's map. J input blocks (source layers x channels); K, H of the target; k, h of the source.

    key, value: [K, H, J, k, h], or head-local [K, H, J, h]. mean: [J, k, h], subtracted from the inputs.
    key_bias, value_bias: [K, H]. heads: [K] int32, the source head each target head reads; None reads all.
    """

    key: jax.Array
    value: jax.Array
    key_mean: jax.Array
    value_mean: jax.Array
    key_bias: jax.Array
    value_bias: jax.Array
    heads: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mapper:
    """Source to target. layers[l] are the source layers that target layer l reads, ascending; joint: keys and values
    both read keys and values, otherwise each its own kind. hidden: where `Repair.group` begins, if it was fitted."""

    maps: tuple[LayerMap, ...]
    source: Geometry = dataclasses.field(metadata={"static": True})
    target: Geometry = dataclasses.field(metadata={"static": True})
    layers: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    joint: bool = dataclasses.field(default=False, metadata={"static": True})
    hidden: HiddenMap | None = None

    def __post_init__(self) -> None:
        if len(self.layers) != self.target.layers or len(self.maps) != self.target.layers:
            raise ValueError(
                f"a map into {self.target.layers} layers needs as many, got {len(self.maps)} maps and"
                f" {len(self.layers)} selections"
            )
        for layer, chosen in enumerate(self.layers):
            if (
                not chosen
                or list(chosen) != sorted(set(chosen))
                or not 0 <= chosen[0] <= chosen[-1] < self.source.layers
            ):
                raise ValueError(
                    f"target layer {layer}: source layers {chosen} are not ascending in 0..{self.source.layers - 1}"
                )

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(m.key.size + m.value.size for m in self.maps)


def map_rows(mapper: Mapper, cache: KVCache, index: Int[Array, "B T"], pos: Int[Array, "B T"]) -> Rows:
    """Source cache rows as target rows, for `kvjax.cache.commit`.

    Args:
      cache: of the source; slot s holds position s.
      index: which slots are read, in [0, filled); a slot's index is its source position.
      pos: where the rows go in the target.

    Returns: per target layer (key, value), each [B, K, T, H] float32. Rows whose index is not a valid slot are
    garbage; `commit`'s count leaves them out.
    """
    take = lambda z: jnp.take_along_axis(z, index[:, None, :, None], axis=2)  # noqa: E731
    rows = tuple((take(k), take(v)) for k, v in zip(cache.k, cache.v, strict=True))
    return map_content(mapper, content(rows, index, mapper.source), pos)


def map_content(mapper: Mapper, features: Float[Array, "B T L 2 k h"], pos: Int[Array, "B T"]) -> Rows:
    """See `map_rows`; `features` as `kvjax.transfer.geometry.content` makes them."""
    rows = []
    for layer, chosen in zip(mapper.maps, mapper.layers, strict=True):
        picked = features[:, :, np.asarray(chosen)]  # [B, T, layers, 2, k, h]
        b, t, j, _, k, h = picked.shape
        if mapper.joint:
            both = picked.reshape(b, t, 2 * j, k, h)
            inputs = both, both
        else:
            inputs = picked[:, :, :, 0], picked[:, :, :, 1]
        key = _project(inputs[0], layer.key, layer.key_mean, layer.key_bias, layer.heads)
        value = _project(inputs[1], layer.value, layer.value_mean, layer.value_bias, layer.heads)
        rows.append((rotated(key, pos, mapper.target), value.transpose(0, 2, 1, 3)))
    return tuple(rows)


def _project(
    x: jax.Array, weight: jax.Array, mean: jax.Array, bias: jax.Array, heads: jax.Array | None
) -> jax.Array:
    """[B, T, J, k, h] -> [B, T, K, H] float32; products in the weight's dtype, accumulated in float32."""
    x = (x - mean).astype(weight.dtype)
    if heads is None:
        out = jnp.einsum("btjkh,mnjkh->btmn", x, weight, preferred_element_type=jnp.float32)
    else:
        out = jnp.einsum("btjmh,mnjh->btmn", x[:, :, :, heads], weight, preferred_element_type=jnp.float32)
    return out + bias
