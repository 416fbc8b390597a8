"""Claims (b) and (c) on meshes of fake devices.

(b) Within one mesh a row's tokens do not depend on the drafts, on the other rows or on its place among
them, bit by bit. (c) Between meshes, and without one, the first token that differs is a near-tie.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import serve
from kvjax import DraftModel, Junk, Ngram, Oracle, make_mesh
from tests.sharding import tiny
from tests.sharding.tiny import CONFIGS, TIE_BOUND, WIDTH

MESHES = [(1, 1), (2, 2), (1, 8)]
REQUEST = tiny.request()


@functools.cache
def model(name: str, mesh: tuple[int, int] | None):
    return tiny.place(name, None if mesh is None else make_mesh(*mesh))


@functools.cache
def referee(name: str) -> tiny.Referee:
    return tiny.Referee(name)


def run(lm, asked, draft, draft_params=()):
    return serve.generate(lm, asked.prompts, draft=draft, draft_params=draft_params, **asked.options())


@functools.cache
def plain(name: str, mesh: tuple[int, int] | None):
    """The baseline of this width: drafts that are junk."""
    result = run(model(name, mesh), REQUEST, Oracle(width=WIDTH), tiny.table(REQUEST))
    assert [len(g.tokens) for g in result] == list(REQUEST.max_new)
    assert result.compiles <= 3, "start, prefill and rounds are three programs"
    return result


def tokens(result):
    return [g.tokens for g in result]


def same(result, expected):
    """Bitwise: tokens and their log-probabilities."""
    assert tokens(result) == tokens(expected)
    assert [g.logprobs for g in result] == [g.logprobs for g in expected]


def on_meshes(test):
    test = pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")(test)
    return pytest.mark.parametrize("name", CONFIGS)(test)


@on_meshes
def test_drafts_change_nothing(name, mesh):
    expected, oracle = plain(name, mesh), Oracle(width=WIDTH)
    right = run(model(name, mesh), REQUEST, oracle, tiny.table(REQUEST, tokens(expected)))
    same(right, expected)
    assert right.compiles == 0
    # all drafts right: every round but the last emits a whole block
    assert [g.rounds for g in right] == [-(-n // WIDTH) for n in REQUEST.max_new]
    assert sum(g.rounds for g in expected) > 3 * sum(g.rounds for g in right)
    mixed = run(model(name, mesh), REQUEST, oracle, tiny.table(REQUEST, tokens(expected), every=3))
    same(mixed, expected)
    assert sum(g.rounds for g in right) < sum(g.rounds for g in mixed) < sum(g.rounds for g in expected)


@on_meshes
def test_rows_do_not_matter_to_each_other(name, mesh):
    expected = plain(name, mesh)
    order = [2, 0, 3, 1]
    asked = REQUEST.take(order)
    permuted = run(model(name, mesh), asked, Oracle(width=WIDTH), tiny.table(asked))
    assert permuted.compiles == 0
    assert [(g.tokens, g.logprobs) for g in permuted] == [
        (expected[i].tokens, expected[i].logprobs) for i in order
    ]
    # row 1 alone: the other rows end at once
    alone = tiny.Request(
        ((9,), REQUEST.prompts[1], (3,), (4,)), (1, 40, 1, 1), (0.0, 0.9, 0.0, 0.0), (0, 5, 0, 0)
    )
    lonely = run(model(name, mesh), alone, Oracle(width=WIDTH), tiny.table(alone))
    assert (lonely[1].tokens, lonely[1].logprobs) == (expected[1].tokens, expected[1].logprobs)


@pytest.mark.parametrize("name, mesh", [("k8", (2, 2)), ("k3", (2, 2)), ("k2", (1, 8))])
@pytest.mark.parametrize("source", [Junk(width=WIDTH, vocab=256), Ngram(width=WIDTH)], ids=["junk", "ngram"])
def test_other_sources_change_nothing(name, mesh, source):
    """The source is part of the compiled program, yet what it verifies is computed alike."""
    same(run(model(name, mesh), REQUEST, source), plain(name, mesh))


def test_a_draft_model_on_the_mesh():
    """The model drafts for itself, so nearly all is accepted; its own cache is sharded too."""
    lm = model("k2", (1, 8))
    result = run(lm, REQUEST, DraftModel(lm.model, WIDTH), lm.params)
    same(result, plain("k2", (1, 8)))
    assert sum(g.accepted for g in result) > 0.9 * sum(g.accepted for g in _perfect())


def _perfect():
    asked = tokens(plain("k2", (1, 8)))
    return run(model("k2", (1, 8)), REQUEST, Oracle(width=WIDTH), tiny.table(REQUEST, asked))


@pytest.mark.parametrize("name, mesh", [(n, m) for n in CONFIGS for m in MESHES] + [("k2", (2, 4))])
def test_between_meshes_only_near_ties_differ(name, mesh):
    result, expected = plain(name, mesh), plain(name, None)
    gaps = referee(name).gaps(REQUEST, tokens(expected), tokens(result))
    print(f"{name} on {mesh}: gaps at the first difference: {gaps}")
    assert all(gap is None or gap <= TIE_BOUND for gap in gaps)
    for mine, theirs, gap in zip(result, expected, gaps, strict=True):
        if gap is None:
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_referee_agrees_with_the_answers(name):
    """Without this, a fault that all meshes share would pass: the referee uses no cache, rounds or mesh."""
    assert referee(name).surprise(REQUEST, tokens(plain(name, None))) <= TIE_BOUND


def test_a_misplaced_head_is_no_near_tie():
    """The comparison can fail: two query heads of different KV heads trade places on the mesh."""
    leaves = dict(tiny.weights("k2"))
    o_proj = leaves["layers.0.attn.o_proj"].copy()  # [D, K, G*H]
    o_proj[:, 0, :16], o_proj[:, 1, :16] = o_proj[:, 1, :16].copy(), o_proj[:, 0, :16].copy()
    leaves["layers.0.attn.o_proj"] = o_proj
    wrong = tiny.place("k2", make_mesh(1, 8), leaves)
    wrong = type(wrong)(model("k2", (1, 8)).model, wrong.params, None, wrong.config, "wrong")
    result = run(wrong, REQUEST, Oracle(width=WIDTH), tiny.table(REQUEST))
    gaps = referee("k2").gaps(REQUEST, tokens(plain("k2", None)), tokens(result))
    assert any(gap is not None and gap > 10 * TIE_BOUND for gap in gaps)


def test_a_batch_that_does_not_divide_is_padded():
    """Three prompts on a data axis of three make four rows, then six; the idle ones change nothing."""
    asked = REQUEST.take([0, 1, 2])
    options = asked.options() | {"max_new_tokens": [5, 6, 7]}
    result = serve.generate(model("k2-n6", (3, 2)), asked.prompts, **options)
    assert result.program["batch"] == 6
    assert len(result) == 3 and [len(g.tokens) for g in result] == [5, 6, 7]
    answers = tokens(plain("k2-n6", None))[:3]
    gaps = referee("k2-n6").gaps(asked, [a[:n] for a, n in zip(answers, (5, 6, 7))], tokens(result))
    assert all(gap is None or gap <= TIE_BOUND for gap in gaps)
