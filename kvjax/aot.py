"""Compile the programs that serving runs for an accelerator that is not here.

`compile_steps` (generation) and `compile_handoff` do it in this process, which must have been started for that (no
device, no search for a TPU); `ask` does it in a child process that is, and whose chatter nobody sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax

from kvjax import topology
from kvjax.config import ModelConfig, RopeConfig

# What the child needs: JAX itself must start nothing but the CPU; libtpu must not look for its machine, nor claim
# it for one process (it will use no chip, and a program that does may be running).
_SURROUNDINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class CompileError(RuntimeError):
    """The compiler refused a program for a reason other than memory; the message is the compiler's."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, in bytes per device.

    `arguments` hold weights, cache and small arrays; `aliased` of them are written in place. `flops` and
    `bytes_accessed` are the compiler's own counts (None: it gives none): information, for they count a kernel as it
    declares itself and a fused read more than once. attention: the backend that was compiled in. error: the program
    needs more memory than the device has (the compiler's sentence); then nothing else is known.
    """

    seconds: float
    cpu_seconds: float = 0.0
    attention: str = ""
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    code: int = 0
    flops: float | None = None
    bytes_accessed: float | None = None
    error: str | None = None

    @property
    def extra(self) -> int:
        """Bytes beyond weights and state while it runs: temporaries, fresh outputs, the program."""
        return self.temporaries + max(self.outputs - self.aliased, 0) + self.code


Stage = Callable[[str], None]
Inspect = Callable[[str, Any], None]


def compile_steps(
    config: ModelConfig, target: str, *, mesh: tuple[int, int], batch: int, size: int, width: int, chunk: int,
    dtype: str, sampled: bool = False, inspect: Inspect | None = None, stage: Stage = lambda name: None,
) -> dict[str, Compiled]:  # fmt: skip
    """Compile `prefill` and `round` for `target`, in an environment that can (BUILD.md).

    Args:
      stage: told the name of each program before it is compiled. inspect: given the name and what JAX compiled.

    Raises:
      TopologyError: this environment cannot. CompileError: the compiler refuses for another reason than memory.
    """
    from kvjax.decode import loop
    from kvjax.decode.ngram import Ngram
    from kvjax.decode.sampler import SamplerProgram, Sampling
    from kvjax.decode.sources import Plain
    from kvjax.models import build
    from kvjax.sharding import make_mesh

    model = build(config, make_mesh(*mesh, devices=topology.devices(target)), dtype)
    source = Plain() if width == 1 else Ngram(width=width)
    program = SamplerProgram(greedy=not sampled, edges=sampled)
    params, row, one = model.abstract(), _struct((batch,), "int32"), _struct((), "int32")
    sampling = jax.tree.map(lambda x: _struct(x.shape, x.dtype), Sampling.create(batch))
    with model.rules.context():
        state = _state(model, source, program, batch, size)
        prefill = (model, source, chunk, params, (), state, one)
        rounds = (model, source, program, params, (), state, sampling, _struct((2,), "uint32"), one, row)
        programs = [
            _Program("prefill", loop.prefill, prefill, chunk), _Program("round", loop.rounds, rounds, width),
        ]  # fmt: skip
        return {p.name: _compile(p, model, target, batch, size, inspect, stage) for p in programs}


def compile_handoff(
    source: ModelConfig, config: ModelConfig, target: str, *, mesh: tuple[int, int], batch: int, size: int, chunk: int,
    span: int, k: int, joint: bool, local: bool, repair: dict[str, int], dtype: str, map_dtype: str,
    inspect: Inspect | None = None, stage: Stage = lambda name: None,
) -> dict[str, Compiled]:  # fmt: skip
    """Compile the programs of a hand-off from `source` into `config`: `prefill` (native, for comparison), `map`, and
    `head` and `tail` as `repair` (fields of `Repair`) asks for them. The map reads k layers at the same depth.

    Args, Raises: as for `compile_steps`.
    """
    from kvjax.decode import loop
    from kvjax.decode.sampler import SamplerProgram
    from kvjax.decode.sources import Plain
    from kvjax.models import build
    from kvjax.sharding import make_mesh
    from kvjax.transfer import select, shapes
    from kvjax.transfer.geometry import Geometry
    from kvjax.transfer.repair import Repair, map_chunk, read_tail, redo_head

    devices = make_mesh(*mesh, devices=topology.devices(target))
    reader, model = build(source, devices, dtype), build(config, devices, dtype)
    asked, one, params = Repair(**repair), _struct((), "int32"), model.abstract()
    entering = (
        (asked.layers + 1, config.hidden) if asked.group else None
    )  # where it begins does not change its cost
    mapper = shapes.abstract(
        Geometry.of(source), Geometry.of(config), select.matching(source.num_layers, config.num_layers, k),
        joint=joint, local=local, dtype=map_dtype, reader=reader.rules, rules=model.rules,
        hidden=entering,
    )  # fmt: skip
    asked.check(mapper, config)
    with model.rules.context():
        state = _state(model, Plain(), SamplerProgram(), batch, size)
        cache = _state(reader, Plain(), SamplerProgram(), batch, size).cache
        prefill = (model, Plain(), chunk, params, (), state, one)
        programs = [
            _Program("prefill", loop.prefill, prefill, chunk),
            _Program("map", map_chunk, (model, asked, span, params, mapper, cache, state, one), span),
        ]
        if asked.head:
            programs.append(_Program("head", redo_head, (model, asked, params, state), asked.head))
        if asked.tail > 1:
            programs.append(_Program("tail", read_tail, (model, asked, params, state), asked.tail - 1))
        return {p.name: _compile(p, model, target, batch, size, inspect, stage) for p in programs}


class _Program(NamedTuple):
    """A jitted function and its abstract arguments; rows: new tokens of a sequence in one call."""

    name: str
    function: Any
    args: tuple[Any, ...]
    rows: int


_struct = jax.ShapeDtypeStruct


def _state(model: Any, source: Any, program: Any, batch: int, size: int) -> Any:
    """A decoding state's shapes, as `loop.start` lays it out."""
    from kvjax.decode import loop

    tokens, row, idle = (
        _struct(s, t) for s, t in (((batch, size), "int32"), ((batch,), "int32"), ((batch,), bool))
    )
    state = loop.start.lower(model, source, program, (), tokens, row, idle).out_info
    return jax.tree.map(lambda x: _struct(x.shape, x.dtype, sharding=x.sharding), state)


def _compile(
    program: _Program, model: Any, target: str, batch: int, size: int, inspect: Inspect | None, stage: Stage
) -> Compiled:
    name = program.name
    stage(name)
    began, worked = time.perf_counter(), time.process_time()
    try:
        compiled = program.function.lower(*program.args).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Ran out of memory" not in str(error):
            raise CompileError(f"{name} for {target}: {error}") from error
        return Compiled(time.perf_counter() - began, time.process_time() - worked, error=_sentence(error))
    spent = time.perf_counter() - began, time.process_time() - worked
    if inspect is not None:
        inspect(name, compiled)
    kv, config = model.rules.kv_heads, model.config
    q = _struct((batch, kv, program.rows * config.num_heads // kv, config.head_dim), model.dtype)
    cache = _struct((batch, kv, size, config.head_dim), model.dtype)
    said, counted = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return Compiled(
        *spent, model.setting.attention.backend(q, cache).name, said.argument_size_in_bytes,
        said.output_size_in_bytes, said.alias_size_in_bytes, said.temp_size_in_bytes,
        said.generated_code_size_in_bytes, counted.get("flops"), counted.get("bytes accessed"),
    )  # fmt: skip


def _sentence(error: Exception) -> str:
    """The line of a compiler's page on memory that says how much there was and is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Used" in line or "exceed" in line.lower()), lines[0])[:300]


def ask(what: str, request: dict[str, Any], *, progress: bool) -> dict[str, Compiled]:
    """`compile_steps(**request)` (what "steps") or `compile_handoff(**request)` ("handoff") in a child process.

    progress: say on stderr what is being compiled, on one line that goes away.

    Raises:
      CompileError: what the child raised, or how it died.
    """
    plain = {k: dataclasses.asdict(v) if isinstance(v, ModelConfig) else v for k, v in request.items()}
    text = json.dumps({"what": what, "request": plain})
    with tempfile.TemporaryFile("w+") as chatter:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvjax.aot"], text=True, cwd=Path(__file__).parents[1],
            env={**os.environ, **_SURROUNDINGS}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=chatter,
        )  # fmt: skip
        try:
            assert child.stdin is not None and child.stdout is not None
            with child.stdin as stdin:
                stdin.write(text)
            answer = _listen(child.stdout, request["target"], progress)
            child.wait()
        finally:
            child.kill()  # does nothing to a process that has ended
            child.wait()
        if answer is None:
            chatter.seek(0)
            last = ["no message", *(line[:500] for line in chatter if line.strip("- \n"))][-1].rstrip()
            what = f"compiling for {request['target']} ended with status {child.returncode}"
            raise CompileError(f"{what}: {last}")
    if "error" in answer:
        raise CompileError(answer["error"])
    return {name: Compiled(**fields) for name, fields in answer["steps"].items()}


def _listen(stream: IO[str], target: str, progress: bool) -> dict[str, Any] | None:
    """Follow the child's lines up to its answer (None if it ends without one)."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    stage, began = "starting the compiler", time.monotonic()
    with _status(progress) as show:
        while True:
            show(f"{target}: {stage}, {time.monotonic() - began:.0f} s")
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=1)
                if line is None:
                    return None
                said = json.loads(line)
                if "stage" not in said:
                    return said
                stage, began = f"compiling {said['stage']}", time.monotonic()


@contextlib.contextmanager
def _status(on: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that is rewritten, and gone at the end."""

    def show(text: str) -> None:
        if on:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    yield show
    show("")


def _answer() -> None:
    """The child: a request on stdin, JSON lines on stdout; whatever a compiler prints goes to stderr."""
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(**fields: Any) -> None:
            print(json.dumps(fields), file=out, flush=True)

        jax.config.update("jax_enable_compilation_cache", False)  # the time is part of the answer
        request: dict[str, Any] = asked["request"]
        request |= {name: _config(request[name]) for name in ("config", "source") if name in request}
        request["mesh"] = tuple(request["mesh"])
        compile: Callable[..., dict[str, Compiled]] = (
            compile_steps if asked["what"] == "steps" else compile_handoff
        )
        try:
            found = compile(**request, stage=lambda name: say(stage=name))
        except (CompileError, topology.TopologyError, ValueError) as error:
            say(error=str(error))
        else:
            say(steps={name: dataclasses.asdict(one) for name, one in found.items()})


def _config(fields: dict[str, Any]) -> ModelConfig:
    fields |= {name: tuple(fields[name]) for name in ("windows", "eos")}
    return ModelConfig(**(fields | {"rope": RopeConfig(**fields["rope"])}))


if __name__ == "__main__":
    _answer()
