"""Named accelerator targets, and their devices for ahead-of-time compilation on a plain CPU machine.

A `Target` holds the public figures of one slice or node (per chip), which the cost ledger divides by.
`devices(name)` returns compile-only devices: they make a `jax.sharding.Mesh`, and a program lowered for
that mesh goes through the real TPU or GPU compiler. They cannot run anything.

TPU names count TensorCores for v5p (`v5p-16` has 8 chips) and chips for v5e and v6e, as Cloud TPU does.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
from jax.experimental import topologies

from kvjax.resources import config_path


class TopologyError(RuntimeError):
    """The target is unknown, or this environment lacks the compiler for it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One accelerator configuration. Bytes, bytes/s and flop/s are per device (one chip)."""

    name: str
    platform: str  # "tpu" or "gpu"
    kind: str  # generation: v5e, v5p, v6e, h100, h200
    devices: int
    topology: str  # what the compiler plug-in calls it
    hbm_bytes: int
    hbm_bandwidth: float
    peak_flops: float  # dense bfloat16
    shape: tuple[int, ...] = ()  # of the network between chips, where it is a torus


_CHIPS = {  # hbm bytes, hbm bytes/s, bf16 flop/s: the vendors' public figures
    "v5e": (16 * 10**9, 819e9, 197e12),
    "v5p": (95 * 10**9, 2765e9, 459e12),
    "v6e": (32 * 10**9, 1640e9, 918e12),
    "h100": (80 * 10**9, 3350e9, 989e12),
    "h200": (141 * 10**9, 4800e9, 989e12),
}


def _tpu(name: str, kind: str, *shape: int) -> Target:
    count = 1
    for side in shape:
        count *= side
    return Target(name, "tpu", kind, count, f"{kind}:{'x'.join(map(str, shape))}", *_CHIPS[kind], shape)


def _gpu(name: str, kind: str, count: int) -> Target:
    return Target(name, "gpu", kind, count, f"1x{count}x1", *_CHIPS[kind])


TARGETS = {
    target.name: target
    for target in (
        _tpu("v5e-4", "v5e", 2, 2),
        _tpu("v5e-8", "v5e", 2, 4),
        _tpu("v6e-8", "v6e", 2, 4),
        _tpu("v5p-8", "v5p", 2, 2, 1),
        _tpu("v5p-16", "v5p", 2, 2, 2),
        _tpu("v5p-32", "v5p", 2, 2, 4),
        _gpu("h100", "h100", 1),
        _gpu("h100-8", "h100", 8),
        _gpu("h200", "h200", 1),
        _gpu("h200-8", "h200", 8),
    )
}


def target(name: str) -> Target:
    """Returns the named target. Raises TopologyError listing the known names."""
    if name not in TARGETS:
        raise TopologyError(f"unknown target {name!r}; known targets: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]


def missing(name: str) -> str | None:
    """Returns None when this environment can compile for the target, else a sentence saying what it lacks."""
    found = target(name)
    if found.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            return (
                f"compiling for {name} needs the package libtpu, which is not installed here; in an environment of "
                "its own (BUILD.md): pip install libtpu"
            )
        return None
    if not any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
        exact = jax.__version__
        return (
            f"compiling for {name} needs the packages jax-cuda12-plugin and jax-cuda12-pjrt of the version of jax "
            f"({exact}), nvidia-cuda-runtime-cu12 and nvidia-cuda-nvcc-cu12; they are not installed here; in an "
            "environment of its own (BUILD.md): pip install nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12 && "
            f"pip install --no-deps jax-cuda12-pjrt=={exact} jax-cuda12-plugin=={exact}"
        )
    return None


def devices(name: str) -> list[jax.Device]:
    """Returns the compile-only devices of the named target, in the plug-in's order.

    Raises TopologyError when the name is unknown, a compiler package is missing (the message names it), or
    the plug-in refuses. An H200 has the compute side of an H100, so it compiles with the same description;
    only the figures in `Target` differ.
    """
    found = target(name)
    lacking = missing(name)
    if lacking is not None:
        raise TopologyError(lacking)
    try:
        if found.platform == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=found.topology)
        else:
            described = topologies.get_topology_desc(
                "h100", platform="cuda", topology=found.topology, target_config=_specification("h100")
            )
    except Exception as error:  # plug-ins raise many types; every one means: cannot compile here
        raise TopologyError(f"the compiler plug-in for {name} refused: {error}") from error
    return list(described.devices)


def _specification(kind: str) -> str:
    """Reads `configs/targets/KIND.txtpb` from the installed package or from a source checkout."""
    return config_path(f"targets/{kind}.txtpb").read_text("utf-8")
