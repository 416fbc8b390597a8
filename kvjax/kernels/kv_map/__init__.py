"""Cached rows of chosen source layers to one target layer's keys or values, in one pass.

Un-rotate (for keys), take the mean off, project, add the bias, rotate (for keys). `ref` (plain XLA, everywhere) defines
it; `tpu` (Mosaic TPU) and `gpu` (Mosaic GPU) are kernels. Each has `is_supported` and `kv_map`;
`kvjax.kernels.dispatch.choose` picks among them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from kvjax.kernels import dispatch

BACKENDS = dispatch.backends("kv_map")


class Affine(NamedTuple):
    """The map of one target layer and channel: y = scale (weight (x - mean)) + bias.

    J input blocks (source layers x channels) of k heads of width h; K target heads of width H. The inputs of one output
    lie side by side, so that kernels read weights as they are stored.

    weight: [K, H, P] float32, bfloat16 or int8, with P = J k h, or P = J h where `heads` says which source head each
    target head reads. mean: [J, k, h] float32. bias: [K, H] float32. scale: [K, H] float32, of int8 weights, else None.
    heads: [K] int32, or None: every target head reads all source heads.
    """

    weight: jax.Array
    mean: jax.Array
    bias: jax.Array
    scale: jax.Array | None = None
    heads: jax.Array | None = None
