"""Cases for `kv_map`, shared by every backend: inputs, float64 answers and the error each rounding allows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.config import RopeConfig
from kvjax.kernels.kv_map import Affine
from kvjax.rope import cos_sin

SOURCE_ROPE = RopeConfig(theta=1e4)
TARGET_ROPE = RopeConfig(  # its magnitude is not 1
    kind="yarn", theta=5e5, factor=4.0, original_max=64, attention_factor=1.2
)


@dataclasses.dataclass(frozen=True)
class MapCase:
    """One call: J source arrays of k heads of width h, every other one keys unless `keys` says; K heads of width H."""

    name: str
    J: int = 2
    k: int = 2
    h: int = 128
    K: int = 2
    H: int = 128
    rows: int = 64
    size: int = 128
    start: int = 64
    batch: int = 1
    turned: bool = True
    local: bool = False
    cache: str = "bfloat16"
    weights: str = "bfloat16"


CASES = (
    MapCase("keys"),
    MapCase("values", turned=False, start=0),
    MapCase("one_head", J=1, k=1, K=1),
    MapCase("batch", batch=2, K=1, J=3),
    MapCase("many_blocks", J=5, k=1, K=1),
    MapCase("more_target_heads", k=1, K=3),
    MapCase("more_source_heads", k=4, K=1),
    MapCase("two_row_blocks", rows=128, size=256, start=128, K=1),
    MapCase("local", J=2, k=3, K=2, local=True),
    MapCase("local_values", J=1, k=2, K=4, local=True, turned=False, start=0),
    MapCase("int8", weights="int8"),
    MapCase("int8_local", J=3, k=2, K=2, weights="int8", local=True),
    MapCase("narrow_source", h=64),
    MapCase("narrow_target", H=64, turned=True),
    MapCase("narrow_both", h=64, H=64, J=3, k=3),
    MapCase("f32", cache="float32", weights="float32"),
    MapCase("f32_values_local", cache="float32", weights="float32", turned=False, local=True),
    MapCase("f32_int8", cache="float32", weights="int8"),
    MapCase("f32_cache", cache="float32"),
    MapCase("f32_weights", weights="float32"),
)


@dataclasses.dataclass(frozen=True)
class MapInputs:
    """Arguments of `kv_map`, and the answer with the error it may have, both [B, K, T, H] float64."""

    sources: list
    affine: Affine
    start: np.int32
    unturn: jnp.ndarray
    turn: jnp.ndarray | None
    keys: tuple[bool, ...]
    answer: np.ndarray
    allowed: np.ndarray

    @property
    def arguments(self) -> tuple:
        return self.sources, self.affine, jnp.int32(self.start), self.unturn, self.turn


def inputs(case: MapCase, seed: int = 0) -> MapInputs:
    rng = np.random.default_rng(seed)
    draw = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    read = 1 if case.local else case.k
    inner = case.J * read * case.h
    # Junk outside the rows that are mapped: it must not be read.
    sources = []
    for _ in range(case.J):
        x = np.full((case.batch, case.k, case.size, case.h), np.nan, np.float32)
        x[:, :, case.start : case.start + case.rows] = draw(case.batch, case.k, case.rows, case.h)
        sources.append(jnp.asarray(x, case.cache))
    weight = draw(case.K, case.H, inner) * inner**-0.5
    scale = None
    if case.weights == "int8":
        scale = np.abs(weight).max(-1) / 127
        weight = np.round(weight / scale[..., None])
    heads = (np.arange(case.K)[::-1] % case.k).astype(np.int32) if case.local else None
    affine = Affine(
        jnp.asarray(weight, case.weights), jnp.asarray(draw(case.J, case.k, case.h)), jnp.asarray(draw(case.K, case.H)),
        None if scale is None else jnp.asarray(scale), None if heads is None else jnp.asarray(heads),
    )  # fmt: skip
    pos = case.start + np.broadcast_to(np.arange(case.rows, dtype=np.int32), (case.batch, case.rows))
    cos, sin = cos_sin(jnp.asarray(pos), SOURCE_ROPE, case.h)
    unturn = jnp.stack([cos, -sin], 1)
    turn = jnp.stack(cos_sin(jnp.asarray(pos + 7), TARGET_ROPE, case.H), 1) if case.turned else None
    keys = tuple(j % 2 == 0 for j in range(case.J))
    answer, allowed = _answer(case, sources, affine, unturn, turn, keys)
    return MapInputs(sources, affine, np.int32(case.start), unturn, turn, keys, answer, allowed)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    cos, sin = (np.asarray(angles[:, i], np.float64)[:, None] for i in (0, 1))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _answer(case: MapCase, sources, affine: Affine, unturn, turn, keys) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and what the rounding of the centred inputs to the products' dtype may do to it: half a unit in the
    last place of each input times its weight, and twice float32's for the sums."""
    weight, mean, bias, scale, heads = (None if z is None else np.asarray(z, np.float64) for z in affine)
    if scale is not None:
        weight = weight * scale[..., None]
    products = case.cache if case.weights == "int8" else case.weights
    unit = 2.0**-8 if products == "bfloat16" else 2.0**-23
    rows = slice(case.start, case.start + case.rows)
    picked = []
    for j, source in enumerate(sources):
        x = np.asarray(source[:, :, rows], np.float64)
        x = _rotate(x, np.asarray(unturn)) if keys[j] else x
        picked.append(x - mean[j][:, None])
    x = np.stack(picked, 1)  # [B, J, k, T, h]
    if heads is None:
        w = weight.reshape(case.K, case.H, case.J, case.k, case.h)
    else:
        w = np.zeros((case.K, case.H, case.J, case.k, case.h))
        blocks = weight.reshape(case.K, case.H, case.J, case.h)
        for m, head in enumerate(heads.astype(int)):
            w[m, :, :, head] = blocks[m]
    out = np.einsum("bjkth,mnjkh->bmtn", x, w) + bias[:, None]
    size = np.einsum("bjkth,mnjkh->bmtn", np.abs(x), np.abs(w))
    error = size * (unit / 2 + 2.0**-20) + np.abs(out) * 2.0**-20
    if turn is None:
        return out, error
    c, s = (np.abs(np.asarray(turn[:, i], np.float64))[:, None] for i in (0, 1))
    a, b = np.split(error, 2, axis=-1)
    return _rotate(out, np.asarray(turn)), np.concatenate([a * c + b * s, b * c + a * s], axis=-1) + 1e-6


def check(got, x: MapInputs) -> None:
    """Raises AssertionError unless every element is within what its roundings allow."""
    got = np.asarray(got)
    assert got.dtype == np.float32 and got.shape == x.answer.shape
    assert np.isfinite(got).all()
    over = np.abs(got - x.answer) / x.allowed
    assert over.max() <= 1, f"{(over > 1).mean():.2%} exceed their bound, by up to {over.max():.2f} times"
