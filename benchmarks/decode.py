"""Decoding and prefill speed on CPU, beside transformers (torch) with the same weights and tokens, in one run.

    python benchmarks/decode.py [--model smollm2-135m-q4_1] [--repeats 7] [--json]

Needs the `parity` extra (torch, transformers) unless --no-torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import kvjax
import serve
from kvjax.bench import Stepper, alternate, bytes_per_token, median, streaming_read
from kvjax.report import Report

TOKENS = 24  # per timed run
COPY = (
    "Repeat this list of settings exactly, line by line, and nothing else:\n"
    "server.host = 0.0.0.0\nserver.port = 8080\nserver.workers = 4\ndatabase.url = postgres://localhost/main\n"
    "database.pool = 10\nlogging.level = info\nlogging.file = /var/log/app.log\ncache.size = 512\n"
    "cache.ttl_seconds = 3600\nqueue.name = jobs\nqueue.retries = 3\n"
)


class Torch:
    """transformers, greedy, one row, with its own cache."""

    def __init__(self, directory: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(os.cpu_count() or 1)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.versions = f"torch {torch.__version__}, transformers {transformers.__version__}"

    def read(self, ids: list[int]) -> float:
        """Seconds to prefill `ids` (only the last position's logits)."""
        x = self.torch.tensor([ids])
        with self.torch.inference_mode():
            began = time.perf_counter()
            out = self.model(x, use_cache=True, logits_to_keep=1)
            took = time.perf_counter() - began
        self.cache, self.next = out.past_key_values, out.logits[:, -1:].argmax(-1)
        return took

    def steps(self, count: int) -> float:
        """Milliseconds per token in a bare loop of forwards: the least overhead transformers can have."""
        with self.torch.inference_mode():
            began = time.perf_counter()
            for _ in range(count):
                out = self.model(self.next, past_key_values=self.cache, use_cache=True)
                self.next = out.logits[:, -1:].argmax(-1)
            return (time.perf_counter() - began) / count * 1e3

    def generate(self, ids: list[int], count: int) -> float:
        """Milliseconds per token of `model.generate`, prefill subtracted (two lengths, one prompt)."""
        x = self.torch.tensor([ids])

        def run(n: int) -> float:
            began = time.perf_counter()
            self.model.generate(
                x, attention_mask=self.torch.ones_like(x), max_new_tokens=n, min_new_tokens=n, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            return time.perf_counter() - began

        with self.torch.inference_mode():
            return (run(count + 1) - run(1)) / count * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-torch", action="store_true", help="leave the comparison out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = (
        (lambda text: print(text, file=sys.stderr, flush=True))
        if sys.stderr.isatty()
        else (lambda text: None)
    )

    kvjax.compile_cache()
    lm = kvjax.load(args.model, dtype="float32")
    facts = {"model": lm.id, "cores": os.cpu_count(), "jax": jax.__version__, "repeats": args.repeats}
    report = Report("decode", facts)
    peer = None
    if not args.no_torch:
        with tempfile.TemporaryDirectory() as directory:
            kvjax.save_hf(lm, Path(directory) / "model", dtype="float32")
            peer = Torch(str(Path(directory) / "model"))
        report.facts["peer"] = peer.versions

    for size, context, share, factor in ((256, 128, 0.70, 2.5), (2048, 1500, 0.50, 2.0)):
        say(f"decoding at {context} tokens of context, bucket {size}")
        ours = Stepper(lm, 1, size, context)
        prompt = ours.tokens[0, :context].tolist()
        timed = {"read": streaming_read, "ours": lambda ours=ours: ours.rounds(TOKENS)}
        if peer is not None:
            peer.read(prompt)
            timed["peer loop"] = lambda: peer.steps(TOKENS)  # type: ignore[union-attr]
            timed["peer generate"] = lambda p=prompt: peer.generate(p, TOKENS)  # type: ignore[union-attr]
        limit = (size - context) // TOKENS - 2
        result = alternate(min(args.repeats, limit), **timed)
        if peer is not None and context <= 128:
            agree(report, lm, peer, prompt)
        gigabytes = bytes_per_token(lm, context) / 1e9
        for name, values in result.items():
            if name != "read":
                report.row(f"decode, context {context}, bucket {size}", who=name, ms=median(values), least=min(values),
                           most=max(values), tokens_per_s=1e3 / median(values), n=len(values))  # fmt: skip
        reached = gigabytes / (median(result["ours"]) / 1e3)
        report.row("memory", context=context, gb_per_token=gigabytes, read_gb_s=median(result["read"]),
                   reached_gb_s=reached, share=reached / median(result["read"]))  # fmt: skip
        report.bar(f"share of streaming read at {context}", reached / median(result["read"]), ">=", share)
        if peer is not None:
            ratios = [p / o for p, o in zip(result["peer generate"], result["ours"])]
            report.bar(f"decode against transformers at {context}", median(ratios), ">=", factor)

    say("rounds by width")
    steppers = {str(w): Stepper(lm, w, 256, 96) for w in (1, 2, 4, 8, 16)}
    rounds = alternate(args.repeats, **{w: (lambda s=s: s.rounds(8)) for w, s in steppers.items()})
    for w, values in rounds.items():
        ratio = median([v / one for v, one in zip(values, rounds["1"])])
        report.row(
            "rounds by width, bucket 256", rows=int(w), ms=median(values), in_steps=ratio, n=len(values)
        )
        if bound := {"4": 1.6, "8": 2.4, "16": 3.0}.get(w):
            report.bar(f"round of {w} rows in single-row steps", ratio, "<=", bound)
    where(report, lm, args.repeats)

    say("prefill")
    ours = Stepper(lm, 1, 640, 512)
    timed = {"ours": ours.prefill}
    if peer is not None:
        timed["peer"] = lambda: peer.read(ours.tokens[0, :512].tolist())  # type: ignore[union-attr]
    result = alternate(args.repeats, **timed)
    for name, values in result.items():
        report.row("prefill of 512 tokens", who=name, s=median(values), least=min(values), most=max(values),
                   tokens_per_s=512 / median(values), n=len(values))  # fmt: skip
    if peer is not None:
        ratio = median([p / o for p, o in zip(result["peer"], result["ours"])])
        report.bar("prefill of 512 tokens against transformers", ratio, ">=", 1.0)

    say("n-gram drafting")
    ngram(report, lm, args.repeats)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


def agree(report: Report, lm: kvjax.LM, peer: Torch, prompt: list[int]) -> None:
    """The timed work is the same work: both emit the same tokens."""
    peer.read(prompt)
    theirs = [int(peer.next)]
    for _ in range(TOKENS - 1):
        peer.steps(1)
        theirs.append(int(peer.next))
    mine = serve.generate(lm, [prompt], max_new_tokens=TOKENS, stop_ids=())[0].tokens
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), TOKENS)
    report.facts["same tokens as transformers"] = f"{same} of {TOKENS}"


