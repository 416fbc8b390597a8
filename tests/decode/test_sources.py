"""Draft sources that need no model, against what they should propose."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.decode.model import DraftModel
from kvjax.decode.ngram import Ngram
from kvjax.decode.sources import Junk, Oracle, Plain
from kvjax.decode.state import View
from tests.decode import tinylm

B, S, W = 3, 24, 6


@functools.partial(jax.jit, static_argnums=0)
def propose(source, params, anchor, pos, tokens):
    view = View(anchor, pos, tokens, None, None, None, None)
    return source.propose(params, (), view)[0].tokens


def drafts(source, tokens, length, params=()) -> np.ndarray:
    tokens, length = np.asarray(tokens, np.int32), np.asarray(length, np.int32)
    anchor = tokens[np.arange(len(length)), length - 1]
    out = np.asarray(propose(source, params, anchor, length - 1, tokens))
    assert out.shape == (len(length), source.width) and out.dtype == np.int32
    np.testing.assert_array_equal(out[:, 0], anchor)
    return out[:, 1:]


def looked_up(text: list[int], longest: int, n: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest known ending, continued as it goes on."""
    for size in range(min(longest, len(text)), 0, -1):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if ends:
            out, period = [], len(text) - ends[-1]
            for _ in range(n):
                out.append((text + out)[len(text) + len(out) - period])
            return out
    return [text[-1]] * n


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("longest", [1, 3])
def test_ngram_copies_what_followed(longest: int, data) -> None:
    """A small alphabet makes matches of every length; slots beyond the text hold garbage that must not match."""
    text = st.lists(st.integers(0, 2), min_size=1, max_size=S)
    rows = [data.draw(text) for _ in range(B)]
    tokens = np.array(
        [r + data.draw(st.lists(st.integers(0, 2), min_size=S - len(r), max_size=S - len(r))) for r in rows]
    )
    got = drafts(Ngram(width=W, longest=longest), tokens, [len(r) for r in rows])
    assert got.tolist() == [looked_up(r, longest, W - 1) for r in rows]


def test_junk_depends_on_the_position_alone() -> None:
    rng = np.random.default_rng(0)
    source = Junk(width=W, vocab=48)
    a, b = (drafts(source, rng.integers(0, 48, (B, S)), [5, 6, 20]) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a[0, 1:], a[1, :-1])  # rows 5 and 6 draft the same positions
    many = np.concatenate(
        [drafts(source, np.zeros((B, S)), [n, n + 1, n + 2]).ravel() for n in range(1, 20, 3)]
    )
    assert many.min() >= 0 and many.max() < 48 and len(np.unique(many)) > 12


def test_oracle_reads_its_table_and_spoils_known_places() -> None:
    table = np.random.default_rng(1).integers(0, 48, (B, S)).astype(np.int32)
    length = np.array([4, 9, 17])
    want = np.stack([t[n : n + W - 1] for t, n in zip(table, length)])
    np.testing.assert_array_equal(drafts(Oracle(width=W), table, length, table), want)
    spoiled = drafts(Oracle(width=W, every=4), table, length, table)
    at = length[:, None] + np.arange(W - 1)
    np.testing.assert_array_equal(spoiled != want, at % 4 == 0)


def test_widths_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        Ngram(width=0)
    with pytest.raises(ValueError, match="a draft model needs width >= 2, got 1"):
        DraftModel(tinylm.language_model().model, 1)
    with pytest.raises(ValueError, match="plain decoding has width 1"):
        drafts(Plain(width=3), np.zeros((B, S)), [1, 1, 1])
    np.testing.assert_array_equal(drafts(Plain(), np.zeros((B, S)), [1, 2, 3]), np.zeros((B, 0)))
