"""`kv_map` as a Mosaic GPU kernel for Hopper: bulk tensor copies feed warpgroup matrix products.

One program per target head, 64 rows and sequence, of one warpgroup. It steps through the J k source heads: their rows
are un-rotated and centred in registers and multiplied from there, so they are written nowhere on the way. Tiles come in
two halves, since a rotation pairs feature i with i + h/2: a pair then lies at one place of two arrays. int8 weights
become the products' dtype a tile at a time, in shared memory; their scale is the epilogue's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.kv_map import Affine

ROWS = 64  # of one warpgroup product
STAGES = 2  # source heads in flight, with their weights


def is_supported(
    sources: Sequence[Any], affine: Affine, *, rows: int, platform: str, device_kind: str = ""
) -> str | None:
    """Returns None if the kernel takes these arrays on this device, else the reason as a sentence."""
    if platform != "gpu":
        return f"the GPU kernel runs on NVIDIA GPUs, and the device is a {platform}"
    if not any(name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return (
            f"the GPU kernel needs Hopper's warpgroup products, and the device is {device_kind or 'unknown'}"
        )
    return _shape_reason(sources, affine, rows)


def _shape_reason(sources: Sequence[Any], affine: Affine, rows: int) -> str | None:
    weight, source = affine.weight, sources[0]
    product = _product(sources, affine)
    if product not in (jnp.bfloat16, jnp.float16):
        return f"the GPU kernel multiplies bfloat16 and float16, not {product} (no float32 warpgroup product)"
    if source.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the GPU kernel reads bfloat16, float16 and float32 caches, not {source.dtype}"
    for name, width in (("source", source.shape[-1]), ("target", weight.shape[1])):
        if width > 128 or width % 32:
            return f"the GPU kernel takes head dimensions up to 128 in steps of 32; the {name}'s is {width}"
    if affine.scale is not None and weight.shape[1] % 64:
        return f"the GPU kernel takes int8 weights for head dimensions 64 and 128; the target's is {weight.shape[1]}"
    if rows % ROWS:
        return f"the GPU kernel maps rows in blocks of {ROWS}, and {rows} do not divide"
    return None


def kv_map(
    sources: Sequence[jax.Array],
    affine: Affine,
    start: jax.Array,
    unturn: jax.Array,
    turn: jax.Array | None,
    *,
    keys: tuple[bool, ...],
    interpret: Any = None,
) -> jax.Array:
    """As `ref.kv_map`. `interpret`: plgpu.InterpretGPUParams (jax 0.11+)."""
    weight, mean, bias, scale, chosen = affine
    (batch, _, _, h), rows = sources[0].shape, unturn.shape[2]
    reason = _shape_reason(sources, affine, rows)
    if reason is not None:
        raise NotImplementedError(reason)
    kv, width, _ = weight.shape
    product, cache = _product(sources, affine), sources[0].dtype
    smem = lambda shape, dtype: plgpu.SMEM(shape, dtype, transforms=_tiling(dtype, shape[-1]))  # noqa: E731
    scratch = {
        "x_smem": smem((STAGES, 2, ROWS, h // 2), cache),
        "w_smem": smem((STAGES, 2, width, h // 2), weight.dtype),
        "un_smem": smem((2, ROWS, h // 2), jnp.float32),
        "out_smem": smem((2, ROWS, width // 2), jnp.float32),  # the target's angles, until the rows are there
        "mean_smem": plgpu.SMEM((STAGES, h), jnp.float32),
        "ends_smem": plgpu.SMEM((2, width), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=5, num_barriers=STAGES),
        "rest_ready": plgpu.Barrier(num_arrivals=4 if turn is None else 6),
    }
    if scale is not None:
        scratch["wide_smem"] = smem((2, width, h // 2), product)
    if interpret is not None:  # the interpreter has no product with its left operand in registers
        scratch["left_smem"] = smem((2, ROWS, h // 2), product)
    ends = jnp.stack([jnp.ones_like(bias) if scale is None else scale, bias])
    operands = [start.reshape(1).astype(jnp.int32), weight, mean, ends, unturn]
    operands += [] if turn is None else [turn]
    operands += [] if chosen is None else [chosen]
    return plgpu.kernel(
        functools.partial(
            _kernel,
            keys=keys,
            turned=turn is not None,
            local=chosen is not None,
            scaled=scale is not None,
            product=product,
        ),  # fmt: skip
        out_type=jax.ShapeDtypeStruct((batch, kv, rows, width), jnp.float32),
        scratch_types=scratch,
        grid=(rows // ROWS, kv, batch),
        grid_names=("block", "head", "batch"),
        interpret=interpret,
        kernel_name="kv_map",
    )(*operands, *sources)


def _product(sources: Sequence[Any], affine: Affine) -> Any:
    """Dtype of the products: the weights', or the cache's where those are int8."""
    return affine.weight.dtype if affine.scale is None else sources[0].dtype


def _tiling(dtype: Any, minor: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The shared-memory layout that tensor copies and warpgroup products agree on."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def _kernel(
    start_ref,  # [1] int32
    w_ref,  # [K, H, P]
    mean_ref,  # [J, k, h]
    ends_ref,  # [2, K, H]: scale and bias
    un_ref,  # [B, 2, T, h/2]
    *refs,  # turned: angles [B, 2, T, H/2]; local: heads [K] int32; J sources [B, k, S, h]; out [B, K, T, H]
    keys: tuple[bool, ...],
    turned: bool,
    local: bool,
    scaled: bool,
    product: Any,
    x_smem,
    w_smem,
    un_smem,
    out_smem,
    mean_smem,
    ends_smem,
    ready,
    rest_ready,
    wide_smem=None,
    left_smem=None,
):
    turn_ref, refs = (refs[0], refs[1:]) if turned else (None, refs)
    heads_ref, refs = (refs[0], refs[1:]) if local else (None, refs)
    *sources, out_ref = refs
    block, head, batch = lax.axis_index("block"), lax.axis_index("head"), lax.axis_index("batch")
    rows = pl.ds(block * ROWS, ROWS)
    read = 1 if local else sources[0].shape[1]
    half, out_half = x_smem.shape[-1], out_smem.shape[-1]
    steps = len(sources) * read
    layout, column_layout = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)

    def source_head(i):
        return heads_ref[head] if local else i

    def fetch(j: int, i, n):
        """Rows of source j's head i (the n-th of all), their mean and their weights."""
        slot = lax.rem(n, jnp.int32(STAGES))
        plgpu.copy_gmem_to_smem(mean_ref.at[j, source_head(i)], mean_smem.at[slot], ready.at[slot])
        for part in (0, 1):
            features = pl.ds(part * half, half)
            plgpu.copy_gmem_to_smem(
                sources[j].at[batch, source_head(i), pl.ds(start_ref[0] + block * ROWS, ROWS), features],
                x_smem.at[slot, part],
                ready.at[slot],
            )
            plgpu.copy_gmem_to_smem(
                w_ref.at[head, :, pl.ds((2 * n + part) * half, half)], w_smem.at[slot, part], ready.at[slot]
            )

    for part in (0, 1):
        plgpu.copy_gmem_to_smem(ends_ref.at[part, head], ends_smem.at[part], rest_ready)
        plgpu.copy_gmem_to_smem(un_ref.at[batch, part, rows], un_smem.at[part], rest_ready)
        if turn_ref is not None:
            plgpu.copy_gmem_to_smem(turn_ref.at[batch, part, rows], out_smem.at[part], rest_ready)
    for n in range(min(STAGES, steps)):
        fetch(n // read, jnp.int32(n % read), jnp.int32(n))
    plgpu.barrier_wait(rest_ready)

    def column(vector, shape):
        """One number for each feature, for every row of a tile."""
        return lax.broadcast_in_dim(plgpu.layout_cast(vector, column_layout), shape, [1])

    def step(j: int, i, accumulators):
        n = j * read + i
        slot = lax.rem(n, jnp.int32(STAGES))
        plgpu.barrier_wait(ready.at[slot])
        a, b = (plgpu.layout_cast(x_smem[slot, part].astype(jnp.float32), layout) for part in (0, 1))
        if keys[j]:
            cos, sin = (plgpu.layout_cast(un_smem[part], layout) for part in (0, 1))
            a, b = a * cos - b * sin, b * cos + a * sin
        lefts = []
        for part, x in enumerate((a, b)):
            mean = column(mean_smem[slot, pl.ds(part * half, half)], x.shape)
            left = (x - mean).astype(product)
            if left_smem is not None:
                left_smem[part] = left
                left = left_smem.at[part]
            lefts.append(left)
            if scaled:
                narrow = plgpu.layout_cast(w_smem[slot, part], plgpu.Layout.WGMMA_UPCAST_2X)
                wide_smem[part] = plgpu.layout_cast(narrow.astype(product), layout)
        if scaled or left_smem is not None:
            plgpu.commit_smem()
        weights = wide_smem if scaled else w_smem.at[slot]
        for part, left in enumerate(lefts):
            for side, accumulator in enumerate(accumulators):
                tile = weights.at[part, pl.ds(side * out_half, out_half)]
                plgpu.wgmma(accumulator, left, tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        later = n + STAGES
        for ahead in range(j, min(len(sources), j + 2 + STAGES // read)):  # whose turn it is then

            @pl.when((later >= ahead * read) & (later < (ahead + 1) * read))
            def _fetch(ahead=ahead):
                fetch(ahead, later - ahead * read, later)

    def product_of_all(*accumulators):
        for j in range(len(sources)):
            lax.fori_loop(0, read, lambda i, _, j=j: step(j, i, accumulators), None)
        return [accumulator[...] for accumulator in accumulators]

    accumulator = plgpu.ACC((ROWS, out_half), jnp.float32)
    halves = pl.run_scoped(product_of_all, accumulator, accumulator)
    for side in (0, 1):
        features = pl.ds(side * out_half, out_half)
        if scaled:
            halves[side] *= column(ends_smem[0, features], halves[side].shape)
        halves[side] += column(ends_smem[1, features], halves[side].shape)
    a, b = halves
    if turned:
        cos, sin = (plgpu.layout_cast(out_smem[part], layout) for part in (0, 1))
        a, b = a * cos - b * sin, b * cos + a * sin
    out_smem[0], out_smem[1] = a, b
    plgpu.commit_smem()
    for side in (0, 1):
        features = pl.ds(side * out_half, out_half)
        plgpu.copy_smem_to_gmem(out_smem.at[side], out_ref.at[batch, head, rows, features])
    plgpu.wait_smem_to_gmem(0)
