"""`serve.generate` and `serve.stream`: the same compiled rounds, whole or as they are committed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

import jax
import numpy as np

from kvjax.compilation import CompileCounter
from kvjax.decode import loop
from kvjax.decode.drafts import source_of
from kvjax.decode.state import DecodeState
from kvjax.lm import LM
from serve.requests import Batch, Options, prepare
from serve.text import TextRow

if TYPE_CHECKING:
    from serve.exact import Course

STOP_CHECK = 8  # rounds between looks at the text for stop strings


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer. `tokens` includes a final stop id, `text` excludes stop strings and special tokens.

    finish_reason: "stop" (a stop id or string) or "length" (max_new_tokens). rounds: target forwards the row took
    part in; accepted: emitted tokens that were drafts. logprobs: raw log p of each token, if asked for.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    rounds: int
    accepted: int
    logprobs: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """Answers in prompt order, and what they cost.

    timings: seconds of prepare, prefill (all chunks), decode and total. compiles: backend compilations during the
    call; cache_hits: programs read from the persistent cache instead. program: the shape identity is promised in.
    warnings: what makes the answers doubtful, in sentences. course: how an exact hand-off went.
    """

    generations: tuple[Generation, ...]
    timings: dict[str, float]
    compiles: int
    cache_hits: int
    program: dict[str, Any]
    warnings: tuple[str, ...] = ()
    course: Course | None = None

    def __iter__(self) -> Iterator[Generation]:
        return iter(self.generations)

    def __len__(self) -> int:
        return len(self.generations)

    def __getitem__(self, i: int) -> Generation:
        return self.generations[i]

    @property
    def text(self) -> str:
        """The text of a single answer."""
        if len(self.generations) != 1:
            raise ValueError(f"{len(self.generations)} answers; use .generations")
        return self.generations[0].text


@dataclasses.dataclass(frozen=True)
class Event:
    """Newly committed tokens of one prompt. The last event of a prompt has its `finish_reason` and `generation`."""

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    generation: Generation | None = None


def generate(lm: LM, prompts: Any, **options: Unpack[Options]) -> Result:
    """Answer a batch of prompts of any lengths.

    Args:
      prompts: texts (encoded as they are), lists of chat messages, or lists of token ids; one or several.
      options: see `Options`.

    Raises:
      ValueError, kvjax.cache.CacheFull: a parameter or prompt that cannot be served, named.
    """
    run = _Run(lm, prompts, **options)
    every = STOP_CHECK if any(run.batch.stop) else 2**31 - 1
    for _ in run.events(every):
        pass
    return run.result()


def stream(lm: LM, prompts: Any, *, every: int = 1, **options: Unpack[Options]) -> Iterator[Event]:
    """As `generate`, token-identical, yielding events after every `every` rounds."""
    if every < 1:
        raise ValueError(f"every must be at least 1 round, got {every}")
    return _Run(lm, prompts, **options).events(every)


class _Run:
    """One batch on its way through the three programs."""

    def __init__(
        self,
        lm: LM,
        prompts: Any,
        *,
        draft: Any = None,
        draft_params: Any = (),
        width: int | None = None,
        **options: Any,
    ) -> None:
        began = time.perf_counter()
        self.lm = lm
        self.source, self.draft_params = source_of(lm, draft, draft_params, width)
        self.batch: Batch = prepare(lm, prompts, width=self.source.width, **options)
        self.rows = [TextRow(lm.tokenizer, stop) for stop in self.batch.stop]
        self.finished: dict[int, Generation] = {}
        self.timings = {"prepare": time.perf_counter() - began, "prefill": 0.0, "decode": 0.0}
        self.compiles = self.hits = 0
        self.warnings: tuple[str, ...] = ()

    def events(self, every: int) -> Iterator[Event]:
        lm, source, batch = self.lm, self.source, self.batch
        model, params, drafting = lm.model, lm.params, self.draft_params
        sent = [0] * batch.count
        cut = np.full(len(batch.length), -1, np.int32)
        key = np.zeros(2, np.uint32)
        state = self._read()
        while len(self.finished) < batch.count:
            with self._device("decode"):
                state = loop.rounds(
                    model,
                    source,
                    batch.program,
                    params,
                    drafting,
                    state,
                    batch.sampling,
                    key,
                    np.int32(every),
                    cut,
                )
                seen = _host(state, logprobs=batch.program.logprobs, drafted=any(batch.stop))
            for b in range(batch.count):
                if b not in self.finished and (event := self._advance(b, seen, sent, cut)):
                    yield event
        self.timings["total"] = sum(self.timings.values())

    def _read(self) -> DecodeState:
        """The state after the prompts, but for their last tokens."""
        lm, source, batch, drafting = self.lm, self.source, self.batch, self.draft_params
        with self._device("prefill"):
            state = loop.start(
                lm.model, source, batch.program, drafting, batch.tokens, batch.length, batch.idle
            )
            for i in range(-(-(int(batch.length.max()) - 1) // batch.chunk)):
                state = loop.prefill(lm.model, source, batch.chunk, lm.params, drafting, state, np.int32(i))
            return jax.block_until_ready(state)

    @contextlib.contextmanager
    def _device(self, phase: str, lm: LM | None = None) -> Iterator[None]:
        """The model's mesh, a clock and a compile counter, around calls to the device only: between events the
        consumer's code runs, which is neither on this mesh nor on this bill, and which may never come back."""
        began = time.perf_counter()
        with CompileCounter() as counter, (lm or self.lm).model.rules.context():
            yield
        self.timings[phase] += time.perf_counter() - began
        self.compiles += counter.compiles
        self.hits += counter.hits

    def _advance(self, b: int, seen: dict[str, Any], sent: list[int], cut: np.ndarray) -> Event | None:
        """Take up row b's new tokens: look for stop strings, release text, finish the row if it is done."""
        first, row = int(self.batch.length[b]), self.rows[b]
        tokens = [int(t) for t in seen["tokens"][b, first : seen["length"][b]]]
        stopped = row.find_stop(tokens)
        if stopped is not None:
            tokens = tokens[:stopped]
            cut[b] = first + stopped
        final = bool(seen["done"][b]) or stopped is not None
        text = row.extend(tokens, final=final, stopped=stopped is not None)
        new = tuple(tokens[sent[b] :])
        sent[b] = len(tokens)
        if not final:
            return Event(b, new, text) if new else None
        stop_ids = set(np.asarray(self.batch.sampling.stop_ids)[b].tolist()) - {-1}
        reason = "stop" if stopped is not None or (tokens and tokens[-1] in stop_ids) else "length"
        scores = None
        if self.batch.logprobs[b]:
            scores = tuple(float(x) for x in seen["logprobs"][b, first : first + len(tokens)])
        rounds, accepted = int(seen["rounds"][b]), int(seen["accepted"][b])
        if stopped is not None:
            # The device went on: count what is kept. A round ends with its only token that is no draft.
            drafted = seen["drafted"][b, first : first + stopped]
            accepted = int(drafted.sum())
            rounds = stopped - accepted + int(drafted[-1])
        done = Generation(row.text, tuple(tokens), first, reason, rounds, accepted, scores)
        self.finished[b] = done
        return Event(b, new, text, reason, done)

    def result(self) -> Result:
        batch = self.batch
        program = {
            "batch": len(batch.length), "size": batch.tokens.shape[1], "width": self.source.width, "chunk": batch.chunk,
            "dtype": self.lm.model.setting.dtype, "source": type(self.source).__name__,
            "mesh": None if self.lm.model.rules.mesh is None else dict(self.lm.model.rules.mesh.shape),
        }  # fmt: skip
        answers = tuple(self.finished[b] for b in range(batch.count))
        return Result(answers, self.timings, self.compiles, self.hits, program, self.warnings)


def _host(state: DecodeState, *, logprobs: bool, drafted: bool) -> dict[str, Any]:
    """The parts of a state the host looks at, as numpy arrays (on every process of a multi-process mesh)."""
    parts = {"tokens": state.tokens, "length": state.length, "done": state.done, "rounds": state.rounds,
             "accepted": state.accepted}  # fmt: skip
    if logprobs:
        parts["logprobs"] = state.logprobs  # type: ignore[assignment]
    if drafted:
        parts["drafted"] = state.drafted
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        return {k: np.asarray(process_allgather(v, tiled=True)) for k, v in parts.items()}
    return {k: np.asarray(v) for k, v in parts.items()}
