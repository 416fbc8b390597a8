"""A map on a mesh: each device holds the weights of the target heads it stores."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax.sharding import MeshError, Rules
from kvjax.transfer.mapper import LayerMap, Mapper

log = logging.getLogger("kvjax")


def place(mapper: Mapper, source: Rules, target: Rules) -> Mapper:
    """The map laid out for two models on one mesh: target heads over `model`, repeated where the cache stores them
    repeatedly. Without a mesh the map as it is.

    Where every target head of a head-local layer reads a source head that its own device stores, the layer is marked
    so, and mapping moves nothing between devices. Otherwise a chunk's source rows are gathered; that is logged.

    Raises:
      MeshError: the two models are on different meshes.
    """
    if source.mesh != target.mesh:
        said = ["no mesh" if r.mesh is None else f"mesh {dict(r.mesh.shape)}" for r in (source, target)]
        raise MeshError(
            f"the source was loaded on {said[0]} and the target on {said[1]}; load both on one mesh"
        )
    if target.mesh is None:
        return mapper
    own = [
        None if m.heads is None else _own(np.asarray(m.heads), mapper, source, target) for m in mapper.maps
    ]
    away = [i for i, m in enumerate(mapper.maps) if m.heads is not None and own[i] is None]
    if away and _split(source):
        log.warning(
            "target layers %s read source heads that other devices store: their source rows are gathered",
            away,
        )
    return dataclasses.replace(
        mapper,
        maps=tuple(_placed(m, h, mapper, source, target) for m, h in zip(mapper.maps, own, strict=True)),
        hidden=jax.device_put(mapper.hidden, target.sharding()),
    )


def _split(rules: Rules) -> bool:
    """Whether devices store different heads."""
    spec = rules.spec("kv_heads")
    return spec is not None and spec[0] is not None


def _own(heads: np.ndarray, mapper: Mapper, source: Rules, target: Rules) -> np.ndarray | None:
    """[K'] for each stored target head the source head it reads, counted among those of its device; None if it is not
    there, or if devices don't store different heads."""
    if not (_split(source) and _split(target)):
        return None
    assert target.mesh is not None
    devices = target.mesh.shape["model"]
    repeats, each = source.kv_heads // mapper.source.kv_heads, source.kv_heads // devices
    found = []
    for i, head in enumerate(np.repeat(heads, target.kv_heads // mapper.target.kv_heads)):
        first = i // (target.kv_heads // devices) * each
        copies = [j for j in range(head * repeats, (head + 1) * repeats) if first <= j < first + each]
        if not copies:
            return None
        found.append(copies[0] - first)
    return np.asarray(found, np.int32)


def _placed(part: LayerMap, own: np.ndarray | None, mapper: Mapper, source: Rules, target: Rules) -> LayerMap:
    part = dataclasses.replace(part, here=own is not None)
    repeats = target.kv_heads // mapper.target.kv_heads
    arrays: dict[str, jax.Array] = {}
    for name, axes in part.axes().items():
        x = np.asarray(getattr(part, name))
        if axes[0] == "kv_heads":
            x = own if name == "heads" and own is not None else np.repeat(x, repeats, axis=0)
        elif own is not None:
            x = np.repeat(x, source.kv_heads // mapper.source.kv_heads, axis=1)
        spec = target.spec(*axes)
        assert target.mesh is not None and spec is not None
        arrays[name] = jax.device_put(x, NamedSharding(target.mesh, spec))
    return dataclasses.replace(part, **arrays)  # type: ignore[arg-type]
