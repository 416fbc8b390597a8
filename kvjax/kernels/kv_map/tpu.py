"""`kv_map` as a Mosaic TPU kernel.

Grid (output tiles, B, row tiles), output tiles outermost: a tile of the weights, [tile, P], is fetched once and stays
while all rows pass. Each step reads the rows of all J source layers for one row tile, un-rotates and centres them in
float32 in VMEM, and accumulates J k products of [rows, h] with [tile, h] transposed; scale, bias and rotation are its
epilogue. Source rows are read once per output tile and written nowhere on the way. Of a head-local map an output tile
is one target head, and its index maps fetch the one source head it reads.

Rotations are whole-width: x cos + roll(x, h/2) sin with the sine's first half negated, so no register is split.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.kv_map import Affine

LANES = 128
ROW_TILE = 512
# Of one tile in VMEM, of which two are held. A tile of a single head may be larger, up to the limit of all together,
# which leaves room on the smallest generation (v5p, 64 MB).
WEIGHT_BYTES, SOURCE_BYTES, LIMIT = 4 << 20, 6 << 20, 48 << 20


def is_supported(
    sources: Sequence[Any], affine: Affine, *, rows: int, platform: str, device_kind: str = ""
) -> str | None:
    """Returns None if the kernel takes these arrays on this device, else the reason as a sentence."""
    if platform != "tpu":
        return f"the TPU kernel runs on TPUs, and the device is a {platform}"
    if any(old in device_kind for old in ("v2", "v3", "v4")):
        return f"the TPU kernel holds a head's weights in vector memory; TPU v5 or newer can, {device_kind} cannot"
    for name, width in (("source", sources[0].shape[-1]), ("target", affine.weight.shape[1])):
        if width % LANES:
            return (
                f"the TPU kernel takes head dimensions that are multiples of {LANES}; the {name}'s is {width}"
            )
    if sources[0].dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel reads float32 and bfloat16 caches, not {sources[0].dtype}"
    step = _row_step(sources)
    if rows % step or sources[0].shape[2] % rows:
        return (
            f"the TPU kernel maps rows in tiles of a multiple of {step} that divide the cache;"
            f" {rows} rows of {sources[0].shape[2]} slots do not"
        )
    need = _tiles(sources, affine, rows)[-1]
    if need > LIMIT:
        return f"the TPU kernel would need {need >> 20} MB of vector memory for one head, of {LIMIT >> 20}"
    return None


def kv_map(
    sources: Sequence[jax.Array],
    affine: Affine,
    start: jax.Array,
    unturn: jax.Array,
    turn: jax.Array | None,
    *,
    keys: tuple[bool, ...],
    interpret: bool = False,
) -> jax.Array:
    """As `ref.kv_map`."""
    weight, mean, bias, scale, chosen = affine
    count, (batch, k, _, h), rows = len(sources), sources[0].shape, unturn.shape[2]
    kv, width, inner = weight.shape
    tile, heads, need = _tiles(sources, affine, rows)
    local, out_tile = chosen is not None, heads * width
    read = 1 if local else k  # source heads of one step
    last = jnp.zeros((batch, 2, rows, width), jnp.float32) if turn is None else _whole(turn)
    ends = jnp.stack([jnp.ones_like(bias) if scale is None else scale, bias]).reshape(2, kv * width)

    def head(o, scalars):
        return scalars[1 + o] if local else 0

    in_specs = [
        pl.BlockSpec((1, read, tile, h), lambda o, b, t, s: (b, head(o, s), s[0] // tile + t, 0))
        for _ in sources
    ]
    in_specs += [
        pl.BlockSpec((out_tile, inner), lambda o, b, t, s: (o, 0)),
        pl.BlockSpec((count, read, 1, h), lambda o, b, t, s: (0, head(o, s), 0, 0)),
        pl.BlockSpec((2, out_tile), lambda o, b, t, s: (0, o)),
        pl.BlockSpec((1, 2, tile, h), lambda o, b, t, s: (b, 0, t, 0)),
        pl.BlockSpec((1, 2, tile, width), lambda o, b, t, s: (b, 0, t, 0)),
    ]
    kernel = functools.partial(
        _kernel,
        keys=keys,
        heads=heads,
        turned=turn is not None,
        dtype=weight.dtype if scale is None else sources[0].dtype,
        scaled=scale is not None,
    )
    read_bytes = batch * rows * inner * sources[0].dtype.itemsize * (kv // heads)
    scalars = [start.reshape(1), chosen] if chosen is not None else [start.reshape(1)]
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
            flops=2 * batch * rows * inner * kv * width,
            transcendentals=0,
            bytes_accessed=read_bytes + weight.nbytes + 4 * batch * rows * kv * width,
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=need),
        interpret=interpret,
        name="kv_map",
    )(
        jnp.concatenate(scalars).astype(jnp.int32),
        *sources,
        weight.reshape(kv * width, inner),
        mean[:, :, None],
        ends,
        _whole(unturn),
        last,
    )


def _kernel(scalars, *refs, keys: tuple[bool, ...], heads: int, turned: bool, dtype: Any, scaled: bool):
    del scalars  # read by the index maps
    sources, (w_ref, mean_ref, ends_ref, un_ref, turn_ref, out_ref) = refs[: len(keys)], refs[len(keys) :]
    read, tile, h = sources[0].shape[1:]
    # A TPU would otherwise multiply float32 in one bfloat16 pass.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    total = jnp.zeros((tile, w_ref.shape[0]), jnp.float32)
    for j, ref in enumerate(sources):
        for head in range(read):
            x = ref[0, head].astype(jnp.float32)
            if keys[j]:
                x = x * un_ref[0, 0] + pltpu.roll(x, h // 2, 1) * un_ref[0, 1]
            x = (x - mean_ref[j, head]).astype(dtype)
            first = (j * read + head) * h
            w = w_ref[:, first : first + h].astype(dtype)
            total += jax.lax.dot_general(
                x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
    if scaled:
        total = total * ends_ref[0:1]
    total += ends_ref[1:2]
    width = total.shape[1] // heads
    for head in range(heads):
        y = total[:, head * width : (head + 1) * width]
        if turned:
            y = y * turn_ref[0, 0] + pltpu.roll(y, width // 2, 1) * turn_ref[0, 1]
        out_ref[0, head] = y


def _row_step(sources: Sequence[Any]) -> int:
    """Rows of a register tile of the cache's dtype."""
    return 32 // sources[0].dtype.itemsize


