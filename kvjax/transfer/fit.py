"""Closed-form maps from moments: every choice of layers, heads and ridge strength is a sub-matrix solve in float64.

The ridge strength is relative: `levels` are added to the diagonal of the inputs' covariance (not of the sum over rows),
so it means the same for any number of rows, inputs and scale, and for keys as for values, whose variance is often far
less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize

from kvjax.transfer.geometry import CHANNELS
from kvjax.transfer.hidden import HiddenMap
from kvjax.transfer.mapper import LayerMap, Mapper, converted
from kvjax.transfer.moments import CalibrationError, HiddenStatistics, Statistics

log = logging.getLogger("kvjax")
METHODS = ("ridge", "recolour")


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """ridge: strength, relative (see the module). method: "ridge", or "recolour", which matches the target's mean and
    covariance (an orthogonal Procrustes between whitened features, arXiv 2609.32259) where ridge shrinks variance.
    local: each target head reads one source head only (arXiv 2609.00891)."""

    ridge: float = 1e-3
    method: str = "ridge"
    local: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is not one of {', '.join(METHODS)}")
        if not self.ridge >= 0:
            raise ValueError(f"ridge must not be negative, got {self.ridge}")


def fit(stats: Statistics, layers: tuple[tuple[int, ...], ...], config: FitConfig = FitConfig()) -> Mapper:
    """The map from source layers `layers[l]` to each target layer l.

    Raises:
      CalibrationError: fewer rows than inputs of one solve (use fewer layers, or local), or singular moments at
        ridge 0.
    """
    maps = []
    for layer, chosen in enumerate(layers):
        heads = assign_heads(stats, layer, chosen) if config.local else None
        parts = []
        for channel in (0, 1):
            weight, mean = _layer(stats, layer, chosen, channel, heads, config)
            parts.append((weight, mean))
        (key, key_mean), (value, value_mean) = parts
        bias = [_target_mean(stats, layer, channel) for channel in (0, 1)]
        leaves = [jnp.asarray(z, jnp.float32) for z in (key, value, key_mean, value_mean, *bias)]
        leaves.append(None if heads is None else jnp.asarray(heads, jnp.int32))
        maps.append(LayerMap(*leaves))
    return Mapper(tuple(maps), stats.source, stats.target, layers, stats.joint)


def _target_mean(stats: Statistics, layer: int, channel: int) -> np.ndarray:
    group, out = stats.outputs(layer, channel)
    return stats.mean_y[group, out].reshape(stats.target.kv_heads, stats.target.head_dim)


def _layer(stats, layer, chosen, channel, heads, config) -> tuple[np.ndarray, np.ndarray]:
    """(weight [K, H, P], mean [J, k, h]); P = J k h, or J h of a head-local map."""
    source, target = stats.source, stats.target
    group, index = stats.inputs(chosen, channel)
    _, out = stats.outputs(layer, channel)
    grid = index.reshape(-1, source.kv_heads, source.head_dim)
    mean = stats.mean_x[group, index].reshape(grid.shape)
    if heads is None:
        cut = index, out, slice(None)
        weight = _solve(stats, group, *cut, layer, channel, config)
        return weight.reshape(target.kv_heads, target.head_dim, -1), mean
    parts = []
    for head in range(target.kv_heads):
        own = slice(head * target.head_dim, (head + 1) * target.head_dim)
        weight = _solve(stats, group, grid[:, heads[head]].reshape(-1), out[own], own, layer, channel, config)
        parts.append(weight)
    return np.stack(parts), mean


def _solve(stats, group, index, out, own, layer, channel, config) -> np.ndarray:
    """[outputs, inputs]: the map of centred inputs to centred outputs."""
    xy = stats.xy[group][np.ix_(index, out)]
    with _naming(stats, index, f"target layer {layer}, {CHANNELS[channel]}s"):
        xx, level = _inputs(stats, group, index, _block(stats, config.local), config.ridge)
        if config.method == "ridge":
            return _ridge(xx, xy, level)
        yy = stats.yy[layer, channel][own, own]
        return _recolour(xx, xy, yy, level)


def fit_hidden(stats: Statistics, layers: tuple[int, ...], *, ridge: float = 1e-3) -> HiddenMap:
    """The map from these source layers to the hidden state in `stats`.

    Raises:
      CalibrationError: no hidden state was collected; fewer rows than inputs, or singular moments at ridge 0.
    """
    part = _hidden(stats)
    _, index = stats.inputs(layers, 0)
    with _naming(stats, index, f"hidden state entering target layer {part.entering}"):
        xx, level = _inputs(stats, 0, index, _block(stats), ridge)
        weight = _ridge(xx, part.xh[index], level)
    grid = (len(index) // stats.source.width, stats.source.kv_heads, stats.source.head_dim)
    single = functools.partial(jnp.asarray, dtype=jnp.float32)
    mean = stats.mean_x[0, index].reshape(grid)
    return HiddenMap(
        single(weight.reshape(-1, *grid)), single(mean), single(part.mean), part.entering, layers
    )


def held_out_hidden(part: HiddenMap, stats: Statistics) -> float:
    """R^2 of the mapped hidden state on other data; see `held_out`."""
    truth = _hidden(stats)
    _, index = stats.inputs(part.layers, 0)
    weight, mean, bias = (np.asarray(z, np.float64) for z in (part.weight, part.mean, part.bias))
    weight = weight.reshape(len(bias), -1)
    total = truth.variance.sum()
    off = truth.mean - bias - weight @ (stats.mean_x[0, index] - mean.reshape(-1))
    xx = stats.xx[0][np.ix_(index, index)]
    return explained(weight, xx, truth.xh[index], np.full((1, 1), total)) - float(off @ off / total)


def _hidden(stats: Statistics) -> HiddenStatistics:
    if stats.hidden is None:
        raise CalibrationError("these moments hold no hidden state; collect them with `hidden`")
    return stats.hidden


def levels(xx: np.ndarray, block: int, ridge: float) -> np.ndarray:
    """[P]: what is added to the diagonal of a covariance of P inputs: `ridge` times the mean variance of an input's own
    block (one kind of row of one source layer), of which each `block` inputs in turn are one."""
    return np.repeat(ridge * np.diag(xx).reshape(-1, block).mean(1), block)


def _block(stats: Statistics, local: bool = False) -> int:
    return stats.source.head_dim if local else stats.source.width


def _inputs(
    stats: Statistics, group: int, index: np.ndarray, block: int, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    """(covariance of these inputs, the ridge added to its diagonal)."""
    xx = stats.xx[group][np.ix_(index, index)]
    return xx, levels(xx, block, ridge)


@contextlib.contextmanager
def _naming(stats: Statistics, index: np.ndarray, where: str) -> Iterator[None]:
    """A solve of these inputs, whose faults are told with what is being fitted."""
    if stats.rows < len(index):
        raise CalibrationError(
            f"{where}: {stats.rows} rows of calibration for {len(index)} inputs; use more text, fewer source layers,"
            " or head-local maps"
        )
    try:
        yield
    except np.linalg.LinAlgError as error:
        raise CalibrationError(f"{where}: the moments are singular ({error}); use a larger ridge") from None


def _ridge(xx: np.ndarray, xy: np.ndarray, level: np.ndarray) -> np.ndarray:
    factor = scipy.linalg.cho_factor(xx + np.diag(level), lower=True)
    return scipy.linalg.cho_solve(factor, xy).T


def _recolour(xx: np.ndarray, xy: np.ndarray, yy: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Cyy^(1/2) Q P^(-1/2): P is the covariance of the ridge prediction, Q the closest orthogonal map (to 1) between
    the whitened prediction and the whitened target. So what is mapped has the target's covariance."""
    weight = _ridge(xx, xy, level)
    predicted = weight @ xx @ weight.T
    cross = weight @ xy  # covariance of prediction and target
    floor = level.mean() + 1e-12 * np.trace(yy) / len(yy)
    whiten, root = _power(predicted, -0.5, floor), _power(yy, 0.5, 0.0)
    u, _, vt = np.linalg.svd(_power(yy, -0.5, floor) @ cross.T @ whiten)
    return root @ (u @ vt) @ whiten @ weight


