"""`Mapper`: one affine map per target layer and channel, from chosen source layers; and its application.

Keys are un-rotated at their source positions, centred, projected, and rotated at their target positions (arXiv
2608.03893). Inputs are centred before the product instead of folding the means into a bias: with means of several
hundred a folded bias costs five times the error in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import Choice
from kvjax.cache import KVCache, Rows
from kvjax.kernels import dispatch, kv_map
from kvjax.kernels.kv_map import Affine
from kvjax.kernels.kv_map.ref import project
from kvjax.rope import cos_sin, rotate
from kvjax.sharding import Rules
from kvjax.transfer.geometry import KEY, VALUE, Geometry
from kvjax.transfer.hidden import HiddenMap
from kvjax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerMap:
    """One target layer's map. J input blocks (source layers x channels); K, H of the target; k, h of the source.

    key, value: [K, H, P], the P = J k h inputs of an output side by side; head-local P = J h. mean: [J, k, h],
    subtracted from the inputs. key_bias, value_bias: [K, H]. heads: [K] int32, the source head each target head reads;
    None reads all. key_scale, value_scale: [K, H] float32, of int8 weights (`converted`), else None.

    On a mesh (`kvjax.transfer.placing.place`) K counts stored heads. here: `heads`, and the second axis of the means,
    then count the source heads a device stores itself, so that no row leaves its device.
    """

    key: jax.Array
    value: jax.Array
    key_mean: jax.Array
    value_mean: jax.Array
    key_bias: jax.Array
    value_bias: jax.Array
    heads: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    here: bool = dataclasses.field(default=False, metadata={"static": True})

    def affine(self, channel: int) -> Affine:
        """The map of keys (0) or values (1), as kernels take it."""
        if channel == KEY:
            return Affine(self.key, self.key_mean, self.key_bias, self.key_scale, self.heads)
        return Affine(self.value, self.value_mean, self.value_bias, self.value_scale, self.heads)

    def arrays(self) -> dict[str, jax.Array]:
        """Those it has, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "here"}
        return {name: x for name, x in named.items() if x is not None}

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of each array: target heads are split; means too where they are the device's own."""
        mean = (None, "kv_heads" if self.here else None, None)
        return {
            name: mean if name.endswith("mean") else ("kv_heads",) + (None,) * (x.ndim - 1)
            for name, x in self.arrays().items()
        }


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


DTYPES = ("float32", "bfloat16", "int8")


