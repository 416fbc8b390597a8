"""A map on a mesh: every device holds the weights of its own target heads, and reads all source heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.sharding import MeshError, Rules
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.hidden import HiddenMap
from kvjax.transfer.mapper import LayerMap, Mapper
from kvjax.transfer.select import Selection


def axes(path: tuple[Any, ...], leaf: Any) -> tuple[str | None, ...]:
    """Logical axes of a leaf of a `Mapper`: weights and biases of rows lead with the target's KV heads."""
    whole = path[0].name == "hidden" or path[-1].name.endswith("mean")
    return (None if whole else "kv_heads", *(None,) * (leaf.ndim - 1))


def place(mapper: Mapper, rules: Rules) -> Mapper:
    """The map where the target lies; itself without a mesh, or where it lies there already.

    Raises:
      MeshError: the mesh stores the target's KV heads more than once.
    """
    check_heads(mapper.target.kv_heads, rules)
    if rules.mesh is None:
        return mapper
    return jax.tree_util.tree_map_with_path(
        lambda p, x: jax.device_put(x, rules.sharding(*axes(p, x))), mapper
    )


def check_heads(kv_heads: int, rules: Rules, name: str = "target") -> None:
    """
    Raises:
      MeshError: the mesh stores the KV heads more than once.
    """
    if rules.kv_heads != kv_heads:
        raise MeshError(
            f"a map moves the {kv_heads} KV heads of the {name}, but a model axis of {rules.kv_heads} stores each"
            f" {rules.kv_heads // kv_heads} times; use a model axis of at most {kv_heads}"
        )


def abstract(
    source: Geometry, target: Geometry, layers: Selection, *, joint: bool, local: bool, dtype: str, rules: Rules,
    hidden: tuple[int, int] | None = None,
) -> Mapper:  # fmt: skip
    """The shapes of a map, to compile for; `layers` as in `Mapper`, hidden: (target layer, D) for a hidden state that
    enters it, from the same source layers. Raises MeshError as `place` does."""
    check_heads(target.kv_heads, rules)
    wide = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out = (target.kv_heads, target.head_dim)
    maps = []
    for chosen in layers:
        grid = (len(chosen) * (2 if joint else 1), source.kv_heads, source.head_dim)
        shape = (*out, grid[0] * grid[2] * (1 if local else grid[1]))
        weight = jax.ShapeDtypeStruct(shape, dtype)
        heads = jax.ShapeDtypeStruct(out[:1], np.int32) if local else None
        maps.append(LayerMap(weight, weight, wide(grid), wide(grid), wide(out), wide(out), heads))  # type: ignore[arg-type]
    part = None
    if hidden is not None:
        entering, width = hidden
        grid = (2 * len(layers[entering]), source.kv_heads, source.head_dim)
        weight = jax.ShapeDtypeStruct((width, *grid), dtype)
        part = HiddenMap(weight, wide(grid), wide((width,)), entering, layers[entering])  # type: ignore[arg-type]
    mapper = Mapper(tuple(maps), source, target, layers, joint, part)

    def placed(path: tuple[Any, ...], leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rules.sharding(*axes(path, leaf)))

    return jax.tree_util.tree_map_with_path(placed, mapper)
