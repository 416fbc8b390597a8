"""How a model card looks: `render` is its README.md, `plot` its loss.png. What it says comes from `train.card`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

_CARD = """\
---
license: apache-2.0
language:
- code
library_name: kvjax
pipeline_tag: text-generation
tags:
- python
- code
---

# {name}

A small language model of Python source, one of a family trained from nothing for the tests, demonstrations
and experiments of kvjax: {parameters:,} parameters, a context of {context:,} tokens. It continues code; it follows no
instructions and knows no facts.

```python
import kvjax, serve

lm = kvjax.load("PATH")  # this directory
print(serve.generate(lm, "def main():\\n", max_new_tokens={tokens}).text)
```

transformers loads the directory too.

## Architecture

{architecture}

## Data

Permissively licensed Python packages and the standard library of CPython {python}, split by package; anyone can
rebuild the same bytes. `configs/mini/manifest.json` of kvjax pins every file. Recipe: SHA-256 `{recipe}`.

{splits}

Tokenizer `{tokenizer[name]}`: byte-level BPE, {tokenizer[vocab]:,} ids, SHA-256 `{tokenizer[sha256]}`. Licences of the
training split's wheels: {licences}.

## Training

{steps:,} of {planned:,} planned steps; these weights are those after step {step:,}, {seen:,} tokens in. The steps took
{hours:.2f} hours by the clock (scoring and checkpoints not counted) on {hardware}, in {compute}. AdamW: learning rate
{optimizer[rate]:g} after {optimizer[warmup]:,} steps of linear warm-up, {shape}, down to {optimizer[floor]:.0%} of it;
betas {optimizer[b1]:g} and {optimizer[b2]:g}, weight decay {optimizer[weight_decay]:g}. Gradients are
clipped at norm {optimizer[clip]:g}.

{phases}

![Loss by step](loss.png)

Losses of steps are of blocks as long as the phase's, those of the selection split of blocks as long as the first
phase's.{selection}

## Bits per byte

On the confirmation split, which nothing was chosen by: {documents:,} documents, {bytes:,} bytes. Every byte is scored
once, with the whole document or at least {least:,} tokens before it. Intervals are of {level:.0%}, from drawing the
{documents:,} documents with replacement. Compressed sizes include what `gzip -n` and `xz` put around the data.

{table}

This model against others on the same documents, in bits per byte (below zero: this one is better):

{differences}

## Samples

{tokens} tokens after prompts written for this card, chosen greedily and drawn at T = {temperature:g} with seed {seed}.
None was picked from several.

{samples}
## Limits

- It is tiny. Names and call signatures are often invented, and what it writes need not run.
- {short:.0%} of its training tokens came in blocks shorter than its context.
- The intervals take documents as independent. They come from {packages} packages, whose styles differ, so the figures
  for yet other packages may lie outside.
- Where a document ends is not scored; a compressed file holds that in its few bytes of framing.
- It was trained on other people's code. The licences named above ask for attribution where what it writes is theirs.

## Licence

