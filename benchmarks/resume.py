"""A run that is killed (SIGKILL) again and again and resumed, against one that nothing interrupts: the same bits.

    python benchmarks/resume.py [--corpus DIR] [--kills 3] [--json]

Without a corpus (`kvjax corpus DIR`) synthetic text and a small tokenizer take its place. Every step's loss, gradient
norm and a checksum of its batch are compared. About a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EVERY, PHASES = 20, ((220, 4, 64), (40, 2, 128))
SMALL = dict(
    model_type="qwen3", vocab_size=400, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=160, rms_norm_eps=1e-6, rope_theta=1e4,
    tie_word_embeddings=True, max_position_embeddings=256,
)  # fmt: skip


def synthetic(folder: Path) -> None:
    """Splits of random sentences over invented words, and a tokenizer trained on them."""
    from train import tokenizer
    from train.corpus import Document, write

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(300)]

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count)).replace("ab", ".\n")

    for split, documents in (("train", 400), ("selection", 60), ("confirmation", 5)):
        texts = [text(draw.randint(5, 400)) for _ in range(documents)]
        write(folder / split, [Document(f"synthetic/{i:04}", t, "docs") for i, t in enumerate(texts)])
    spec = dataclasses.replace(tokenizer.SPECS["mini"], vocab=SMALL["vocab_size"])
    tokenizer.save(tokenizer.train([text(20_000)], spec), folder / "tokenizers" / "small")


def settings(corpus: Path) -> Any:
    """mini-s for a real corpus, a smaller model for the synthetic one; short phases either way."""
    from kvjax.resources import config_path
    from train import config

    told = config.read(config_path("mini/mini-s.toml"))
    if (corpus / "tokenizers" / "small").is_dir():
        told = dataclasses.replace(told, options={"tokenizer": "tokenizers/small", "model": SMALL})
    return dataclasses.replace(
        told,
        options={**told.options, "held_out": 2048},
        optimizer=dataclasses.replace(told.optimizer, warmup=20),
        phases=tuple(config.Phase(*phase) for phase in PHASES),
        run=dataclasses.replace(told.run, every=EVERY),
    )


def train(corpus: Path, directory: Path) -> None:
    """Child: train, or go on, to the end."""
    import jax.numpy as jnp

    import kvjax
    from train.loop import fit
    from train.pretrain import Pretrain

    class Watched(Pretrain):
        """Each step tells a checksum of its batch, as its program sees it (22 bits, exact in float32)."""

        def loss(self, params, batch, key):
            value, weight, more = super().loss(params, batch, key)
            flat = batch["tokens"].reshape(-1).astype(jnp.uint32)
            odd = jnp.uint32(2) * jnp.arange(flat.size, dtype=jnp.uint32) + jnp.uint32(2654435761)
            total = (flat * odd * (odd >> 3)).sum() >> jnp.uint32(10)
            return value, weight, more | {"batch": total.astype(jnp.float32) * weight}

    kvjax.compile_cache(directory.with_name("programs"))
    told = settings(corpus)
    fit(Watched(told, corpus), told, directory)


def start(corpus: Path, directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(corpus), str(directory)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"a run failed:\n{said.decode()}")


def done(directory: Path) -> int:
    """Steps in the journal."""
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(process: subprocess.Popen[bytes], directory: Path, step: int) -> int:
    """SIGKILL once the journal has reached `step`; where it really stood."""
    while done(directory) < step:
        if process.poll() is not None:
            finish(process)
            raise SystemExit(f"the run ended before step {step}")
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return done(directory)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="a directory made by `kvjax corpus`")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the moments; default another every time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(*args.child)
        return 0

    import jax

    import kvjax
    from kvjax.report import Report

    total = sum(steps for steps, _, _ in PHASES)
    moments = sorted(random.Random(args.seed).sample(range(EVERY + 5, total - 5), args.kills))
    facts = {"jax": jax.__version__, "kvjax": kvjax.__version__, "corpus": "given" if args.corpus else "synthetic",
             "steps": total, "checkpoint every": EVERY}  # fmt: skip
    report = Report("resume", facts)
    with tempfile.TemporaryDirectory() as folder:
        corpus = args.corpus or Path(folder) / "corpus"
        if args.corpus is None:
            synthetic(corpus)
        killed, whole = Path(folder) / "killed", Path(folder) / "whole"
        for moment in moments:
            at = kill_at(start(corpus, killed), killed, moment)
            saved = [int(p.name) for p in (killed / "checkpoints").iterdir() if p.name.isdigit()]
            report.row("kills", killed_after=at, resumes_at=max(saved))
        finish(start(corpus, killed))
        finish(start(corpus, whole))
        runs = [
            [json.loads(line) for line in (d / "metrics.jsonl").read_text().splitlines()]
            for d in (killed, whole)
        ]
    first, last = runs[1][0], runs[1][-1]
    report.row("uninterrupted run", first_loss=first["loss"], last_loss=last["loss"],
               bits_per_byte=last["bits_per_byte"])  # fmt: skip
    counts = [len(run) for run in runs]
    report.bar("steps recorded twice or missing", abs(counts[0] - total) + abs(counts[1] - total), "<=", 0)
    for what, key in (("losses", "loss"), ("gradient norms", "grad_norm"), ("batches", "batch")):
        differ = sum((a["step"], a[key]) != (b["step"], b[key]) for a, b in zip(*runs))
        report.bar(f"{what} that differ", differ, "<=", 0)
    scores = [[run["bits_per_byte"] for run in r if "bits_per_byte" in run] for r in runs]
    report.bar("scores that differ", sum(a != b for a, b in zip(*scores)), "<=", 0)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
