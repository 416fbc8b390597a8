"""Every backend of `block_attention` against a float64 answer, with junk in every slot no row sees."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.attention import Choice
from kvjax.kernels.block_attention import bounds, gpu, ref, tpu
from tests.kernels import cases
from tests.kernels.backends import JUNK, NO_GPU_INTERPRETER, attend, gpu_interpreter, has_gpu_interpreter
from tests.kernels.cases import CASES, CHAINS, Case

H100 = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}


def _name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=_name)
@pytest.mark.parametrize("name", ["ref", "tpu", "gpu"])
def test_case(name: str, case: Case):
    if name == "gpu":
        arrays = [jax.ShapeDtypeStruct((1, 1, 8, case.H), case.dtype)] * 2
        if case.dtype == "float32":
            assert "float32" in gpu.is_supported(*arrays, **H100)
            return
        assert gpu.is_supported(*arrays, **H100) is None
        if not has_gpu_interpreter:
            pytest.skip(NO_GPU_INTERPRETER)
    x = cases.inputs(case, k_junk=JUNK[name][0], v_junk=JUNK[name][1])
    cases.check(attend(name, x), cases.answer(x), case.dtype)


@pytest.mark.parametrize("case", [c for c in CASES if any(u > 1 for u in c.upper)], ids=_name)
def test_tolerances_notice_one_slot(case: Case):
    """The table itself: an answer that forgets the last visible slot fails the check."""
    x = cases.inputs(case, k_junk=0.0, v_junk=0.0)
    short = cases.answer(dataclasses.replace(x, upper=x.upper - 1))
    with pytest.raises(AssertionError):
        cases.check(tuple(a.astype(np.float32) for a in short), cases.answer(x), case.dtype)


@pytest.mark.parametrize("case", [c for c in CHAINS if c.R > c.stair], ids=_name)
def test_tolerances_notice_a_missing_stair(case: Case):
    """The table itself: an answer whose later rows see no more than the first fails the check."""
    x = cases.inputs(case, k_junk=0.0, v_junk=0.0)
    flat = cases.answer(dataclasses.replace(x, stair=0))
    with pytest.raises(AssertionError):
        cases.check(tuple(a.astype(np.float32) for a in flat), cases.answer(x), case.dtype)


@settings(max_examples=50, deadline=None)
@given(
    upper=st.integers(-3, 50), stair=st.integers(0, 9), R=st.integers(1, 90), rows=st.sampled_from([8, 16, 64]),
    S=st.integers(1, 60),
)  # fmt: skip
def test_bounds_of_row_blocks(upper: int, stair: int, R: int, rows: int, S: int):
    """`sure` and `reach` are the tightest bounds of what the rows of each block see."""
    mask = cases.visible(np.array([upper]), None, R, S, stair)[0]
    sure, reach = bounds.of_row_blocks(jnp.array([upper], jnp.int32), stair, R=R, rows=rows, S=S)
    assert sure.shape == reach.shape == (1, -(-R // rows))
    for block, (low, high) in enumerate(zip(np.maximum(sure[0], 0), np.maximum(reach[0], 0), strict=True)):
        here = mask[block * rows : (block + 1) * rows]
        assert low == here.all(axis=0).sum() and high == here.any(axis=0).sum()


@pytest.mark.parametrize("windowed", [False, True])
def test_reference_agrees_with_jax(windowed: bool):
    """The plain-XLA path against `jax.nn.dot_product_attention`, residual included where it exists."""
    case = Case("", (100, 256), K=3, R=6, window=30 if windowed else 0)
    x = cases.inputs(case, k_junk=0.0, v_junk=0.0)
    mask = cases.visible(x.upper, x.lower, case.R, case.S)[:, None]
    residual = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters
    want = jax.nn.dot_product_attention(
        *(jnp.swapaxes(a, 1, 2) for a in (x.q, x.k, x.v)),
        mask=jnp.asarray(mask),
        scale=x.scale,
        **({"return_residual": True} if residual else {}),
    )
    out, lse = attend("ref", x)
    if residual:
        want, want_lse = want
        np.testing.assert_allclose(lse, np.swapaxes(want_lse, 1, 2), atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(out, np.swapaxes(want, 1, 2), atol=2e-6)


@pytest.mark.parametrize("name", ["ref", "tpu"])
def test_rows_do_not_depend_on_other_sequences(name: str):
    """Bitwise: what a sequence gets is the same whatever its neighbour in the batch holds."""
    x = cases.inputs(Case("", (150, 90), R=12), k_junk=0.0, v_junk=0.0)
    y = cases.inputs(Case("", (150, 256), R=12), k_junk=0.0, v_junk=0.0, seed=1)
    mixed = dataclasses.replace(
        y, **{f: np.stack([getattr(x, f)[0], getattr(y, f)[1]]) for f in ("q", "k", "v", "upper")}
    )
    for a, b in zip(attend(name, x), attend(name, mixed), strict=True):
        assert np.array_equal(a[0], b[0])


def test_tpu_tiles_rows():
    """A prefill chunk folds to more rows than one block holds; blocks see their own window."""
    case = Case("", (250,), K=1, R=1300, S=256, H=32, window=1100)
    x = cases.inputs(case, k_junk=np.nan, v_junk=np.nan)
    cases.check(attend("tpu", x), cases.answer(x), case.dtype)


@pytest.mark.skipif(not has_gpu_interpreter, reason=NO_GPU_INTERPRETER)
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_gpu_splits_agree(splits: int, window: int):
    """However the tiles are dealt out, empty shares included, the merged answer is right."""
    case = Case("", (250,), K=1, R=70, S=328, dtype="bfloat16", window=window, stair=3)
    x = cases.inputs(case, k_junk=np.nan, v_junk=np.nan)
    run = functools.partial(
        gpu.block_attention, splits=splits, interpret=gpu_interpreter(), scale=x.scale, stair=3
    )
    got = jax.jit(run)(x.q, x.k, x.v, x.upper, x.lower)
    cases.check(tuple(map(np.asarray, got)), cases.answer(x), "bfloat16")


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["ref", "tpu"])
def test_fuzz(name: str, data):
    """Random shapes and bounds, windows that begin below 0 or beyond upper included."""
    shape = data.draw(st.sampled_from([(2, 1, 192), (1, 5, 100), (3, 16, 64)]))  # few: each one compiles
    K, R, S = shape
    upper = tuple(data.draw(st.lists(st.integers(0, S), min_size=2, max_size=2)))
    window = data.draw(st.sampled_from([0, 1, 3, 60, 400]))
    stair = data.draw(st.sampled_from([0, 1, 3]))
    case = Case("fuzz", upper, K=K, R=R, S=S, H=32, window=window, stair=stair)
    x = cases.inputs(case, k_junk=JUNK[name][0], v_junk=JUNK[name][1], seed=data.draw(st.integers(0, 99)))
    cases.check(attend(name, x), cases.answer(x), case.dtype)


@pytest.mark.parametrize(
    ("module", "dtype", "H", "platform", "kind", "words"),
    [
        (tpu, "bfloat16", 128, "tpu", "TPU v5 lite", None),
        (tpu, "float32", 80, "tpu", "TPU v6 lite", None),
        (tpu, "bfloat16", 128, "tpu", "TPU v3", "v4 or newer"),
        (tpu, "float16", 128, "tpu", "TPU v5", "not float16"),
        (tpu, "bfloat16", 36, "tpu", "TPU v5", "not 36"),
        (tpu, "bfloat16", 128, "gpu", "NVIDIA H100", "device is a gpu"),
        (gpu, "bfloat16", 96, "gpu", "NVIDIA H200", None),
        (gpu, "bfloat16", 128, "gpu", "NVIDIA A100-SXM4-80GB", "A100"),
        (gpu, "float32", 128, "gpu", "NVIDIA H100 80GB HBM3", "not float32"),
        (gpu, "bfloat16", 256, "gpu", "NVIDIA H100 80GB HBM3", "not 256"),
        (gpu, "bfloat16", 128, "cpu", "cpu", "device is a cpu"),
        (ref, "float32", 36, "cpu", "cpu", None),
    ],
)
def test_is_supported(module, dtype, H, platform, kind, words):
    arrays = [jax.ShapeDtypeStruct((1, 2, 8, H), dtype), jax.ShapeDtypeStruct((1, 2, 128, H), dtype)]
    reason = module.is_supported(*arrays, platform=platform, device_kind=kind)
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize("stair", [0, 4])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("platform", "kind", "cores"), [("tpu", "TPU v6 lite", 1), ("gpu", "NVIDIA H200", 132)]
)
def test_kernel_lowers_without_the_device(platform: str, kind: str, cores: int, windowed: bool, stair: int):
    """Traced for a described device, its kernel is chosen and Pallas accepts it (no compiler needed)."""
    described = jax.sharding.AbstractDevice(kind, cores, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("model",), abstract_device=described)
    q = jax.ShapeDtypeStruct((1, 8, 64, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8, 1024, 128), jnp.bfloat16)
    limits = [jax.ShapeDtypeStruct(s, jnp.int32) for s in [(1,)] + [(1, 64)] * windowed]
    call = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu_v2"}[platform]
    backend = Choice(platform, kind).backend(q, k)
    assert backend.name == platform
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(
            jax.jit(functools.partial(backend.run, scale=0.1, stair=stair)),
            platforms=["tpu" if platform == "tpu" else "cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(call)],
        )(q, k, k, *limits)
    assert exported.mlir_module().count(f"@{call}") == 1


def test_gpu_refuses_what_it_cannot_multiply():
    """Called past its `is_supported`, the GPU kernel says why instead of failing inside Pallas."""
    q, k = jnp.zeros((1, 1, 4, 32)), jnp.zeros((1, 1, 64, 32))
    with pytest.raises(NotImplementedError, match="not float32"):
        gpu.block_attention(q, k, k, jnp.zeros(1, jnp.int32), scale=1.0)
