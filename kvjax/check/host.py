"""Sampling on the host in float64, written apart from the device's: probabilities, and how near a call was.

Margins and gaps are in units of logits / T. A perturbation of every logit / T by at most e closes a gap of 2e
between two tokens, and moves the log-odds of any set's probability by at most 2e: the same scale, so the three
ways in which a choice can flip (another token ahead, top-k or min-p edge, top-p edge) compare with one bound.
"""

from __future__ import annotations

import dataclasses

import numpy as np

Vector = np.ndarray


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sampling parameters of one row; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        parts = [f"T={self.temperature:g}"]
        parts += [f"top_k={self.top_k}"] if self.top_k else []
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"min_p={self.min_p:g}"] if self.min_p else []
        return " ".join(parts)


def margins(logits: Vector, setting: Setting, limit: int) -> tuple[Vector, Vector]:
    """(z, margin), each [V] float64: z = logits / T, margin >= 0 where the filters let a token through, and its
    distance from the edge. Ids at and beyond `limit` are never chosen."""
    z = np.asarray(logits, np.float64) / (setting.temperature or 1.0)
    z = np.where(np.arange(len(z)) < limit, z, -np.inf)
    margin = np.where(np.isfinite(z), np.inf, -np.inf)
    if setting.temperature == 0:
        return z, margin
    order = np.argsort(-z, kind="stable")
    ordered, edge = z[order], np.full(len(z), np.inf)
    if 0 < setting.top_k < limit:
        k = setting.top_k
        edge[:k] = ordered[:k] - ordered[k]
        edge[k:] = ordered[k:] - ordered[k - 1]
    if setting.top_p < 1:
        alive = edge >= 0
        p = np.where(alive, np.exp(ordered - ordered[0]), 0.0)
        p /= p.sum()
        before = np.clip(np.cumsum(p) - p, 0.0, 1.0)
        with np.errstate(divide="ignore"):
            mass = np.log(setting.top_p / (1 - setting.top_p)) - (np.log(before) - np.log1p(-before))
        inside = alive & (before < setting.top_p)
        last = int(np.flatnonzero(inside)[-1])
        after = ordered[last + 1] if last + 1 < len(z) else -np.inf
        within = np.minimum(mass, ordered - after)
        without = np.maximum(np.minimum(mass, 0), ordered - ordered[last])
        nucleus = np.where(inside, within, without)
        edge = np.where(alive, np.minimum(edge, nucleus), edge)
    margin[order] = np.minimum(margin[order], edge)
    if setting.min_p > 0:
        margin = np.minimum(margin, z - (ordered[0] + np.log(setting.min_p)))
    return z, margin


def probabilities(z: Vector, margin: Vector) -> Vector:
    """[V] float64: what a token is drawn with."""
    p = np.where(margin >= 0, np.exp(z - z.max()), 0.0)
    return p / p.sum()


def gap(z: Vector, margin: Vector, noise: Vector, first: int, second: int) -> float:
    """How far the referee is from choosing either token: 0 is a dead heat. z, margin, noise: [V] (noise 0 for
    greedy). For two tokens inside the filters, one of them on top, it is the difference of z + noise."""
    noisy = z + noise
    return max(_cost(noisy, margin, first), _cost(noisy, margin, second))


def _cost(noisy: Vector, margin: Vector, token: int) -> float:
    """What must be conceded for `token` to win: its own way in, and against each rival the cheaper of overtaking
    it and seeing it filtered out."""
    if not np.isfinite(noisy[token]):
        return float("inf")
    ahead = np.maximum(noisy - noisy[token], 0)
    rivals = np.minimum(np.maximum(margin, 0), ahead)
    return float(max(-margin[token], rivals.max(), 0.0))
