"""Maps stored in int8: the error is within what the scales allow, and the file says what it holds."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import RopeConfig
from kvjax.rope import cos_sin
from kvjax.transfer import artifact, fit, moments
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import LayerMap, Mapper, converted, map_content

SOURCE = Geometry(3, 4, 16, RopeConfig())
TARGET = Geometry(2, 3, 32, RopeConfig(kind="yarn", factor=4.0, original_max=64, attention_factor=1.2))
LAYERS = ((0, 2), (1, 2))
MANIFEST = artifact.Manifest(
    artifact.Party("a", None, "w", "t", SOURCE), artifact.Party("b", None, "v", "t", TARGET), "ridge", {},
    {"longest": 64}, {},
)  # fmt: skip


def mapper(local: bool = False) -> Mapper:
    """Outputs of very different sizes, one of them 0: a scale of their own matters."""
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    blocks = 4
    inner = blocks * 16 * (1 if local else 4)
    maps = []
    for _ in LAYERS:
        sizes = jnp.asarray(10.0 ** rng.uniform(-3, 1, (3, 32, 1)), jnp.float32).at[1, 5].set(0)
        maps.append(
            LayerMap(
                draw(3, 32, inner) * sizes, draw(3, 32, inner) * sizes, draw(blocks, 4, 16), draw(blocks, 4, 16),
                draw(3, 32), draw(3, 32), jnp.asarray([2, 0, 3], jnp.int32) if local else None,
            )
        )  # fmt: skip
    return Mapper(tuple(maps), SOURCE, TARGET, LAYERS, joint=True)


@pytest.mark.parametrize("local", [False, True], ids=["full", "local"])
def test_the_error_is_within_half_a_step_of_every_weight(local: bool) -> None:
    """|y8 - y| <= scale / 2 * sum |x - mean|, for rotated keys of both features of a pair; and it is no less than a
    hundredth of that somewhere, so the bound is not idle."""
    made = mapper(local)
    small = converted(made, "int8")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 7, 3, 2, 4, 16)), jnp.float32)
    pos = jnp.asarray(rng.integers(0, 4096, (2, 7)), jnp.int32)
    cos, sin = (np.abs(np.asarray(z))[:, None] for z in cos_sin(pos, TARGET.rope, 32))
    for chosen, part, exact, rounded in zip(
        LAYERS, small.maps, map_content(made, x, pos), map_content(small, x, pos), strict=True
    ):
        picked = np.asarray(x[:, :, np.asarray(chosen)], np.float64).reshape(2, 7, 4, 4, 16)
        for channel, affine in enumerate(part.affine(c) for c in (0, 1)):
            assert affine.weight.dtype == jnp.int8 and affine.scale.shape == (3, 32)
            size = np.abs(picked - np.asarray(affine.mean))
            total = (
                size.sum((2, 4))[..., np.asarray(affine.heads)] if local else size.sum((2, 3, 4))[..., None]
            )
            total = np.broadcast_to(total, (2, 7, 3)).transpose(0, 2, 1)
            allowed = np.asarray(affine.scale)[:, None] / 2 * total[..., None]  # [B, K, T, H]
            if channel == 0:
                a, b = np.split(allowed, 2, axis=-1)
                allowed = np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1)
            exactly = np.asarray(exact[channel], np.float64)
            slack = 1e-5 * (1 + np.abs(exactly))  # of float32 sums
            off = np.abs(np.asarray(rounded[channel]) - exactly)
            assert (off <= allowed + slack).all()
            assert (off > allowed / 100)[allowed > 0].mean() > 0.5


def test_every_output_feature_has_its_own_scale() -> None:
    made = mapper()
    small = converted(made, "int8")
    for whole, part in zip(made.maps, small.maps, strict=True):
        top = np.abs(np.asarray(part.key)).max(-1)
        assert ((top == 127) == (np.asarray(part.key_scale) > 0)).all() and (top == 0).sum() == 1
        back = np.asarray(part.key) * np.asarray(part.key_scale)[..., None]
        assert (np.abs(back - np.asarray(whole.key)) <= np.asarray(part.key_scale)[..., None] * 0.5001).all()
    again = converted(small, "int8")
    np.testing.assert_array_equal(again.maps[0].key, small.maps[0].key)
    assert converted(small, "bfloat16").maps[0].key_scale is None
    with pytest.raises(ValueError, match="'int4' is not one of float32, bfloat16, int8"):
        converted(made, "int4")


@pytest.mark.parametrize("local", [False, True], ids=["full", "local"])
def test_a_stored_map_is_the_one_that_was_saved(local: bool, tmp_path: Path) -> None:
    made = mapper(local)
    size = {}
    for dtype in ("float32", "bfloat16", "int8"):
        artifact.save(tmp_path / dtype, made, MANIFEST, dtype=dtype)
        loaded, _ = artifact.load(tmp_path / dtype)
        size[dtype] = (tmp_path / dtype / artifact.WEIGHTS).stat().st_size
        want = converted(made, dtype)
        for a, b in zip(loaded.maps, want.maps, strict=True):
            x, y = a.arrays(), b.arrays()
            assert {n: z.dtype for n, z in x.items()} == {n: z.dtype for n, z in y.items()}
            jax.tree.map(np.testing.assert_array_equal, x, y)
        wide, _ = artifact.load(tmp_path / dtype, dtype="float32")
        again = converted(want, "float32")
        np.testing.assert_array_equal(wide.maps[1].value, again.maps[1].value)
        assert wide.maps[1].value_scale is None
    assert size["int8"] < size["bfloat16"] < size["float32"]
    if not local:
        assert size["int8"] < 0.3 * size["float32"]
    with pytest.raises(artifact.ArtifactError, match="'int4' is not one of"):
        artifact.save(tmp_path / "x", made, MANIFEST, dtype="int4")


def test_held_out_figures_of_an_int8_map_are_those_of_its_weights() -> None:
    """`held_out` reads weights: those of int8 times their scale."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 600, 3, 2, 4, 16)).astype(np.float32)
    y = x.reshape(2, 600, -1) @ rng.normal(size=(384, 2 * 2 * 3 * 32)).astype(np.float32) / 20
    total = moments.update(
        moments.empty(SOURCE, TARGET, joint=True), jnp.asarray(x), jnp.asarray(y.reshape(2, 600, 2, 2, 3, 32)),
        jnp.ones((2, 600)),
    )  # fmt: skip
    stats = moments.statistics(total, SOURCE, TARGET)
    made = fit.fit(stats, ((0, 1, 2),) * 2, fit.FitConfig(ridge=1e-6))
    exact, rounded = (fit.held_out(converted(made, d), stats) for d in ("float32", "int8"))
    assert exact.min() > 0.99
    np.testing.assert_allclose(rounded, exact, atol=0.01)
