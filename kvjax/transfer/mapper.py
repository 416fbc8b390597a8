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

from kvjax.attention import Choice
from kvjax.cache import KVCache, Rows
from kvjax.kernels import dispatch, kv_map
from kvjax.kernels.kv_map import Affine
from kvjax.kernels.kv_map.ref import project
from kvjax.rope import cos_sin, rotate
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

    def affine(self, channel: int) -> Affine:
        """The map of keys (0) or values (1), as kernels take it."""
        if channel == KEY:
            return Affine(self.key, self.key_mean, self.key_bias, self.key_scale, self.heads)
        return Affine(self.value, self.value_mean, self.value_bias, self.value_scale, self.heads)


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
    choice: Choice,
) -> Rows:  # fmt: skip
    """Source cache rows as target rows, for `kvjax.cache.commit`.

    Args:
      cache: of the source; slot s holds position s.
      index: which slots are read, in [0, filled); a slot's index is its source position. A scalar is the first of T
        adjacent slots, which kernels read where they lie; [B, T] gathers.
      pos: where the rows go in the target.
      choice: the device, for the kernel.

    Returns: per target layer (key, value), each [B, K, T, H] float32. Rows whose index is not a valid slot are
    garbage; `commit`'s count leaves them out.
    """
    if index.ndim:
        take = lambda z: jnp.take_along_axis(z, index[:, None, :, None], axis=2)  # noqa: E731
        read, start = index, jnp.int32(0)
    else:
        take = lambda z: z  # noqa: E731
        read, start = jnp.broadcast_to(index + jnp.arange(pos.shape[1], dtype=jnp.int32), pos.shape), index
    used = sorted({i for chosen in mapper.layers for i in chosen})
    keys, values = ({i: take(slabs[i]) for i in used} for slabs in (cache.k, cache.v))
    cos, sin = cos_sin(read, mapper.source.rope, mapper.source.head_dim)
    norm = cos * cos + sin * sin  # not 1 where the rope has an attention factor
    unturn = jnp.stack([cos / norm, -sin / norm], 1)
    turn = jnp.stack(cos_sin(pos, mapper.target.rope, mapper.target.head_dim), 1)

    def mapped(layer: LayerMap, chosen: tuple[int, ...], channel: int) -> jax.Array:
        if mapper.joint:
            sources = [slabs[i] for i in chosen for slabs in (keys, values)]
            kinds = (True, False) * len(chosen)
        else:
            sources = [(keys, values)[channel][i] for i in chosen]
            kinds = (channel == KEY,) * len(chosen)
        affine = layer.affine(channel)
        where = {"platform": choice.platform, "device_kind": choice.device_kind}
        backend = dispatch.choose("map", kv_map.BACKENDS, sources, affine, rows=pos.shape[1], **where)
        return backend.run(sources, affine, start, unturn, turn if channel == KEY else None, keys=kinds)

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
