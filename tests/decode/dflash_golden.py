"""The golden drafters: a tiny target, a drafter, and what a reference implementation computed with them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import kvjax
from kvjax.checkpoints.drafters import load_drafter
from kvjax.decode.drafts import drafter_params
from kvjax.lm import LM, Drafter
from kvjax.models.drafter import DrafterParams

ROOT = Path(__file__).parents[1] / "golden"
PUBLIC = ("dflash-a", "dflash-b", "dflash-c")  # by the public reference implementation
NAMES = tuple(sorted(path.name for path in ROOT.glob("dflash-*")))


@dataclasses.dataclass(frozen=True)
class Round:
    """start: position of the anchor; taps [c, T*D]: features new to the drafter; hidden and logits [B, ...], row 0
    unused; block [B]: anchor and drafts; verify [B, V]."""

    start: int
    taps: np.ndarray
    hidden: np.ndarray
    logits: np.ndarray
    block: np.ndarray
    verify: np.ndarray


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, the greedy answer, and how many tokens each round committed after the answer's first."""

    ids: list[int]
    output: list[int]
    committed: list[int]
    rounds: list[Round]

    @property
    def begun(self) -> list[int]:
        """The prompt with the first token of the answer, which the reference takes from its prefill: the anchor of
        its first round."""
        return [*self.ids, self.output[0]]

    @property
    def emitted(self) -> list[int]:
        """`committed` without what the last round has over the answer's length."""
        end = len(self.output) - 1
        stops = [min(n, end) for n in np.cumsum(self.committed).tolist()]
        return [b - a for a, b in zip([0, *stops], stops) if b > a]


@functools.cache
def target(name: str) -> LM:
    return kvjax.load(ROOT / name / "target")


@functools.cache
def drafter(name: str) -> Drafter:
    return load_drafter(ROOT / name / "drafter", target(name))


@functools.cache
def prompts(name: str) -> list[Prompt]:
    entries = json.loads((ROOT / name / "expected.json").read_text())["prompts"]
    tensors = load_file(ROOT / name / "rounds.safetensors")
    found = []
    for i, entry in enumerate(entries):
        rounds = []
        while f"p{i}.r{len(rounds)}.start" in tensors:
            part = lambda what: tensors[f"p{i}.r{len(rounds)}.{what}"][0]  # noqa: B023, E731
            names = ("taps", "draft_hidden", "draft_logits", "block", "verify_logits")
            rounds.append(Round(int(part("start")), *map(part, names)))
        found.append(Prompt(entry["ids"], entry["output"], entry["committed_per_round"], rounds))
    return found


def bound(name: str) -> DrafterParams:
    """The arrays that golden drafter runs on."""
    return drafter_params(drafter(name), target(name))