def converted(mapper: Mapper, dtype: str) -> Mapper:
    """The map with weights of `dtype`, one of `DTYPES`; means, biases and scales stay float32.

    int8 is symmetric, one scale for each output feature of a layer and channel: scale = max |weight| / 127 over its P
    inputs, so a weight is off by at most scale / 2 and an output by at most scale / 2 * sum |x - mean|.

    Raises:
      ValueError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    maps = []
    for part in mapper.maps:
        changed: dict[str, jax.Array | None] = {}
        for name, scale in (("key", part.key_scale), ("value", part.value_scale)):
            weight = getattr(part, name)
            if (scale is not None) == (dtype == "int8"):  # no rounding of what is rounded already
                changed |= {name: weight.astype(dtype), f"{name}_scale": scale}
                continue
            weight = weight.astype(jnp.float32)
            if scale is not None:
                changed |= {name: (weight * scale[..., None]).astype(dtype), f"{name}_scale": None}
                continue
            scale = jnp.max(jnp.abs(weight), axis=-1) / 127
            steps = jnp.round(weight / jnp.where(scale == 0, 1, scale)[..., None])
            changed |= {name: steps.astype(dtype), f"{name}_scale": scale}
        maps.append(dataclasses.replace(part, **changed))  # type: ignore[arg-type]
    return dataclasses.replace(mapper, maps=tuple(maps))


def map_rows(
    mapper: Mapper, cache: KVCache, index: Int[Array, ""] | Int[Array, "B T"], pos: Int[Array, "B T"], *,
    rules: Rules, choice: Choice,
) -> Rows:  # fmt: skip
    """Source cache rows as target rows, for `kvjax.cache.commit`.

    Args:
      mapper: on a mesh, as `kvjax.transfer.placing.place` lays it out.
      cache: of the source; slot s holds position s.
      index: which slots are read, in [0, filled); a slot's index is its source position. A scalar, a multiple
        of T, is the first of T adjacent slots, which kernels read where they lie; [B, T] gathers.
      pos: where the rows go in the target.
      rules: the target's; the source is on the same mesh. choice: the device, for the kernel.

    Returns: per target layer (key, value), each [B, K', T, H] float32. Rows whose index is not a valid slot are
    garbage; `commit`'s count leaves them out. On a mesh a map that reads all source heads gathers the T rows of the
    source layers it reads, never the cache.

    Raises:
      ValueError: the map was not placed for this mesh.
    """
    mapper = dataclasses.replace(mapper, hidden=None)  # makes no rows
    first = jax.typeof(mapper.maps[0].key)
    heads_axis = rules.spec("kv_heads")
    if first.shape[0] != rules.kv_heads or (heads_axis and first.sharding.spec[0] != heads_axis[0]):
        raise ValueError(
            f"the map holds {first.shape[0]} KV heads, laid out as {first.sharding.spec}, and the target stores"
            f" {rules.kv_heads} of {mapper.target.kv_heads}, as {heads_axis}; kvjax.transfer.placing.place moves it"
        )
    used = sorted({i for chosen in mapper.layers for i in chosen})
    slabs = [{i: s[i] for i in used} for s in (cache.k, cache.v)]
    source = None if rules.mesh is None else jax.typeof(cache.k[0]).sharding.spec
    out, row = rules.spec("batch", "kv_heads", None, None), rules.spec("batch", None)
    specs = dataclasses.replace(
        mapper,
        maps=tuple(
            dataclasses.replace(m, **{name: rules.spec(*axes) for name, axes in m.axes().items()})  # type: ignore[arg-type]
            for m in mapper.maps
        ),
    )
    run = rules.local(
        functools.partial(_map_rows, choice=choice, gather=source and source[1]),
        (specs, source, source, row if index.ndim else rules.spec(), row),
        out,
    )
    placed = (rules.reshard(z, "batch", None) if z.ndim else z for z in (index, pos))
    return run(mapper, *slabs, *placed)


def _map_rows(mapper: Mapper, keys, values, index, pos, *, choice: Choice, gather: str | None) -> Rows:
    """`map_rows` of one device's heads. gather: the mesh axis over which source heads are split, if they are."""
    width = pos.shape[1]
    read = index if index.ndim else jnp.broadcast_to(index + jnp.arange(width, dtype=jnp.int32), pos.shape)

    def rows(slab: jax.Array, everywhere: bool) -> tuple[jax.Array, jax.Array]:
        """(array, slot of the first row): the slab itself, or the rows alone where they are moved anyway."""
        if not (everywhere or index.ndim):
            return slab, index
        if index.ndim:
            slab = jnp.take_along_axis(slab, index[:, None, :, None], axis=2)
        else:
            slab = jax.lax.dynamic_slice_in_dim(slab, index, width, axis=2)
        if everywhere and gather is not None:
            slab = jax.lax.all_gather(slab, gather, axis=1, tiled=True)
            slab = slab[:, :: slab.shape[1] // mapper.source.kv_heads]  # heads that are stored more than once
        return slab, jnp.int32(0)

    cos, sin = cos_sin(read, mapper.source.rope, mapper.source.head_dim)
    norm = cos * cos + sin * sin  # not 1 where the rope has an attention factor
    unturn = jnp.stack([cos / norm, -sin / norm], 1)
    turn = jnp.stack(cos_sin(pos, mapper.target.rope, mapper.target.head_dim), 1)
    take = functools.cache(lambda channel, i, everywhere: rows((keys, values)[channel][i], everywhere))

    def mapped(layer: LayerMap, chosen: tuple[int, ...], channel: int) -> jax.Array:
        channels = (KEY, VALUE) if mapper.joint else (channel,)
        everywhere = gather is not None and not layer.here
        sources, starts = zip(*(take(c, i, everywhere) for i in chosen for c in channels), strict=True)
        affine = layer.affine(channel)
        where = {"platform": choice.platform, "device_kind": choice.device_kind}
        backend = dispatch.choose("map", kv_map.BACKENDS, sources, affine, rows=width, **where)
        kinds = tuple(c == KEY for _ in chosen for c in channels)
        return backend.run(sources, affine, starts[0], unturn, turn if channel == KEY else None, keys=kinds)

    return tuple(
        (mapped(layer, chosen, KEY), mapped(layer, chosen, VALUE))
        for layer, chosen in zip(mapper.maps, mapper.layers, strict=True)
    )


def map_content(mapper: Mapper, features: Float[Array, "B T L 2 k h"], pos: Int[Array, "B T"]) -> Rows:
    """The same of rows that are features already (`kvjax.transfer.geometry.content`): in XLA, with gradients."""
    cos, sin = cos_sin(pos, mapper.target.rope, mapper.target.head_dim)
    rows = []
    for layer, chosen in zip(mapper.maps, mapper.layers, strict=True):
        picked = features[:, :, np.asarray(chosen)]  # [B, T, layers, 2, k, h]
        if mapper.joint:
            inputs = (picked.reshape(*picked.shape[:2], -1, *picked.shape[4:]),) * 2
        else:
            inputs = picked[:, :, :, KEY], picked[:, :, :, VALUE]
        key, value = (project(x, layer.affine(channel)) for channel, x in enumerate(inputs))
        rows.append((rotate(key, cos[:, None], sin[:, None]), value))
    return tuple(rows)
