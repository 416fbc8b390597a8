"""`kv_map` through the real TPU and GPU compilers, at the geometries of the pairs it is for; nothing runs here."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax import make_mesh, plan, topology
from kvjax.attention import Choice
from kvjax.cache import KVCache
from kvjax.kernels import dispatch
from kvjax.kernels.kv_map import BACKENDS, Affine
from kvjax.sharding import Rules
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import LayerMap, Mapper, map_rows

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
@pytest.mark.parametrize("target", ["v5e-8", "v5p-16", "v6e-8", "h100"])
def test_eight_heads_of_128(mesh_for, target: str, call: dict, turned: bool):
    compile_for(mesh_for(target), turned=turned, **call)


@pytest.mark.parametrize("target", ["v5e-8", "v5p-16", "v6e-8"])
def test_float32_weights(mesh_for, target: str):
    compile_for(mesh_for(target), count=8, weights="float32")


@pytest.mark.parametrize("heads", ["all", "here"])
@pytest.mark.parametrize("target", ["v5e-8", "h100-8"])
def test_a_chunk_on_eight_devices(request, target: str, heads: str):
    """`map_rows` between two Qwen3-8B caches, two layers, one KV head a device: kernels, and what travels."""
    lacking = topology.missing(target)
    if lacking is not None and "aot" not in (request.config.getoption("-m") or ""):
        pytest.skip(lacking)
    mesh = make_mesh(1, 8, devices=topology.devices(target))
    config = dataclasses.replace(plan.find("qwen3-8b")[1], num_layers=2, windows=())
    geometry, rules = Geometry.of(config), Rules.create(config, mesh)
    rows, size, own = 256, 32768, heads == "here"

    def struct(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(*axes))

    weight = struct((8, 128, 4 * 128 * (1 if own else 8)), jnp.bfloat16, "kv_heads", None, None)
    mean = struct((4, 8, 128), jnp.float32, None, "kv_heads" if own else None, None)
    bias = struct((8, 128), jnp.float32, "kv_heads", None)
    read = struct((8,), jnp.int32, "kv_heads") if own else None
    part = LayerMap(weight, weight, mean, mean, bias, bias, read, here=own)
    mapper = Mapper((part, part), geometry, geometry, ((0, 1), (0, 1)), joint=True)
    slab = struct((1, 8, size, 128), jnp.bfloat16, "batch", "kv_heads", None, None)
    cache = KVCache((slab,) * 2, (slab,) * 2, struct((1,), jnp.int32, "batch"))
    device = mesh.devices.flat[0]
    choice = Choice(device.platform, device.device_kind)
    with rules.context():
        run = jax.jit(functools.partial(map_rows, rules=rules, choice=choice))
        pos = struct((1, rows), jnp.int32, "batch", None)
        compiled = run.lower(mapper, cache, struct((), jnp.int32), pos).compile()
    text = compiled.as_text()
    assert len(re.findall(rf'custom_call_target="{CALL[device.platform]}\w*"', text)) == 4
    travels = [
        name for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if name in text
    ]
    assert travels == ([] if own else ["all-gather"])
    assert compiled.memory_analysis().temp_size_in_bytes < 32 << 20, "temporaries as large as a layer's cache"
