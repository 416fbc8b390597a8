"""`kvjax check`: the three claims of exactness, proved on a given model.

(a) distribution  the accept rule emits the model's own distribution
(b) identity      inside one program tokens are the same with and without drafts, in any slot, beside any rows
(c) programs      between programs of different width every mismatch is a near-tie of the model itself
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax

from kvjax.check.across import TAU_LIMIT, across
from kvjax.check.distribution import NEW, PROMPTS, ROWS, calls, distribution, groups
from kvjax.check.drafters import DRAFTERS, Drafter, drafters_of
from kvjax.check.identity import batches, identity
from kvjax.check.programs import Programs, Step
from kvjax.check.prompts import known, prompts
from kvjax.check.report import ModelReport, Report
from kvjax.lm import LM

__all__ = ["DRAFTERS", "Drafter", "ModelReport", "Report", "check", "drafters_of"]

BATCH, SIZE = 8, 256
EDGE = {"float32": 1e-3, "bfloat16": TAU_LIMIT["bfloat16"]}


def check(
    lm: LM, *, count: int = 24, tokens: int = 32, widths: Sequence[int] = (2, 4, 8, 16), samples: int = 384,
    drafters: Sequence[Drafter] = DRAFTERS, progress: bool = False,
) -> ModelReport:  # fmt: skip
    """Check one model.

    Args:
      count: prompts, each answered greedily and sampled, `tokens` long. widths: programs compared, each >= 2.
      samples: rows drawn per prompt of claim (a), spread over its settings.
      progress: a bar on stderr.

    Raises:
      ValueError: an argument out of range, named.
    """
    widths = tuple(sorted(set(widths)))
    for name, value, least in (("prompts", count, 1), ("tokens", tokens, 1), ("samples", samples, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not widths or widths[0] < 2:
        raise ValueError(f"widths must be 2 or more (1 is what they are compared with), got {list(widths)}")
    began = time.perf_counter()
    model, size = lm.model, SIZE
    chunk = 64 if model.setting.attention.platform == "cpu" else 256
    while size < 2 * (tokens + 2 * widths[-1]):
        size *= 2
    longest = min(size - tokens - widths[-1], lm.config.max_positions - tokens)
    if longest < 2 * widths[-1]:
        raise ValueError(
            f"{lm.id} has {lm.config.max_positions} positions: too few for {tokens} tokens in blocks of {widths[-1]}"
        )
    ways = model.rules.data
    batch, many = (-(-n // ways) * ways for n in (BATCH, ROWS))

    ids = prompts(lm, count, longest)
    work = batches(ids, known(lm), batch)
    draws = 2 * PROMPTS * sum(calls(samples, group, many) for group in groups(known(lm)))
    drafted = sum(d.widest is None or width <= d.widest for width in widths for d in drafters)
    total = draws + len(work) * (1 + len(widths) + drafted) + len(widths)
    step, close = _progress(lm.id, total) if progress else (lambda: None, lambda: None)
    try:
        laws, first = distribution(
            Programs(lm, many, chunk, chunk, NEW, step), samples, EDGE[model.setting.dtype]
        )
        bitwise = jax.default_backend() == "cpu"
        programs = Programs(lm, batch, size, chunk, tokens, step)
        rows, differences, second, pairs = identity(programs, work, widths, drafters, bitwise)
        table, mismatches, third = across(lm, pairs, widths, batch, size, chunk, step)
    finally:
        close()
    about = {
        "prompts": len(ids), "answers": sum(row["rows"] for row in rows), "tokens": sum(row["tokens"] for row in rows),
        "dtype": model.setting.dtype, "mesh": None if model.rules.mesh is None else dict(model.rules.mesh.shape),
        "batch": batch, "size": size, "chunk": chunk, "widths": list(widths), "jax": jax.__version__,
        "device": jax.devices()[0].device_kind, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    names = ("distribution", "identity", "differences", "programs", "mismatches")
    tables = dict(zip(names, (laws, rows, differences, table, mismatches)))
    return ModelReport(lm.id, about, tables, [*first, *second, *third])


def _progress(name: str, total: int) -> tuple[Step, Step]:
    from tqdm import tqdm

    bar: Any = tqdm(total=total, desc=f"check {name}", unit="run", leave=False)
    return bar.update, bar.close
