"""The judge on tiny models: conditions that must equal native do, those that must not do not."""

from __future__ import annotations

import random
import string
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.stats import bootstrap
from kvjax.transfer import calibrate, fit, judge, select
from kvjax.transfer.scoring import Cut, behind, native

GOLDEN = Path(__file__).parents[1] / "golden"
_RNG = random.Random(1)
TEXTS = ["".join(_RNG.choices(string.printable, k=300)) for _ in range(24)]
CUT = Cut(48, 16, 4)


@pytest.fixture(scope="module")
def lm():
    return kvjax.load(GOLDEN / "qwen3-tied")


@pytest.fixture(scope="module")
def texts(lm) -> judge.Texts:
    return judge.samples([np.asarray(lm.tokenizer.encode(t)) for t in TEXTS[:6]], CUT)


@pytest.fixture(scope="module")
def mapper(lm):
    stats = calibrate.collect(lm, lm, TEXTS, length=64, batch=4, sequences=24, joint=False)
    return fit.fit(stats, select.matching(2, 2), fit.FitConfig(ridge=1e-7))


@pytest.fixture(scope="module")
def results(lm, mapper, texts):
    conditions = {"map": judge.mapped(lm, mapper, CUT), **judge.controls(lm, lm, mapper, CUT)}
    assert all(isinstance(c, judge.Condition) for c in conditions.values())
    return judge.judge(lm, lm, conditions, texts, batch=3, steps=5)


def test_what_must_be_native_is(results) -> None:
    native = results["native"]
    np.testing.assert_array_equal(native.kl, 0)
    np.testing.assert_array_equal(native.top1, 1)
    assert native.free is None
    for name in (
        "source alone",
        "native, re-injected",
        "map",
        "source cache, target's rope",
        "raw source cache",
    ):
        np.testing.assert_allclose(results[name].nats, native.nats, atol=2e-3, err_msg=name)
        assert results[name].kl.max() < 1e-4 and results[name].top1.min() == 1, name
    for name in ("native, re-injected", "map"):
        assert results[name].free.max() < 1e-4 and results[name].same.min() == 1, name


def test_what_must_not_be_native_is_not(results) -> None:
    for name in ("no context", "zero cache", "random map", "another text's cache"):
        assert results[name].kl.min() > 1e-3, name
    assert np.isnan(results["no context"].free).all()
    assert results["zero cache"].free.min() > 1e-4


def test_similarity_is_one_for_the_native_cache_and_less_for_others(lm, mapper, texts) -> None:
    conditions = {"map": judge.mapped(lm, mapper, CUT), **judge.controls(lm, lm, mapper, CUT)}
    found = judge.similarity(lm, conditions, texts, batch=3)
    assert "no context" not in found
    for name in ("native, re-injected", "map"):
        assert min(found[name]) > 0.9999, name
    for name in ("random map", "another text's cache"):
        mean, worst = found[name]
        assert worst <= mean < 0.999, name


def test_ratios(results) -> None:
    value, low, high = judge.recovery(results, "map")
    assert low <= value <= high and abs(value - 1) < 0.2
    assert judge.recovery(results, "no context")[0] == 0 and judge.recovery(results, "native")[0] == 1


def test_choice_scores_each_candidate_as_alone(lm, mapper) -> None:
    cut = Cut(40, 8, 2)
    tokens = np.stack([np.asarray(lm.tokenizer.encode(t))[: cut.length] for t in TEXTS[:6]])
    right = judge.choice(lm, lm, {"map": judge.mapped(lm, mapper, cut)}, tokens, cut, batch=3)
    expected = []
    for i in range(6):
        scores = []
        for j in range(4):
            text = np.concatenate([tokens[i, : cut.prefix], tokens[(i + j) % 6, cut.prefix :]])[None]
            logits, _ = native(lm.model, lm.params, jnp.asarray(text), cut)
            logits = np.asarray(logits[0], np.float64)
            chosen = logits[np.arange(8), text[0, cut.prefix :]]
            scores.append(np.mean(np.log(np.exp(logits).sum(-1)) - chosen))
        expected.append(float(np.argmin(scores) == 0))
    assert right["native"].tolist() == right["map"].tolist() == expected


def test_behind_given_rows_is_native_also_for_other_tails(lm, texts) -> None:
    tokens = jnp.asarray(texts.tokens[:2])
    for tail in (1, 7, 48):
        cut = Cut(48, 16, tail)
        logits, rows = native(lm.model, lm.params, tokens, cut)
        np.testing.assert_allclose(behind(lm.model, lm.params, rows, tokens, cut), logits, atol=1e-4)


def test_cuts_that_cannot_be() -> None:
    for prefix, suffix, tail in ((4, 1, 0), (4, 1, 5), (4, 0, 1)):
        with pytest.raises(ValueError, match="the tail must be within the prefix"):
            Cut(prefix, suffix, tail)


def test_bootstrap_covers_the_mean() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        x = rng.normal(3.0, 1.0, size=40)
        _, low, high = bootstrap(
            {"x": x, "one": np.ones(40)}, lambda m: m["x"] / m["one"], draws=400, seed=seed
        )
        hits += low <= 3.0 <= high
    assert 178 <= hits <= 199  # 95 % of 200, less what 40 texts cost, within three deviations
