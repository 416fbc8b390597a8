"""What the sampler should do, written again in float64 numpy, one distribution at a time."""

from __future__ import annotations

import numpy as np


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
