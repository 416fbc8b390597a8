"""`kvjax demo`: what this project does, on the small models that ship with it, in under a minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.decode import loop
from kvjax.lm import LM
from kvjax.report import Report
from kvjax.resources import packaged_maps
from kvjax.transfer.repair import Repair
from serve.generate import Result, generate
from serve.handoff import Transfer, handoff

SOURCE, TARGET = "mini-s", "mini-m"
MAP = f"{SOURCE}-to-{TARGET}"
LONG = 900  # tokens of the long prompt, which is source code of this project
TAIL = 32
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
    for act in (_generation, _handoff):
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


def _handoff(lms: dict[str, LM], tokens: int, report: Report, show: Callable[[str], Any]) -> None:
    """A long prompt that the target reads itself, that the source reads for it, and the same taken back where the
    target disagrees. Each twice: the first call compiles."""
    if MAP not in packaged_maps():
        report.facts["hand-off"] = "left out: no map is installed"
        return
    source, target = (lms[name] for name in (SOURCE, TARGET))
    transfer = Transfer.load(MAP, source, target)
    assert target.tokenizer is not None
    path = Path(loop.__file__)
    prompt = target.tokenizer.encode(path.read_text("utf-8"))[:LONG]
    show(f"{len(prompt)} tokens of {path.name}, which end with {target.tokenizer.decode(prompt[-16:])!r}:")
    options: dict[str, Any] = {"max_new_tokens": tokens, "stop_ids": []}
    hand = {"repair": Repair(TAIL), **options}
    ways: dict[str, Callable[[], Result]] = {
        f"{TARGET} reads": lambda: generate(target, [prompt], **options),
        f"{SOURCE} reads": lambda: handoff(source, transfer, target, [prompt], **hand),
        f"{SOURCE} reads, exact": lambda: handoff(source, transfer, target, [prompt], exact=True, **hand),
    }
    native: tuple[int, ...] = ()
    for way, answer in ways.items():
        answer()  # compiles
        result = answer()
        tokens_of, timings, course = result[0].tokens, result.timings, result.course
        native = native or tokens_of
        first = course.first_provisional_s if course else timings["total"] - timings["decode"]
        report.row(
            "hand-off", way=way, prompt_tokens=len(prompt), first_token_ms=1e3 * first,
            source_reads_ms=1e3 * timings.get("read", 0.0), map_ms=1e3 * timings.get("map", 0.0),
            target_reads_ms=1e3 * timings.get("prefill", 0.0),
            same_tokens=sum(a == b for a, b in zip(tokens_of, native, strict=True)) / len(native),
            taken_back=sum(course.retracted) if course else "",
        )  # fmt: skip
        show(f"{way}: {result.text[:100]!r}")


def _costs(name: str, index: int, result: Result) -> dict[str, Any]:
    answer, timings = result.generations[0], result.timings
    row: dict[str, Any] = {"model": name, "prompt": index, "prompt_tokens": answer.prompt_tokens}
    row |= {"tokens": len(answer.tokens), "prefill_ms": 1e3 * timings["prefill"]}
    row["tokens_per_s"] = len(answer.tokens) / timings["decode"]
    row["compiled"] = result.compiles
    return row
