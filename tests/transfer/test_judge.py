"""The judge on tiny models: conditions that must equal native do, those that must not do not."""

from __future__ import annotations

import random
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import MaskSpec
from kvjax.models.layers import rms_norm
from kvjax.rope import cos_sin
from kvjax.stats import bootstrap
from kvjax.transfer import calibrate, conditions, fit, judge, latency, scoring, select
from kvjax.transfer.repair import Repair
from kvjax.transfer.scoring import Cut, behind, first, native, rollout

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
def asked(lm, mapper) -> dict[str, conditions.Condition]:
    found = {
        "map": conditions.mapped(mapper, CUT),
        "self-map": conditions.mapped(mapper, CUT, own=True),
        "another text's cache": conditions.mapped(mapper, CUT, shift=1),
        **conditions.controls(lm, lm, mapper, CUT, 5),
    }
    assert all(isinstance(c, conditions.Condition) for c in found.values())
    return found


@pytest.fixture(scope="module")
def results(lm, asked, texts):
    return judge.judge(lm, lm, asked, texts, batch=3, steps=5)


MUST = (
    "source alone",
    "native, re-injected",
    "map",
    "self-map",
    "source cache, target's rope",
    "raw source cache",
)


def test_what_must_be_native_is(results) -> None:
    native = results["native"]
    np.testing.assert_array_equal(native.kl, 0)
    np.testing.assert_array_equal(native.top1, 1)
    for name in MUST:
        found = results[name]
        np.testing.assert_allclose(found.nats, native.nats, atol=2e-3, err_msg=name)
        assert found.kl.max() < 1e-4 and found.top1.min() == 1, name
        assert found.forced_kl.max() < 1e-4 and found.forced_top1.min() == 1, name
        assert found.free_kl.max() < 1e-4 and found.free_same.min() == 1, name
        assert found.cosine.shape == (6, 2) and found.cosine.min() > 0.9999, name


def test_what_must_not_be_native_is_not(results) -> None:
    for name in set(results) - {"native", *MUST}:
        assert results[name].kl.min() > 1e-3 and results[name].forced_kl.min() > 1e-3, name
    for name in ("random map", "another text's cache", "zero cache"):
        assert results[name].cosine.mean() < 0.999, name
        assert results[name].free_kl.min() > 1e-4, name
    for name in ("no context", "text hand-off, 5 tokens", "last 5 tokens alone"):
        assert results[name].cosine is None, name  # its rows do not stand for those of the prefix


