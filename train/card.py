"""The card of a trained model: README.md, loss.png and card.json beside its weights. Every number in them is read from
the run, the manifest, the model or a measurement; what cannot belong together is refused.

    python -m train.card --model DIR --run RUN --corpus CORPUS --hardware "2 cores of ..." [--step N]
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

import kvjax
import serve
from kvjax.lm import LM
from kvjax.resources import config_path
from kvjax.stats import LEVEL
from train.card_page import plot, render
from train.checkpoint import write_json
from train.compress import XZ
from train.corpus import MANIFEST
from train.evaluate import CONTEXT, Confirmation, Measured, Scores

PROMPTS = (
    "def read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import argparse\nimport json\n\n\ndef main():\n",
    '"""Tests of the parser."""\n\nimport pytest\n\n',
)
TOKENS, TEMPERATURE, SEED = 64, 0.8, 0  # of the samples


class CardError(ValueError):
    """Figures that are missing or do not belong to this model; the message names file and field."""


def write_card(
    directory: str | Path, lm: LM, run: str | Path, measured: Measured, *, hardware: str, step: int | None = None,
    manifest: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the card of the model exported to `directory`, and return the figures of `card.json`.

    Args:
      lm: the model as loaded from there. run: the directory of its training. measured: its confirmation figures.
      hardware: what it was trained on, in words. step: of the exported checkpoint; None is the run's last.
      manifest: the corpus' own; default `configs/mini/manifest.json`.

    Raises:
      CardError: a file that is missing or damaged, or figures of another model, tokenizer or corpus.
    """
    directory, run = Path(directory), Path(run)
    config, entries = _json(run / "config.json"), _entries(run / "metrics.jsonl")
    facts = json.loads((manifest or config_path(MANIFEST)).read_text("utf-8"))
    figures = {
        "name": config["name"],
        "weights": {p.name: _sha256(p) for p in sorted(directory.glob("*.safetensors"))},
        "architecture": _architecture(lm, config, run),
        "data": _data(lm, config, facts, measured),
        "training": _training(config, entries, step, hardware, run),
        "confirmation": _confirmation(config["name"], facts, measured),
        "sampling": {"tokens": TOKENS, "temperature": TEMPERATURE, "seed": SEED},
        "samples": samples(lm),
    }
    if not figures["weights"]:
        raise CardError(f"{directory}: holds no *.safetensors; write the card beside the exported model")
    (directory / "loss.png").write_bytes(plot(entries, figures["training"]["phases"]))
    (directory / "README.md").write_text(render(figures), "utf-8")
    write_json(directory / "card.json", figures)
    return figures


def samples(lm: LM) -> list[dict[str, str]]:
    """`TOKENS` tokens after each of `PROMPTS`, greedy and drawn; special tokens are shown as text."""
    assert lm.tokenizer is not None
    kinds = {"greedy": 0.0, "sampled": TEMPERATURE}
    asked = list(itertools.product(PROMPTS, kinds.values()))
    answers = serve.generate(
        lm, [prompt for prompt, _ in asked], max_new_tokens=TOKENS, temperature=[t for _, t in asked], seed=SEED,
        stop_ids=(),
    )  # fmt: skip
    texts = iter([lm.tokenizer.decode(answer.tokens, skip_special=False) for answer in answers])
    return [{"prompt": prompt, **{kind: next(texts) for kind in kinds}} for prompt in PROMPTS]


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise CardError(f"{path}: cannot be read: {error}") from None


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if not found or any(e.keys() < {"step", "loss", "rate", "tokens", "seconds"} for e in found):
            raise CardError(f"{path}: a line lacks step, loss, rate, tokens or seconds, or there is none")
    except (OSError, ValueError, AttributeError) as error:
        raise CardError(f"{path}: cannot be read: {error}") from None
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise CardError(f"{what} is {expected}, and of this model {found}: they do not belong together")


