"""`kv_map`: the reference against the mapper it speeds up, the TPU kernel (interpreted) against the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import RopeConfig
from kvjax.kernels.kv_map import ref, tpu
from kvjax.rope import cos_sin, rotate
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import LayerMap, Mapper, map_content


def inputs(
    seed: int,
    *,
    count: int,
    k: int,
    h: int,
    kv: int,
    width: int,
    batch: int = 2,
    size: int = 32,
    dtype="float32",
):
    rng = np.random.default_rng(seed)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    sources = [draw(batch, k, size, h).astype(dtype) for _ in range(count)]
    weight = draw(kv, width, count, k, h).astype(dtype) * (count * k * h) ** -0.5
    return sources, weight, draw(count, k, h), draw(kv, width)


def angles(pos, rope, width, *, unit: bool = False):
    cos, sin = cos_sin(pos, rope, width)
    if unit:
        norm = cos * cos + sin * sin
        cos, sin = cos / norm, sin / norm
    return jnp.stack([cos, sin], 2)


@pytest.mark.parametrize("joint", [True, False])
def test_the_reference_is_what_the_mapper_does(joint: bool) -> None:
    """On keys that were rotated, with other geometry and another base (and yarn's magnitude) on the other side."""
    source = Geometry(3, 2, 8, RopeConfig(theta=1e4))
    target = Geometry(
        1, 3, 6, RopeConfig(kind="yarn", theta=5e5, factor=4.0, original_max=64, attention_factor=1.2)
    )
    chosen, rows, start = (0, 2), 8, 16
    count = len(chosen) * (2 if joint else 1)
    _, key, mean, bias = inputs(0, count=count, k=2, h=8, kv=3, width=6)
    _, value, value_mean, value_bias = inputs(1, count=count, k=2, h=8, kv=3, width=6)
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.normal(size=(2, 32, 3, 2, 2, 8)), jnp.float32)
    every = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (2, 32))
    cos, sin = cos_sin(every, source.rope, 8)
    cached_k = [
        rotate(features[:, :, i, 0], cos[:, :, None], sin[:, :, None]).transpose(0, 2, 1, 3) for i in range(3)
    ]
    cached_v = [features[:, :, i, 1].transpose(0, 2, 1, 3) for i in range(3)]
    pos = start + jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (2, rows))
    mapper = Mapper(
        (LayerMap(key, value, mean, value_mean, bias, value_bias),), source, target, (chosen,), joint
    )
    ((want_k, want_v),) = map_content(mapper, features[:, start : start + rows], pos)
    both = [a for i in chosen for a in (cached_k[i], cached_v[i])]
    un, turn = angles(pos, source.rope, 8, unit=True), angles(pos, target.rope, 6)
    run = functools.partial(ref.kv_map, start=jnp.int32(start), unturn=un, rows=rows)
    if joint:
        kinds = (True, False) * len(chosen)
        got_k = run(both, key, mean, bias, turn=turn, keys=kinds)
        got_v = run(both, value, value_mean, value_bias, turn=None, keys=kinds)
    else:
        got_k = run([cached_k[i] for i in chosen], key, mean, bias, turn=turn, keys=(True,) * len(chosen))
        got_v = run(
            [cached_v[i] for i in chosen],
            value,
            value_mean,
            value_bias,
            turn=None,
            keys=(False,) * len(chosen),
        )
    np.testing.assert_allclose(got_k, want_k, atol=2e-5)
    np.testing.assert_allclose(got_v, want_v, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    ("count", "k", "kv", "rows", "start"), [(2, 1, 2, 16, 16), (3, 2, 1, 8, 0), (1, 2, 3, 16, 0)]
)
def test_the_tpu_kernel_is_the_reference(count, k, kv, rows, start, turned, dtype) -> None:
    sources, weight, mean, bias = inputs(3, count=count, k=k, h=128, kv=kv, width=128, dtype=dtype)
    pos = start + jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (2, rows))
    rope = RopeConfig(theta=1e4)
    un, turn = angles(pos, rope, 128, unit=True), angles(pos, RopeConfig(theta=1e6), 128) if turned else None
    kinds = tuple(j % 2 == 0 for j in range(count))
    arguments = (sources, weight, mean, bias, jnp.int32(start), un, turn)
    want = ref.kv_map(*arguments, rows=rows, keys=kinds)
    got = jax.jit(functools.partial(tpu.kv_map, rows=rows, keys=kinds, interpret=True))(*arguments)
    np.testing.assert_allclose(got, want, atol=3e-5 if dtype == "float32" else 3e-2, rtol=1e-3)


def test_refusals_say_why() -> None:
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weight = struct((8, 128, 4, 8, 128))
    check = functools.partial(tpu.is_supported, platform="tpu")
    assert check(struct((1, 8, 512, 128)), weight, rows=256) is None
    assert "multiples of 128; the source's is 64" in check(struct((1, 8, 512, 64)), weight, rows=256)
    assert "do not divide" in check(struct((1, 8, 500, 128)), weight, rows=256)
    assert "the device is a gpu" in tpu.is_supported(
        struct((1, 8, 512, 128)), weight, rows=256, platform="gpu"
    )
