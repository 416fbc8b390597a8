"""Running requests through the compiled programs under test, the ones `serve.generate` runs.

No stop ids, so that every answer has its full length, and always with log-probabilities, which are compared.
All runs share a batch, a size and a chunk, so there is one program per (source, sampler). Prompts are read once
and their state is copied for each run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.check.host import Setting
from kvjax.check.prompts import known
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Stateless
from kvjax.decode.state import DecodeState, DraftSource
from kvjax.lm import LM

KEY = np.zeros(2, np.uint32)  # the key `serve.generate` uses
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """One row: a prompt, by number and ids, and how to answer it."""

    prompt: int
    ids: tuple[int, ...]
    setting: Setting
    seed: int = 0


class Answer(NamedTuple):
    """tokens: [n] emitted; logprobs: [n] float32; text: [S] prompt and answer; rounds and accepted drafts;
    filled: valid slots of the cache, which must be all tokens but the last."""

    tokens: np.ndarray
    logprobs: np.ndarray
    text: np.ndarray
    rounds: int
    accepted: int
    filled: int


class Loaded(NamedTuple):
    """A batch whose prompts were read. rows: [B] requests, None for idle rows."""

    rows: tuple[Request | None, ...]
    tokens: np.ndarray
    length: np.ndarray
    idle: np.ndarray
    state: DecodeState


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of one (batch, size, chunk) on a model. `new` tokens are emitted per row, whatever they are."""

    lm: LM
    batch: int
    size: int
    chunk: int
    new: int
    step: Step = lambda: None  # called after each run

    def sampler(self, settings: Sequence[Setting]) -> SamplerProgram:
        """The program that serves all of these settings."""
        sampling = self._sampling([Request(0, (), s) for s in settings])
        return SamplerProgram.of(sampling, limit=known(self.lm), logprobs=True)

    def load(self, rows: Sequence[Request | None]) -> Loaded:
        """Read the prompts of up to B rows; the rest, and rows that are None, are idle."""
        full = (*rows, *(None,) * (self.batch - len(rows)))
        tokens = np.zeros((self.batch, self.size), np.int32)
        length = np.ones(self.batch, np.int32)
        for b, row in enumerate(full):
            if row is not None:
                tokens[b, : len(row.ids)] = row.ids
                length[b] = len(row.ids)
        idle = np.asarray([row is None for row in full])
        # Only the presence of log-probabilities shapes the state; every run here has them.
        state = read(self.lm, self.chunk, Stateless(), (), tokens, length, idle)
        return Loaded(full, tokens, length, idle, state)

    def run(
        self, loaded: Loaded, source: DraftSource, draft_params: Any, program: SamplerProgram,
        rows: Sequence[Request | None] | None = None,
    ) -> list[Answer | None]:  # fmt: skip
        """Answers of a batch, None for idle rows. rows: the same prompts with other settings or seeds."""
        lm, rows = self.lm, loaded.rows if rows is None else rows
        with lm.model.rules.context():
            if isinstance(source, Stateless):
                state = _copy(loaded.state)
            else:
                state = read(lm, self.chunk, source, draft_params, loaded.tokens, loaded.length, loaded.idle)
            state = loop.rounds(
                lm.model, source, program, lm.params, draft_params, state, self._sampling(rows), KEY,
                np.int32(2**31 - 1), np.full(self.batch, -1, np.int32),
            )  # fmt: skip
            parts = (
                state.tokens,
                state.length,
                state.logprobs,
                state.rounds,
                state.accepted,
                state.cache.filled,
            )
            tokens, length, scores, *counts = (np.asarray(x) for x in parts)
        answers: list[Answer | None] = []
        for b, row in enumerate(rows):
            first, last = int(loaded.length[b]), int(length[b])
            new = slice(first, last)
            answer = Answer(tokens[b, new], scores[b, new], tokens[b], *(int(x[b]) for x in counts))
            answers.append(None if row is None else answer)
        self.step()
        return answers

    def _sampling(self, rows: Sequence[Request | None]) -> Sampling:
        settings = [Setting() if row is None else row.setting for row in rows]
        return Sampling.create(
            len(rows), temperature=[s.temperature for s in settings], top_k=[s.top_k for s in settings],
            top_p=[s.top_p for s in settings], min_p=[s.min_p for s in settings],
            seed=[0 if row is None else row.seed for row in rows], max_new=self.new,
        )  # fmt: skip


def read(
    lm: LM,
    chunk: int,
    source: DraftSource,
    draft_params: Any,
    tokens: np.ndarray,
    length: np.ndarray,
    idle: np.ndarray,
) -> DecodeState:
    """A state with all prompts in the cache."""
    program = SamplerProgram(logprobs=True)
    with lm.model.rules.context():
        state = loop.start(lm.model, source, program, draft_params, tokens, length, idle)
        for i in range(-(-(int(length.max()) - 1) // chunk)):
            state = loop.prefill(lm.model, source, chunk, lm.params, draft_params, state, np.int32(i))
    return state


@jax.jit
def _copy(state: DecodeState) -> DecodeState:
    return jax.tree.map(jnp.copy, state)
