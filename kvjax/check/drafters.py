"""The draft sources a check runs, as data: adding one is adding a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import kvjax.lm
from kvjax.decode.drafts import source_of
from kvjax.decode.ngram import Ngram
from kvjax.decode.sources import Junk, Oracle
from kvjax.decode.state import DraftSource
from kvjax.lm import LM


@dataclasses.dataclass(frozen=True)
class Drafter:
    """make(width, vocab) is the source; params(texts) its parameters, given the baseline's own prompts and answers
    [B, S]. rows: how the batch is laid out against the baseline's, "same", "reversed", or "alone" (one row of it
    in another slot, the others idle). widest: the largest width it has."""

    name: str
    make: Callable[[int, int], DraftSource]
    params: Callable[[np.ndarray], Any] = lambda texts: ()
    rows: str = "same"
    widest: int | None = None


def every_third_wrong(texts: np.ndarray) -> np.ndarray:
    """Drafts of which every third position is another token: acceptance stops at known places."""
    drafts = texts.copy()
    drafts[:, ::3] ^= 1
    return drafts


def baseline(width: int, vocab: int) -> DraftSource:
    """Plain decoding in the program of this width."""
    return Junk(width=width, vocab=vocab)


DRAFTERS = (
    Drafter("oracle", lambda width, vocab: Oracle(width=width), lambda texts: texts),
    Drafter(
        "oracle, every 3rd wrong", lambda width, vocab: Oracle(width=width), every_third_wrong, "reversed"
    ),
    Drafter("n-gram", lambda width, vocab: Ngram(width=width), rows="reversed"),
    Drafter("oracle, alone", lambda width, vocab: Oracle(width=width), lambda texts: texts, "alone"),
)
"""What every model is checked with: full acceptance, rejections at known places, and text look-up."""


def drafters_of(lm: LM, draft: LM | kvjax.lm.Drafter) -> tuple[Drafter, ...]:
    """`draft` as rows of the table: whole batches, and rows alone."""
    _, params = source_of(lm, draft)
    widest = None if isinstance(draft, LM) else draft.model.drafter.block
    return tuple(
        Drafter(
            name,
            lambda width, vocab: source_of(lm, draft, width=width)[0],
            lambda texts: params,
            rows,
            widest,
        )
        for name, rows in ((draft.id, "reversed"), (f"{draft.id}, alone", "alone"))
    )
