"""`block_attention` as a Mosaic TPU kernel: one pass over the filled part of the cache.

Grid (B, K, row blocks, slot tiles), slot tiles innermost. The bounds of each row block are prefetched
scalars, so the index map of k and v stops advancing after the last tile a row of the block sees: a tile that
repeats is not fetched again, and its step does nothing. A windowed call starts at the first tile its rows see.
A head narrower than the lanes would leave part of every register empty, so XLA stores such a cache with its
slots along the lanes; the kernel then reads [H, slots] tiles. To ask for the usual order would copy the cache.
Per row block the running maximum, sum and weighted values stay in VMEM (online softmax, float32).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.block_attention import bounds

LANES = 128
ROW_BLOCK = 512
_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two of them is 0, not NaN


def is_supported(
    q: jax.ShapeDtypeStruct | jax.Array,
    k: jax.ShapeDtypeStruct | jax.Array,
    *,
    platform: str,
    device_kind: str = "",
) -> str | None:
    """Returns None if the kernel takes these arrays on this device, else the reason as a sentence."""
    if platform != "tpu":
        return f"the TPU kernel runs on TPUs, and the device is a {platform}"
    if any(old in device_kind for old in ("v2", "v3")):
        return f"the TPU kernel needs a TPU v4 or newer, and the device is a {device_kind}"
    if q.dtype != k.dtype:
        return f"the TPU kernel needs q and k of one dtype, got {q.dtype} and {k.dtype}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel takes float32 and bfloat16, not {q.dtype}"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"the TPU kernel takes head dimensions up to 256 in steps of 8, not {q.shape[-1]}"
    return None


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    upper: jax.Array,
    lower: jax.Array | None = None,
    *,
    scale: float,
    stair: int = 0,
    slot_tile: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `ref.block_attention`; unused slots of k and v may hold anything, NaN included.

    q: [B,K,R,H], k and v: [B,K,S,H], upper: [B] int32, lower: [B,R] int32 or None; float32 or bfloat16.
    scale is positive. Returns out [B,K,R,H] float32 and lse [B,K,R] float32. `slot_tile` is the number of
    slots per step (default 1024, or 512 for wide row blocks); `interpret=True` runs on any backend, slowly.
    """
    B, K, R, H = q.shape
    S = k.shape[2]
    rows, blocks = _row_blocks(R, q.dtype)
    tile = min(S, slot_tile or (1024 if rows <= 128 else 512))
    estimate = cost(q, k)
    turned = H % LANES != 0
    if turned:
        k, v = jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3)
    kv_tile = (1, 1, H, tile) if turned else (1, 1, tile, H)
    windowed = lower is not None
    if not windowed:
        lower = jnp.zeros((B, R), jnp.int32)
    pad = rows * blocks - R
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
    lower = jnp.pad(jnp.maximum(lower, 0).astype(jnp.int32), ((0, 0), (0, pad)), mode="edge")
    per_block = lower.reshape(B * blocks, rows)
    sure, reach = bounds.of_row_blocks(upper, stair, R=R, rows=rows, S=S)

    def kv_index(b, h, i, j, upper_ref, sure_ref, reach_ref, first_ref, last_ref):
        block = b * blocks + i
        end = jnp.maximum(pl.cdiv(reach_ref[block], tile) - 1, 0)
        n = jnp.minimum(first_ref[block] // tile + j, end)
        return (b, h, 0, n) if turned else (b, h, n, 0)

    def row_index(b, h, i, j, *scalars):
        return b, h, i, 0

    in_specs = [
        pl.BlockSpec((1, 1, rows, H), row_index),
        pl.BlockSpec(kv_tile, kv_index),
        pl.BlockSpec(kv_tile, kv_index),
    ]
    operands = [q, k, v]
    if windowed:
        in_specs.append(pl.BlockSpec((1, rows, 1), lambda b, h, i, j, *scalars: (b, i, 0)))
        operands.append(lower[:, :, None])
    varying = _varying(*operands, upper)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            scale=scale,
            stair=stair,
            tile=tile,
            slot_axis=1 if turned else 0,
            blocks=blocks,
            windowed=windowed,
            precision=_precision(q.dtype),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((B, K, rows * blocks, H), jnp.float32, **varying),
            jax.ShapeDtypeStruct((B, K, 1, rows * blocks), jnp.float32, **varying),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(B, K, blocks, pl.cdiv(S, tile)),
            in_specs=in_specs,
            out_specs=(
                pl.BlockSpec((1, 1, rows, H), row_index),
                pl.BlockSpec((1, 1, 1, rows), lambda b, h, i, j, *scalars: (b, h, 0, i)),
            ),
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, H), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=estimate,
        interpret=interpret,
        name="block_attention",
    )(
        jnp.minimum(upper, S).astype(jnp.int32),
        sure.reshape(-1),
        reach.reshape(-1),
        jnp.min(per_block, axis=1),
        jnp.max(per_block, axis=1),
        *operands,
    )
    return out[:, :, :R], lse[:, :, 0, :R]