def _power(symmetric: np.ndarray, exponent: float, floor: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(symmetric)
    return (vectors * (np.maximum(values, 0) + floor) ** exponent) @ vectors.T


def assign_heads(stats: Statistics, layer: int, chosen: tuple[int, ...]) -> np.ndarray:
    """[K] source head for each target head: the assignment with the most explained variance (mean of both channels),
    one to one where the source has as many heads, otherwise each its best."""
    source, target = stats.source, stats.target
    score = np.zeros((target.kv_heads, source.kv_heads))
    for channel in (0, 1):
        group, index = stats.inputs(chosen, channel)
        _, out = stats.outputs(layer, channel)
        grid = index.reshape(-1, source.kv_heads, source.head_dim)
        for head in range(target.kv_heads):
            own = slice(head * target.head_dim, (head + 1) * target.head_dim)
            yy = stats.yy[layer, channel][own, own]
            for other in range(source.kv_heads):
                part = grid[:, other].reshape(-1)
                xx, xy = stats.xx[group][np.ix_(part, part)], stats.xy[group][np.ix_(part, out[own])]
                level = levels(xx, source.head_dim, 1e-3) + 1e-12
                score[head, other] += explained(_ridge(xx, xy, level), xx, xy, yy) / 2
    if source.kv_heads >= target.kv_heads:
        return scipy.optimize.linear_sum_assignment(-score)[1]
    return score.argmax(1)


def explained(weight: np.ndarray, xx: np.ndarray, xy: np.ndarray, yy: np.ndarray) -> float:
    """R^2 of a centred linear map on the data behind these covariances: 1 - E|y - Wx|^2 / E|y|^2. Of yy only the trace
    counts."""
    residual = np.trace(yy) - 2 * np.sum(weight.T * xy) + np.sum((weight @ xx) * weight)
    return float(1 - residual / np.trace(yy))


def held_out(mapper: Mapper, stats: Statistics) -> np.ndarray:
    """[L, 2] R^2 of `mapper`'s keys and values on other data: `stats` come from text it was not fitted on, and the
    map's own means are used, so a shift of the mean counts as error."""
    mapper, result = converted(mapper, "float32"), np.zeros((stats.target.layers, 2))
    for layer, (part, chosen) in enumerate(zip(mapper.maps, mapper.layers, strict=True)):
        heads = None if part.heads is None else np.asarray(part.heads)
        for channel in (0, 1):
            weight, mean, bias = [
                np.asarray(z, np.float64)
                for z in (
                    (part.key, part.key_mean, part.key_bias),
                    (part.value, part.value_mean, part.value_bias),
                )[channel]
            ]
            group, index = stats.inputs(chosen, channel)
            _, out = stats.outputs(layer, channel)
            full = dense(weight, heads, mean.shape)
            xx, xy = stats.xx[group][np.ix_(index, index)], stats.xy[group][np.ix_(index, out)]
            yy = stats.yy[layer, channel]
            offset = full @ (stats.mean_x[group, index] - mean.reshape(-1)) + bias.reshape(-1)
            off = stats.mean_y[group, out] - offset
            result[layer, channel] = explained(full, xx, xy, yy) - off @ off / np.trace(yy)
    return result


def dense(weight: np.ndarray, heads: np.ndarray | None, grid: tuple[int, ...]) -> np.ndarray:
    """[K H, J k h]: a layer's weight with the zeros of a head-local one written out."""
    if heads is None:
        return weight.reshape(weight.shape[0] * weight.shape[1], -1)
    k, h, _ = weight.shape
    full = np.zeros((k, h, *grid), weight.dtype)
    for head in range(k):
        full[head, :, :, heads[head]] = weight[head].reshape(h, grid[0], grid[2])
    return full.reshape(k * h, -1)
