"""The shapes of a map, to compile for one that was not fitted."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from kvjax.sharding import Rules
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.hidden import HiddenMap
from kvjax.transfer.mapper import LayerMap, Mapper
from kvjax.transfer.select import Selection


def abstract(
    source: Geometry, target: Geometry, layers: Selection, *, joint: bool, local: bool, dtype: str, reader: Rules,
    rules: Rules, hidden: tuple[int, int] | None = None,
) -> Mapper:  # fmt: skip
    """A map of `ShapeDtypeStruct`s as `kvjax.transfer.placing.place` would lay it out for these models.

    Args:
      layers: as in `Mapper`. reader, rules: of the source and the target. hidden: (target layer, D) for a hidden state
        that enters it, from the same source layers.
      local: head-local; heads line up where both models have as many.
    """

    def struct(shape: tuple[int, ...], dtype: str = "float32", *axes: str | None) -> jax.ShapeDtypeStruct:
        axes = axes or (None,) * len(shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(*axes))

    split = all(dict(r.axes)["kv_heads"] is not None for r in (reader, rules))
    here = local and split and source.kv_heads == target.kv_heads
    out = (rules.kv_heads, target.head_dim)
    maps = []
    for chosen in layers:
        blocks = len(chosen) * (2 if joint else 1)
        inputs = blocks * source.head_dim * (1 if local else source.kv_heads)
        mean = (blocks, reader.kv_heads if here else source.kv_heads, source.head_dim)
        named = {
            "key": struct((*out, inputs), dtype), "value": struct((*out, inputs), dtype), "key_mean": struct(mean),
            "value_mean": struct(mean), "key_bias": struct(out), "value_bias": struct(out),
        }  # fmt: skip
        if local:
            named["heads"] = struct(out[:1], "int32")
        part = LayerMap(**named, here=here)  # type: ignore[arg-type]
        named = {
            name: struct(x.shape, np.dtype(x.dtype).name, *part.axes()[name]) for name, x in named.items()
        }
        maps.append(dataclasses.replace(part, **named))  # type: ignore[arg-type]
    state = None
    if hidden is not None:
        entering, width = hidden
        grid = (2 * len(layers[entering]), source.kv_heads, source.head_dim)
        arrays = struct((width, *grid), dtype), struct(grid), struct((width,))
        state = HiddenMap(*arrays, entering, layers[entering])  # type: ignore[arg-type]
    return Mapper(tuple(maps), source, target, layers, joint, state)
