"""Rotary embedding against transformers' frequencies and against float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kvjax.config import ModelConfig, RopeConfig
from kvjax.rope import cos_sin, inverse_frequencies, rotate, unrotate

REFERENCE = json.loads((Path(__file__).parent / "golden" / "rope.json").read_text())
POSITIONS = (0, 1, 100, 32767, 131071)
ROPES = [
    RopeConfig(theta=1e4),
    RopeConfig(theta=1e6),
    RopeConfig("linear", 1e4, 4.0),
    RopeConfig("llama3", 5e5, 8.0, 8192),
    RopeConfig("yarn", 1e6, 4.0, 32768, attention_factor=1.1386),
]


def _parse(row: dict) -> RopeConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": row["head_dim"],
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 8,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "rope_parameters": row["rope_parameters"],
        }
    ).rope


def _name(row: dict) -> str:
    return f"{row['rope_parameters']['rope_type']}-{REFERENCE.index(row)}-H{row['head_dim']}"


@pytest.mark.parametrize("row", REFERENCE, ids=_name)
def test_frequencies_and_attention_factor_equal_those_of_transformers(row):
    rope = _parse(row)
    ours, theirs = inverse_frequencies(rope, row["head_dim"]), np.array(row["inv_freq"])
    assert ours.dtype == np.float64 and ours.shape == (row["head_dim"] // 2,)
    # Theirs are float32 powers and, on the ramps, differences of float32 numbers near 1.
    np.testing.assert_allclose(ours, theirs, rtol=4e-6)
    assert rope.attention_factor == pytest.approx(row["attention_factor"], rel=1e-12)


def test_the_reference_tells_the_variants_apart():
    """The bound above is far below the differences between the rows it has to distinguish."""
    wide = [np.array(r["inv_freq"]) for r in REFERENCE if r["head_dim"] == 128]
    same = [(i, j) for i in range(len(wide)) for j in range(i) if np.allclose(wide[i], wide[j], rtol=1e-3)]
    assert not same


def _angles64(pos: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    return pos[..., None].astype(np.float64) * inverse_frequencies(rope, head_dim)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r.kind}-{r.theta:g}")
def test_angles_against_float64(rope, head_dim):
    pos = np.array([POSITIONS], np.int32)
    cos, sin = jax.jit(lambda p: cos_sin(p, rope, head_dim))(pos)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (1, len(POSITIONS), head_dim // 2)
    angle = _angles64(pos, rope, head_dim)
    np.testing.assert_allclose(cos, rope.attention_factor * np.cos(angle), atol=6e-7)
    np.testing.assert_allclose(sin, rope.attention_factor * np.sin(angle), atol=6e-7)


def test_a_float32_product_would_fail_the_bound():
    """Why the angles are not simply position x frequency in float32."""
    rope, pos = RopeConfig(theta=1e4), np.array(POSITIONS, np.int32)
    product = pos[:, None].astype(np.float32) * inverse_frequencies(rope, 80).astype(np.float32)
    assert np.abs(np.cos(product) - np.cos(_angles64(pos, rope, 80))).max() > 1e-4


@settings(deadline=None)  # the first call compiles
@given(st.integers(0, 2**31 - 1), st.floats(1.5, 1e7), st.sampled_from([2, 64, 96]))
def test_angles_at_any_position(pos, theta, head_dim):
    rope, at = RopeConfig(theta=theta), np.array([pos], np.int32)
    cos, sin = cos_sin(jnp.asarray(at), rope, head_dim)
    # The float32 correction term is at most 2^-33 turns a position, so its own rounding stays small.
    exact = _angles64(at, rope, head_dim)
    bound = 6e-7 + pos * 2e-16 + pos * math.pi * 2**-32 * 2**-22
    np.testing.assert_allclose(cos, np.cos(exact), atol=bound)
    np.testing.assert_allclose(sin, np.sin(exact), atol=bound)


def _rotate64(x: np.ndarray, angle: np.ndarray, factor: float) -> np.ndarray:
    """Pairs (i, i + H/2) as complex numbers, turned."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * np.exp(1j * angle) * factor
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r.kind}-{r.theta:g}")
def test_rotate_and_unrotate_against_float64(rope, head_dim):
    x = np.random.default_rng(0).standard_normal((2, len(POSITIONS), 3, head_dim)).astype(np.float32)
    pos = np.stack([POSITIONS, POSITIONS[::-1]]).astype(np.int32)

    @jax.jit
    def there_and_back(x, pos):
        cos, sin = cos_sin(pos, rope, head_dim)
        turned = rotate(x, cos[:, :, None], sin[:, :, None])
        return turned, unrotate(turned, cos[:, :, None], sin[:, :, None])

    turned, back = there_and_back(x, pos)
    angle = _angles64(pos, rope, head_dim)[:, :, None]
    np.testing.assert_allclose(turned, _rotate64(x, angle, rope.attention_factor), atol=4e-6)
    np.testing.assert_allclose(back, x, atol=2e-6)
    exact = unrotate(
        jnp.asarray(_rotate64(x, angle, rope.attention_factor), jnp.float32),
        *(t[:, :, None] for t in cos_sin(jnp.asarray(pos), rope, head_dim)),
    )
    np.testing.assert_allclose(exact, x, atol=4e-6)


