"""The backends of `block_attention` as tests call them: jitted, kernels interpreted, tiles small."""

from __future__ import annotations

import functools
import warnings

import jax
import numpy as np

from kvjax.kernels.block_attention import gpu, ref, tpu
from tests.kernels import cases

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from jax.experimental.pallas import mosaic_gpu as plgpu

NO_GPU_INTERPRETER = f"jax {jax.__version__} has no interpreter for Mosaic GPU (jax 0.11 and later have)"
has_gpu_interpreter = hasattr(plgpu, "InterpretGPUParams")

# The XLA path may meet NaN in unused keys, and finite junk of any size in unused values.
JUNK = {"ref": (np.nan, 1e30), "tpu": (np.nan, np.nan), "gpu": (np.nan, np.nan)}


def gpu_interpreter():
    """Simulates copies, barriers and uninitialised (NaN) memory, and raises on a race."""
    return plgpu.InterpretGPUParams(detect_races=True) if has_gpu_interpreter else None


@functools.cache
def backend(name: str, scale: float, stair: int):
    """The jitted backend, in tiles small enough that every case has several."""
    run = {
        "ref": ref.block_attention,
        "tpu": functools.partial(tpu.block_attention, interpret=True, slot_tile=64),
        "gpu": functools.partial(gpu.block_attention, interpret=gpu_interpreter()),
    }[name]
    return jax.jit(functools.partial(run, scale=scale, stair=stair))


def attend(name: str, x: cases.Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) of the named backend for one case."""
    out, lse = backend(name, x.scale, x.stair)(x.q, x.k, x.v, x.upper, x.lower)
    return np.asarray(out), np.asarray(lse)