def where(report: Report, lm: kvjax.LM, repeats: int) -> None:
    """Split a single-row step: layers, head, and what the round adds around the forward."""
    model, size = lm.model, 256
    full = Stepper(lm, 1, size, 96)
    state = full.state

    def forward(params, tokens, state, head):
        def body(i, total):
            out = model.forward(params, tokens + i, state.length[:, None] + i, state.cache, logits=head)
            got = out.logits[0, 0, 0] if head else out.rows[-1][0][0, 0, 0, 0]
            return total + got

        return jax.lax.fori_loop(0, 8, body, np.float32(0))

    run = jax.jit(forward, static_argnums=3)
    token = np.zeros((1, 1), np.int32)

    def timed(head: bool) -> float:
        began = time.perf_counter()
        run(lm.params, token, state, head).block_until_ready()
        return (time.perf_counter() - began) / 8 * 1e3

    timed(True), timed(False)
    result = alternate(repeats, layers=lambda: timed(False), forward=lambda: timed(True))
    whole = median(alternate(repeats, whole=lambda: full.rounds(8))["whole"])
    layers, both = median(result["layers"]), median(result["forward"])
    head = (lm.config.vocab * lm.config.hidden * model.dtype.itemsize) / 1e9
    body = bytes_per_token(lm, 0) / 1e9 - head
    table = "where a single-row step goes, bucket 256"
    report.row(table, part="layers (all but the last MLP)", ms=layers, gb=body, gb_s=body / layers * 1e3)
    report.row(
        table, part="head and last MLP", ms=both - layers, gb=head, gb_s=head / max(both - layers, 1e-9) * 1e3
    )
    report.row(table, part="sampling, verification, state", ms=whole - both, gb=0.0, gb_s=0.0)


def ngram(report: Report, lm: kvjax.LM, repeats: int) -> None:
    """A prompt whose answer copies it, plain and drafted in turn."""
    chat = lm.tokenizer is not None and lm.tokenizer.has_chat_template
    prompts = [[{"role": "user", "content": COPY}]] if chat else [COPY + "\n" + COPY]
    options = dict(max_new_tokens=96, size=512)

    def run(draft):
        result = serve.generate(lm, prompts, draft=draft, **options)
        return result.timings["decode"], result[0]

    drafts = {"plain": None, **{f"n-gram {w}": kvjax.Ngram(width=w) for w in (4, 8, 16)}}
    for draft in drafts.values():
        run(draft)
    result = alternate(max(3, repeats // 2), **{name: (lambda d=d: run(d)) for name, d in drafts.items()})
    plain = [seconds for seconds, _ in result["plain"]]
    for name, values in result.items():
        answer = values[0][1]
        report.row(
            "n-gram drafting on a copying prompt", source=name, decode_s=median([s for s, _ in values]),
            tokens=len(answer.tokens), tokens_per_round=len(answer.tokens) / max(answer.rounds, 1),
            speed_up=median([p / s for p, (s, _) in zip(plain, values)]),
            same_as_plain=str(answer.tokens == result["plain"][0][1].tokens), n=len(values),
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