def test_position_zero_changes_nothing():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 64)), jnp.float32)
    cos, sin = cos_sin(jnp.zeros((1, 4), jnp.int32), RopeConfig(), 64)
    assert (rotate(x, cos, sin) == x).all() and (unrotate(x, cos, sin) == x).all()


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 64)), jnp.float32) for _ in range(2))
    scores = []
    for start in (0, 7, 1000, 131000):
        turned = [rotate(x, *cos_sin(jnp.array([[p]], jnp.int32), RopeConfig(theta=1e6), 64))
                  for x, p in ((q, start + 40), (k, start))]  # fmt: skip
        scores.append(float((turned[0] * turned[1]).sum()))
    np.testing.assert_allclose(scores, scores[0], atol=2e-5)


def test_positions_restart_and_repeat_per_row():
    """Rows of a batch have their own positions, and equal positions give equal bits."""
    pos = jnp.array([[5, 6, 7], [6, 7, 5]], jnp.int32)
    cos, _ = jax.jit(lambda p: cos_sin(p, RopeConfig(), 32))(pos)
    assert (cos[0, 0] == cos[1, 2]).all() and (cos[0, 1:] == cos[1, :2]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_dtype_is_kept_and_the_turn_is_float32(dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, 64)), dtype)
    cos, sin = cos_sin(jnp.full((2, 3), 131071, jnp.int32), RopeConfig(), 64)
    turned = rotate(x, cos, sin)
    assert turned.dtype == dtype
    assert (turned == rotate(x.astype(jnp.float32), cos, sin).astype(dtype)).all()


def test_head_axes_may_stand_before_or_after_positions():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((2, 5, 3, 4, 16)), jnp.float32)  # B T K G H
    cos, sin = cos_sin(jnp.arange(10, dtype=jnp.int32).reshape(2, 5), RopeConfig(), 16)
    after = rotate(x, cos[:, :, None, None], sin[:, :, None, None])
    before = rotate(x.transpose(0, 2, 3, 1, 4), cos[:, None, None], sin[:, None, None])
    np.testing.assert_array_equal(after, before.transpose(0, 3, 1, 2, 4))


def test_refusals():
    with pytest.raises(TypeError, match="integer"):
        cos_sin(jnp.zeros((1, 2)), RopeConfig(), 32)
    with pytest.raises(ValueError, match="head_dim"):
        inverse_frequencies(RopeConfig(), 33)


def test_sharding_passes_through_unchanged():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rope = RopeConfig("yarn", 1e4, 4.0, 64, attention_factor=1.2)
    x = np.random.default_rng(5).standard_normal((2, 3, 4, 8)).astype(np.float32)
    pos = np.arange(6, dtype=np.int32).reshape(2, 3)

    def both(x, pos):
        cos, sin = (t[:, :, None] for t in cos_sin(pos, rope, 8))
        turned = rotate(x, cos, sin)
        return turned, unrotate(turned, cos, sin)

    plain = both(jnp.asarray(x), jnp.asarray(pos))
    with jax.set_mesh(mesh):
        spec = P("data", None, "model", None)
        sharded = jax.jit(both)(jax.device_put(x, spec), jax.device_put(pos, P("data", None)))
    for ours, alone in zip(sharded, plain):
        assert ours.sharding.spec == spec
        np.testing.assert_allclose(ours, alone, atol=1e-6)
