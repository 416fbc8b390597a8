"""The compile cache and the counter, against what JAX really does (both ends of the version matrix)."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.compilation as compilation
from kvjax.compilation import CompileCounter, compile_cache, cpu_key


def fresh_function(constant: float):
    """A jitted function no other test has compiled."""
    return jax.jit(lambda x: x * constant + 0.625)


def test_a_jitted_function_compiles_once():
    f, x = fresh_function(3.0625), jax.device_put(np.ones(3, np.float32))
    with CompileCounter() as first:
        f(x)
    with CompileCounter() as second:
        f(x)
    assert (first.compiles, second.compiles) == (1, 0)
    assert first.seconds > 0 and second.seconds == 0


def test_a_new_shape_compiles_again():
    f = fresh_function(3.125)
    arrays = [jax.device_put(np.ones(n, np.float32)) for n in (3, 4, 3)]
    with CompileCounter() as counter:
        for x in arrays:
            f(x)
    assert counter.compiles == 2


def test_eager_operations_count():
    x = jax.device_put(np.ones((3, 5, 7, 11), np.float32))  # a shape no other test uses
    with CompileCounter() as counter:
        jnp.tanh(x)
    assert counter.compiles == 1


def test_counters_nest_and_stop():
    # Counters that each brought a listener would count double here.
    f, x = fresh_function(3.25), jax.device_put(np.ones(3, np.float32))
    g = fresh_function(3.375)
    with CompileCounter() as outer:
        f(x)
        with CompileCounter() as inner:
            g(x)
        assert (outer.compiles, inner.compiles) == (2, 1)
    fresh_function(3.5)(x)
    assert (outer.compiles, inner.compiles) == (2, 1)


def test_a_counter_that_never_started_says_so():
    with pytest.raises(RuntimeError, match="inside `with`"):
        _ = CompileCounter().compiles


def test_a_cache_hit_is_no_compile(tmp_path, restored_cache_options):
    directory = compile_cache(tmp_path)
    x = jax.device_put(np.ones(3, np.float32))
    with CompileCounter() as cold:
        fresh_function(3.625)(x)
    assert (cold.compiles, cold.hits) == (1, 0)
    assert any(directory.iterdir())
    jax.clear_caches()
    with CompileCounter() as warm:
        fresh_function(3.625)(x)
    assert (warm.compiles, warm.hits, warm.programs) == (0, 1, 1)


def test_the_cache_serves_another_process(tmp_path):
    program = textwrap.dedent("""
        import json, sys
        import jax, numpy as np
        from kvjax.compilation import CompileCounter, compile_cache
        jax.config.update("jax_platforms", "cpu")
        x = jax.device_put(np.ones(3, np.float32))
        jax.jit(lambda x: x + 1)(x)  # JAX has already compiled something without a cache
        compile_cache(sys.argv[1])
        with CompileCounter() as counter:
            jax.jit(lambda x: x * 7.5 + 1)(x)
        print(json.dumps([counter.compiles, counter.hits]))
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(2)]
    assert runs == [[1, 0], [0, 1]]


def test_directory_is_keyed_by_jaxlib_and_cpu(tmp_path, restored_cache_options, monkeypatch):
    import jaxlib

    path = compile_cache(tmp_path)
    assert path.parent == tmp_path and path.is_dir()
    assert jaxlib.__version__ in path.name and cpu_key() in path.name
    assert jax.config.jax_compilation_cache_dir == str(path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1
    monkeypatch.setattr(compilation.platform, "machine", lambda: "another-machine")
    assert compile_cache(tmp_path) != path


def test_an_existing_setting_is_respected(tmp_path, restored_cache_options):
    mine = tmp_path / "mine"
    jax.config.update("jax_compilation_cache_dir", str(mine))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 12.0)
    assert compile_cache() == mine
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 12.0
    # ... but a directory that is named wins.
    assert compile_cache(tmp_path / "named").parent == tmp_path / "named"


def test_default_directory_is_below_the_home(tmp_path, restored_cache_options, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    assert compile_cache().parent == tmp_path / ".cache" / "kvjax" / "compile"


def test_a_directory_that_cannot_be_made(tmp_path, restored_cache_options):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        compile_cache(tmp_path / "file")
