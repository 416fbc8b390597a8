"""Claim (c): between programs logits differ by rounding, and every mismatch of tokens must be a near-tie.

A mismatch counts at its first divergent position. It is explained iff a float32 referee puts the two tokens within
tau = 4 x the largest logit difference of the two programs on 64 neutral positions, itself bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.check import host
from kvjax.check.identity import Pair, first_difference
from kvjax.check.programs import KEY
from kvjax.check.prompts import known, prompts
from kvjax.check.report import Row
from kvjax.check.teacher import Teacher, neutral
from kvjax.decode.sampler import noise
from kvjax.lm import LM
from kvjax.report import Bar

FACTOR = 4.0
TAU_LIMIT = {"float32": 5e-4, "bfloat16": 2.0}
SPAN = 16  # neutral positions per row, at least


def across(
    lm: LM, pairs: Sequence[Pair], widths: Sequence[int], batch: int, size: int, chunk: int, step=lambda: None
) -> tuple[list[Row], list[Row], list[Bar]]:
    """Compare width 1 with each width. Returns the table by width, the mismatches, and bars."""
    bound = TAU_LIMIT[lm.model.setting.dtype]
    difference = drift(lm, widths, batch, size, chunk)
    mismatches: list[Row] = []
    table: list[Row] = []
    referee: Teacher | None = None
    for width in widths:
        mine = [pair for pair in pairs if pair.width == width]
        tau = FACTOR * difference[width]
        found = []
        for pair in mine:
            if not np.array_equal(pair.plain.tokens, pair.base.tokens):
                referee = Teacher.referee(lm) if referee is None else referee
                found.append(judge(lm, referee, pair, min(tau, bound)))
        explained = sum(row["explained"] for row in found)
        table.append({
            "width": width, "rows": len(mine), "tokens": sum(len(pair.base.tokens) for pair in mine),
            "logit difference": difference[width], "tau": tau, "mismatches": len(found), "explained": explained,
            "unexplained": len(found) - explained,
        })  # fmt: skip
        mismatches += found
        step()
    bars = [
        Bar("programs: unexplained mismatches", sum(row["unexplained"] for row in table), "<=", 0),
        Bar("programs: tau", max(row["tau"] for row in table), "<=", bound),
    ]
    return table, mismatches, bars


def drift(lm: LM, widths: Sequence[int], batch: int, size: int, chunk: int) -> dict[int, float]:
    """Per width the largest difference of a logit between its program and that of width 1, on neutral positions."""
    span = max(SPAN, *widths)
    cut = min(size // 2, size - span - max(widths))
    texts, prefix = np.zeros((batch, size), np.int32), np.zeros(batch, np.int32)
    long = [ids for ids in prompts(lm, 8 * batch, cut, seed=2) if len(ids) > span][:batch]
    for b in range(batch):
        ids = long[b % len(long)]
        texts[b, : len(ids)] = ids
        prefix[b] = len(ids) - span
    reference = neutral(lm, texts, prefix, 1, span, chunk)
    return {w: float(np.abs(neutral(lm, texts, prefix, w, span, chunk) - reference).max()) for w in widths}


def judge(lm: LM, referee: Teacher, pair: Pair, tau: float) -> Row:
    """The mismatch of one pair, with what the referee says about its two tokens."""
    request, a, b = pair.request, pair.plain, pair.base
    at = first_difference(a.tokens, b.tokens)
    position = len(request.ids) + at
    text = a.text.copy()
    text[position:] = 0
    logits = referee.at(text, position).astype(np.float64)
    z, margin = host.margins(logits, request.setting, known(lm))
    drawn = np.zeros(len(z))
    if request.setting.temperature > 0:
        drawn = _noise(request.seed, position, len(z))
    first, second = (int(x.tokens[at]) if at < len(x.tokens) else -1 for x in (a, b))
    gap = host.gap(z, margin, drawn, first, second) if min(first, second) >= 0 else float("inf")
    best = np.sort(np.where(margin >= 0, z + drawn, -np.inf))[-2:]
    return {
        "width": pair.width, "mode": str(request.setting), "prompt": request.prompt, "position": position,
        "width 1": first, "width W": second, "gap": gap, "top-2 gap": float(best[1] - best[0]), "tau": tau,
        "explained": gap <= tau,
    }  # fmt: skip


def _noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """[V] float64: the noise that the sampler adds for this seed and position."""
    key = jax.random.wrap_key_data(jnp.asarray(KEY))
    drawn = noise(key, jnp.asarray([seed], jnp.uint32), jnp.asarray([[position]], jnp.int32), vocab)
    return np.asarray(drawn[0, 0], np.float64)
