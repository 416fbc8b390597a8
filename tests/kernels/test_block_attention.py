"""Every backend of `block_attention` against a float64 answer, with junk in every slot no row sees."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.kernels import block_attention as dispatch
from kvjax.kernels.block_attention import gpu, ref, tpu
from tests.kernels import cases
from tests.kernels.cases import CASES, Case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from jax.experimental.pallas import mosaic_gpu as plgpu

H100 = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}
NO_GPU_INTERPRETER = f"jax {jax.__version__} has no interpreter for Mosaic GPU (jax 0.11 and later have)"
has_gpu_interpreter = hasattr(plgpu, "InterpretGPUParams")

# The XLA path may meet NaN in unused keys, and finite junk of any size in unused values.
JUNK = {"ref": (np.nan, 1e30), "tpu": (np.nan, np.nan), "gpu": (np.nan, np.nan)}


@functools.cache
def backend(name: str, windowed: bool):
    """The jitted backend; kernels run interpreted, in tiles small enough that every case has several."""
    run = {
        "ref": ref.block_attention,
        "tpu": functools.partial(tpu.block_attention, interpret=True, slot_tile=64),
        "gpu": functools.partial(gpu.block_attention, interpret=_gpu_interpreter()),
    }[name]
    if windowed:
        return jax.jit(
            lambda q, k, v, upper, lower, scale: run(q, k, v, upper, lower, scale=scale), static_argnums=5
        )
    return jax.jit(lambda q, k, v, upper, lower, scale: run(q, k, v, upper, scale=scale), static_argnums=5)


def _gpu_interpreter():
    """Simulates copies, barriers and uninitialised (NaN) memory, and raises on a race."""
    return plgpu.InterpretGPUParams(detect_races=True) if has_gpu_interpreter else None


def attend(name: str, x: cases.Inputs):
    out, lse = backend(name, x.lower is not None)(x.q, x.k, x.v, x.upper, x.lower, x.scale)
    return np.asarray(out), np.asarray(lse)


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
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_gpu_splits_agree(splits: int):
    """However the slots are cut, empty ranges included, the merged answer is the same."""
    x = cases.inputs(Case("", (150,), K=1, R=5, S=320, dtype="bfloat16"), k_junk=np.nan, v_junk=np.nan)
    run = functools.partial(gpu.block_attention, splits=splits, interpret=_gpu_interpreter(), scale=x.scale)
    got = jax.jit(run)(x.q, x.k, x.v, x.upper)
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
    case = Case("fuzz", upper, K=K, R=R, S=S, H=32, window=window)
    x = cases.inputs(case, k_junk=JUNK[name][0], v_junk=JUNK[name][1], seed=data.draw(st.integers(0, 99)))
    cases.check(attend(name, x), cases.answer(x), case.dtype)


def test_supported_says_why():
    """On a CPU both kernels refuse with a sentence and XLA takes over; naming a kernel is an error."""
    x = cases.inputs(Case("", (7,)), k_junk=0.0, v_junk=0.0)
    reasons = dispatch.supported(x.q, x.k)
    assert list(reasons) == ["tpu", "gpu", "xla"] and reasons["xla"] is None
    if jax.default_backend() != "cpu":
        pytest.skip("the rest is about a machine with no accelerator")
    assert reasons["tpu"] == "it runs on tpu devices, and the device is a cpu"
    with pytest.raises(dispatch.UnsupportedError, match="'tpu': it runs on tpu devices"):
        dispatch.block_attention(x.q, x.k, x.v, x.upper, scale=1.0, backend="tpu")
    with pytest.raises(ValueError, match="unknown block_attention backend 'cudnn'; known: tpu, gpu, xla"):
        dispatch.block_attention(x.q, x.k, x.v, x.upper, scale=1.0, backend="cudnn")
    got = dispatch.block_attention(*map(jnp.asarray, (x.q, x.k, x.v, x.upper)), scale=x.scale)
    cases.check(tuple(map(np.asarray, got)), cases.answer(x), "float32")


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


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("platform", "kind", "cores"), [("tpu", "TPU v6 lite", 1), ("gpu", "NVIDIA H200", 132)]
)
def test_kernel_lowers_without_the_device(platform: str, kind: str, cores: int, windowed: bool):
    """Traced for a described device, the dispatcher picks its kernel and Pallas accepts it (no compiler needed)."""
    described = jax.sharding.AbstractDevice(kind, cores, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("model",), abstract_device=described)
    q = jax.ShapeDtypeStruct((1, 8, 64, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8, 1024, 128), jnp.bfloat16)
    bounds = [jax.ShapeDtypeStruct(s, jnp.int32) for s in [(1,)] + [(1, 64)] * windowed]
    call = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu_v2"}[platform]
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(lambda *a: dispatch.block_attention(*a, scale=0.1))
        exported = jax.export.export(
            run,
            platforms=["tpu" if platform == "tpu" else "cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(call)],
        )(q, k, k, *bounds)
    assert exported.mlir_module().count(f"@{call}") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 2, 64, 16)}, "k has shape"),
        ({"v": (1, 2, 32, 32)}, "v has shape"),
        ({"upper": (2,)}, "upper has shape"),
        ({"lower": (1, 3)}, "lower has shape"),
        ({"q": (2, 8, 32)}, r"takes q \[B,K,R,H\]"),
        ({"q": (1, 2, 0, 32)}, "at least one row"),
    ],
)
def test_bad_shapes_are_named(change, message):
    shapes = {"q": (1, 2, 8, 32), "k": (1, 2, 64, 32), "v": (1, 2, 64, 32), "upper": (1,)} | change
    arrays = {
        n: jnp.zeros(s, jnp.int32 if n in ("upper", "lower") else jnp.float32) for n, s in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        dispatch.block_attention(**arrays, scale=1.0)


def test_bad_dtypes_are_named():
    q, k = jnp.zeros((1, 1, 4, 32)), jnp.zeros((1, 1, 64, 32), jnp.bfloat16)
    with pytest.raises(ValueError, match="one dtype"):
        dispatch.block_attention(q, k, k, jnp.zeros(1, jnp.int32), scale=1.0)
    with pytest.raises(ValueError, match="upper must be integer"):
        dispatch.block_attention(q, k.astype(q.dtype), k.astype(q.dtype), jnp.zeros(1), scale=1.0)
    with pytest.raises(NotImplementedError, match="not float32"):
        gpu.block_attention(q, k.astype(q.dtype), k.astype(q.dtype), jnp.zeros(1, jnp.int32), scale=1.0)
