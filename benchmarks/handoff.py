"""Handing a prompt over: time to first token by length, natively, warm and cold; exact hand-off over real prompts.

    python benchmarks/handoff.py MAP [--source mini-s] [--target mini-m] [--corpus DIR] [--long 8192] [--demand 5]

MAP is a directory that `kvjax fit` or `kvjax train` wrote for the two models, or the name of one that ships. Native,
warm (the source's cache is there: map, repair, first token) and cold (the source reads first) alternate in one run, on
random tokens. Lengths beyond the models' context are timed all the same: the programs and their cost are real, what
they would say is not.
The exact hand-off needs --corpus, what `kvjax corpus` wrote; without it that part is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import kvjax
import serve
from kvjax import documents
from kvjax.bench import median
from kvjax.lm import LM
from kvjax.report import Report
from kvjax.transfer import latency, windows
from kvjax.transfer.repair import Repair
from serve.exact import WIDTH, Course, Exact
from serve.handoff import Transfer

AT = 1024  # prompt tokens at which --demand is asked for
FLAT = 1.25  # mapping a token at the longest length may cost so many times what it does at the shortest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("map", metavar="MAP", type=Path)
    parser.add_argument("--source", default="mini-s")
    parser.add_argument("--target", default="mini-m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--tail", type=int, default=32, help="last prompt tokens the target reads itself")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--long", type=int, help="one more length, timed --long-repeats times")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--long-repeats", type=int, default=3)
    parser.add_argument("--demand", type=float, help=f"how many times faster warm must be at {AT:,} tokens")
    parser.add_argument(
        "--corpus", type=Path, help="for the exact hand-off: prompts of its confirmation split"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.demand is not None and AT not in args.lengths:
        parser.error(f"--demand is asked for at {AT} tokens, which --lengths does not have")

    kvjax.compile_cache()
    source, target = (kvjax.load(name, dtype=args.dtype) for name in (args.source, args.target))
    transfer = Transfer.load(args.map, source, target)
    repair = Repair(args.tail)
    report = Report(
        "hand-off",
        {"source": source.id, "target": target.id, "map": f"{args.map}, {transfer.mapper.size:,} weights",
         "tail": args.tail, "repeats": args.repeats, "device": jax.devices()[0].device_kind, "cores": os.cpu_count(),
         "jax": jax.__version__},
    )  # fmt: skip
    lengths(report, source, target, transfer, repair, args)
    if args.corpus is None:
        report.facts["exact hand-off"] = "not run: --corpus is not given"
    else:
        exact(report, source, target, transfer, repair, args)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


def lengths(
    report: Report, source: LM, target: LM, transfer: Transfer, repair: Repair, args: argparse.Namespace
) -> None:
    def timed(lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
        return latency.by_length(source, target, transfer.mapper, repair, lengths, repeats)

    rows = timed(sorted(args.lengths), args.repeats)
    for kind in ("warm", "cold"):
        report.facts[f"break-even, {kind}"] = latency.told(latency.break_even(rows, kind), rows)
    if args.long:
        rows += timed([args.long], args.long_repeats)
    context = min(source.config.max_positions, target.config.max_positions)
    for row in rows:
        report.row("time to first token", **row, context="within" if row["tokens"] <= context else "beyond")
        if args.demand is not None and row["tokens"] == AT:
            name = f"warm against native, prompt of {AT:,} tokens: times faster"
            report.bar(name, row["warm: times faster"], ">=", args.demand)
    first, last = rows[0], rows[-1]
    each = "map ms per 1,000 tokens"
    name = f"map a token at {last['tokens']:,} tokens / at {first['tokens']:,}"
    report.bar(name, last[each] / first[each], "<=", FLAT)


def exact(
    report: Report, source: LM, target: LM, transfer: Transfer, repair: Repair, args: argparse.Namespace
) -> None:
    texts = windows.encoded(documents.read(args.corpus / "confirmation"), target)
    prompts = windows.beginnings(texts, args.prompt_tokens, args.prompts).tolist()
    chunk = 128
    size = -(-(args.prompt_tokens + args.new_tokens + WIDTH) // chunk) * chunk
    options: dict[str, Any] = {"max_new_tokens": args.new_tokens, "size": size, "chunk": chunk}
    junk = kvjax.Junk(width=WIDTH, vocab=target.config.vocab)

    def native(prompt: list[int]) -> tuple[float, float]:
        """Seconds to the first and to the last token of plain decoding."""
        began, first = time.perf_counter(), 0.0
        for _ in serve.stream(target, [prompt], **options):
            first = first or time.perf_counter() - began
        return first, time.perf_counter() - began

    def handed(prompt: list[int]) -> tuple[tuple[int, ...], Course, float]:
        run = Exact(source, transfer, target, [prompt], repair, **options)
        result = run.answer()
        device = sum(run.timings[k] for k in ("read", "map", "provisional", "prefill", "decode"))
        return result[0].tokens, result.course, device

    native(prompts[0]), handed(prompts[0])  # compile
    plain, courses, device, same = [], [], [], 0
    for prompt in prompts:
        plain.append(native(prompt))
        tokens, course, seconds = handed(prompt)
        courses.append(course)
        device.append(seconds)
        # Identity is promised within one program, so the native answer is the one of the same width.
        same += tokens == serve.generate(target, [prompt], draft=junk, **options)[0].tokens
    begun, ended = zip(*plain)
    seconds = {
        "native: first token": begun, "native: last token": ended,
        "exact: first provisional token": [c.first_provisional_s for c in courses],
        "exact: first confirmed token": [c.first_confirmed_s for c in courses],
        "exact: last token": [c.last_s for c in courses],
    }  # fmt: skip
    for name, values in seconds.items():
        low, high = np.quantile(values, [0.05, 0.95])
        row = {"median ms": 1e3 * median(list(values)), "5 %": 1e3 * low, "95 %": 1e3 * high}
        report.row("exact hand-off", what=name, **row)
    said, back = (sum(sum(getattr(c, k)) for c in courses) for k in ("provisional", "retracted"))
    early = [n / c.first_provisional_s for n, c in zip(begun, courses, strict=True)]
    report.facts |= {
        "prompts": f"{len(prompts)} of {args.prompt_tokens} tokens, {args.new_tokens} new ones",
        "provisional tokens": said, "share retracted": back / max(said, 1),
        "first provisional against native: times faster": median(early),
        "total compute against native": median([d / e for d, e in zip(device, ended, strict=True)]),
    }  # fmt: skip
    report.bar("exact hand-off: answers identical to native, of those asked", same / args.prompts, "==", 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
