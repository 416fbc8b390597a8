"""What only an accelerator can show: exactness in bfloat16, step times against the memory limit, kernels.

    benchmarks/gpu.sh [--dry-run] [--out DIR] [--json] [--model qwen3-8b]

Sections: every `block_attention` backend of the device against float64 answers and against XLA, with NaN in unused
slots; one width, one answer, whatever is drafted; prefill, decode and verify of a published geometry with random
weights. A section that fails is reported and the others still run. `--dry-run` runs the same code on the CPU with
everything small, to show that it is ready. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention, topology
from kvjax.config import ModelConfig
from kvjax.cost import memory, step_cost
from kvjax.decode import loop
from kvjax.decode.ngram import Ngram
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Junk, Oracle, Plain
from kvjax.models import Model, build
from kvjax.report import Report
from tests.kernels import cases

GEOMETRIES = Path(__file__).parents[1] / "configs" / "models"
SECONDS = 600  # the whole run
WIDTHS = (4, 8, 16)
# Targets, not measurements: a step is mostly reading weights, so a block of rows should cost little more than one row.
LIMIT_SHARE = 0.5  # of the memory limit, at least, for one row
BLOCK_COST = 1.5  # times a single row, at most, for 16 rows


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is. contexts: tokens before a timed step; size: cache slots."""

    small: ModelConfig  # for exactness
    large: ModelConfig  # for times
    rows: int
    small_size: int
    small_chunk: int
    max_new: int
    contexts: tuple[int, ...]
    size: int
    chunk: int
    rounds: int
    repeats: int


def sizes(model: str, dry: bool) -> Sizes:
    large = ModelConfig.from_hf(tomllib.loads((GEOMETRIES / f"{model}.toml").read_text()))
    cut = dataclasses.replace
    if dry:
        tiny = cut(
            large, vocab=512, hidden=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128,
            windows=(),
        )  # fmt: skip
        return Sizes(tiny, tiny, 4, 128, 32, 24, (32, 96), 256, 32, 4, 2)
    small = cut(
        large,
        vocab=32768,
        hidden=2048,
        num_layers=6,
        num_heads=16,
        num_kv_heads=8,
        intermediate=6144,
        windows=(),
    )
    return Sizes(small, large, 8, 512, 256, 64, (512, 8192), 8704, 512, 16, 5)


def random_params(model: Model) -> tuple[jax.Array, ...]:
    """Weights from normal(0, 0.02), norms 1, made on the device leaf by leaf."""

    def draw(key: jax.Array, shape: tuple[int, ...], norm: bool) -> jax.Array:
        return jnp.ones(shape, model.dtype) if norm else 0.02 * jax.random.normal(key, shape, model.dtype)

    make = jax.jit(draw, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(model.names))
    return tuple(make(k, s.shape, n.endswith("norm")) for k, n, s in zip(keys, model.names, model.shapes))


