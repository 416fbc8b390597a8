"""A mapped hidden state: what enters one layer of the target, as an affine map of the source's cache.

With it the target computes a group of its own layers from there (`kvjax.transfer.repair`) instead of taking their rows
from the map. Same features, same centring, same closed form as for rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache import Rows
from kvjax.transfer.geometry import Geometry, content
from kvjax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenMap:
    """Into the hidden state of width D that enters target layer `entering`. J blocks: keys and values of the source
    layers `layers`; k, h of the source.

    weight: [D, J, k, h]; mean: [J, k, h], subtracted from the inputs; bias: [D].
    """

    weight: jax.Array
    mean: jax.Array
    bias: jax.Array
    entering: int = dataclasses.field(metadata={"static": True})
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def map_hidden(
    part: HiddenMap, rows: Rows, pos: Int[Array, "B T"], source: Geometry
) -> Float[Array, "B T D"]:
    """rows: all layers of the source, (k, v) each [B, K, T, H], rotated for `pos`. Products run in the weight's dtype
    and accumulate in float32."""
    x = content(tuple(rows[i] for i in part.layers), pos, source)
    b, t, layers, _, k, h = x.shape
    x = (x.reshape(b, t, 2 * layers, k, h) - part.mean).astype(part.weight.dtype)
    return jnp.einsum("btjkh,djkh->btd", x, part.weight, preferred_element_type=jnp.float32) + part.bias