def _architecture(lm: LM, run_config: dict[str, Any], run: Path) -> dict[str, Any]:
    c, options = lm.config, "options.model."
    sizes = {"vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.num_layers}
    for field, value in sizes.items():
        _same(f"{run / 'config.json'}: {options}{field}", value, run_config.get(options + field))
    return {
        "type": c.model_type, "parameters": sum(int(p.size) for p in lm.params), "layers": c.num_layers,
        "width": c.hidden, "query heads": c.num_heads, "KV heads": c.num_kv_heads, "head width": c.head_dim,
        "MLP width": c.intermediate, "vocabulary": c.vocab, "context": c.max_positions,
        "RoPE base": c.rope.theta, "norms of q and k": c.qk_norm, "head tied to the embedding": c.tie,
        "dtype of the file": c.dtype,
    }  # fmt: skip


def _data(lm: LM, config: dict[str, Any], facts: dict[str, Any], measured: Measured) -> dict[str, Any]:
    assert lm.tokenizer is not None
    _same("config.json: task.tokenizer", lm.tokenizer.hash, config.get("task.tokenizer"))
    names = [name for name, entry in facts["tokenizers"].items() if entry["sha256"] == lm.tokenizer.hash]
    if not names:
        raise CardError(f"manifest: no tokenizer has the model's SHA-256, {lm.tokenizer.hash}")
    pinned = facts["splits"]["confirmation"]
    _same("manifest: splits.confirmation.bytes", int(measured.model.bytes.sum()), pinned["bytes"])
    _same("manifest: splits.confirmation.documents", len(measured.model.bytes), pinned["documents"])
    splits = {
        split: {"packages": len(facts["packages"][split]), **entry}
        for split, entry in facts["splits"].items()
    }
    return {
        "recipe": facts["recipe"], "standard library": facts["stdlib"], "splits": splits,
        "licences": dict(Counter(p["licence"] for p in facts["packages"]["train"]).most_common()),
        "tokenizer": {"name": names[0], **facts["tokenizers"][names[0]]},
    }  # fmt: skip


def _training(
    config: dict[str, Any], entries: list[dict[str, Any]], step: int | None, hardware: str, run: Path
) -> dict[str, Any]:
    phases: list[dict[str, int]] = []
    while f"phases.{len(phases)}.steps" in config:
        i = len(phases)
        phases.append({key: config[f"phases.{i}.{key}"] for key in ("steps", "batch", "length")})
    done = {e["step"]: e for e in entries}
    step = entries[-1]["step"] if step is None else step
    if step not in done:
        raise CardError(f"{run / 'metrics.jsonl'}: has no step {step}; its last is {entries[-1]['step']}")
    return {
        "config": config, "phases": phases, "step": step, "steps": len(entries),
        "planned": sum(phase["steps"] for phase in phases),
        "tokens": sum(e["tokens"] for e in entries if e["step"] <= step),
        "seconds": sum(e["seconds"] for e in entries), "hardware": hardware,
        "selection": {k: done[step][k] for k in ("selection_loss", "bits_per_byte") if k in done[step]},
    }  # fmt: skip


def _confirmation(name: str, facts: dict[str, Any], measured: Measured) -> dict[str, Any]:
    def row(code: str, scores: Scores) -> dict[str, Any]:
        low, high = scores.interval()
        return {"code": code, "bits_per_byte": scores.bits_per_byte, "low": low, "high": high}

    def less(code: str, other: Scores) -> dict[str, Any]:
        value, low, high = measured.model.minus(other)
        return {"code": code, "bits_per_byte": value, "low": low, "high": high}

    size = int(measured.model.bytes.sum())
    ngram = "Kneser-Ney 5-gram over the same tokens, of the training split"
    table = [row(name, measured.model), row(ngram, measured.ngram)]
    table += [row(f"{codec}, each document", measured.of(codec)) for codec in measured.compressed]
    for codec, found in measured.compressed.items():
        table.append({"code": f"{codec}, the split in one piece", "bits_per_byte": found.whole / size})
    return {
        "documents": len(measured.model.bytes), "bytes": size, "context": CONTEXT // 2, "level": LEVEL,
        "packages": len(facts["packages"]["confirmation"]), "table": table,
        "differences": [less(ngram, measured.ngram), less(f"{XZ}, each document", measured.of(XZ))],
    }  # fmt: skip


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
              help="The exported model, which gets the card.")  # fmt: skip
@click.option("--run", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
              help="The directory of its training.")  # fmt: skip
@click.option("--corpus", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--hardware", required=True, help="What it was trained on, in words.")
@click.option("--step", type=int, help="Step of the exported checkpoint; default the run's last.")
def main(model: Path, run: Path, corpus: Path, hardware: str, step: int | None) -> None:
    """Measure an exported model on the confirmation split and write its card."""
    try:
        lm = kvjax.load(model, dtype="float32")
        write_card(model, lm, run, Confirmation(corpus).measure(lm), hardware=hardware, step=step)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
