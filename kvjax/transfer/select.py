"""Which source layers each target layer reads."""

from __future__ import annotations

import numpy as np

from kvjax.transfer.fit import _ridge, explained, levels
from kvjax.transfer.moments import Statistics

Selection = tuple[tuple[int, ...], ...]
HOW = ("explained", "matching")


def choose(how: str, stats: Statistics, k: int, *, ridge: float = 1e-3) -> Selection:
    """`by_explained_variance` or `matching`, by its name in `HOW`.

    Raises:
      ValueError: another name, or more layers than the source has.
    """
    if how not in HOW:
        raise ValueError(f"layers {how!r} is not one of {', '.join(HOW)}")
    if how == "matching":
        return matching(stats.source.layers, stats.target.layers, k)
    return by_explained_variance(stats, k, ridge=ridge)


def by_explained_variance(stats: Statistics, k: int, *, ridge: float = 1e-3) -> Selection:
    """The k source layers that alone explain most of each target layer (mean R^2 of keys and values)."""
    _check(k, stats.source.layers)
    order = np.argsort(-table(stats, ridge=ridge), axis=1, kind="stable")[:, :k]
    return tuple(tuple(sorted(int(i) for i in row)) for row in order)


def table(stats: Statistics, *, ridge: float = 1e-3) -> np.ndarray:
    """[target layers, source layers]: R^2 of each source layer alone, mean of keys and values."""
    found = np.zeros((stats.target.layers, stats.source.layers))
    for source in range(stats.source.layers):
        for channel in (0, 1):
            group, index = stats.inputs((source,), channel)
            xx = stats.xx[group][np.ix_(index, index)]
            level = levels(xx, stats.source.width, ridge) + 1e-12
            for layer in range(stats.target.layers):
                _, out = stats.outputs(layer, channel)
                xy = stats.xy[group][np.ix_(index, out)]
                found[layer, source] += explained(_ridge(xx, xy, level), xx, xy, stats.yy[layer, channel]) / 2
    return found


def matching(source: int, target: int, k: int = 1) -> Selection:
    """The source layer at the same relative depth, and its nearest neighbours up to k layers in all."""
    _check(k, source)
    chosen = []
    for layer in range(target):
        at = round(layer * (source - 1) / max(target - 1, 1))
        nearest = sorted(range(source), key=lambda i: (abs(i - at), i))[:k]
        chosen.append(tuple(sorted(nearest)))
    return tuple(chosen)


def _check(k: int, layers: int) -> None:
    if not 1 <= k <= layers:
        raise ValueError(f"k = {k}: the source has {layers} layers, so 1 <= k <= {layers}")