class Clock:
    """Progress on stderr, so that a run that is cut off shows how far it came."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{self.spent:5.0f} s] {text}", file=sys.stderr, flush=True)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.began


def compile_all(wanted: dict[str, Any], report: Report, clock: Clock) -> dict[str, Any]:
    """Compile lowered programs: the first alone, for a clean time, the others beside each other."""

    def one(lowered: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        return lowered.compile(), time.perf_counter() - began

    names = list(wanted)
    with ThreadPoolExecutor(8) as pool:
        done = [one(wanted[names[0]]), *pool.map(one, [wanted[n] for n in names[1:]])]
    for i, (name, (_, seconds)) in enumerate(zip(names, done)):
        report.row("compile times", program=name, seconds=seconds, beside=0 if i == 0 else len(names) - 2)
    clock(f"compiled {len(names)} programs")
    return {name: program for name, (program, _) in zip(names, done)}


# --- kernels -------------------------------------------------------------------------------------------------------


def check_kernels(report: Report, clock: Clock) -> None:
    """Every case on every backend that takes it: float64 answers, the XLA path, NaN wherever no row sees."""
    device = jax.devices()[0]
    where = {"platform": device.platform, "device_kind": device.device_kind}
    wrong, moved = 0, 0
    for backend in attention.BACKENDS:
        first = cases.inputs(cases.CASES[0], k_junk=0, v_junk=0)
        taken, worst, failed = 0, {"out": 0.0, "lse": 0.0, "xla": 0.0}, []
        refused = backend.is_supported(first.q.astype(jnp.bfloat16), first.k.astype(jnp.bfloat16), **where)
        if refused is not None:
            report.row("kernels", backend=backend.name, cases=0, failed=0, note=refused)
            continue
        for case in cases.CASES:
            # The XLA path promises only finite values there: its weight of 0 does not silence a NaN.
            x = cases.inputs(case, k_junk=np.nan, v_junk=1e30 if backend.name == "xla" else np.nan)
            if backend.is_supported(x.q, x.k, **where) is not None:
                continue
            taken += 1
            try:
                got, want = run_case(backend, x), cases.answer(x)
                for name, g, w in zip(("out", "lse"), got, want):
                    worst[name] = max(worst[name], float(np.nanmax(cases.errors(g, w))))
                if backend.name != "xla":
                    clean = cases.inputs(case, k_junk=0, v_junk=0)
                    plain = run_case(attention.BACKENDS[-1], clean)
                    worst["xla"] = max(worst["xla"], float(np.nanmax(cases.errors(got[0], plain[0]))))
                cases.check(got, want, case.dtype)
            except Exception as error:  # one that does not compile must not hide the others
                failed.append(f"{case.name}: {str(error).splitlines()[0][:120]}")
        places = sum(place_changes(backend, w) for w in (0, 100))
        wrong, moved = wrong + len(failed), moved + places
        report.row("kernels", backend=backend.name, cases=taken, failed=len(failed), out_error=worst["out"],
                   lse_error=worst["lse"], beside_xla=worst["xla"], moved_bits=places,
                   note="; ".join(failed))  # fmt: skip
        clock(f"kernel {backend.name}: {taken} cases, {len(failed)} failed")
    report.bar("kernel cases out of tolerance", wrong, "==", 0)
    report.bar("elements whose bits depend on the row's place", moved, "==", 0)


def run_case(backend: attention.Backend, x: cases.Inputs) -> tuple[np.ndarray, np.ndarray]:
    with jax.default_matmul_precision("highest"):  # float32 means float32
        call = jax.jit(lambda *a: backend.run(*a, scale=x.scale, stair=x.stair))
        out, lse = call(x.q, x.k, x.v, x.upper, x.lower)
    return np.asarray(out), np.asarray(lse)


def place_changes(backend: attention.Backend, window: int) -> int:
    """Elements that differ between a token as row t of one chain and as an earlier row of a later one."""
    groups, length = 4, 16
    case = cases.Case("", (2000,), K=2, R=groups * (length + 8), S=2048, H=128, dtype="bfloat16")
    x = cases.inputs(case, k_junk=0, v_junk=0)
    changed = 0
    found = {}
    for first in (0, 1, 5, 8):
        upper = np.array([1500 + first], np.int32)
        lower = None
        if window:
            lower = (upper[:, None] - window + np.arange(groups * length) // groups).astype(np.int32)
        rows = slice(groups * first, groups * (first + length))
        moved = dataclasses.replace(x, q=x.q[:, :, rows], upper=upper, lower=lower, stair=groups)
        found[first] = run_case(backend, moved)[0]
    for first in (1, 5, 8):
        changed += int(
            (found[0][:, :, groups * first :] != found[first][:, :, : -groups * first or None]).sum()
        )
    return changed


# --- one width, one answer -----------------------------------------------------------------------------------------


def check_identity(
    report: Report, s: Sizes, backend: str | None, widths: tuple[int, ...], clock: Clock
) -> None:
    """Junk, right, partly right and looked-up drafts, and rows in another order: bit by bit the same tokens."""
    model = build(s.small, None, "bfloat16", backend)
    params = random_params(model)
    rng = np.random.default_rng(0)
    batch, size = s.rows, s.small_size
    length = rng.integers(2, size - s.max_new - max(widths) - 1, batch).astype(np.int32)
    length[0] = 1
    tokens = rng.integers(0, s.small.vocab, (batch, size)).astype(np.int32)
    warm = np.arange(batch) % 2  # greedy and sampled rows in one program
    sampling = Sampling.create(
        batch, temperature=0.8 * warm, top_k=50 * warm, top_p=np.where(warm, 0.95, 1.0), seed=np.arange(batch),
        max_new=s.max_new,
    )  # fmt: skip
    program = SamplerProgram.of(sampling)
    junk = rng.integers(0, s.small.vocab, (batch, size)).astype(np.int32)
    key, cut, limit = np.zeros(2, np.uint32), np.full(batch, -1, np.int32), np.int32(2**31 - 1)

    def filled(tokens: np.ndarray, length: np.ndarray) -> Any:
        """The state behind the prompts: the same programs for every source, none of which has a state."""
        state = loop.start(model, Plain(), program, (), tokens, length, np.zeros(batch, bool))
        for i in range(-(-(int(length.max()) - 1) // s.small_chunk)):
            state = loop.prefill(model, Plain(), s.small_chunk, params, (), state, np.int32(i))
        return state

    state, lowered = filled(tokens, length), {}
    tag = backend or "default"
    for width in widths:
        sources = {
            "oracle": Oracle(width=width),
            "junk": Junk(width=width, vocab=s.small.vocab),
            "ngram": Ngram(width=width),
        }
        for name, source in sources.items():
            table = junk if name == "oracle" else ()
            lowered[f"identity {tag} W={width} {name}"] = loop.rounds.lower(
                model, source, program, params, table, state, sampling, key, limit, cut
            )
    compiled = compile_all(lowered, report, clock)

    def decode(name: str, width: int, table: Any, order: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
        """Answers, [batch, max_new], in the rows' first order."""
        order = np.arange(batch) if order is None else order
        mine = jax.tree.map(lambda x: x[order], sampling)
        table = table[order] if isinstance(table, np.ndarray) else table
        call = compiled[f"identity {tag} W={width} {name}"]
        out = call(params, table, filled(tokens[order], length[order]), mine, key, limit, cut)
        back = np.argsort(order)
        all_tokens, ends = np.asarray(out.tokens)[back], np.asarray(out.length)[back]
        if not np.array_equal(ends, length + s.max_new):
            raise AssertionError(f"rows ended at {ends}, expected {length + s.max_new}")
        return np.stack([row[n : n + s.max_new] for row, n in zip(all_tokens, length)]), out

    differ = within = 0
    for width in widths:
        base, plain = decode("oracle", width, junk)
        right = junk.copy()
        for b, n in enumerate(length):
            right[b, n : n + s.max_new] = base[b]
        partly = np.where(np.arange(size) % 3 == 0, right ^ 1, right).astype(np.int32)
        runs = {
            "right": decode("oracle", width, right),
            "two of three right": decode("oracle", width, partly),
            "rows in another order": decode("oracle", width, junk, rng.permutation(batch)),
            "junk source": decode("junk", width, ()),
            "n-gram source": decode("ngram", width, ()),
        }
        for what, (answer, out) in runs.items():
            rows = int((answer != base).any(axis=1).sum())
            differ += rows
            within += rows if "source" not in what else 0
            report.row("identity in bfloat16", backend=tag, W=width, drafts=what, rows=batch, differ=rows,
                       rounds=int(np.asarray(out.rounds).sum()),
                       rounds_junk=int(np.asarray(plain.rounds).sum()))  # fmt: skip
            if what == "right":
                least = -(-s.max_new // width) * batch
                report.bar(
                    f"rounds, all drafts right, {tag} W={width}", np.asarray(out.rounds).sum(), "==", least
                )
    report.bar(f"rows that drafts or order change within a program, {tag}", within, "==", 0)
    report.bar(f"rows that any source changes, {tag}", differ, "==", 0)
    clock(f"identity {tag}: {differ} rows differ")


# --- times ---------------------------------------------------------------------------------------------------------


def known_target() -> topology.Target | None:
    """The figures of this device, if the table has its kind."""
    kind = jax.devices()[0].device_kind.lower()
    names = {"h200": "h200", "h100": "h100", "v5 lite": "v5e", "v5e": "v5e", "v6": "v6e", "v5": "v5p"}
    chip = next((chip for text, chip in names.items() if text in kind), None)
    return next((t for t in topology.TARGETS.values() if t.kind == chip), None)


def streaming_read(nbytes: int) -> float:
    """Bytes per second of summing a large array: what stands in for an unknown device's figure."""
    x = jax.jit(lambda: jnp.ones((nbytes // 4,), jnp.float32))()
    total = jax.jit(lambda x: x.sum())
    return nbytes / seconds(lambda: jax.block_until_ready(total(x)), 5)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of `repeats` timings after one warm-up."""
    run()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def time_steps(report: Report, s: Sizes, backend: str | None, dry: bool, clock: Clock) -> None:
    """Prefill tokens a second, and one round of 1, 8 and 16 rows behind each context, beside the memory limit."""
    model = build(s.large, None, "bfloat16", backend)
    target = known_target()
    bandwidth = target.hbm_bandwidth if target else streaming_read(1 << (24 if dry else 30))
    report.facts["memory bandwidth"] = (
        f"{bandwidth / 1e9:.0f} GB/s, {f'{target.kind} figure' if target else 'measured'}"
    )
    need = memory(s.large, batch=1, size=s.size).total
    stats = jax.devices()[0].memory_stats() or {}
    if need * 1.2 > stats.get("bytes_limit", 2**62):
        raise MemoryError(f"needs {need / 1e9:.1f} GB and room to work; name a smaller geometry with --model")
    params = jax.block_until_ready(random_params(model))
    clock(f"{sum(x.nbytes for x in params) / 1e9:.2f} GB of weights made")

    program, sampling = SamplerProgram(), Sampling.create(1, max_new=s.size)
    key, cut = np.zeros(2, np.uint32), np.full(1, -1, np.int32)
    tokens = np.random.default_rng(0).integers(0, s.large.vocab, (1, s.size)).astype(np.int32)
    table = tokens ^ 1

    def begun(context: int) -> Any:
        return loop.start(
            model, Plain(), program, (), tokens, np.full(1, context + 1, np.int32), np.zeros(1, bool)
        )

    state, tag = begun(s.contexts[0]), backend or "default"
    lowered = {}
    for width in (1, 8, 16):
        source = Plain() if width == 1 else Oracle(width=width)
        drafts = () if width == 1 else table
        lowered[f"round {tag} W={width}"] = loop.rounds.lower(
            model, source, program, params, drafts, state, sampling, key, np.int32(1), cut
        )
    lowered[f"prefill {tag}"] = loop.prefill.lower(model, Plain(), s.chunk, params, (), state, np.int32(0))
    compiled = compile_all(lowered, report, clock)

    single: dict[int, float] = {}
    for context in s.contexts:
        state, chunks = begun(context), -(-context // s.chunk)
        state = compiled[f"prefill {tag}"](params, (), state, np.int32(0))  # warm-up; rewritten below
        jax.block_until_ready(state)
        began = time.perf_counter()
        for i in range(chunks):
            state = compiled[f"prefill {tag}"](params, (), state, np.int32(i))
        jax.block_until_ready(state)
        took = time.perf_counter() - began
        flops = sum(
            step_cost(s.large, batch=1, rows=s.chunk, context=i * s.chunk, head=False).flops
            for i in range(chunks)
        )
        of_peak = {"of_peak": flops / took / target.peak_flops} if target else {}
        report.row("prefill", attention=tag, tokens=chunks * s.chunk, seconds=took,
                   tokens_per_s=chunks * s.chunk / took, tflops=flops / took / 1e12, **of_peak)  # fmt: skip
        for width in (1, 8, 16):
            call, drafts = compiled[f"round {tag} W={width}"], () if width == 1 else table
            kept = {"state": jax.tree.map(jnp.copy, state)}

            def several(count: int, call=call, drafts=drafts, kept=kept) -> None:
                kept["state"] = call(params, drafts, kept["state"], sampling, key, np.int32(count), cut)
                jax.block_until_ready(kept["state"])

            # The difference of two counts leaves out what one call costs the host.
            long, short = (seconds(lambda n=n: several(n), s.repeats) for n in (2 * s.rounds, s.rounds))
            step = (long - short) / s.rounds
            limit = step_cost(s.large, batch=1, rows=width, context=context).bytes / bandwidth
            report.row("steps", attention=tag, context=context, W=width, ms=step * 1e3, limit_ms=limit * 1e3,
                       of_limit=limit / step, call_ms=(2 * short - long) * 1e3)  # fmt: skip
            clock(f"context {context} W={width}: {step * 1e3:.2f} ms, limit {limit * 1e3:.2f} ms")
            if width == 1:
                single[context] = step
            if (
                dry or backend is not None
            ):  # nothing is claimed of a CPU, or of a backend that is not the default
                continue
            if width == 1:
                report.bar(
                    f"one row at {context}, share of the memory limit", limit / step, ">=", LIMIT_SHARE
                )
            else:
                report.bar(
                    f"{width} rows at {context}, in single rows", step / single[context], "<=", BLOCK_COST
                )


# --- all -----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, everything small")
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    names = sorted(path.stem for path in GEOMETRIES.glob("*.toml"))
    parser.add_argument("--model", default="qwen3-8b", choices=names, help="geometry of the timed model")
    args = parser.parse_args()
    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    if device.platform == "cpu" and not args.dry_run:
        parser.error("no accelerator is here; --dry-run runs everything small on the CPU")
    clock, s = Clock(), sizes(args.model, args.dry_run)
    report = Report("gpu", {
        "device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "timed model": args.model,
        "dry run": args.dry_run,
    })  # fmt: skip

    def save() -> None:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu.json").write_text(report.as_json())

    sections: dict[str, Callable[[], None]] = {
        "kernels": lambda: check_kernels(report, clock),
        "identity": lambda: check_identity(report, s, None, WIDTHS[::2] if args.dry_run else WIDTHS, clock),
        "steps": lambda: time_steps(report, s, None, args.dry_run, clock),
    }
    if device.platform != "cpu":  # where a kernel is the default, XLA's attention beside it
        sections["identity, xla"] = lambda: check_identity(report, s, "xla", (8,), clock)
        sections["steps, xla"] = lambda: time_steps(report, s, "xla", args.dry_run, clock)
    broken = 0
    for name, run in sections.items():
        if name.endswith("xla") and clock.spent > 0.6 * SECONDS:
            report.facts[f"section {name}"] = f"left out: {clock.spent:.0f} s were spent"
            continue
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            broken += 1
            report.facts[f"section {name}"] = (
                f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            )
        save()
    report.bar("sections that failed", broken, "==", 0)
    report.bar("seconds in all", clock.spent, "<=", SECONDS)
    save()
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
