"""A mapped hidden state: what enters one layer of the target, as an affine map of the source's cache.

With it the target computes a group of its own layers from there (`kvjax.transfer.repair`) instead of taking their rows
from the map. Same features, same centring, same closed form as for rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    """rows: of the source layers `part.layers`, (k, v) each [B, K, T, H], rotated for `pos`. Products run in the
    weight's dtype and accumulate in float32."""
    x = content(rows, pos, source)
    b, t, layers, _, k, h = x.shape
    x = (x.reshape(b, t, 2 * layers, k, h) - part.mean).astype(part.weight.dtype)
    return jnp.einsum("btjkh,djkh->btd", x, part.weight, preferred_element_type=jnp.float32) + part.bias


# --- as `kvjax.transfer.artifact` stores it -------------------------------------------------------------------------


def about(part: HiddenMap | None) -> dict[str, Any] | None:
    """What the manifest says of it."""
    return (
        None if part is None else {"entering": part.entering, "layers": part.layers, "width": len(part.bias)}
    )


def tensors(part: HiddenMap | None, dtype: str) -> dict[str, np.ndarray]:
    """Its arrays by name, the weight in `dtype`."""
    if part is None:
        return {}
    arrays = {"weight": part.weight.astype(_kind(dtype)), "mean": part.mean, "bias": part.bias}
    return {f"hidden.{name}": np.asarray(x) for name, x in arrays.items()}


def shapes(about: dict[str, Any] | None, source: Geometry) -> dict[str, tuple[int, ...]]:
    """Of the arrays that go with a manifest's entry."""
    if about is None:
        return {}
    grid, width = (2 * len(about["layers"]), source.kv_heads, source.head_dim), about["width"]
    return {"hidden.weight": (width, *grid), "hidden.mean": grid, "hidden.bias": (width,)}


def read(about: dict[str, Any] | None, arrays: dict[str, np.ndarray], dtype: str | None) -> HiddenMap | None:
    """The inverse of `tensors`; dtype: of the weight in memory, None as stored."""
    if about is None:
        return None
    weight, mean, bias = (jnp.asarray(arrays[f"hidden.{name}"]) for name in ("weight", "mean", "bias"))
    weight = weight.astype(_kind(dtype)) if dtype else weight
    return HiddenMap(weight, mean, bias, about["entering"], tuple(about["layers"]))


def _kind(dtype: str) -> str:
    """One matrix among a map's many is not worth its int8."""
    return "bfloat16" if dtype == "int8" else dtype