def _tiles(sources: Sequence[Any], affine: Affine, rows: int) -> tuple[int, int, int]:
    """(rows of one step, target heads of one output tile, bytes of VMEM for it all)."""
    kv, width, inner = affine.weight.shape
    column, row = inner * affine.weight.dtype.itemsize, inner * sources[0].dtype.itemsize
    step = _row_step(sources)
    fitting = [n for n in range(step, ROW_TILE + 1, step) if rows % n == 0 and n * row <= SOURCE_BYTES]
    tile = max(fitting, default=step)
    whole = [n for n in range(1, kv + 1) if kv % n == 0 and n * width * column <= WEIGHT_BYTES]
    heads = 1 if affine.heads is not None else max(whole, default=1)
    h = sources[0].shape[-1]
    # Weights, sources, means (a row padded to eight), angles and results are held twice; sums and one step's rows once.
    out = heads * width
    flowing = out * column + tile * row + 32 * math.prod(affine.mean.shape)
    flowing += 4 * tile * (2 * h + 2 * width + out)
    standing = 4 * tile * (3 * out + 4 * h) + 4 * out * h
    return tile, heads, 2 * flowing + standing + (2 << 20)


def _whole(angles: jax.Array) -> jax.Array:
    """[B, 2, T, h/2] cosine and sine as [B, 2, T, h]: multipliers of x and of x rolled by half its width."""
    cos, sin = angles[:, 0], angles[:, 1]
    return jnp.stack([jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)], 1)
