"""Training speed on CPU beside torch (transformers' Qwen3): same weights, batches and optimizer, in turn in one run.

    python benchmarks/training.py [--model s|m|both] [--batch 8] [--length 256] [--repeats 7] [--json]

A turn is one step to settle and STEPS timed ones. torch runs SDPA attention and fused AdamW. Before that, both train
on the same batches for some steps, and their losses are compared. Needs the `parity` extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.bench import alternate, median
from kvjax.config import ModelConfig
from kvjax.models import build
from kvjax.report import Report
from kvjax.resources import config_path
from train import config as training
from train import step as stepping
from train.pretrain import Pretrain

STEPS = 3  # timed in a turn
AGREE = 4  # steps whose losses are compared first
FLOOR, GOAL = 0.8, 1.0


class Ours:
    """A model of the mini family as `kvjax train` trains it, on random tokens: its loss, optimizer and step."""

    def __init__(self, name: str, mesh: Any = None, **optimizer: Any) -> None:
        """`optimizer`: changes to the file's table."""
        told = training.read(config_path(f"mini/{name}.toml"))
        self.config = dataclasses.replace(told, optimizer=dataclasses.replace(told.optimizer, **optimizer))
        self.shape = ModelConfig.from_hf(self.config.options["model"])
        self.model = build(self.shape, mesh, train=True)
        # Pretrain without its corpus.
        self.task: Any = types.SimpleNamespace(
            model=self.model, master=self.model, config=self.shape, rules=self.model.rules,
            seed=self.config.run.seed, remat=False,
        )  # fmt: skip
        self.params, self.decayed = Pretrain.init(self.task)
        self.rate = stepping.schedule(self.config.optimizer, self.config.steps)
        transform = stepping.optimizer(self.config.optimizer, self.config.steps, self.decayed)
        with self.model.rules.context():
            self.state = stepping.create(jax.tree.map(jnp.copy, self.params), transform, 0)
        loss = functools.partial(Pretrain.loss, self.task)
        self.take = stepping.make_step(loss, transform, self.rate)

    def step(self, tokens: np.ndarray) -> float:
        batch = jax.device_put(tokens, self.model.rules.sharding("batch", None))
        self.state, metrics = self.take(self.state, {"tokens": batch})
        return float(metrics["loss"])

    def flops(self, batch: int, length: int) -> float:
        """Of a step: 6 a weight and token, and what causal attention needs (half the square), three times."""
        c = self.shape
        weights = sum(s.size for n, s in zip(self.model.names, self.model.shapes) if len(s.shape) > 1)
        attention = 2 * 2 * (length + 1) / 2 * c.num_heads * c.head_dim * c.num_layers
        return batch * length * (6 * weights + 3 * attention)


class Torch:
    """The same, with transformers' model and torch's optimizer."""

    def __init__(self, ours: Ours) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(os.cpu_count() or 1)
        self.torch, self.rate, self.done = torch, ours.rate, 0
        with tempfile.TemporaryDirectory() as directory:
            lm = kvjax.LM(ours.model, ours.params, None, ours.shape, "mini")
            kvjax.save_hf(lm, Path(directory) / "model", dtype="float32")
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                str(Path(directory) / "model"), dtype=torch.float32, attn_implementation="sdpa"
            )
        self.model.train()
        o = ours.config.optimizer
        self.clip = o.clip
        every = list(self.model.parameters())
        groups = [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=o.rate, betas=(o.b1, o.b2), eps=o.eps, fused=True)
        self.versions = f"torch {torch.__version__}, transformers {transformers.__version__}"

    def step(self, tokens: np.ndarray) -> float:
        torch = self.torch
        x = torch.from_numpy(tokens.astype(np.int64))
        for group in self.adam.param_groups:
            group["lr"] = float(self.rate(self.done))
        logits = self.model(input_ids=x[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.done += 1
        return loss.item()


def turn(step: Callable[[np.ndarray], float], draw: Callable[[], np.ndarray]) -> float:
    """Seconds a step. The first one lets the other library's threads come to rest."""
    step(draw())
    batches = [draw() for _ in range(STEPS)]
    began = time.perf_counter()
    for tokens in batches:
        step(tokens)
    return (time.perf_counter() - began) / STEPS


def peaks(size: int = 1536) -> dict[str, Callable[[], float]]:
    """GFLOP/s of one large float32 product in either library."""
    import torch

    x = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    a, b = jnp.asarray(x), torch.from_numpy(x)
    product = jax.jit(jnp.dot)

    def timed(run: Callable[[], Any]) -> float:
        run()
        began = time.perf_counter()
        run(), run()
        return 2 * 2 * size**3 / (time.perf_counter() - began) / 1e9

    return {
        "jax": lambda: timed(lambda: product(a, a).block_until_ready()),
        "torch": lambda: timed(lambda: torch.mm(b, b)),
    }


def compare(report: Report, name: str, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    say(f"{name}: compiling")
    rng = np.random.default_rng(0)
    ours = Ours(name)
    peer = Torch(ours)
    report.facts["peer"] = peer.versions

    def draw() -> np.ndarray:
        return rng.integers(0, ours.shape.vocab, (args.batch, args.length + 1)).astype(np.int32)

    apart = 0.0
    for _ in range(AGREE):
        tokens = draw()
        apart = max(apart, abs(ours.step(tokens) - peer.step(tokens)))
    say(f"{name}: in turn")
    timed = {"kvjax": lambda: turn(ours.step, draw), "torch": lambda: turn(peer.step, draw)}
    peak_runs = {f"peak {who}": run for who, run in peaks().items()}
    result = alternate(args.repeats, **timed, **peak_runs)
    peak = max(median(result[who]) for who in peak_runs)
    tokens_a_step, flops = args.batch * args.length, ours.flops(args.batch, args.length)
    for who in timed:
        seconds = result[who]
        report.row(
            f"{name}, batches of {args.batch} x {args.length}", who=who, ms=1e3 * median(seconds),
            least=1e3 * min(seconds), most=1e3 * max(seconds), tokens_per_s=tokens_a_step / median(seconds),
            gflop_s=flops / median(seconds) / 1e9, utilisation=flops / median(seconds) / 1e9 / peak, n=len(seconds),
        )  # fmt: skip
    report.row("peaks of a float32 product, GFLOP/s", model=name,
               **{who: median(result[f"peak {who}"]) for who in ("jax", "torch")})  # fmt: skip
    ratios = [b / a for a, b in zip(result["kvjax"], result["torch"])]
    report.row("ratio of throughputs", model=name, median=median(ratios), least=min(ratios), most=max(ratios),
               goal=GOAL, reached=str(median(ratios) >= GOAL))  # fmt: skip
    report.bar(f"{name}: difference of the first {AGREE} losses", apart, "<=", 1e-3)
    report.bar(f"{name}: throughput against torch", median(ratios), ">=", FLOOR)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("s", "m", "both"), default="both")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = (
        (lambda text: print(text, file=sys.stderr, flush=True))
        if sys.stderr.isatty()
        else (lambda text: None)
    )
    facts = {"cores": os.cpu_count(), "jax": jax.__version__, "repeats": args.repeats, "steps a turn": STEPS}
    report = Report("training", facts)
    for name in ("mini-s", "mini-m") if args.model == "both" else (f"mini-{args.model}",):
        compare(report, name, args, say)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
