"""Claim (a): with drafts, the emitted tokens follow the model's own distribution.

Many seeds of a few prompts emit three tokens each, mixed settings in one batch. Drafts are the row's own plain
answer, or that with one token wrong, so that full acceptance and each place of rejection occur. The law of every
token given those before it comes from a teacher-forced forward without a cache, filtered in float64 on the host.

  first    counts of the first token against that law
  next     ranks of the 2nd and 3rd token under their laws (randomised to be uniform)
  repeats  how often a token equals the one before it: noise used twice shows here, most of all when hot
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from kvjax.check import host, stats
from kvjax.check.host import Setting
from kvjax.check.identity import MIXED_VOCAB
from kvjax.check.programs import Programs, Request
from kvjax.check.prompts import known, prompts
from kvjax.check.report import Row
from kvjax.check.teacher import Teacher
from kvjax.decode.sources import Oracle, Stateless
from kvjax.lm import LM
from kvjax.report import Bar

PROMPTS, LENGTH, NEW, WIDTH, ROWS = 3, 13, 3, 4, 32
ALARM = 1e-3  # chance that correct code fails one check: Bonferroni over its tests
PLAIN = (Setting(1.0), Setting(3.0), Setting(1.5, min_p=0.02))
SORTED = (Setting(0.7, top_p=0.9), Setting(1.0, top_k=20), Setting(1.3, top_k=50, top_p=0.95, min_p=0.01))


def groups(vocab: int) -> tuple[tuple[Setting, ...], ...]:
    """Settings by program: those that need a sort apart, unless the vocabulary is so small that it costs little."""
    return ((*PLAIN, *SORTED),) if vocab <= MIXED_VOCAB else (PLAIN, SORTED)


@dataclasses.dataclass
class Seen:
    """Evidence on one setting: per prompt the first tokens and their law; ranks by position; repeats and chances."""

    first: dict[int, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    ranks: dict[int, list[float]] = dataclasses.field(default_factory=lambda: {1: [], 2: []})
    repeats: dict[int, list[bool]] = dataclasses.field(default_factory=lambda: {1: [], 2: []})
    chances: dict[int, list[float]] = dataclasses.field(default_factory=lambda: {1: [], 2: []})


def distribution(programs: Programs, samples: int, edge: float) -> tuple[list[Row], list[Bar]]:
    """Draw `samples` rows per prompt, spread over the settings, rounded up to whole batches, and test them.

    programs: a batch for `ROWS` rows of `NEW` tokens. edge: a token this near a filter's edge, in logits / T, may
    fall on either side of it in float32; it is left out.
    """
    lm, limit = programs.lm, known(programs.lm)
    seen = {setting: Seen() for setting in (*PLAIN, *SORTED)}
    outside, accepted, rng = 0, 0, np.random.default_rng(1)
    seeds = itertools.count(1)  # none twice: rows that share noise would not be independent
    for prompt, ids in enumerate(chosen(lm)):
        loaded = programs.load([Request(prompt, ids, Setting())] * programs.batch)
        for group in groups(limit):
            sampler = programs.sampler(group)
            for n in range(calls(samples, group, programs.batch)):
                settings = [
                    group[(n * programs.batch + b) // WIDTH % len(group)] for b in range(programs.batch)
                ]
                rows = [Request(prompt, ids, setting, seed=next(seeds)) for setting in settings]
                plain = programs.run(loaded, Stateless(), (), sampler, rows)
                texts = np.stack([a.text for a in plain if a is not None])
                answers = programs.run(
                    loaded, Oracle(width=WIDTH), spoil(texts, len(ids), limit), sampler, rows
                )
                accepted += sum(a.accepted for a in answers if a is not None)
                told = np.stack([a.text[: LENGTH + NEW] for a in answers if a is not None])
                told[:, len(ids) + NEW :] = 0
                logits = own(lm).logits(told, [len(ids) - 1] * len(told), NEW)
                for row, text, scores in zip(rows, told, logits):
                    outside += take(seen[row.setting], row, text[len(ids) :][:NEW], scores, limit, edge, rng)
    table = tests(seen)
    worst = min(1.0, min(row["p"] for row in table) * len(table))
    return table, [
        Bar("distribution: smallest p-value times number of tests", worst, ">=", ALARM),
        Bar("distribution: tokens outside the filters", outside, "<=", 0),
        Bar("distribution: accepted drafts", accepted, ">=", 1),
    ]


def calls(samples: int, group: tuple[Setting, ...], batch: int) -> int:
    """Batches per prompt that give `group` its share of `samples` rows."""
    return -(-samples * len(group) // (len((*PLAIN, *SORTED)) * batch))


def chosen(lm: LM) -> list[tuple[int, ...]]:
    """A few prompts of different kinds, cut short."""
    return prompts(lm, 4 * PROMPTS, LENGTH)[::4]


def own(lm: LM) -> Teacher:
    """The model itself, teacher-forced, in its own precision."""
    return Teacher(lm.model, lm.params)


def spoil(texts: np.ndarray, length: int, limit: int) -> np.ndarray:
    """Drafts: row b's own answer, with token b % 4 - 1 behind the prompt wrong (none where that is -1)."""
    drafts = texts.copy()
    for b in range(len(texts)):
        if b % WIDTH:
            at = length + b % WIDTH - 1
            drafts[b, at] = (drafts[b, at] + 1) % limit
    return drafts


def take(
    seen: Seen,
    row: Request,
    tokens: np.ndarray,
    logits: np.ndarray,
    limit: int,
    edge: float,
    rng: np.random.Generator,
) -> int:
    """Add one row's tokens [NEW], given its logits [NEW, V], to the evidence; the number outside the filters."""
    for j, token in enumerate(tokens):
        z, margin = host.margins(logits[j], row.setting, limit)
        if margin[token] < 0:
            return int(margin[token] < -edge)
        p = host.probabilities(z, margin)
        if j == 0:
            counts, _ = seen.first.setdefault(row.prompt, (np.zeros(len(p)), p))
            counts[token] += 1
            continue
        likelier = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
        seen.ranks[j].append(likelier + rng.random() * p[token])
        seen.repeats[j].append(bool(token == tokens[j - 1]))
        seen.chances[j].append(float(p[tokens[j - 1]]))
    return 0


def tests(seen: dict[Setting, Seen]) -> list[Row]:
    """All tests of all settings."""
    rows: list[Row] = []

    def add(test: str, setting: Setting, samples: int, statistic: float, dof: int | None, p: float) -> None:
        row = {
            "test": test,
            "setting": str(setting),
            "samples": samples,
            "statistic": statistic,
            "dof": dof,
            "p": p,
        }
        rows.append(row)

    for setting, found in seen.items():
        for prompt, (counts, law) in found.first.items():
            add(
                f"first, prompt {prompt}",
                setting,
                int(counts.sum()),
                *stats.goodness(counts, law * counts.sum()),
            )
        for j, ranks in found.ranks.items():
            add(f"next, {j} to {j + 1}", setting, len(ranks), *stats.uniform(np.asarray(ranks)))
        for j, repeats in found.repeats.items():
            p = stats.hits(sum(repeats), np.asarray(found.chances[j]))
            add(f"repeats, {j} to {j + 1}", setting, len(repeats), float(sum(repeats)), None, p)
    return rows
