"""Exact hand-off: the mapped cache answers at once, the target's own prefill catches up, and what it does not confirm
is taken back.

Tokens spoken from the mapped cache are drafts. While they are made, the target reads the prompt itself, a chunk at a
time; when it is done it verifies them in blocks, as it would any drafts, and goes on alone. The answer is that of
native prefill and decoding in the same programs (chunk grid and width), token for token; what is saved is the time
until something can be shown. In total more is computed than natively.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import numpy as np

from kvjax.decode import loop
from kvjax.decode.sources import Oracle, Plain
from kvjax.lm import LM
from kvjax.transfer.mapper import Mapper
from kvjax.transfer.repair import Repair
from serve.generate import Event, Result
from serve.handoff import Transfer, _Handoff
from serve.requests import Options

WIDTH = 8  # rows in which the target verifies what was said


@dataclasses.dataclass(frozen=True)
class Provisional:
    """Prompt `index` probably goes on with these tokens from position `pos`."""

    index: int
    tokens: tuple[int, ...]
    pos: int


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """The answer of prompt `index` is final before position `upto`; `tokens` are the ones this confirms."""

    index: int
    tokens: tuple[int, ...]
    upto: int


@dataclasses.dataclass(frozen=True)
class Retracted:
    """What prompt `index` was said to have at position `start` and later is withdrawn."""

    index: int
    start: int


@dataclasses.dataclass(frozen=True)
class Course:
    """How an exact hand-off went, per prompt but for the seconds. first_provisional_s, first_confirmed_s, last_s: from
    the call. provisional: tokens said early; retracted: of those, taken back."""

    first_provisional_s: float
    first_confirmed_s: float
    last_s: float
    provisional: tuple[int, ...]
    retracted: tuple[int, ...]


def stream_exact(
    source: LM, mapper: Mapper | Transfer, target: LM, prompts: Any, *, repair: Repair = Repair(), pace: int = 1,
    **options: Unpack[Options],
) -> Iterator[Provisional | Confirmed | Retracted | Event]:  # fmt: skip
    """Events as they come; each prompt ends with the `Event` that `serve.stream` would end with.

    Args:
      pace: provisional tokens said between two chunks of the target's own prefill. options: as for `serve.generate`,
        without draft and stop; `width` (default 8) is that of the rounds that verify.
    """
    yield from Exact(source, mapper, target, prompts, repair, pace, **options).run()


class Exact(_Handoff):
    """One batch. After `run`, `result()` is the exact answer, with its `Course`."""

    def __init__(
        self, source: LM, mapper: Mapper | Transfer, target: LM, prompts: Any, repair: Repair = Repair(), pace: int = 1,
        width: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if "draft" in options or "stop" in options:
            raise ValueError("an exact hand-off drafts by itself, and takes stop_ids but no stop strings yet")
        self.began = time.perf_counter()
        super().__init__(
            source,
            mapper,
            target,
            prompts,
            repair,
            draft=Oracle(width=width or WIDTH),
            draft_params=np.zeros(0),
            **options,
        )
        self.pace = pace
        self.timings |= {"provisional": 0.0, "prefill": 0.0}

    def run(self) -> Iterator[Provisional | Confirmed | Retracted | Event]:
        lm, batch, key = self.lm, self.batch, np.zeros(2, np.uint32)
        model, native_source = lm.model, self.source
        cut = np.full(len(batch.length), -1, np.int32)
        said = batch.length.copy()  # positions before which something was said
        first_said = 0.0
        self.source = Plain()
        early = self._read()
        self.source = native_source
        with self._device("prefill"):
            state = loop.start(
                model, native_source, batch.program, early.tokens, batch.tokens, batch.length, batch.idle
            )
        for i in range(max(-(-(int(batch.length.max()) - 1) // batch.chunk), 1)):
            with self._device("provisional"):
                early = loop.rounds(
                    model,
                    Plain(),
                    batch.program,
                    lm.params,
                    (),
                    early,
                    batch.sampling,
                    key,
                    np.int32(self.pace),
                    cut,
                )
                tokens, length = np.asarray(early.tokens), np.asarray(early.length)
            first_said = first_said or time.perf_counter() - self.began
            for b in range(batch.count):
                if length[b] > said[b]:
                    yield Provisional(b, tuple(tokens[b, said[b] : length[b]].tolist()), int(said[b]))
                    said[b] = length[b]
            if i * batch.chunk < int(batch.length.max()) - 1:
                with self._device("prefill"):
                    state = loop.prefill(
                        model, native_source, batch.chunk, lm.params, early.tokens, state, np.int32(i)
                    )
                    jax.block_until_ready(state)
        drafts, drafted = early.tokens, tokens
        retracted = np.zeros(batch.count, int)
        settled, sent, first_confirmed = batch.length.copy(), [0] * batch.count, 0.0
        while len(self.finished) < batch.count:
            with self._device("decode"):
                state = loop.rounds(
                    model,
                    native_source,
                    batch.program,
                    lm.params,
                    drafts,
                    state,
                    batch.sampling,
                    key,
                    np.int32(1),
                    cut,
                )
                seen = {"tokens": state.tokens, "length": state.length, "done": state.done, "rounds": state.rounds,
                        "accepted": state.accepted, "logprobs": state.logprobs, "drafted": state.drafted}  # fmt: skip
                seen = {k: None if v is None else np.asarray(v) for k, v in seen.items()}
            first_confirmed = first_confirmed or time.perf_counter() - self.began
            for b in range(batch.count):
                if b in self.finished:
                    continue
                start, end = int(settled[b]), int(seen["length"][b])
                own, told = seen["tokens"][b, start:end], drafted[b, start : min(end, said[b])]
                wrong = np.flatnonzero(own[: len(told)] != told)
                if len(wrong) or (seen["done"][b] and said[b] > end):
                    at = start + int(wrong[0]) if len(wrong) else end
                    retracted[b] += said[b] - at
                    said[b] = at
                    yield Retracted(b, at)
                settled[b] = end
                yield Confirmed(b, tuple(own.tolist()), end)
                if event := self._advance(b, seen, sent, cut):
                    if event.finish_reason:
                        yield event
        total = time.perf_counter() - self.began
        provisional = tuple(int(x) for x in (np.asarray(length) - batch.length)[: batch.count])
        self._course = Course(
            first_said, first_confirmed, total, provisional, tuple(int(x) for x in retracted)
        )
        self.timings["total"] = total

    def result(self) -> Result:
        return dataclasses.replace(super().result(), course=self._course)

    def answer(self) -> Result:
        """Run to the end."""
        for _ in self.run():
            pass
        return self.result()
