"""Second moments of both models' features over calibration text: one pass, then every fit is a sub-matrix solve.

Sums are float32 products of highest precision about a shift (the mean of the first batch), so that a mean of 354, as
Qwen2.5's key biases have, does not eat the digits of a variance of 1; `statistics` turns them into float64 on the host.
Bounded memory: nothing grows with the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.transfer.geometry import Geometry
from kvjax.typing import Array, Float


class CalibrationError(ValueError):
    """Calibration data or moments that no map can be fitted from; the message says why."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenMoments:
    """Sums of the hidden state, D wide, that enters target layer `entering`, about `shift`. h, hh [D]: it and its
    square; xh [P, D]: against all inputs of the one group."""

    shift: jax.Array
    h: jax.Array
    xh: jax.Array
    hh: jax.Array
    entering: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over rows, about `shift`. P = L 2 K H of the source, Q of the target, C channel groups.

    joint: one group (C = 1) whose inputs are keys and values together; otherwise two, in which keys are explained
    by keys and values by values, at a quarter of the memory.

    rows, skipped: float32 counts of rows taken in, and of rows with a NaN or infinity, left out.
    x [C, P/C], y [C, Q/C]: sums; xx [C, P/C, P/C]; xy [C, P/C, Q/C]; yy [L, 2, W, W] with W = K H of the target.
    """

    rows: jax.Array
    skipped: jax.Array
    shift_x: jax.Array
    shift_y: jax.Array
    x: jax.Array
    y: jax.Array
    xx: jax.Array
    xy: jax.Array
    yy: jax.Array
    hidden: HiddenMoments | None = None


def memory(source: Geometry, target: Geometry, *, joint: bool, hidden: tuple[int, int] | None = None) -> int:
    """Bytes of the moments of a pair."""
    shapes = abstract(source, target, joint=joint, hidden=hidden)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def abstract(
    source: Geometry, target: Geometry, *, joint: bool, hidden: tuple[int, int] | None = None
) -> Moments:
    """Shapes of the moments of a pair (float32). hidden: (layer, D) to take in what enters that target layer too.

    Raises:
      CalibrationError: `hidden` of a layer there is not, or without `joint`.
    """
    if hidden is not None:
        if not joint:
            raise CalibrationError(
                "a hidden state is explained by keys and values together: moments must be joint"
            )
        if not 0 < hidden[0] < target.layers:
            raise CalibrationError(
                f"hidden state entering layer {hidden[0]}: the target has layers 0..{target.layers - 1}, and what"
                " enters layer 0 is the embedding"
            )
    groups = 1 if joint else 2
    p, q = (2 * g.layers * g.width // groups for g in (source, target))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    part = None
    if hidden is not None:
        layer, d = hidden
        part = HiddenMoments(shape((d,)), shape((d,)), shape((p, d)), shape((d,)), entering=layer)
    return Moments(
        shape(()), shape(()), shape((groups, p)), shape((groups, q)), shape((groups, p)), shape((groups, q)),
        shape((groups, p, p)), shape((groups, p, q)), shape((target.layers, 2, target.width, target.width)),
        part,
    )  # fmt: skip


def empty(
    source: Geometry, target: Geometry, *, joint: bool, hidden: tuple[int, int] | None = None
) -> Moments:
    shapes = abstract(source, target, joint=joint, hidden=hidden)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@functools.partial(jax.jit, donate_argnums=0)
def update(
    moments: Moments,
    x: Float[Array, "B T L 2 K H"],
    y: Float[Array, "B T M 2 J I"],
    weight: Float[Array, "B T"],
    hidden: Float[Array, "B T D"] | None = None,
) -> Moments:
    """Take in the rows with weight 1 (0 leaves a row out); rows that are not finite are counted and left out."""
    groups = moments.x.shape[0]
    finite = jnp.isfinite(x).all((2, 3, 4, 5)) & jnp.isfinite(y).all((2, 3, 4, 5))
    if hidden is not None:
        finite &= jnp.isfinite(hidden).all(2)
    taken = weight * finite
    kept = taken.reshape(-1, 1) > 0
    xs, ys = (jnp.where(kept[None], _by_group(z, groups), 0) for z in (x, y))  # [C, rows, .]
    count = taken.sum()
    first = moments.rows == 0
    mean = lambda z: z.sum(1) / jnp.maximum(count, 1)  # noqa: E731
    shift_x = jnp.where(first, mean(xs), moments.shift_x)
    shift_y = jnp.where(first, mean(ys), moments.shift_y)
    rows = kept[None].astype(jnp.float32)
    xs, ys = (xs - shift_x[:, None]) * rows, (ys - shift_y[:, None]) * rows
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    layers, _, width, _ = moments.yy.shape
    by_layer = _by_layer(ys, layers, width)
    old, new = moments.hidden, None
    if old is not None:
        assert hidden is not None
        hs = jnp.where(kept, hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32), 0)
        shift = jnp.where(first, hs.sum(0) / jnp.maximum(count, 1), old.shift)
        hs = (hs - shift) * rows[0]
        xh = old.xh + product("ri,rj->ij", xs[0], hs)
        new = HiddenMoments(shift, old.h + hs.sum(0), xh, old.hh + (hs * hs).sum(0), old.entering)
    return Moments(
        moments.rows + count, moments.skipped + (weight * ~finite).sum(), shift_x, shift_y,
        moments.x + xs.sum(1), moments.y + ys.sum(1),
        moments.xx + product("cri,crj->cij", xs, xs), moments.xy + product("cri,crj->cij", xs, ys),
        moments.yy + product("rlci,rlcj->lcij", by_layer, by_layer), new,
    )  # fmt: skip


def _by_group(z: jax.Array, groups: int) -> jax.Array:
    """[B, T, L, 2, K, H] as [C, B T, features]; in two groups each is laid out [L, K, H], in one [L, 2, K, H]."""
    b, t, layers, _, k, h = z.shape
    z = z.reshape(b * t, layers, 2, k * h)
    if groups == 2:
        z = z.transpose(2, 0, 1, 3)
    return z.reshape(groups, b * t, -1)


def _by_layer(ys: jax.Array, layers: int, width: int) -> jax.Array:
    """The inverse for the target: [rows, L, 2, W]."""
    groups, rows = ys.shape[:2]
    if groups == 2:
        return ys.reshape(2, rows, layers, width).transpose(1, 2, 0, 3)
    return ys.reshape(rows, layers, 2, width)


@dataclasses.dataclass(frozen=True)
class HiddenStatistics:
    """Of the hidden state that enters target layer `entering`: mean and variance [D], its covariance with the inputs
    [P, D]."""

    entering: int
    mean: np.ndarray
    xh: np.ndarray
    variance: np.ndarray


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Means and covariances, float64 on the host. Layout as in `Moments`; `blocks` finds a layer's features."""

    rows: int
    skipped: int
    source: Geometry
    target: Geometry
    mean_x: np.ndarray
    mean_y: np.ndarray
    xx: np.ndarray
    xy: np.ndarray
    yy: np.ndarray
    hidden: HiddenStatistics | None = None

    @property
    def joint(self) -> bool:
        return len(self.xx) == 1

    def inputs(self, layers: tuple[int, ...], channel: int) -> tuple[int, np.ndarray]:
        """(group, indices): the features that explain `channel`, of these source layers, laid out [J, K, H] with
        J = layers x channels of the group."""
        g = self.source
        parts = KEY_VALUE if self.joint else (0,)
        per = len(parts) * g.width
        index = np.concatenate([np.arange(layer * per, (layer + 1) * per) for layer in layers])
        return (0 if self.joint else channel), index

    def outputs(self, layer: int, channel: int) -> tuple[int, np.ndarray]:
        """(group, indices) of one target layer's keys or values, laid out [K, H]."""
        width = self.target.width
        if self.joint:
            first = (2 * layer + channel) * width
            return 0, np.arange(first, first + width)
        return channel, np.arange(layer * width, (layer + 1) * width)

    def own_kind(self) -> Statistics:
        """Of moments of both kinds, the part that explains keys by keys and values by values."""
        if not self.joint:
            return self
        x, y = ([_one_kind(g, channel) for channel in KEY_VALUE] for g in (self.source, self.target))
        pairs = list(zip(x, y, strict=True))
        return dataclasses.replace(
            self, mean_x=np.stack([self.mean_x[0, i] for i in x]), mean_y=np.stack([self.mean_y[0, i] for i in y]),
            xx=np.stack([self.xx[0][np.ix_(i, i)] for i in x]),
            xy=np.stack([self.xy[0][np.ix_(i, j)] for i, j in pairs]), hidden=None,
        )  # fmt: skip


