"""Shared set-up: eight fake CPU devices, typed calls, options for real models, and skips that say why."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

# Before any backend starts. The tolerances and bitwise claims under test are those of the CPU; programs
# for TPU and GPU are compiled from here too, but ahead of time, which needs no device.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from kvjax.typing import check_shapes  # noqa: E402  (after the platform is settled)

check_shapes()

GOLDEN = Path(__file__).parent / "golden"

# What a marked test cannot do without; asking for the marker by name runs it regardless, so that a
# broken environment fails there instead of skipping.
NEEDS = {
    "aot": ("libtpu", "an AOT environment (BUILD.md)"),
    "parity": ("torch", "the `parity` extra"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-dir",
        type=Path,
        default=None,
        help="directory with real checkpoints (NAME.gguf files or Hugging Face directories)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expression = config.getoption("-m") or ""
    for item in items:
        for marker, (module, what) in NEEDS.items():
            if (
                item.get_closest_marker(marker)
                and marker not in expression
                and not importlib.util.find_spec(module)
            ):
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
        if item.get_closest_marker("slow") and "slow" not in expression:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Drop each module's compiled programs: every one holds dozens of memory maps, and Linux grants a process
    65,530, which the whole suite would come near."""
    yield
    jax.clear_caches()


CACHE_OPTIONS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextlib.contextmanager
def _restored_cache_options() -> Iterator[None]:
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def restored_cache_options() -> Iterator[None]:
    """Puts JAX's compile cache back as it was before the test."""
    with _restored_cache_options():
        yield


@pytest.fixture(scope="module")
def restored_cache_options_after_module() -> Iterator[None]:
    """Puts JAX's compile cache back as it was before the module's tests."""
    with _restored_cache_options():
        yield


@pytest.fixture(scope="session")
def models_dir(request: pytest.FixtureRequest) -> Path:
    """The directory of real checkpoints; skips without `--models-dir`."""
    path = request.config.getoption("--models-dir")
    if path is None:
        pytest.skip("needs real checkpoints: --models-dir DIR")
    if not path.is_dir():
        pytest.fail(f"--models-dir {path}: no such directory")
    return path


@pytest.fixture(scope="session")
def smollm2(models_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, a Llama with a tied head and three KV heads."""
    return _model(models_dir, "smollm2-135m-q4_1.gguf")


@pytest.fixture(scope="session")
def qwen_coder(models_dir: Path) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct as a GGUF file, with q/k/v biases and two KV heads."""
    return _model(models_dir, "qwen2.5-coder-0.5b.gguf")


def _model(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.exists():
        pytest.skip(f"needs {name} in --models-dir")
    return path


@pytest.fixture(scope="session")
def golden_dirs() -> list[Path]:
    """The committed tiny checkpoints, each with the logits the reference implementation gave."""
    directories = sorted(path.parent for path in GOLDEN.glob("*/config.json"))
    if not directories:
        pytest.fail(f"no golden checkpoints under {GOLDEN.name}/")
    return directories
