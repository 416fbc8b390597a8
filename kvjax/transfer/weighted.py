"""Maps fitted where the target looks: rows weighted by the attention they receive (CacheBridge, arXiv 2609.00891).

For target KV head m, row i and query positions u (log-spaced), with attention a_ui, output o_u and query q_u:
  values  r_i = sum_u a_ui^2                                  what an error of value i does to the output,
  keys    r_i = sum_u a_ui^2 |v_i - o_u|^2 |q_u|^2 / H         what an error of key i does to it, to first order.
Rows count with w = 1 + alpha (r - 1), r scaled to mean 1. Since w is linear in alpha, one pass collects moments under
weights 1 and r, and any alpha is a sum of the two; alpha is the largest for which the effective number of rows
(Kish: n / (1 + alpha^2 var r)) stays at min(n, 2 P).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.lm import LM
from kvjax.models import Model
from kvjax.transfer import calibrate
from kvjax.transfer.fit import FitConfig, _ridge, assign_heads, levels
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import LayerMap, Mapper
from kvjax.transfer.moments import CalibrationError, Statistics
from kvjax.transfer.select import Selection
from kvjax.typing import Array, Float, Int, Params, Texts

log = logging.getLogger("kvjax")
QUERIES = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """Sums over rows under the weights 1 and r (axis A = 2), about a shift, for L target layers, K heads and 2
    channels; P inputs of one solve, H outputs.

    rows: []. r, r2: [L, K, 2] sums of r and r^2. x: [A, L, K, 2, P]; y: [A, L, K, 2, H]; xx: [A, L, K, 2, P, P];
    xy: [A, L, K, 2, P, H].
    """

    rows: jax.Array
    r: jax.Array
    r2: jax.Array
    x: jax.Array
    y: jax.Array
    xx: jax.Array
    xy: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def attention_weights(model: Model, params: Params, ids: Int[Array, "B T"]) -> Float[Array, "L K 2 B T"]:
    """r of every row of whole texts, keys before values, not yet scaled."""
    batch, length = ids.shape
    pos = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
    queries = model.bind(params).queries(ids, pos)
    rows = model.forward(params, ids, pos, logits=False).rows
    at = np.unique(np.round(np.geomspace(1, length, QUERIES)).astype(int) - 1)
    seen = jnp.arange(length)[None] <= at[:, None]
    found = []
    for q, (k, v) in zip(queries, rows, strict=True):
        q = q[:, at].astype(jnp.float32)  # [B, U, K, G, H]
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        scores = jnp.einsum("bukgh,bkth->bkgut", q, k) * q.shape[-1] ** -0.5
        a = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        out = jnp.einsum("bkgut,bkth->bkguh", a, v)
        square = a * a
        # |v_i - o_u|^2 without an array over i, u and H
        far = (v * v).sum(-1)[:, :, None, None] + (out * out).sum(-1)[..., None]
        far = far - 2 * jnp.einsum("bkguh,bkth->bkgut", out, v)
        strength = (q * q).sum(-1).transpose(0, 2, 3, 1)[..., None] / q.shape[-1]
        key = (square * jnp.maximum(far, 0) * strength).sum((2, 3))  # [B, K, T]
        found.append(jnp.stack([key, square.sum((2, 3))], 1))
    return jnp.stack(found).transpose(0, 3, 2, 1, 4)


def fit_pair(
    source: LM, target: LM, texts: Texts, stats: Statistics, selection: Selection, config: FitConfig, *,
    length: int, batch: int, sequences: int, progress: bool | None = None,
) -> Mapper:  # fmt: skip
    """A second pass over the texts that gave `stats`, and the map weighted by the attention its rows receive.

    Every token of a text counts. The moments are per target head, so they are the largest thing here; their size is
    told first.

    Raises:
      CalibrationError: they do not fit into memory, moments that are not finite, fewer rows than inputs.
    """
    heads = None
    if config.local:
        heads = np.stack([assign_heads(stats, layer, chosen) for layer, chosen in enumerate(selection)])
    tuples = None if heads is None else tuple(tuple(map(int, row)) for row in heads)
    make = functools.partial(empty, selection, heads, stats.source, stats.target, stats.joint)
    size = 2 * sum(z.size * z.dtype.itemsize for z in jax.tree.leaves(jax.eval_shape(make)))
    log.info("weighted moments take %.2f GB while they are updated", size / 1e9)
    if size > (room := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise CalibrationError(
            f"weighted moments take {size / 1e9:.1f} GB and this machine has {room / 1e9:.1f}; use fewer source layers,"
            " head-local maps or separate channels"
        )
    shift = _layered(stats)
    sums = make()
    bar = tqdm(total=sequences, unit="text", desc="weighted moments",
               disable=not sys.stderr.isatty() if progress is None else not progress)  # fmt: skip
    with bar:
        for group in _groups(calibrate.blocks(texts, target, length=length, limit=sequences), batch):
            x, y = (calibrate.features(lm.model, lm.params, group) for lm in (source, target))
            r = attention_weights(target.model, target.params, group)
            sums = update(sums, selection, tuples, stats.joint, shift, x, y, r)
            bar.update(batch)
    if not np.isfinite(sums.xy).all() or not np.isfinite(sums.r2).all():
        raise CalibrationError("weighted moments are not finite; the plain fit counts and skips such rows")
    return fit(sums, selection, heads, stats.source, stats.target, stats.joint, shift, config)[0]


def _layered(stats: Statistics) -> tuple[np.ndarray, np.ndarray]:
    """Means of both models' features, [L, 2, K, H] float32."""
    found = []
    for means, g in ((stats.mean_x, stats.source), (stats.mean_y, stats.target)):
        shape = (g.layers, 2) if stats.joint else (2, g.layers)
        grid = means.astype(np.float32).reshape(*shape, g.kv_heads, g.head_dim)
        found.append(grid if stats.joint else grid.swapaxes(0, 1))
    return found[0], found[1]