KEY_VALUE = (0, 1)


def _one_kind(g: Geometry, channel: int) -> np.ndarray:
    return np.arange(g.layers * 2 * g.width).reshape(g.layers, 2, g.width)[:, channel].reshape(-1)


def statistics(
    moments: Moments, source: Geometry, target: Geometry, *, tolerated: float = 0.01
) -> Statistics:
    """
    Raises:
      CalibrationError: no rows, or more than `tolerated` of them not finite.
    """
    host: Any = jax.tree.map(lambda z: np.asarray(z, np.float64), moments)
    rows, skipped = int(host.rows), int(host.skipped)
    if not rows:
        raise CalibrationError(f"no rows were taken in ({skipped} were not finite)")
    if skipped > tolerated * (rows + skipped):
        raise CalibrationError(
            f"{skipped} of {rows + skipped} rows are not finite, more than {tolerated:.0%}; one of the models"
            " overflows on this text"
        )
    dx, dy = host.x / rows, host.y / rows
    layers, width = target.layers, target.width
    by_layer = (
        dy.reshape(2, layers, width).transpose(1, 0, 2) if len(dy) == 2 else dy.reshape(layers, 2, width)
    )
    hidden, part = None, host.hidden
    if part is not None:
        dh = part.h / rows
        xh = part.xh / rows - dx[0, :, None] * dh
        hidden = HiddenStatistics(part.entering, part.shift + dh, xh, part.hh / rows - dh * dh)
    return Statistics(
        rows, skipped, source, target, host.shift_x + dx, host.shift_y + dy,
        host.xx / rows - dx[:, :, None] * dx[:, None], host.xy / rows - dx[:, :, None] * dy[:, None],
        host.yy / rows - by_layer[..., :, None] * by_layer[..., None, :], hidden,
    )  # fmt: skip
