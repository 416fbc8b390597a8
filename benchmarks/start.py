"""Time to first token of a fresh process, cold and warm, and how many programs a session of requests compiles.

    python benchmarks/start.py [--model smollm2-135m-q4_1] [--runs 3] [--requests 50] [--json]

Cold: an empty compilation cache. Warm: the same process started again on the cache the cold one left. The clock starts
before the interpreter. Every backend compilation of the process counts, those of eager operations included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BUCKETS = (512, 2048)
PROGRAMS = 6  # three for each bucket


def first_token(model: str, cache: str, began: float) -> None:
    """Child: load, answer one prompt, print phase times as JSON."""
    from kvjax.compilation import CompileCounter, compile_cache

    with CompileCounter() as counter:
        import kvjax
        import serve

        marks = {"imports": time.time() - began}
        compile_cache(cache)
        lm = kvjax.load(model, progress=False)
        marks["load"] = time.time() - began - sum(marks.values())
        events = serve.stream(lm, ["The first token of this text"], max_new_tokens=2, stop_ids=())
        next(events)
        marks["first token"] = time.time() - began - sum(marks.values())
        marks["total"] = time.time() - began
    print(json.dumps({**marks, "compiles": counter.compiles, "cache hits": counter.hits}))


def session(model: str, requests: int) -> None:
    """Child: `requests` prompts of up to 1,500 tokens in two buckets, one at a time, width 1."""
    import numpy as np

    from kvjax.compilation import CompileCounter

    with CompileCounter() as counter:
        import kvjax
        import serve

        lm = kvjax.load(model, progress=False)
        random = np.random.default_rng(0)
        after = []
        for _ in range(requests):
            length = int(np.exp(random.uniform(np.log(8), np.log(1500))))
            prompt = random.integers(0, lm.tokenizer.vocab, length).tolist()
            size = next(s for s in BUCKETS if length + 4 + 1 <= s)
            serve.generate(lm, [prompt], max_new_tokens=4, size=size)
            after.append(counter.programs)
    print(json.dumps({"requests": requests, "programs": counter.programs, "after each": after}))


def child(*arguments: str) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, *rest = args.child
        first_token(rest[0], rest[1], float(rest[2])) if kind == "first" else session(rest[0], int(rest[1]))
        return 0

    import jax

    import kvjax
    from kvjax.checkpoints.pull import pull, registry
    from kvjax.report import Report

    facts = {"model": args.model, "jax": jax.__version__, "kvjax": kvjax.__version__, "runs": args.runs}
    report = Report("start", facts)
    if args.model in registry():
        pull(args.model)  # the download is not part of a start
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                row = child("--child", "first", args.model, cache, repr(time.time()))
                report.row("time to first token, seconds", start=kind, **row)
    rows = report.tables["time to first token, seconds"]
    for kind in ("cold", "warm"):
        mine = sorted(r["total"] for r in rows if r["start"] == kind)
        report.facts[f"{kind} start, median"] = f"{mine[len(mine) // 2]:.2f} s"
    report.bar(
        "compilations of a warm start", max(r["compiles"] for r in rows if r["start"] == "warm"), "<=", 0
    )
    found = child("--child", "session", args.model, str(args.requests))
    report.row("programs of a session", requests=found["requests"], programs=found["programs"],
               after_first=found["after each"][0], last_new_at=_last_growth(found["after each"]))  # fmt: skip
    report.bar(f"programs for {args.requests} requests, buckets {BUCKETS}", found["programs"], "<=", PROGRAMS)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


def _last_growth(counts: list[int]) -> int:
    """The request after which no program was added."""
    return next(i + 1 for i, n in enumerate(counts) if n == counts[-1])


if __name__ == "__main__":
    raise SystemExit(main())
