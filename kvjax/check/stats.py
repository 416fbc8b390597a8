"""The few statistics the check needs, exact and on the host."""

from __future__ import annotations

import math

import numpy as np

SMALLEST_BIN = 5.0


def chi_square_tail(x: float, dof: int) -> float:
    """P(chi-square with `dof` >= 1 degrees of freedom > x), by the finite sums for integer dof."""
    if x <= 0:
        return 1.0
    half = x / 2
    i = dof % 2 / 2
    total = math.erfc(math.sqrt(half)) if dof % 2 else 0.0
    term = math.exp(-half) * half**i / math.gamma(i + 1)
    while i < dof / 2:
        total += term
        i += 1
        term *= half / i
    return min(total, 1.0)


def goodness(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int, float]:
    """Pearson's test: (statistic, degrees of freedom, p-value). Neighbouring bins are joined, from the largest
    expectation down, until each expects at least 5; fewer than two such bins say nothing (p = 1)."""
    order = np.argsort(-expected, kind="stable")
    bins: list[list[float]] = []
    seen = hoped = 0.0
    for i in order:
        seen += counts[i]
        hoped += expected[i]
        if hoped >= SMALLEST_BIN:
            bins.append([seen, hoped])
            seen = hoped = 0.0
    if (seen or hoped) and bins:
        bins[-1][0] += seen
        bins[-1][1] += hoped
    if len(bins) < 2:
        return 0.0, 0, 1.0
    x = sum((a - b) ** 2 / b for a, b in bins)
    return x, len(bins) - 1, chi_square_tail(x, len(bins) - 1)


def uniform(values: np.ndarray, bins: int = 16) -> tuple[float, int, float]:
    """Pearson's test that values in [0, 1) are uniform."""
    bins = int(max(2, min(bins, len(values) / SMALLEST_BIN)))
    counts = np.bincount(np.minimum((np.asarray(values) * bins).astype(int), bins - 1), minlength=bins)
    return goodness(counts.astype(float), np.full(bins, len(values) / bins))


def hits(count: int, chances: np.ndarray) -> float:
    """Two-sided p-value of `count` successes among independent trials with these chances (exact)."""
    law = np.ones(1)
    for p in chances:
        law = np.append(law * (1 - p), 0.0) + np.append(0.0, law * p)
    return float(min(1.0, 2 * min(law[: count + 1].sum(), law[count:].sum())))