Apache-2.0.
"""


def plot(entries: list[dict[str, Any]], phases: list[dict[str, int]]) -> bytes:
    """A PNG of the training loss (raw, and its running mean), the selection loss, the learning rate and where each
    phase begins."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    steps, loss = (np.array([e[key] for e in entries], float) for key in ("step", "loss"))
    width = max(1, len(loss) // 100)
    mean = np.convolve(loss, np.full(width, 1 / width), "valid")
    scored = [(e["step"], e["selection_loss"]) for e in entries if "selection_loss" in e]
    figure, axis = pyplot.subplots(figsize=(7.5, 4), dpi=100, layout="constrained")
    axis.plot(steps, loss, color="#c6d8ea", linewidth=0.5, label="training, each step")
    axis.plot(steps[width - 1 :], mean, color="#1f5f9e", linewidth=1.2, label=f"training, mean of {width}")
    if scored:
        axis.plot(*zip(*scored), "o", color="#d1495b", markersize=3, label="selection")
    begin = np.cumsum([0, *(phase["steps"] for phase in phases)])
    for start, phase in zip(begin, phases):
        if start < steps[-1]:
            axis.axvline(start, color="#888888", linewidth=0.8, linestyle=":")
            text, late = f" {phase['batch']} x {phase['length']} ", start > 0.8 * steps[-1]
            side = "right" if late else "left"
            axis.text(start, 0.01, text, fontsize=7, ha=side, transform=axis.get_xaxis_transform())
    low, high = min([*mean, *(v for _, v in scored)]), max(mean)
    room = 0.1 * (high - low) + 1e-6
    axis.set(xlabel="step", ylabel="nats per token", ylim=(low - room, high + room))
    other = axis.twinx()
    other.plot(steps, [e["rate"] for e in entries], color="#7a9e3f", linewidth=0.9, label="learning rate")
    other.set(ylabel="learning rate", ylim=(0, None))
    lines = [*axis.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axis.legend(
        handles=lines, fontsize=8, ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", metadata={"Software": None})
    pyplot.close(figure)
    # a palette makes a third of the size; this way of choosing one keeps the colours of thin lines
    palette = (
        Image.open(raw).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    palette.save(small, "PNG", optimize=True)
    return small.getvalue()


def render(figures: dict[str, Any]) -> str:
    """README.md of the figures of `card.json`."""
    made, data, training, scored = (figures[k] for k in ("architecture", "data", "training", "confirmation"))
    phases, config, tokenizer = training["phases"], training["config"], data["tokenizer"]
    spent = [p["steps"] * p["batch"] * p["length"] for p in phases]
    short = sum(n for n, p in zip(spent, phases) if p["length"] < made["context"])
    decay = f"constant, then linear over the last {config['optimizer.decay']:.0%} of the steps"
    loss = training["selection"].get("selection_loss")
    splits = [
        (name, *(f"{s[k]:,}" for k in ("packages", "documents", "bytes")), f"{tokenizer['tokens'][name]:,}",
         f"`{s['sha256']}`") for name, s in data["splits"].items()
    ]  # fmt: skip
    values = {
        "name": figures["name"], "parameters": made["parameters"], "context": made["context"],
        "architecture": _table(("", ""), made.items()), "python": data["standard library"]["version"],
        "recipe": data["recipe"], "tokenizer": tokenizer,
        "splits": _table(("split", "wheels", "documents", "bytes", "tokens", "SHA-256"), splits),
        "licences": ", ".join(f"{name} ({count})" for name, count in data["licences"].items()),
        **{k: training[k] for k in ("steps", "planned", "step", "hardware")}, "seen": training["tokens"],
        "hours": training["seconds"] / 3600,
        "optimizer": {k.removeprefix("optimizer."): v for k, v in config.items() if k.startswith("optimizer.")},
        "shape": decay if config["optimizer.schedule"] == "wsd" else "a cosine", "compute": config["run.compute"],
        "phases": _table(
            ("phase", "steps", "sequences", "tokens in each", "tokens"),
            [(i, p["steps"], p["batch"], p["length"], n) for i, (p, n) in enumerate(zip(phases, spent), 1)],
        ),
        "selection": f" At step {training['step']:,} the latter is {loss:.3f}." if loss is not None else "",
        **{k: scored[k] for k in ("documents", "bytes", "level", "packages")}, "least": scored["context"],
        "table": _table(("", "bits per byte", "interval"), map(_scored, scored["table"])),
        "differences": _table(("against", "difference", "interval"), map(_scored, scored["differences"])),
        "samples": "\n".join(map(_sample, figures["samples"])), **figures["sampling"],
        "short": short / sum(spent),
    }  # fmt: skip
    return _CARD.format(**values)


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    heads, cells = list(heads), [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *cells])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _scored(row: dict[str, Any]) -> tuple[str, str, str]:
    interval = f"{row['low']:.4f} to {row['high']:.4f}" if "low" in row else ""
    return row["code"], f"{row['bits_per_byte']:.4f}", interval


def _sample(sample: dict[str, str]) -> str:
    parts = []
    for name, text in sample.items():
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        parts.append(f"{name}:\n\n{fence}text\n{text.rstrip(chr(10))}\n{fence}\n")
    return "\n".join(parts)
