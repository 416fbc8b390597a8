"""Every backend of `kv_map` against a float64 answer with NaN around the mapped rows; and its use by the mapper."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Choice
from kvjax.cache import KVCache
from kvjax.config import RopeConfig
from kvjax.kernels import dispatch
from kvjax.kernels.kv_map import BACKENDS, Affine, gpu, ref, tpu
from kvjax.rope import cos_sin, rotate
from kvjax.sharding import Rules
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import LayerMap, Mapper, map_content, map_rows
from tests.kernels import map_cases
from tests.kernels.backends import NO_GPU_INTERPRETER, gpu_interpreter, has_gpu_interpreter
from tests.kernels.map_cases import CASES, MapCase

V5E = {"platform": "tpu", "device_kind": "TPU v5 lite"}
H100 = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}


def run(name: str, x: map_cases.MapInputs) -> np.ndarray:
    call = {
        "ref": ref.kv_map,
        "tpu": functools.partial(tpu.kv_map, interpret=True),
        "gpu": functools.partial(gpu.kv_map, interpret=gpu_interpreter()),
    }[name]
    return np.asarray(jax.jit(functools.partial(call, keys=x.keys))(*x.arguments))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["ref", "tpu", "gpu"])
def test_case(name: str, case: MapCase) -> None:
    x = map_cases.inputs(case)
    if name == "tpu":
        refused = tpu.is_supported(x.sources, x.affine, rows=case.rows, **V5E)
        if case.h % 128 or case.H % 128:
            assert refused is not None and "multiples of 128" in refused
            return
        assert refused is None
    if name == "gpu":
        refused = gpu.is_supported(x.sources, x.affine, rows=case.rows, **H100)
        if "float32" in (case.weights, case.cache if case.weights == "int8" else ""):
            assert refused is not None and "not float32" in refused
            return
        assert refused is None
        if not has_gpu_interpreter:
            pytest.skip(NO_GPU_INTERPRETER)
    map_cases.check(run(name, x), x)


@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[10]], ids=lambda c: c.name)
def test_the_bound_notices_a_row_or_a_weight(case: MapCase) -> None:
    """The table itself: a neighbouring row's source, or one weight block left out, fails the check."""
    x = map_cases.inputs(case)
    moved = [jnp.nan_to_num(s) for s in x.sources]
    moved = [moved[0].at[:, :, case.start].set(moved[0][:, :, case.start + 1]), *moved[1:]]
    without = x.affine._replace(weight=x.affine.weight.at[0, 0, : case.h].set(0))
    for sources, affine in ((moved, x.affine), (x.sources, without)):
        got = ref.kv_map(sources, affine, *x.arguments[2:], keys=x.keys)
        with pytest.raises(AssertionError, match="exceed their bound"):
            map_cases.check(got, x)


def pair(joint: bool, local: bool):
    """A mapper between other geometries, content features, and the source cache that holds them, rotated."""
    source = Geometry(3, 2, 8, RopeConfig(theta=1e4))
    target = Geometry(2, 3, 6, map_cases.TARGET_ROPE)
    layers = ((0, 2), (1,))
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    maps = []
    for chosen in layers:
        blocks = len(chosen) * (2 if joint else 1)
        inner = blocks * (1 if local else 2) * 8
        heads = jnp.asarray([1, 0, 1], jnp.int32) if local else None
        weights = [draw(3, 6, inner) for _ in range(2)]
        maps.append(LayerMap(*weights, draw(blocks, 2, 8), draw(blocks, 2, 8), draw(3, 6), draw(3, 6), heads))
    features = draw(2, 32, 3, 2, 2, 8)
    every = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (2, 32))
    cos, sin = (z[:, :, None] for z in cos_sin(every, source.rope, 8))
    keys = tuple(rotate(features[:, :, i, 0], cos, sin).transpose(0, 2, 1, 3) for i in range(3))
    values = tuple(features[:, :, i, 1].transpose(0, 2, 1, 3) for i in range(3))
    cache = KVCache(keys, values, jnp.full(2, 32, jnp.int32))
    return Mapper(tuple(maps), source, target, layers, joint), features, cache


@pytest.mark.parametrize("local", [False, True], ids=["full", "local"])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "separate"])
def test_rows_of_a_cache_are_mapped_as_their_features(joint: bool, local: bool) -> None:
    """Adjacent rows, gathered ones, and features taken beforehand are one map; other target positions rotate on."""
    mapper, features, cache = pair(joint, local)
    index = jnp.asarray([[16, 17, 18, 19], [3, 31, 0, 7]], jnp.int32)
    pos = index + 5
    want = map_content(
        mapper, jnp.take_along_axis(features, index[:, :, None, None, None, None], axis=1), pos
    )
    run = functools.partial(map_rows, mapper, cache, rules=Rules(None, 3, ()), choice=Choice("cpu"))
    got = run(index, pos)
    adjacent = run(jnp.int32(16), pos[:1].repeat(2, 0))
    for a, b, c in zip(jax.tree.leaves(want), jax.tree.leaves(got), jax.tree.leaves(adjacent), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        np.testing.assert_allclose(a[0], c[0], atol=2e-5)
    shifted = run(index, pos + 1)
    assert np.abs(np.asarray(shifted[0][0] - got[0][0])).max() > 0.1
    np.testing.assert_array_equal(shifted[0][1], got[0][1])


def structs(
    h: int = 128, size: int = 512, *, kv: int = 8, cache="bfloat16", weights="bfloat16", count: int = 4
):
    affine = Affine(
        jax.ShapeDtypeStruct((kv, 128, count * 8 * h), weights), jax.ShapeDtypeStruct((count, 8, h), jnp.float32),
        jax.ShapeDtypeStruct((kv, 128), jnp.float32),
    )  # fmt: skip
    return [jax.ShapeDtypeStruct((1, 8, size, h), cache)] * count, affine


def test_refusals_say_why() -> None:
    check = functools.partial(tpu.is_supported, rows=256, **V5E)
    assert check(*structs()) is None
    assert "multiples of 128; the source's is 64" in check(*structs(64))
    assert "256 rows of 500 slots do not" in check(*structs(size=500))
    assert "not float16" in check(*structs(cache="float16"))
    assert "MB of vector memory" in check(*structs(weights="float32", count=80))
    assert "v5 or newer can, TPU v4 cannot" in tpu.is_supported(
        *structs(), rows=256, platform="tpu", device_kind="TPU v4"
    )
    assert "the device is a gpu" in tpu.is_supported(*structs(), rows=256, platform="gpu")


def test_the_first_backend_that_can_is_chosen_and_a_named_one_must() -> None:
    choose = functools.partial(dispatch.choose, "map", BACKENDS)
    assert choose(*structs(), rows=256, **V5E).name == "tpu"
    assert choose(*structs(64), rows=256, **V5E).name == "xla"
    assert choose(*structs(), rows=256, platform="cpu").name == "xla"
    with pytest.raises(ValueError, match="map backend 'tpu' cannot be used: .* the source's is 64"):
        choose(*structs(64), rows=256, name="tpu", **V5E)
    with pytest.raises(ValueError, match="unknown map backend 'cuda'; known: tpu, gpu, xla"):
        choose(*structs(), rows=256, name="cuda", **V5E)
