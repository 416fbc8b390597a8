"""Every kernel through the real TPU and GPU compilers, at the geometries it will meet; nothing runs here."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax import topology
from kvjax.attention import Backend, Choice
from kvjax.kernels.block_attention import gpu

pytestmark = pytest.mark.aot

TPUS = ("v5e-8", "v5p-16", "v6e-8")
CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}  # how a kernel of ours shows in the compiled program
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def structs(mesh, B, K, R, S, H, dtype, windowed, spec=None):
    """Arguments (q, k, v, upper[, lower]); `spec` shards q, k and v, its first entry the bounds."""
    spec = spec or P()
    rows = P(*spec[:1])
    shapes = [((B, K, R, H), dtype, spec), ((B, K, S, H), dtype, spec), ((B, K, S, H), dtype, spec)]
    shapes += [((B,), jnp.int32, rows)] + [((B, R), jnp.int32, rows)] * windowed
    return [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p)) for s, d, p in shapes]


def chosen(mesh, arguments) -> Backend:
    """What `attend` would use on the mesh for the whole arrays; it must be the kernel of its platform."""
    device = mesh.devices.flat[0]
    backend = Choice(device.platform, device.device_kind).backend(*arguments[:2])
    assert backend.name == device.platform
    return backend


def compile_for(target, mesh, arguments, *, stair, run=None):
    """Compiles one call; the kernel must be in it, exactly once, and the cache must not be copied."""
    platform = topology.target(target).platform
    run = run or functools.partial(chosen(mesh, arguments).run, scale=0.1, stair=stair)
    compiled = jax.jit(run).lower(*arguments).compile()
    text = compiled.as_text()
    assert len(re.findall(rf'custom_call_target="{CALL[platform]}\w*"', text)) == 1
    k = arguments[1]
    size = math.prod(k.sharding.shard_shape(k.shape))
    here = size * k.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes >= 2 * here
    assert memory.temp_size_in_bytes < max(here, 32 << 20), "temporaries as large as the cache"
    if here > 1 << 20:  # a smaller cache may be padded
        made = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|transpose|fusion|pad)\(", text)
        assert not [op for shape, op in made if math.prod(map(int, shape.split(","))) >= size]
    return text


@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
@pytest.mark.parametrize("stair", [0, 4], ids=["flat", "stair"])
@pytest.mark.parametrize("R", [4, 32, 64, 1024], ids=["W1", "W8", "W16", "chunk256"])
@pytest.mark.parametrize("K", [1, 8])
@pytest.mark.parametrize("target", [*TPUS, "h100"])
def test_qwen3_8b(mesh_for, target: str, K: int, R: int, stair: int, windowed: bool):
    """Qwen3-8B (G 4, H 128) with all or an eighth of its KV heads on the device, 32K slots; trees and chains."""
    mesh = mesh_for(target)
    compile_for(target, mesh, structs(mesh, 1, K, R, 32768, 128, jnp.bfloat16, windowed), stair=stair)


@pytest.mark.parametrize(
    ("B", "K", "T", "G", "S", "H", "dtype"),
    [
        (1, 1, 2048, 4, 32768, 128, "bfloat16"),  # a 2,048-token chunk
        (1, 1, 256, 8, 32768, 128, "bfloat16"),  # Qwen3-32B and Llama-70B on 8 devices, a chunk
        (1, 2, 16, 8, 32768, 128, "bfloat16"),  # the same on 4 devices, a verified block
        (16, 1, 16, 4, 8192, 128, "bfloat16"),
        (1, 2, 16, 7, 32768, 64, "bfloat16"),  # Qwen2.5-0.5B
        (1, 3, 1, 3, 2000, 64, "bfloat16"),  # SmolLM2-135M
        (2, 2, 7, 1, 100, 32, "bfloat16"),
        (1, 2, 13, 5, 40, 80, "bfloat16"),
        (1, 2, 8, 3, 1000, 96, "bfloat16"),
        (1, 1, 16, 4, 4096, 256, "bfloat16"),
        (1, 2, 128, 4, 2000, 128, "float32"),
        (1, 3, 1, 3, 300, 64, "float32"),
    ],
)
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
@pytest.mark.parametrize("target", [*TPUS, "h100"])
def test_other_shapes(mesh_for, target: str, B, K, T, G, S, H, dtype, windowed: bool):
    """Other models, long chunks, small heads, rows and slots that fill no tile; float32 on TPU."""
    mesh = mesh_for(target)
    arguments = structs(mesh, B, K, T * G, S, H, jnp.dtype(dtype), windowed)
    refused = {"not float32": dtype == "float32", "slots, not 100": S == 100, "not 256": H == 256}
    if target == "h100" and any(refused.values()):
        device = mesh.devices.flat[0]
        where = {"platform": device.platform, "device_kind": device.device_kind}
        assert next(r for r in refused if refused[r]) in gpu.is_supported(*arguments[:2], **where)
        return
    compile_for(target, mesh, arguments, stair=G)


@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
@pytest.mark.parametrize("target", [*TPUS, "h100-8"])
def test_sharded(mesh_for, target: str, windowed: bool):
    """Under `jax.shard_map` on a (2, 4) mesh: devices do not talk."""
    mesh = mesh_for(target, data=2, model=4)
    spec = P("data", "model")
    arguments = structs(mesh, 4, 8, 64, 32768, 128, jnp.bfloat16, windowed, spec)
    specs = (spec, spec, spec, P("data")) + (P("data"),) * windowed
    call = functools.partial(chosen(mesh, arguments).run, scale=0.1, stair=4)
    run = jax.shard_map(lambda *a: call(*a), in_specs=specs, out_specs=(spec, spec))
    text = compile_for(target, mesh, arguments, stair=4, run=run)
    assert not [name for name in COLLECTIVES if name in text]
