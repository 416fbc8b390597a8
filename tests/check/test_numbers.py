"""The check's own arithmetic: tail probabilities, laws after filters, and how near a choice was."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.check import host, stats
from kvjax.check.host import Setting
from kvjax.decode.sampler import SamplerProgram, Sampling, filtered

SETTINGS = [
    Setting(1.0),
    Setting(0.7, top_p=0.9),
    Setting(2.5, top_k=7),
    Setting(1.5, min_p=0.05),
    Setting(1.3, top_k=20, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("dof", [1, 2, 3, 8, 15, 40])
def test_chi_square_tail(dof):
    for x in (0.0, 0.3, 1.0, 7.5, 30.0, 90.0):
        assert stats.chi_square_tail(x, dof) == pytest.approx(scipy.stats.chi2.sf(x, dof), rel=1e-9)


def test_goodness_joins_small_bins():
    expected = np.asarray([30.0, 12.0, 4.0, 2.0, 1.0, 0.5, 0.5])
    counts = np.asarray([25.0, 15.0, 5.0, 3.0, 1.0, 1.0, 0.0])
    x, dof, p = stats.goodness(counts, expected)
    # 4 + 2 reach five; the last 2 go to that bin
    assert dof == 2 and x == pytest.approx(25 / 30 + 9 / 12 + 4 / 8) and p > 0.3
    assert stats.goodness(counts[::-1].copy(), expected)[2] < 1e-9
    assert stats.goodness(np.asarray([3.0]), np.asarray([3.0])) == (0.0, 0, 1.0)


def test_hits_is_the_exact_law():
    chances = np.full(20, 0.1)
    for count in (0, 2, 9):
        low, high = scipy.stats.binom.cdf(count, 20, 0.1), scipy.stats.binom.sf(count - 1, 20, 0.1)
        assert stats.hits(count, chances) == pytest.approx(min(1, 2 * min(low, high)))


def test_p_values_are_fair():
    """Right samples give p-values below q about q of the time; a slightly wrong law is found."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(30))
    right = [
        stats.goodness(np.bincount(rng.choice(30, 400, p=p), minlength=30), 400 * p)[2] for _ in range(400)
    ]
    assert 0.02 < np.mean(np.asarray(right) < 0.05) < 0.09
    flat = p**0.5 / (p**0.5).sum()
    assert stats.goodness(np.bincount(rng.choice(30, 400, p=flat), minlength=30), 400 * p)[2] < 1e-6
    assert stats.uniform(rng.random(300))[2] > 1e-3 > stats.uniform(rng.random(300) ** 1.5)[2]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_law_equals_the_device_filters(setting):
    logits = np.random.default_rng(3).normal(0, 2, (6, 1, 90)).astype(np.float32)
    sampling = Sampling.create(
        6, temperature=setting.temperature, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p
    )
    device = np.asarray(filtered(jnp.asarray(logits), sampling, SamplerProgram.of(sampling)))[:, 0]
    for row, want in zip(logits[:, 0], device):
        z, margin = host.margins(row, setting, 90)
        np.testing.assert_array_equal(margin >= 0, np.isfinite(want))
        want = np.exp(want.astype(np.float64) - want.max())
        np.testing.assert_allclose(host.probabilities(z, margin), want / want.sum(), atol=1e-6)


def test_limit_is_never_chosen():
    z, margin = host.margins(np.arange(10.0), Setting(1.0, top_k=3), 8)
    assert host.probabilities(z, margin)[8:].sum() == 0 and np.flatnonzero(margin >= 0).tolist() == [5, 6, 7]
    assert host.gap(z, margin, np.zeros(10), 7, 9) == float("inf")


def test_gap_of_two_leaders_is_their_difference():
    logits = np.asarray([1.0, 4.0, 3.5, -2.0])
    z, margin = host.margins(logits, Setting(), 4)
    assert host.gap(z, margin, np.zeros(4), 1, 2) == pytest.approx(0.5)
    assert host.gap(z, margin, np.zeros(4), 2, 0) == pytest.approx(3.0)  # neither leads: both must catch up
    z, margin = host.margins(logits, Setting(0.5), 4)
    assert host.gap(z, margin, np.asarray([0.0, 0.0, 0.8, 0.0]), 1, 2) == pytest.approx(0.2)


def test_gap_of_a_token_at_the_edge_of_top_k():
    """The noise favours token 2, which is out by 0.01: a program that let it in is 0.01 away."""
    z, margin = host.margins(np.asarray([2.0, 1.0, 0.99, 0.0]), Setting(1.0, top_k=2), 4)
    noise = np.asarray([0.0, 0.0, 5.0, 0.0])
    assert host.gap(z, margin, noise, 0, 2) == pytest.approx(0.01)
    far = host.margins(np.asarray([2.0, 1.0, 0.5, 0.0]), Setting(1.0, top_k=2), 4)
    assert host.gap(*far, noise, 0, 2) == pytest.approx(0.5)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.01, 0.1, 0.5]), st.sampled_from(SETTINGS[:4]))
def test_a_flip_by_rounding_is_always_explained(seed, size, setting):
    """Two programs whose z differ from the referee's by at most `size` never choose tokens over 2 * size apart."""
    rng = np.random.default_rng(seed)
    logits, noise = rng.normal(0, 2, 40), rng.gumbel(size=40)
    chosen = []
    for _ in range(2):
        z, margin = host.margins(logits + setting.temperature * rng.uniform(-size, size, 40), setting, 40)
        chosen.append(int(np.argmax(np.where(margin >= 0, z + noise, -np.inf))))
    z, margin = host.margins(logits, setting, 40)
    assert host.gap(z, margin, noise, *chosen) <= 2 * size + 1e-9
