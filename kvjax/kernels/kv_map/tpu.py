"""`kv_map` as a Mosaic TPU kernel.

Grid (output tiles, B, row tiles), output tiles outermost: a tile of the weights, [J k h, tile], is fetched once and
stays while all rows pass. Each step reads the rows of all J source layers for one row tile, un-rotates and centres them
in float32 in VMEM, and accumulates J k products of [rows, h] with [h, tile]; rotation and bias are its epilogue.
Source rows are read once per output tile and written nowhere on the way.

Rotations are whole-width: x cos + roll(x, h/2) sin with the sine's first half negated, so no register is split.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ROW_TILE = 256
# Of one tile in VMEM, of which two are held; 16 MB is what a kernel gets unasked.
WEIGHT_BYTES, SOURCE_BYTES = 3 << 20, 3 << 20


def is_supported(source: Any, weight: Any, *, rows: int, platform: str, device_kind: str = "") -> str | None:
    """Returns None if the kernel takes these arrays on this device, else the reason as a sentence."""
    if platform != "tpu":
        return f"the TPU kernel runs on TPUs, and the device is a {platform}"
    for name, width in (("source", source.shape[-1]), ("target", weight.shape[1])):
        if width % LANES:
            return (
                f"the TPU kernel takes head dimensions that are multiples of {LANES}; the {name}'s is {width}"
            )
    if rows % 8 or source.shape[2] % rows:
        return f"the TPU kernel maps rows in tiles; {rows} rows of {source.shape[2]} slots do not divide"
    return None


def kv_map(
    sources: Sequence[jax.Array],
    weight: jax.Array,
    mean: jax.Array,
    bias: jax.Array,
    start: jax.Array,
    unturn: jax.Array | None,
    turn: jax.Array | None,
    *,
    rows: int,
    keys: tuple[bool, ...],
    interpret: bool = False,
) -> jax.Array:
    """As `ref.kv_map`; `start` must be a multiple of `rows`, as a prompt chunk's is."""
    count, (batch, k, _, h) = len(sources), sources[0].shape
    kv, width = weight.shape[:2]
    tile = _row_tile(rows, count * k * h * sources[0].dtype.itemsize)
    packed = weight.transpose(2, 3, 4, 0, 1).reshape(count * k, h, kv * width)
    heads = _heads_a_tile(kv, width, count * k * h * weight.dtype.itemsize)
    out_tile = heads * width
    full = jnp.zeros((batch, rows, 2, h), jnp.float32) if unturn is None else _whole(unturn, inverse=True)
    last = jnp.zeros((batch, rows, 2, width), jnp.float32) if turn is None else _whole(turn, inverse=False)

    def row_index(o, b, t, start_ref):
        return b, 0, start_ref[0] // tile + t, 0

    in_specs = [pl.BlockSpec((1, k, tile, h), row_index) for _ in sources]
    in_specs += [
        pl.BlockSpec((count * k, h, out_tile), lambda o, b, t, s: (0, 0, o)),
        pl.BlockSpec((count, k, h), lambda o, b, t, s: (0, 0, 0)),
        pl.BlockSpec((1, out_tile), lambda o, b, t, s: (0, o)),
        pl.BlockSpec((1, tile, 2, h), lambda o, b, t, s: (b, t, 0, 0)),
        pl.BlockSpec((1, tile, 2, width), lambda o, b, t, s: (b, t, 0, 0)),
    ]
    kernel = functools.partial(_kernel, count=count, keys=keys, heads=heads, turned=turn is not None)
    flops = 2 * batch * rows * count * k * h * kv * width
    moved = batch * rows * count * k * h * sources[0].dtype.itemsize * (kv // heads) + packed.nbytes
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, kv, rows, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(kv // heads, batch, rows // tile),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, heads, tile, width), lambda o, b, t, s: (b, o, t, 0)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=moved + 4 * batch * rows * kv * width
        ),
        interpret=interpret,
    )(start.reshape(1).astype(jnp.int32), *sources, packed, mean, bias.reshape(1, -1), full, last)


def _kernel(start_ref, *refs, count: int, keys: tuple[bool, ...], heads: int, turned: bool):
    del start_ref  # read by the index maps
    sources, (w_ref, mean_ref, bias_ref, un_ref, turn_ref, out_ref) = refs[:count], refs[count:]
    k, tile, h = sources[0].shape[1:]
    total = jnp.zeros((tile, w_ref.shape[-1]), jnp.float32)
    for j, ref in enumerate(sources):
        for head in range(k):
            x = ref[0, head].astype(jnp.float32)
            if keys[j]:
                x = x * un_ref[0, :, 0] + pltpu.roll(x, h // 2, 1) * un_ref[0, :, 1]
            x = (x - mean_ref[j, head][None]).astype(w_ref.dtype)
            total += jnp.dot(x, w_ref[j * k + head], preferred_element_type=jnp.float32)
    total += bias_ref[0][None]
    width = total.shape[1] // heads
    for head in range(heads):
        y = total[:, head * width : (head + 1) * width]
        if turned:
            y = y * turn_ref[0, :, 0] + pltpu.roll(y, width // 2, 1) * turn_ref[0, :, 1]
        out_ref[0, head] = y


def _row_tile(rows: int, row_bytes: int) -> int:
    """Rows of one step: the most, up to `ROW_TILE`, that divide and whose sources fit `SOURCE_BYTES`, at least 8."""
    fitting = [n for n in range(8, ROW_TILE + 1, 8) if rows % n == 0 and n * row_bytes <= SOURCE_BYTES]
    return max(fitting, default=8)


def _heads_a_tile(heads: int, width: int, column_bytes: int) -> int:
    """Target heads in one output tile: the most that divide and whose weights fit `WEIGHT_BYTES`, at least one."""
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n * width * column_bytes <= WEIGHT_BYTES]
    return max(fitting, default=1)


def _whole(angles: jax.Array, *, inverse: bool) -> jax.Array:
    """[B, T, 2, h/2] cosine and sine as [B, T, 2, h]: multipliers of x and of x rolled by half its width."""
    cos, sin = angles[:, :, 0], angles[:, :, 1]
    sin = -sin if inverse else sin
    return jnp.stack([jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)], 2)
