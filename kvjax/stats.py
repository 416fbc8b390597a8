"""Intervals by resampling: what a mean over texts could have been with other texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

DRAWS = 2000
LEVEL = 0.95


def bootstrap(
    columns: Mapping[str, np.ndarray], statistic: Callable[[Mapping[str, np.ndarray]], Any], *,
    draws: int = DRAWS, seed: int = 0,
) -> tuple[float, float, float]:  # fmt: skip
    """(value, low, high): `statistic` of the columns' means over texts, and its 95 % interval when texts are drawn
    anew with replacement, the same ones for every column.

    Args:
      columns: name -> [N] float64, one value a text. statistic: from the means by name to a number.
    """
    matrix = np.stack([np.asarray(values, np.float64) for values in columns.values()])
    rng = np.random.default_rng(seed)
    count = matrix.shape[1]
    weights = rng.multinomial(count, np.full(count, 1 / count), size=draws) / count  # [draws, N]
    with np.errstate(divide="ignore", invalid="ignore"):  # a ratio may be undefined: NaN says so
        value = float(statistic(dict(zip(columns, matrix.mean(1), strict=True))))
        drawn = np.asarray(
            [statistic(dict(zip(columns, m, strict=True))) for m in weights @ matrix.T], np.float64
        )
    if not np.isfinite(drawn).all():
        return value, float("nan"), float("nan")
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, float(low), float(high)
