"""`kv_map` through the real TPU compiler, at the geometries of the pairs it is for; nothing runs here."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.kernels.kv_map import tpu

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("turned", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(
    ("count", "kv", "rows", "size"),
    [
        (8, 8, 256, 32768),  # Qwen3 or Llama 8B, 8 layers of their own kind
        (8, 1, 256, 32768),  # an eighth of the target's heads on the device
        (16, 8, 2048, 8192),  # keys and values of 8 layers, a long chunk
    ],
)
@pytest.mark.parametrize("target", ["v5e-8", "v5p-16", "v6e-8"])
def test_eight_heads_of_128(mesh_for, target: str, count: int, kv: int, rows: int, size: int, turned: bool):
    mesh = mesh_for(target)
    whole = NamedSharding(mesh, P())
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
    sources = [struct((1, 8, size, 128), jnp.bfloat16)] * count
    angles = struct((1, rows, 2, 64), jnp.float32)
    arguments = (
        sources, struct((kv, 128, count, 8, 128), jnp.bfloat16), struct((count, 8, 128), jnp.float32),
        struct((kv, 128), jnp.float32), struct((), jnp.int32), angles, angles if turned else None,
    )  # fmt: skip
    assert tpu.is_supported(sources[0], arguments[1], rows=rows, platform="tpu") is None
    run = functools.partial(tpu.kv_map, rows=rows, keys=(turned,) * count)
    compiled = jax.jit(run).lower(*arguments).compile()
    assert len(re.findall(r'custom_call_target="tpu_custom_call\w*"', compiled.as_text())) == 1
    # The weights are laid out for the kernel once a call; the cache is not copied.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * arguments[1].size * 2 + (16 << 20)
