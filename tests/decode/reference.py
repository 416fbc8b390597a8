"""What the sampler should do, written again in float64 numpy, and the test that judges draws."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2


def filtered_probabilities(
    logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution a sampled row draws from: [V] float64.

    Temperature, then the top_k likeliest, then the smallest set of these that holds top_p of their probability,
    then those of at least min_p times the likeliest. Ids tied at an edge stay.
    """
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max())
    if top_k and top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        held, edge = 0.0, 0.0
        for i in order:
            edge = p[i]
            held += p[i]
            if held >= top_p:
                break
        p[p < edge] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square of counts against a distribution; cells that expect fewer than 5 are pooled. 0 if something
    impossible was drawn."""
    counts, expected = counts.ravel(), probabilities.ravel() * counts.sum()
    if counts[expected == 0].sum():
        return 0.0
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5:  # too little for a cell of its own
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))
