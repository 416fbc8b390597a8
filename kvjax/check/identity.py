"""Claim (b): inside one program, tokens do not depend on drafts, on slots, or on the other rows.

The baseline of a width is plain decoding in the same program: drafts that are junk. Tokens must be equal, and on
CPU their log-probabilities bit for bit, which hangs on every logit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.check.drafters import Drafter, baseline
from kvjax.check.host import Setting
from kvjax.check.programs import Answer, Loaded, Programs, Request
from kvjax.check.prompts import known
from kvjax.check.report import Row
from kvjax.decode.sources import Stateless
from kvjax.report import Bar

MODES = (Setting(), Setting(0.7, top_p=0.9))
MIXED_VOCAB = 4096  # up to here a sort costs little, and greedy and sampled rows share batches and programs


@dataclasses.dataclass(frozen=True)
class Pair:
    """One request, answered by plain decoding of width 1 and by the baseline of a width."""

    request: Request
    width: int
    plain: Answer
    base: Answer


def batches(ids: Sequence[tuple[int, ...]], vocab: int, batch: int) -> list[list[Request]]:
    """Every prompt in every mode, in batches that one program serves."""
    each = [[Request(i, prompt, mode, seed=i + 1) for i, prompt in enumerate(ids)] for mode in MODES]
    if vocab <= MIXED_VOCAB:
        each = [[request for both in zip(*each) for request in both]]
    return [group[n : n + batch] for group in each for n in range(0, len(group), batch)]


def identity(
    programs: Programs, work: Sequence[Sequence[Request]], widths: Sequence[int], drafters: Sequence[Drafter],
    bitwise: bool,
) -> tuple[list[Row], list[Row], list[Bar], list[Pair]]:  # fmt: skip
    """Run everything. Returns the table by (width, drafter, mode), the rows that differ, bars, and the material of
    claim (c). bitwise: log-probabilities count."""
    vocab = known(programs.lm)
    rows: dict[tuple[int, str, str], Row] = {}
    differences: list[Row] = []
    pairs: list[Pair] = []
    mixed = any(len({r.setting for r in requests}) > 1 for requests in work)
    for number, requests in enumerate(work):
        settings = MODES if mixed else [r.setting for r in requests]
        sampler = programs.sampler(settings)
        laid: dict[str, tuple[list[int | None], Loaded]] = {}
        for how in ("same", *(d.rows for d in drafters)):
            if how not in laid:
                order = arrange(how, len(requests), programs.batch, number)
                laid[how] = order, programs.load([None if i is None else requests[i] for i in order])
        plain = programs.run(laid["same"][1], Stateless(), (), sampler)
        for width in widths:
            base = programs.run(laid["same"][1], baseline(width, vocab), (), sampler)
            found = zip(requests, plain, base)
            pairs += [
                Pair(request, width, a, b) for request, a, b in found if a is not None and b is not None
            ]
            for drafter in drafters:
                if drafter.widest is not None and width > drafter.widest:
                    continue
                order, loaded = laid[drafter.rows]
                texts = np.zeros((programs.batch, programs.size), np.int32)
                for slot, i in enumerate(order):
                    if i is not None and (answer := base[i]) is not None:
                        texts[slot] = answer.text
                answers = programs.run(loaded, drafter.make(width, vocab), drafter.params(texts), sampler)
                for slot, i in enumerate(order):
                    mine, want = answers[slot], None if i is None else base[i]
                    if i is None or mine is None or want is None:
                        continue
                    request = requests[i]
                    row = rows.setdefault(
                        (width, drafter.name, str(request.setting)), _blank(width, drafter, request)
                    )
                    differences += _compare(row, drafter, width, request, mine, want)
    table = [rows[key] for key in sorted(rows)]
    return table, differences, bars(table, widths, programs.new, bitwise), pairs


def arrange(how: str, count: int, batch: int, number: int) -> list[int | None]:
    """Which of `count` requests sits in each slot of a batch; None is an idle row."""
    if how == "same":
        order: list[int | None] = [*range(count)]
    elif how == "reversed":
        return [*[None] * (batch - count), *range(count)[::-1]]
    elif how == "alone":
        order = [None] * batch
        order[(3 * number + 1) % batch] = number % count
    else:
        raise ValueError(f"unknown arrangement of rows {how!r}; known: same, reversed, alone")
    return [*order, *[None] * (batch - len(order))]


def bars(table: Sequence[Row], widths: Sequence[int], new: int, bitwise: bool) -> list[Bar]:
    """Nothing may differ; and drafts must have been accepted, or nothing was shown."""
    fewest = {width: -(-new // width) for width in widths}
    oracle = [row for row in table if row["drafts"] == "oracle"]
    late = sum(row["rounds"] - row["rows"] * fewest[row["width"]] for row in oracle)
    made = [
        Bar("identity: rows whose tokens differ", sum(row["tokens differ"] for row in table), "<=", 0),
        Bar("identity: rows whose cache length is off", sum(row["cache off"] for row in table), "<=", 0),
        Bar("identity: rounds above the fewest, right drafts", late, "<=", 0),
    ]
    if bitwise:
        bits = sum(row["bits differ"] for row in table)
        made.insert(1, Bar("identity: rows whose log-probability bits differ", bits, "<=", 0))
    return made


def _blank(width: int, drafter: Drafter, request: Request) -> Row:
    names = ("rows", "tokens", "rounds", "accepted", "tokens differ", "bits differ", "cache off")
    return {"width": width, "drafts": drafter.name, "mode": str(request.setting), **dict.fromkeys(names, 0)}


def _compare(
    row: Row, drafter: Drafter, width: int, request: Request, mine: Answer, want: Answer
) -> list[Row]:
    same = np.array_equal(mine.tokens, want.tokens)
    bits = same and np.array_equal(mine.logprobs.view(np.uint32), want.logprobs.view(np.uint32))
    row["rows"] += 1
    row["tokens"] += len(mine.tokens)
    row["rounds"] += mine.rounds
    row["accepted"] += mine.accepted
    row["cache off"] += mine.filled != len(request.ids) + len(mine.tokens) - 1
    row["tokens differ"] += not same
    row["bits differ"] += not bits
    if same:
        return []
    at = first_difference(mine.tokens, want.tokens)
    return [{
        "width": width, "drafts": drafter.name, "mode": str(request.setting), "prompt": request.prompt,
        "position": len(request.ids) + at, "baseline": _token(want.tokens, at), "drafted": _token(mine.tokens, at),
    }]  # fmt: skip


def first_difference(a: np.ndarray, b: np.ndarray) -> int:
    """Index of the first unequal token (the shorter length, if one continues the other)."""
    n = min(len(a), len(b))
    unequal = np.flatnonzero(a[:n] != b[:n])
    return int(unequal[0]) if len(unequal) else n


def _token(tokens: np.ndarray, at: int) -> int | None:
    return int(tokens[at]) if at < len(tokens) else None