def _groups(blocks: Iterable[np.ndarray], batch: int) -> Iterator[jax.Array]:
    """[batch, T] as often as there are enough blocks."""
    group = []
    for block in blocks:
        group.append(block)
        if len(group) == batch:
            yield jnp.asarray(np.stack(group))
            group = []


def empty(
    selection: Selection, heads: np.ndarray | None, source: Geometry, target: Geometry, joint: bool
) -> Weighted:
    """heads: [L, K] source heads of a head-local map, None for a full one."""
    blocks = len(selection[0]) * (2 if joint else 1)
    p = blocks * source.head_dim * (1 if heads is not None else source.kv_heads)
    lead = (target.layers, target.kv_heads, 2)
    z = functools.partial(jnp.zeros, dtype=jnp.float32)
    h = target.head_dim
    return Weighted(
        z(()), z(lead), z(lead), z((2, *lead, p)), z((2, *lead, h)), z((2, *lead, p, p)), z((2, *lead, p, h))
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=0)
def update(
    sums: Weighted, selection: Selection, heads: tuple[tuple[int, ...], ...] | None, joint: bool, shift: Any,
    x: Float[Array, "B T M 2 k h"], y: Float[Array, "B T L 2 K H"], r: Float[Array, "L K 2 B T"],
) -> Weighted:  # fmt: skip
    """Take in whole texts. shift: (means of x [M, 2, k, h], of y [L, 2, K, H]) from the unweighted pass."""
    x, y = x - shift[0], y - shift[1]
    scaled = r / jnp.maximum(r.mean((3, 4), keepdims=True), 1e-30)
    batch, length = x.shape[:2]
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    new: dict[str, list[Any]] = {name: [] for name in ("x", "y", "xx", "xy")}
    for layer, chosen in enumerate(selection):
        picked = x[:, :, np.asarray(chosen)]
        for head in range(y.shape[4]):
            for channel in (0, 1):
                part = (
                    picked.reshape(batch, length, -1, *picked.shape[4:])
                    if joint
                    else picked[:, :, :, channel]
                )
                if heads is not None:
                    part = part[:, :, :, heads[layer][head]]
                inputs = part.reshape(batch * length, -1)
                outputs = y[:, :, layer, channel, head].reshape(batch * length, -1)
                weight = jnp.stack([jnp.ones(batch * length), scaled[layer, head, channel].reshape(-1)])
                new["x"].append(product("an,np->ap", weight, inputs))
                new["y"].append(product("an,nh->ah", weight, outputs))
                new["xx"].append(product("an,np,nq->apq", weight, inputs, inputs))
                new["xy"].append(product("an,np,nh->aph", weight, inputs, outputs))
    lead = (2, *sums.r.shape)
    put = {name: jnp.stack(parts, 1).reshape(*lead, *parts[0].shape[1:]) for name, parts in new.items()}
    return Weighted(
        sums.rows + batch * length, sums.r + scaled.sum((3, 4)), sums.r2 + (scaled**2).sum((3, 4)),
        sums.x + put["x"], sums.y + put["y"], sums.xx + put["xx"], sums.xy + put["xy"],
    )  # fmt: skip


