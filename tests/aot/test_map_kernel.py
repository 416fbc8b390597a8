"""`kv_map` through the real TPU and GPU compilers, at the geometries of the pairs it is for; nothing runs here."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.kernels import dispatch
from kvjax.kernels.kv_map import BACKENDS, Affine

pytestmark = pytest.mark.aot

CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}  # how a kernel of ours shows in the compiled program


def compile_for(
    mesh, *, count, k=8, kv=8, rows=256, size=32768, turned=True, weights="bfloat16", local=False
):
    """Compiles one call; the kernel must be in it, exactly once, and neither cache nor weights may be copied."""
    whole = NamedSharding(mesh, P())
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
    sources = [struct((1, k, size, 128), jnp.bfloat16)] * count
    small = lambda *shape: struct(shape, jnp.float32)  # noqa: E731
    affine = Affine(
        struct((kv, 128, count * (1 if local else k) * 128), jnp.dtype(weights)), small(count, k, 128), small(kv, 128),
        small(kv, 128) if weights == "int8" else None, struct((kv,), jnp.int32) if local else None,
    )  # fmt: skip
    angles = small(1, 2, rows, 64)
    arguments = sources, affine, struct((), jnp.int32), angles, angles if turned else None
    device = mesh.devices.flat[0]
    where = {"platform": device.platform, "device_kind": device.device_kind}
    backend = dispatch.choose("map", BACKENDS, sources, affine, rows=rows, **where)
    assert backend.name == device.platform, backend
    run = functools.partial(backend.run, keys=(turned,) * count)
    compiled = jax.jit(run).lower(*arguments).compile()
    assert len(re.findall(rf'custom_call_target="{CALL[device.platform]}\w*"', compiled.as_text())) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20


@pytest.mark.parametrize("turned", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(
    "call",
    [
        dict(count=8),  # Qwen3 or Llama 8B, 8 layers of their own kind
        dict(count=8, kv=1),  # an eighth of the target's heads on the device
        dict(count=16, rows=2048, size=8192),  # keys and values of 8 layers, a long chunk
        dict(count=16, weights="int8"),
        dict(count=16, local=True),
        dict(count=16, local=True, weights="int8", kv=1, k=1),  # head-local on eight devices
        dict(count=48, weights="int8"),  # both kinds of 24 layers
    ],
    ids=["k8", "k8-one-head", "k8-joint", "int8", "local", "local-int8-one-head", "k24-joint-int8"],
)
@pytest.mark.parametrize("target", ["v5e-8", "v5p-16", "v6e-8"])
def test_eight_heads_of_128(mesh_for, target: str, call: dict, turned: bool):
    compile_for(mesh_for(target), turned=turned, **call)


@pytest.mark.parametrize("target", ["v5e-8", "v5p-16", "v6e-8"])
def test_float32_weights(mesh_for, target: str):
    compile_for(mesh_for(target), count=8, weights="float32")
