"""Moments and closed-form maps against planted relations, lstsq and each other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import RopeConfig
from kvjax.transfer import fit, moments, select
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import map_content

ROPE = RopeConfig()
SOURCE, TARGET = Geometry(3, 2, 4, ROPE), Geometry(4, 3, 6, ROPE)


def data(seed: int, rows: int = 3000, offset: float = 0.0, noise: float = 0.0):
    """Source and target features with a fixed linear relation between them, plus noise."""
    rng = np.random.default_rng(seed)
    plan = np.random.default_rng(0)
    mix = plan.normal(size=(SOURCE.width,) * 2)
    x = rng.normal(size=(2, rows // 2, SOURCE.layers, 2, SOURCE.width)) @ mix + offset
    wide = x.reshape(2, rows // 2, -1)
    y = wide @ plan.normal(size=(wide.shape[-1], 2 * TARGET.layers * TARGET.width)) / 5 + offset
    y = y + noise * rng.normal(size=y.shape)
    return (
        x.reshape(2, rows // 2, SOURCE.layers, 2, SOURCE.kv_heads, SOURCE.head_dim).astype(np.float32),
        y.reshape(2, rows // 2, TARGET.layers, 2, TARGET.kv_heads, TARGET.head_dim).astype(np.float32),
    )


def taken_in(pairs, joint: bool, weights=None) -> moments.Statistics:
    total = moments.empty(SOURCE, TARGET, joint=joint)
    for i, (x, y) in enumerate(pairs):
        weight = np.ones(x.shape[:2], np.float32) if weights is None else weights[i]
        total = moments.update(total, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight))
    return moments.statistics(total, SOURCE, TARGET)


ALL = ((0, 1, 2),) * TARGET.layers


def predicted(mapper, x):
    pos = jnp.zeros(x.shape[:2], jnp.int32)  # no rotation at position 0
    rows = map_content(mapper, jnp.asarray(x), pos)
    return np.stack([np.stack([k, v], 2).transpose(0, 3, 2, 1, 4) for k, v in rows], 2)


def test_a_planted_relation_is_recovered() -> None:
    x, y = data(1)
    mapper = fit.fit(taken_in([(x, y)], True), ALL, fit.FitConfig(ridge=0))
    new_x, new_y = data(2)
    np.testing.assert_allclose(predicted(mapper, new_x), new_y, atol=2e-3)
    assert fit.held_out(mapper, taken_in([(new_x, new_y)], True)).min() > 0.9999


@pytest.mark.parametrize("joint", [True, False])
def test_closed_form_is_lstsq(joint: bool) -> None:
    x, y = data(1, noise=1.0)
    chosen = ((0, 2),) * TARGET.layers
    mapper = fit.fit(taken_in([(x, y)], joint), chosen, fit.FitConfig(ridge=0))
    for channel in (0, 1):
        picked = x[:, :, [0, 2]] if joint else x[:, :, [0, 2]][:, :, :, channel]
        inputs = picked.reshape(-1, np.prod(picked.shape[2:])).astype(np.float64)
        outputs = y[:, :, 1, channel].reshape(len(inputs), -1).astype(np.float64)
        solution, *_ = np.linalg.lstsq(inputs - inputs.mean(0), outputs - outputs.mean(0), rcond=None)
        weight = (mapper.maps[1].key, mapper.maps[1].value)[channel]
        np.testing.assert_allclose(np.asarray(weight).reshape(-1, inputs.shape[1]).T, solution, atol=1e-4)


@pytest.mark.parametrize("local", [True, False])
def test_ridge_knows_no_units(local: bool) -> None:
    """Keys a hundred times as large, of one layer or of all, are shrunk no more and no less."""
    x, y = data(1, noise=1.0)
    how = fit.FitConfig(ridge=0.1, local=local)
    plain = predicted(fit.fit(taken_in([(x, y)], True), ALL, how), x)
    for layers in ([1], [0, 1, 2]):
        large = x.copy()
        large[:, :, layers, 0] *= 100
        np.testing.assert_allclose(
            predicted(fit.fit(taken_in([(large, y)], True), ALL, how), large), plain, atol=1e-2
        )
    less = predicted(fit.fit(taken_in([(x, y)], True), ALL, fit.FitConfig(ridge=1e-6, local=local)), x)
    assert np.abs(less - plain).max() > 0.1  # this ridge does something


@pytest.mark.parametrize("joint", [True, False])
def test_streaming_is_one_batch_also_far_from_zero(joint: bool) -> None:
    parts = [data(i, offset=300.0, noise=1.0) for i in range(4)]
    whole = tuple(np.concatenate(z, 1) for z in zip(*parts, strict=True))
    a, b = taken_in(parts, joint), taken_in([whole], joint)
    for field in dataclasses.fields(moments.Statistics):
        u, v = getattr(a, field.name), getattr(b, field.name)
        if isinstance(u, np.ndarray):
            np.testing.assert_allclose(u, v, rtol=1e-4, atol=1e-4 * np.abs(v).max())
    wide = whole[0].reshape(-1, 2 * SOURCE.layers * SOURCE.width).astype(np.float64)
    if joint:
        np.testing.assert_allclose(a.xx[0], np.cov(wide.T, bias=True), rtol=1e-3, atol=1e-3)


def test_rows_of_weight_zero_do_not_count_and_nan_rows_are_skipped() -> None:
    x, y = data(1)
    weight = np.ones(x.shape[:2], np.float32)
    weight[:, ::2] = 0
    spoiled = x.copy()
    spoiled[:, ::2] = np.nan
    a = taken_in([(spoiled, y)], True, [weight])
    b = taken_in([(x[:, 1::2], y[:, 1::2])], True)
    assert a.rows == b.rows and a.skipped == 0
    np.testing.assert_allclose(a.xy, b.xy, rtol=1e-3, atol=1e-3)
    bad = x.copy()
    bad[0, :5] = np.inf
    assert taken_in([(bad, y)], True).skipped == 5
    bad[0, :100] = np.nan
    with pytest.raises(moments.CalibrationError, match="100 of 3000 rows"):
        taken_in([(bad, y)], True)


def test_too_few_rows_are_refused_and_singular_moments_named() -> None:
    x, y = data(1, rows=40)
    with pytest.raises(moments.CalibrationError, match="40 rows of calibration for 48 inputs"):
        fit.fit(taken_in([(x, y)], True), ALL)
    x, y = data(1)
    x[:, :, 1] = x[:, :, 0]
    with pytest.raises(
        moments.CalibrationError, match="target layer 0, keys: the moments are singular.*larger ridge"
    ):
        fit.fit(taken_in([(x, y)], True), ALL, fit.FitConfig(ridge=0))


def test_head_local_is_the_full_map_of_a_masked_relation() -> None:
    """Where each target head depends on one source head only, both fits give that map, and the heads are found."""
    rng = np.random.default_rng(0)
    heads = [1, 0, 1]
    x, _ = data(3)
    x = rng.normal(size=x.shape).astype(np.float32)
    y = np.zeros((*x.shape[:2], TARGET.layers, 2, TARGET.kv_heads, TARGET.head_dim), np.float32)
    for head, other in enumerate(heads):
        plan = rng.normal(size=(SOURCE.layers, SOURCE.head_dim, TARGET.layers, TARGET.head_dim))
        y[..., head, :] = np.einsum("btlch,lhmi->btmci", x[..., other, :], plan)
    stats = taken_in([(x, y)], False)
    local = fit.fit(stats, ALL, fit.FitConfig(ridge=1e-9, local=True))
    full = fit.fit(stats, ALL, fit.FitConfig(ridge=1e-9))
    for part, whole in zip(local.maps, full.maps, strict=True):
        assert part.heads is not None and part.heads.tolist() == heads
        written = fit.dense(np.asarray(part.key), np.asarray(part.heads), part.key_mean.shape)
        np.testing.assert_allclose(written, fit.dense(np.asarray(whole.key), None, ()), atol=1e-3)
    np.testing.assert_allclose(predicted(local, x), predicted(full, x), atol=1e-3)


def test_heads_are_assigned_one_to_one_where_they_can_be() -> None:
    x, y = data(5, noise=0.3)
    small = dataclasses.replace(
        taken_in([(x, y)], False), target=dataclasses.replace(TARGET, kv_heads=2, head_dim=9)
    )
    assert sorted(fit.assign_heads(small, 0, (0,)).tolist()) == [0, 1]


def test_recolour_gives_the_targets_mean_and_covariance() -> None:
    x, y = data(1, noise=6.0)
    stats = taken_in([(x, y)], True)
    for method, same in (("recolour", True), ("ridge", False)):
        out = predicted(fit.fit(stats, ALL, fit.FitConfig(ridge=1e-8, method=method)), x)
        a, b = (z[:, :, 2, 1].reshape(-1, TARGET.width) for z in (out, y))
        np.testing.assert_allclose(a.mean(0), b.mean(0), atol=1e-2 * np.abs(b).max())
        shrunk = np.trace(np.cov(a.T)) / np.trace(np.cov(b.T))
        assert bool(abs(shrunk - 1) < 0.01) is same


def test_layers_are_ranked_by_what_they_explain() -> None:
    rng = np.random.default_rng(1)
    x, y = data(1)
    x = rng.normal(size=x.shape).astype(np.float32)
    for layer in range(TARGET.layers):
        best = layer % SOURCE.layers
        plan = rng.normal(size=(SOURCE.width, TARGET.width))
        other = 0.3 * rng.normal(size=(SOURCE.width, TARGET.width))
        for channel in (0, 1):
            flat = x[:, :, :, channel].reshape(*x.shape[:3], -1)
            both = flat[:, :, best] @ plan + flat[:, :, (best + 1) % 3] @ other
            y[:, :, layer, channel] = both.reshape(y.shape[:2] + y.shape[4:])
    stats = taken_in([(x, y)], False)
    assert select.by_explained_variance(stats, 1) == tuple((layer % 3,) for layer in range(4))
    second = select.by_explained_variance(stats, 2)
    assert second == tuple(tuple(sorted((layer % 3, (layer + 1) % 3))) for layer in range(4))


def test_matching_layers_follow_relative_depth() -> None:
    assert select.matching(4, 8) == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))
    assert select.matching(24, 28)[0] == (0,) and select.matching(24, 28)[-1] == (23,)
    assert select.matching(4, 2, 3) == ((0, 1, 2), (1, 2, 3))
    with pytest.raises(ValueError, match="1 <= k <= 4"):
        select.matching(4, 2, 5)


def test_memory_is_what_the_arrays_take() -> None:
    for joint in (True, False):
        total = sum(z.nbytes for z in jax.tree.leaves(moments.empty(SOURCE, TARGET, joint=joint)))
        assert moments.memory(SOURCE, TARGET, joint=joint) == total


def test_own_kind_is_a_part_of_both() -> None:
    x, y = data(1, noise=1.0)
    part, direct = taken_in([(x, y)], True).own_kind(), taken_in([(x, y)], False)
    for field in ("mean_x", "mean_y", "xx", "xy", "yy"):
        np.testing.assert_allclose(getattr(part, field), getattr(direct, field), atol=1e-4)
    assert not part.joint and part.own_kind() is part
