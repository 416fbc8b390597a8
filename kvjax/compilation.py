"""The persistent compilation cache, and a counter of what was really compiled."""

from __future__ import annotations

import hashlib
import platform
import threading
from pathlib import Path

import jax
import jaxlib

# Emitted once per executable asked for, whether the compiler ran or the persistent cache had it ...
_REQUEST_EVENT = "/jax/core/compile/backend_compile_duration"
# ... and this one, before it, when the persistent cache had it.
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


def default_cache_directory() -> Path:
    """Where the command line keeps compiled programs: `~/.cache/kvjax/compile`."""
    return Path.home() / ".cache" / "kvjax" / "compile"


def compile_cache(directory: str | Path | None = None) -> Path:
    """Keep compiled programs on disk, and return the directory that holds them.

    Programs are stored below `directory` (default: `default_cache_directory()`) in a folder named after
    the jaxlib version and the features of this CPU: XLA:CPU compiles for the machine it runs on, and
    such a program may die of an illegal instruction on another machine that shares the home directory.
    Every program is kept, however small and however quickly it compiled, because one that is missing
    costs a start more than all of them cost the disk.

    With no `directory`, a cache that was set up before (`jax_compilation_cache_dir`, from code or from
    JAX's environment variable) is left exactly as it is and its directory is returned.

    Raises:
      OSError: the directory cannot be made.
    """
    existing = jax.config.jax_compilation_cache_dir
    if directory is None and existing:
        return Path(existing)
    root = default_cache_directory() if directory is None else Path(directory).expanduser()
    path = root.absolute() / f"jaxlib-{jaxlib.__version__}-{cpu_key()}"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _decide_again()
    return path


def no_compile_cache() -> None:
    """Keep and read no compiled programs from here on, also where a cache was in use before."""
    jax.config.update("jax_enable_compilation_cache", False)
    _decide_again()


def _decide_again() -> None:
    """JAX settles at the first compilation of a process whether and where it caches; make it look again."""
    from jax.experimental.compilation_cache import compilation_cache as jax_cache

    jax_cache.reset_cache()


def cpu_key() -> str:
    """Twelve hex digits that differ between CPUs whose compiled programs cannot be exchanged."""
    facts = {platform.machine(), platform.processor()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        # Model names count too: LLVM's tuning, not only its instruction set, follows the model.
        keys = ("flags", "Features", "model name", "CPU implementer", "CPU part")
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in keys:
                facts.add(f"{name.strip()}:{' '.join(sorted(value.split()))}")
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]


class CompileCounter:
    """Counts the compilations of this process while the context is open.

    `compiles` counts runs of the backend compiler, those of eager operations included; `hits` counts
    programs that came from the persistent cache instead; `programs` is both together and `seconds` the
    time they took. The numbers keep growing until the context closes and stay as they are afterwards.
    Ahead-of-time compilation (`jit(f).lower(...).compile()`) of a program counts like any other.

        with CompileCounter() as counter:
            serve.generate(lm, prompts)
        print(counter.compiles, counter.hits)
    """

    def __init__(self) -> None:
        self._start: tuple[int, int, float] | None = None
        self._stop: tuple[int, int, float] | None = None

    def __enter__(self) -> CompileCounter:
        _listen()
        self._start, self._stop = _totals(), None
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = _totals()

    def _delta(self) -> tuple[int, int, float]:
        if self._start is None:
            raise RuntimeError("CompileCounter counts only inside `with`")
        stop = _totals() if self._stop is None else self._stop
        return (stop[0] - self._start[0], stop[1] - self._start[1], stop[2] - self._start[2])

    @property
    def programs(self) -> int:
        return self._delta()[0]

    @property
    def hits(self) -> int:
        return self._delta()[1]

    @property
    def compiles(self) -> int:
        programs, hits, _ = self._delta()
        return programs - hits

    @property
    def seconds(self) -> float:
        return self._delta()[2]

    def __repr__(self) -> str:
        if self._start is None:
            return "CompileCounter(not started)"
        return f"CompileCounter(compiles={self.compiles}, hits={self.hits}, seconds={self.seconds:.3f})"


# JAX offers no way to ask for totals, and a listener per counter would slow every later compilation:
# one listener, registered by the first counter, feeds these.
_lock = threading.Lock()
_listening = False
_programs = 0
_hits = 0
_seconds = 0.0


def _totals() -> tuple[int, int, float]:
    with _lock:
        return _programs, _hits, _seconds


def _listen() -> None:
    global _listening
    with _lock:
        if _listening:
            return
        _listening = True
    jax.monitoring.register_event_listener(_on_event)
    jax.monitoring.register_event_duration_secs_listener(_on_duration)


def _on_event(event: str, **_: object) -> None:
    global _hits
    if event == _HIT_EVENT:
        with _lock:
            _hits += 1


def _on_duration(event: str, duration: float, **_: object) -> None:
    global _programs, _seconds
    if event == _REQUEST_EVENT:
        with _lock:
            _programs += 1
            _seconds += duration