def test_figures_are_those_of_plain_forwards(lm, mapper, texts, results) -> None:
    """One text, from logits of whole sequences (of the ids the tokenizer has): what each column means."""
    model, params, cut, known = lm.model, lm.params, texts.cut, lm.tokenizer.vocab
    tokens = jnp.asarray(texts.tokens[:1])

    def logits(ids, start):
        found, _ = native(model, params, ids, Cut(start, ids.shape[1] - start))
        return np.asarray(found[0, :, :known], np.float64)

    def log_p(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    def kl(ours, theirs):
        return (np.exp(theirs) * (theirs - ours)).sum(-1).mean()

    suffix = np.asarray(tokens[0, cut.prefix :])
    truth = log_p(logits(tokens, cut.prefix))
    np.testing.assert_allclose(results["native"].nats[0], -truth[np.arange(16), suffix].mean(), atol=1e-4)

    # Text hand-off: the model's own greedy words instead of the prefix, then the tail.
    _, rows = native(model, params, tokens, cut)
    written, _ = rollout(model, params, first(rows, cut.given), tokens, cut, 5, known)
    texts_of = {
        "text hand-off, 5 tokens": written,
        "last 5 tokens alone": tokens[:, cut.given - 5 : cut.given],
        "no context": tokens[:, :0],
    }
    for name, context in texts_of.items():
        told = jnp.concatenate([context, tokens[:, cut.given :]], 1)
        ours = log_p(logits(told, context.shape[1] + cut.tail))
        found = results[name]
        np.testing.assert_allclose(found.nats[0], -ours[np.arange(16), suffix].mean(), atol=1e-4)
        np.testing.assert_allclose(found.kl[0], kl(ours, truth), atol=1e-4)
        np.testing.assert_allclose(found.top1[0], (ours.argmax(-1) == truth.argmax(-1)).mean())
        # Teacher-forced: both on the native continuation of the prefix.
        near = log_p(logits(jnp.concatenate([context, tokens[:, cut.given : cut.prefix], written], 1),
                            context.shape[1] + cut.tail))  # fmt: skip
        real = log_p(logits(jnp.concatenate([tokens[:, : cut.prefix], written], 1), cut.prefix))
        np.testing.assert_allclose(found.forced_kl[0], kl(near, real), atol=1e-4)


def test_attention_outputs_are_those_of_the_model(lm, texts) -> None:
    """Through o_proj they are what the model's own attention gives."""
    model, config, tokens = lm.model, lm.config, jnp.asarray(texts.tokens[:2])

    @jax.jit
    def both(params):
        module, pos = model.bind(params), scoring.positions(tokens)
        rows = model.forward(params, tokens, pos).rows
        outputs = scoring.attended(model, module.queries(tokens, pos), rows, 0)
        cos, sin = cos_sin(pos, config.rope, config.head_dim)
        x, found = module.embed[...][tokens], []
        for layer, output in zip(module.layers, outputs, strict=True):
            flat = output.transpose(0, 3, 1, 2, 4).reshape(*tokens.shape, -1)
            ours = flat @ layer.attn.o_proj[...].reshape(config.hidden, -1).T
            normed = rms_norm(x, layer.input_layernorm[...], config.eps)
            found.append((ours, layer.attn(normed, cos, sin, None, pos, MaskSpec(), None, None)[0]))
            x = layer(x, cos, sin, None, pos, MaskSpec(), None, None)[0]
        return found

    for ours, theirs in both(lm.params):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_repairs_replace_what_they_say(lm, mapper, texts) -> None:
    """Of a spoiled map: all layers or a whole prefix repaired is native; cheaper repairs cost less."""
    bad = conditions.random_map(mapper)
    cut = Cut(48, 16)
    whole = judge.Texts(texts.tokens, cut)
    every = [Repair(), Repair(8), Repair(8, layers=1), Repair(48), Repair(8, layers=2)]
    asked = {str(r): conditions.repaired(lm, bad, cut, r) for r in every}
    found = judge.judge(lm, lm, asked, whole, batch=3)
    assert found[str(Repair())].forced_kl is None
    for repair in every[3:]:
        assert found[str(repair)].kl.max() < 1e-4, repair
    for repair in every[:3]:
        assert found[str(repair)].kl.min() > 1e-3, repair
    price = [latency.flops_share(lm.config, bad, r, 48) for r in every]
    assert price[0] < price[1] < price[2] and price[3] == 1.0
    for wrong in (Repair(49), Repair(8, layers=3), Repair(head=1)):
        with pytest.raises(ValueError, match="cannot be judged"):
            conditions.repaired(lm, bad, cut, wrong)
    spoiled = judge.judge(lm, lm, {"mapped": conditions.mapped(bad, cut)}, whole, batch=3)
    np.testing.assert_allclose(found[str(Repair())].kl, spoiled["mapped"].kl, rtol=1e-5)


def test_shares_of_the_way_to_native(results) -> None:
    nats = {name: a.nats for name, a in results.items()}
    value, low, high = judge.covered(nats, "map", "no context")
    assert low <= value <= high and abs(value - 1) < 0.2
    assert judge.covered(nats, "no context", "no context")[0] == 0
    assert judge.covered(nats, "native", "no context")[0] == 1
    top1 = {name: a.top1 for name, a in results.items()}
    here, start = results["zero cache"].top1.mean(), results["no context"].top1.mean()
    np.testing.assert_allclose(
        judge.covered(top1, "zero cache", "no context")[0], (here - start) / (1 - start)
    )


def test_choice_scores_each_candidate_as_alone(lm, mapper) -> None:
    cut = Cut(40, 8, 2)
    tokens = np.stack([np.asarray(lm.tokenizer.encode(t))[: cut.length] for t in TEXTS[:6]])
    right = judge.choice(lm, lm, {"map": conditions.mapped(mapper, cut)}, tokens, cut, batch=3)
    expected = []
    for i in range(6):
        scores = []
        for j in range(4):
            text = np.concatenate([tokens[i, : cut.prefix], tokens[(i + j) % 6, cut.prefix :]])[None]
            logits, _ = native(lm.model, lm.params, jnp.asarray(text), cut)
            logits = np.asarray(logits[0, :, : lm.tokenizer.vocab], np.float64)
            chosen = logits[np.arange(8), text[0, cut.prefix :]]
            scores.append(np.mean(np.log(np.exp(logits).sum(-1)) - chosen))
        expected.append(float(np.argmin(scores) == 0))
    assert right["native"].tolist() == right["map"].tolist() == expected


def test_behind_given_rows_is_native_also_for_other_tails(lm, texts) -> None:
    tokens = jnp.asarray(texts.tokens[:2])
    for tail in (1, 7, 48):
        cut = Cut(48, 16, tail)
        logits, rows = native(lm.model, lm.params, tokens, cut)
        found = behind(lm.model, lm.params, first(rows, cut.given), tokens, cut)
        np.testing.assert_allclose(found, logits, atol=1e-4)


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
