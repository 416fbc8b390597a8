"""`kvjax demo`: what this project does, on the small models that ship with it, in under a minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvjax.lm import LM
from kvjax.report import Report
from serve.generate import Result, generate

SOURCE, TARGET = "mini-s", "mini-m"
TOKENS = 64
PROMPTS = (
    '"""Read a configuration file."""\n\nimport json\nfrom pathlib import Path\n\n\ndef load(path):\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "import argparse\n\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser(",
)


def demo(
    load: Callable[[str], LM], *, tokens: int = TOKENS, show: Callable[[str], Any] = lambda text: None
) -> Report:
    """Run each act and report what it cost.

    Args:
      load: from a model's name to the model.
      tokens: to generate for each prompt.
      show: called with lines to read as they come.

    Returns: a report without bars; `facts` has the seconds of the whole.
    """  # fmt: skip
    began = time.perf_counter()
    report = Report("kvjax demo")
    lms = {}
    for name in (SOURCE, TARGET):
        lms[name] = load(name)
    report.facts["load_s"] = time.perf_counter() - began
    for act in (_generation,):
        act(lms, tokens, report, show)
    report.facts["total_s"] = time.perf_counter() - began
    return report


def _generation(lms: dict[str, LM], tokens: int, report: Report, show: Callable[[str], Any]) -> None:
    """Plain greedy decoding: the first call (with its compilation), then one that is timed."""
    for name, lm in lms.items():
        first = generate(lm, PROMPTS[0], max_new_tokens=tokens)
        report.row("first call", model=name, seconds=first.timings["total"], compiled=first.compiles)
        for i, prompt in enumerate(PROMPTS):
            result = generate(lm, prompt, max_new_tokens=tokens)
            if i == 0:
                show(f"{name}, {len(lm.tokenizer.encode(prompt)) if lm.tokenizer else 0} tokens of prompt:")
                show(prompt + result.text)
            report.row("generation", **_costs(name, i, result))


def _costs(name: str, index: int, result: Result) -> dict[str, Any]:
    answer, timings = result.generations[0], result.timings
    row: dict[str, Any] = {"model": name, "prompt": index, "prompt_tokens": answer.prompt_tokens}
    row |= {"tokens": len(answer.tokens), "prefill_ms": 1e3 * timings["prefill"]}
    row["tokens_per_s"] = len(answer.tokens) / timings["decode"]
    row["compiled"] = result.compiles
    return row