def fit(
    sums: Weighted, selection: Selection, heads: np.ndarray | None, source: Geometry, target: Geometry, joint: bool,
    shift: Any, config: FitConfig,
) -> tuple[Mapper, np.ndarray]:  # fmt: skip
    """(the map, alpha [L, K, 2]); every head and channel has means of its own weights' centre.

    Raises:
      CalibrationError: fewer rows than inputs.
    """
    host: Any = jax.tree.map(lambda z: np.asarray(z, np.float64), sums)
    rows, p = float(host.rows), host.x.shape[-1]
    if rows < p:
        raise CalibrationError(
            f"{rows:.0f} rows of calibration for {p} inputs; use more text or fewer source layers"
        )
    variance = np.maximum(host.r2 / rows - (host.r / rows) ** 2, 1e-30)
    alpha = np.minimum(1, np.sqrt(np.maximum(rows / min(rows, 2 * p) - 1, 0) / variance))
    mean_x, mean_y = (np.asarray(z, np.float64) for z in shift)
    block = source.width if heads is None else source.head_dim
    maps = []
    for layer, chosen in enumerate(selection):
        found: dict[str, list[Any]] = {"key": [], "value": [], "key_bias": [], "value_bias": []}
        centre = mean_x[np.asarray(chosen)]  # [J, 2, k, h]
        for channel, name in enumerate(("key", "value")):
            grid = centre.reshape(-1, *centre.shape[2:]) if joint else centre[:, channel]
            for head in range(target.kv_heads):
                at = layer, head, channel
                a = float(alpha[at])
                mix = lambda z, at=at, a=a: (1 - a) * z[(0, *at)] + a * z[(1, *at)]  # noqa: E731
                total = (1 - a) * rows + a * host.r[at]
                dx, dy = mix(host.x) / total, mix(host.y) / total
                xx = mix(host.xx) / total - np.outer(dx, dx)
                xy = mix(host.xy) / total - np.outer(dx, dy)
                weight = _ridge(xx, xy, levels(xx, block, config.ridge))  # [H, P]
                # The map subtracts the plain means; what the weighted centre is off by goes into the bias.
                found[f"{name}_bias"].append(mean_y[layer, channel, head] + dy - weight @ dx)
                found[name].append(weight)
            found[f"{name}_mean"] = [grid]
        leaves: list[Any] = [jnp.asarray(np.stack(found[n]), jnp.float32) for n in ("key", "value")]
        leaves += [jnp.asarray(found[f"{n}_mean"][0], jnp.float32) for n in ("key", "value")]
        leaves += [jnp.asarray(np.stack(found[f"{n}_bias"]), jnp.float32) for n in ("key", "value")]
        leaves.append(None if heads is None else jnp.asarray(heads[layer], jnp.int32))
        maps.append(LayerMap(*leaves))
    return Mapper(tuple(maps), source, target, selection, joint), alpha