def cost(q: jax.Array, k: jax.Array) -> pl.CostEstimate:
    """What a full cache costs: q [B,K,R,H] against k [B,K,S,H]. A shorter `upper` costs less."""
    B, K, R, H = q.shape
    S = k.shape[2]
    return pl.CostEstimate(
        flops=4 * B * K * R * S * H,
        transcendentals=B * K * R * S,
        bytes_accessed=B * K * (q.dtype.itemsize * H * (R + 2 * S) + 4 * R * (H + 1)),
    )


def _row_blocks(R: int, dtype: jnp.dtype) -> tuple[int, int]:
    """Rows per block and number of blocks: whole sublanes, and whole lanes of lse with several blocks."""
    if R <= ROW_BLOCK:
        step = 32 // jnp.dtype(dtype).itemsize
        return -(-R // step) * step, 1
    blocks = -(-R // ROW_BLOCK)
    return -(-R // (blocks * LANES)) * LANES, blocks


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 means float32: the matrix unit's default would round the inputs to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _varying(*arrays: jax.Array) -> dict[str, jax.sharding.ManualAxisType]:
    """Inside `jax.shard_map` an output must say over which mesh axes it varies: those of any input."""
    axes = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    return {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}


def _kernel(
    upper_ref,  # [B] int32, scalar memory: the bound of row 0
    sure_ref,  # [B * blocks] int32: every row of the block sees the slots before it
    reach_ref,  # [B * blocks] int32: none sees a slot from here on
    first_ref,  # [B * blocks] int32: smallest `lower` of the block's rows
    last_ref,  # [B * blocks] int32: largest
    q_ref,  # [1, 1, rows, H]
    k_ref,  # [1, 1, tile, H], or [1, 1, H, tile] with slot_axis 1
    v_ref,  # likewise
    *refs: Any,  # windowed: lower [1, rows, 1]; out [1, 1, rows, H], lse [1, 1, 1, rows]; top, total, acc
    scale: float,
    stair: int,
    tile: int,
    slot_axis: int,
    blocks: int,
    windowed: bool,
    precision: lax.Precision | None,
):
    lower_ref = refs[0] if windowed else None
    out_ref, lse_ref, top_ref, total_ref, acc_ref = refs[windowed:]
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    block = b * blocks + i
    upper, sure, reach = upper_ref[b], sure_ref[block], reach_ref[block]
    first, last = first_ref[block], last_ref[block]
    start = (first // tile + j) * tile

    @pl.when(j == 0)
    def _init():
        top_ref[...] = jnp.full_like(top_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(masked: bool):
        v = v_ref[0, 0]
        # Scaled after the maximum is taken off: a compiler may then not fuse the two into one rounding in one of
        # the two variants of this step only, and a row's bits do not depend on which of them its tile took.
        scores = lax.dot_general(
            q_ref[0, 0],
            k_ref[0, 0],
            (((1,), (1 - slot_axis,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if masked:
            slot = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            visible = slot < reach
            if stair:  # slot < upper + row // stair, without the division
                ahead = start - upper + 1 + lax.broadcasted_iota(jnp.int32, (1, tile), 1)
                row = i * scores.shape[0] + lax.broadcasted_iota(jnp.int32, (scores.shape[0], 1), 0)
                visible = visible & (ahead * stair <= row)
            if lower_ref is not None:
                visible = visible & (slot >= lower_ref[0])
            scores = jnp.where(visible, scores, _LOWEST)
            # Slots no row sees may hold NaN, which a weight of 0 would not silence.
            slot = start + lax.broadcasted_iota(jnp.int32, v.shape, slot_axis)
            seen = (slot < reach) & (slot >= first)
            v = jnp.where(seen, v.astype(jnp.float32), 0.0).astype(v.dtype)
        old = top_ref[:, :1]
        top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scale * (scores - top))
        if masked:
            weights = jnp.where(visible, weights, 0.0)
        keep = jnp.exp(scale * (old - top))
        total = keep * total_ref[:, :1] + jnp.sum(weights, axis=1, keepdims=True)
        top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        acc_ref[...] = keep * acc_ref[...] + lax.dot_general(
            weights.astype(v.dtype),
            v,
            (((1,), (slot_axis,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    live = start < reach
    edge = (start + tile > sure) | (start < last)
    pl.when(live & edge)(functools.partial(step, True))
    pl.when(live & ~edge)(functools.partial(step, False))

    @pl.when(j == pl.num_programs(3) - 1)
    def _finish():
        total = total_ref[...]
        some = total > 0.0
        out_ref[0, 0] = acc_ref[...] / jnp.where(some[:, :1], total[:, :1], 1.0)
        lse = jnp.where(some, scale * top_ref[...] + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
        lse_ref[0, 0] = lse.T[:1]
