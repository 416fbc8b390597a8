"""Training a cache map in coordinates in which its inputs are white.

A map's inputs differ in variance by orders of magnitude and are strongly correlated, so a step of Adam in the weights
themselves mostly moves the few directions of large variance. Here a weight is W = diag(s) V C^(-1/2), with C the
covariance of its inputs and s the scale of its outputs; the optimizer sees the gradient of V, and what it answers is
carried back to W. What is trained and saved stays the map.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from kvjax.transfer.mapper import Mapper
from kvjax.transfer.moments import Statistics

NAMES = ("key", "value")
FLOOR = 1e-4
"""Added to a covariance, relative to its mean diagonal; and the least scale of an output, relative to the largest."""


def basis(mapper: Mapper, stats: Statistics) -> tuple[dict[str, Any], ...]:
    """Per target layer: whiten, one [G, P, P] for both channels of a joint map, else one for each, with
    whiten whiten^T the inverse covariance of the P inputs of each target head of a head-local map (G = K), else of all
    (G = 1); scale {key, value [K, H]}, the standard deviations of the outputs.

    stats: of this pair, on text like the training's.
    """
    layers = []
    for part, chosen in zip(mapper.maps, mapper.layers, strict=True):
        heads = [slice(None)] if part.heads is None else [int(h) for h in np.asarray(part.heads)]
        whiten, scale = [], {}
        for channel, name in enumerate(NAMES):
            group, index = stats.inputs(chosen, channel)
            grid = index.reshape(-1, stats.source.kv_heads, stats.source.head_dim)
            picked = [grid[:, head].reshape(-1) for head in heads]
            covariance = np.stack([stats.xx[group][np.ix_(i, i)] for i in picked])
            weight = np.asarray(getattr(part, name), np.float64)
            power = np.sqrt(((weight @ covariance) * weight).sum(-1))
            scale[name] = jnp.asarray(np.maximum(power, FLOOR * power.max()), jnp.float32)
            if channel == 0 or not mapper.joint:
                whiten.append(jnp.asarray(np.stack([_whiten(c) for c in covariance]), jnp.float32))
        layers.append({"whiten": tuple(whiten), "scale": scale})
    return tuple(layers)


def affine(arrays: Any, tree: Any) -> Any:
    """Of parameters {key, value [K, H, P], key_bias, value_bias [K, H]} per layer."""
    out = []
    for layer, params in zip(arrays, tree, strict=True):
        changed: dict[str, jax.Array] = {}
        for name, whiten in zip(NAMES, _both(layer), strict=True):
            scale = layer["scale"][name]
            weight = params[name] @ whiten.swapaxes(-1, -2)
            changed |= {name: weight * scale[..., None], f"{name}_bias": params[f"{name}_bias"] * scale}
        out.append(changed)
    return tuple(out)


def residual(arrays: Any, tree: Any) -> Any:
    """Of factors {key, value: {down [r, P], up [K, H, r]}} per layer. The heads of a head-local map share `down`, whose
    coordinates are the mean of theirs."""
    out = []
    for layer, params in zip(arrays, tree, strict=True):
        changed = {}
        for name, whiten in zip(NAMES, _both(layer), strict=True):
            up = params[name]["up"] * layer["scale"][name][..., None]
            changed[name] = {"down": params[name]["down"] @ whiten.mean(0).T, "up": up}
        out.append(changed)
    return tuple(out)


def _both(layer: Any) -> tuple[jax.Array, jax.Array]:
    return layer["whiten"][0], layer["whiten"][-1]


def _whiten(covariance: np.ndarray) -> np.ndarray:
    """[P, P] upper triangular U with U U^T the inverse of the floored covariance."""
    size = len(covariance)
    floor = FLOOR * np.trace(covariance) / size
    lower = np.linalg.cholesky(covariance + floor * np.eye(size))
    return scipy.linalg.solve_triangular(lower, np.eye(size), lower=True).T
