"""`block_attention` as a Mosaic GPU kernel for Hopper: bulk tensor copies feed warpgroup matrix products.

One warpgroup per program, 64 rows each. The tiles of slots are dealt out to `splits` shares (tile n to share
n mod splits), so that a long cache with few heads still fills the chip; each share yields its own (out, lse),
and they merge by log-sum-exp in XLA. Only tiles that some row sees are read, so empty cache costs nothing, and
the shares are level however much is filled. Who sums a slot depends on the slot alone, never on how far the rows
see: a token's bits are the same from any row of any block.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.block_attention import bounds

ROWS = 64  # rows of one warpgroup product
TILE = 64  # slots per step
# Tiles of k and of v in flight. Shared memory then holds two programs, which hide each other's waits.
STAGES = 2
PROGRAMS = 2 * 132  # what an H100 or H200 runs at once: slots are split until there are about this many
# Fewest tiles worth a share of their own: each share writes its rows in float32, and they are read again.
SPLIT_TILES = 4
_LOWEST = -1e30  # finite, so that the difference of two of them is 0, not NaN
_LOG2E = math.log2(math.e)


def is_supported(
    q: jax.ShapeDtypeStruct | jax.Array,
    k: jax.ShapeDtypeStruct | jax.Array,
    *,
    platform: str,
    device_kind: str = "",
) -> str | None:
    """Returns None if the kernel takes these arrays on this device, else the reason as a sentence."""
    if platform != "gpu":
        return f"the GPU kernel runs on NVIDIA GPUs, and the device is a {platform}"
    if not any(name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return (
            f"the GPU kernel needs Hopper's warpgroup products, and the device is {device_kind or 'unknown'}"
        )
    return _shape_reason(q, k)


def _shape_reason(q: jax.ShapeDtypeStruct | jax.Array, k: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the GPU kernel takes bfloat16 and float16, not {q.dtype} (no float32 warpgroup product)"
    if q.dtype != k.dtype:
        return f"the GPU kernel needs q and k of one dtype, got {q.dtype} and {k.dtype}"
    if q.shape[-1] > 128 or q.shape[-1] % 16:
        return f"the GPU kernel takes head dimensions up to 128 in steps of 16, not {q.shape[-1]}"
    if k.shape[2] > TILE and k.shape[2] % 8:
        return f"the GPU kernel takes caches of a multiple of 8 slots, not {k.shape[2]}"
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
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As `ref.block_attention`; unused slots of k and v may hold anything, NaN included.

    q: [B,K,R,H], k and v: [B,K,S,H], upper: [B] int32, lower: [B,R] int32 or None; bfloat16 or float16.
    scale is positive. Returns out [B,K,R,H] float32 and lse [B,K,R] float32. `splits` is the number of shares
    (default: enough to fill the chip); `interpret`: plgpu.InterpretGPUParams (jax 0.11+).
    """
    reason = _shape_reason(q, k)
    if reason is not None:
        raise NotImplementedError(reason)
    B, K, R, H = q.shape
    S = k.shape[2]
    if S < TILE:  # a cache this small is cheap to copy; a larger one never is
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, TILE - S), (0, 0))) for x in (k, v))
    blocks = pl.cdiv(R, ROWS)
    pad = blocks * ROWS - R
    if splits is None:
        splits = max(1, min(S // (TILE * SPLIT_TILES), PROGRAMS // (B * K * blocks)))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
    operands = [q, k, v, jnp.minimum(upper, S).astype(jnp.int32)]
    operands += bounds.of_row_blocks(upper, stair, R=R, rows=ROWS, S=S)
    if lower is not None:
        lower = jnp.pad(jnp.maximum(lower, 0).astype(jnp.int32), ((0, 0), (0, pad)), mode="edge")
        operands += [jnp.min(lower.reshape(B, blocks, ROWS), axis=2), lower]

    tiled = _tiling(q.dtype, H)
    scratch = {
        "q_smem": plgpu.SMEM((ROWS, H), q.dtype, transforms=tiled),
        "k_smem": plgpu.SMEM((STAGES, TILE, H), q.dtype, transforms=tiled),
        "v_smem": plgpu.SMEM((STAGES, TILE, H), q.dtype, transforms=tiled),
        "out_smem": plgpu.SMEM((ROWS, H), jnp.float32, transforms=_tiling(jnp.float32, H)),
        "lse_smem": plgpu.SMEM((ROWS,), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "k_ready": plgpu.Barrier(num_barriers=STAGES),
        "v_ready": plgpu.Barrier(num_barriers=STAGES),
    }
    if lower is not None:
        scratch |= {"lower_smem": plgpu.SMEM((ROWS,), jnp.int32), "lower_ready": plgpu.Barrier()}
    if interpret is not None:  # the interpreter has no product with its left operand in registers
        scratch["weights_smem"] = plgpu.SMEM((ROWS, TILE), q.dtype, transforms=_tiling(q.dtype, TILE))
    out, lse = plgpu.kernel(
        functools.partial(_kernel, scale=scale * _LOG2E, stair=stair, slots=k.shape[2], splits=splits),
        out_type=(
            jax.ShapeDtypeStruct((splits, B, K, blocks * ROWS, H), jnp.float32),
            jax.ShapeDtypeStruct((splits, B, K, blocks * ROWS), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(splits, blocks, K, B),
        grid_names=("split", "block", "head", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="block_attention",
    )(*operands)
    return _merge(out[:, :, :, :R], lse[:, :, :, :R])


def _tiling(dtype: jnp.dtype, H: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The shared-memory layout that tensor copies and warpgroup products agree on."""
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(H * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def _merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins the shares: out [splits,B,K,R,H], lse [splits,B,K,R] -> out [B,K,R,H], lse [B,K,R]."""
    if lse.shape[0] == 1:
        return out[0], lse[0]
    top = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=0)
    out = jnp.einsum("nbkr,nbkrh->bkrh", weights, out, precision=lax.Precision.HIGHEST)
    return out / jnp.where(total == 0.0, 1.0, total)[..., None], top + jnp.log(total)


def _kernel(
    q_ref,  # [B, K, blocks * 64, H]
    k_ref,  # [B, K, slots, H]
    v_ref,  # [B, K, slots, H]
    upper_ref,  # [B] int32: the bound of row 0
    sure_ref,  # [B, blocks] int32: every row of the block sees the slots before it
    reach_ref,  # [B, blocks] int32: none sees a slot from here on
    *refs,  # windowed: first [B, blocks] int32, lower [B, blocks * 64]; out [splits, B, K, ...], lse
    scale: float,  # times log2 e: the softmax is computed in powers of two
    stair: int,
    slots: int,
    splits: int,
    q_smem,
    k_smem,
    v_smem,
    out_smem,
    lse_smem,
    q_ready,
    k_ready,
    v_ready,
    lower_smem=None,
    lower_ready=None,
    weights_smem=None,
):
    windowed = lower_smem is not None
    first_ref, lower_ref = refs[:2] if windowed else (None, None)
    out_ref, lse_ref = refs[-2:]
    split, block = lax.axis_index("split"), lax.axis_index("block")
    head, batch = lax.axis_index("head"), lax.axis_index("batch")
    rows = pl.ds(block * ROWS, ROWS)
    H = q_smem.shape[-1]
    row_layout, layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    upper, sure, reach = upper_ref[batch], sure_ref[batch, block], reach_ref[batch, block]
    first = first_ref[batch, block] if windowed else jnp.int32(0)
    low = lax.div(first, jnp.int32(TILE))
    begin = low + lax.rem(split + splits - lax.rem(low, jnp.int32(splits)), jnp.int32(splits))

    def count(tiles):
        """How many of the tiles before number `tiles` are this share's."""
        return lax.div(jnp.maximum(tiles - begin, 0) + (splits - 1), jnp.int32(splits))

    steps = count(lax.div(reach + (TILE - 1), jnp.int32(TILE)))

    def place(step):
        """Where the tile is read: a tile that would reach over the end of the cache starts earlier."""
        return jnp.minimum((begin + step * splits) * TILE, slots - TILE)

    def fetch(ref, smem, ready, step):
        slot = lax.rem(step, jnp.int32(STAGES))
        plgpu.copy_gmem_to_smem(ref.at[batch, head, pl.ds(place(step), TILE)], smem.at[slot], ready.at[slot])

    plgpu.copy_gmem_to_smem(q_ref.at[batch, head, rows], q_smem, q_ready)
    if windowed:
        plgpu.copy_gmem_to_smem(lower_ref.at[batch, rows], lower_smem, lower_ready)
    for stage in range(STAGES):

        @pl.when(stage < steps)
        def _fill(step=stage):
            fetch(k_ref, k_smem, k_ready, jnp.int32(step))
            fetch(v_ref, v_smem, v_ready, jnp.int32(step))

    plgpu.barrier_wait(q_ready)
    if windowed:
        plgpu.barrier_wait(lower_ready)
        lower = plgpu.layout_cast(lower_smem[...], row_layout)

    def step(n, carry, masked: bool):
        acc, top, total = carry
        stage = lax.rem(n, jnp.int32(STAGES))
        start = place(n)
        fresh = (begin + n * splits) * TILE  # slots before it, if any were read, belong to the previous tile

        plgpu.barrier_wait(k_ready.at[stage])

        def product(acc_ref):
            plgpu.wgmma(acc_ref, q_smem, k_smem.at[stage].transpose((1, 0)))
            return acc_ref[...]

        scores = pl.run_scoped(product, plgpu.ACC((ROWS, TILE), jnp.float32))

        @pl.when(n + STAGES < steps)
        def _next_k():
            fetch(k_ref, k_smem, k_ready, n + STAGES)

        if masked:
            slot = start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
            visible = (slot < reach) & (slot >= fresh)
            if stair:  # slot < upper + row // stair, without the division
                row = block * ROWS + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout)
                visible = visible & ((slot - upper + 1) * stair <= row)
            if windowed:
                visible = visible & (slot >= lax.broadcast_in_dim(lower, scores.shape, [0]))
            scores = jnp.where(visible, scores, _LOWEST)
        new_top = jnp.maximum(top, scores.max(axis=1))
        # Scaled after the maximum is taken off: the compiler may then not fuse the two into one rounding in only
        # one of the two loops, and a row's bits do not depend on which of them its tile took.
        keep = jnp.exp2((top - new_top) * scale)
        weights = jnp.exp2((scores - lax.broadcast_in_dim(new_top, scores.shape, [0])) * scale)
        if masked:
            weights = jnp.where(visible, weights, 0.0)
        total = total * keep + weights.sum(axis=1)

        plgpu.barrier_wait(v_ready.at[stage])
        if masked:
            # Slots no row sees may hold NaN, which a weight of 0 would not silence.
            @pl.when((start + TILE > reach) | (start < first))
            def _clear():
                slot = start + plgpu.broadcasted_iota(jnp.int32, (TILE, H), 0, layout=layout)
                seen = (slot < reach) & (slot >= first)
                held = plgpu.layout_cast(v_smem[stage], layout)
                v_smem[stage] = jnp.where(seen, held, jnp.zeros_like(held))
                plgpu.commit_smem()

        left = weights.astype(v_smem.dtype)  # stays in registers
        if weights_smem is not None:
            weights_smem[...] = left
            plgpu.commit_smem()
            left = weights_smem

        def weigh(part_ref):
            plgpu.wgmma(part_ref, left, v_smem.at[stage])
            return part_ref[...]

        acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
        acc = acc + pl.run_scoped(weigh, plgpu.ACC(acc.shape, jnp.float32))

        @pl.when(n + STAGES < steps)
        def _next_v():
            fetch(v_ref, v_smem, v_ready, n + STAGES)

        return acc, new_top, total

    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout),
    )
    # The tiles before `sure` hold nothing to mask, unless there are windows.
    whole = jnp.int32(0) if windowed else count(lax.div(sure, jnp.int32(TILE)))
    carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    acc, top, total = lax.fori_loop(whole, steps, functools.partial(step, masked=True), carry)

    some = total > 0.0
    safe = jnp.where(some, total, 1.0)
    out_smem[...] = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
    lse_smem[...] = jnp.where(some, top * (scale / _LOG2E) + jnp.log(safe), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_ref.at[split, batch, head, rows])
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[split, batch, head, rows])
    plgpu.wait_smem_to_gmem(0)
