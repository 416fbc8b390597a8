"""Host-side preparation: prompts to padded arrays, one value or one per prompt to per-row arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from kvjax.cache import CacheFull
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.state import DraftSource
from kvjax.lm import LM, Drafter

SMALLEST = 256


class Options(TypedDict, total=False):
    """Options of a request. Those marked * are one value, or one per prompt."""

    max_new_tokens: int | Sequence[int]  # *, default 128
    temperature: float | Sequence[float]  # *, default 0: greedy; greedy and sampled rows share one program
    top_k: int | Sequence[int]  # *, default 0: off
    top_p: float | Sequence[float]  # *, default 1: off
    min_p: float | Sequence[float]  # *, default 0: off
    seed: int | Sequence[int]  # *, default 0; seed and position alone fix the noise
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None  # that end a text, or lists per prompt
    stop_ids: Sequence[int] | None  # default: the model's end-of-sequence ids
    logprobs: bool | Sequence[bool]  # *, raw log p of every emitted token
    thinking: bool | None  # the chat template's thinking switch, for templates that have one
    # a draft source (`kvjax.Ngram(width=8)`), a block drafter (`kvjax.load_drafter`), or a smaller model of the same
    # vocabulary
    draft: DraftSource | Drafter | LM | None
    draft_params: Any  # arrays of a draft source that has some
    width: (
        int | None
    )  # rows of a round, one more than are drafted: default a drafter's block, 4 with a draft model
    size: int | None  # cache slots per row; default: the next power of two
    chunk: int | None  # prompt tokens per prefill call; default 128 on CPU, 256 elsewhere


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts ready for the device. Rows beyond `count` are idle; they fill the program's batch."""

    count: int
    tokens: np.ndarray  # [B, S] int32
    length: np.ndarray  # [B] int32
    idle: np.ndarray  # [B] bool
    sampling: Sampling
    program: SamplerProgram
    stop: tuple[tuple[str, ...], ...]  # stop strings of each prompt
    logprobs: tuple[bool, ...]
    max_new: tuple[int, ...]
    chunk: int


def bucket(length: int, smallest: int = SMALLEST) -> int:
    """The power of two at or above `length`, at least `smallest`: few sizes mean few programs."""
    return max(smallest, 1 << (length - 1).bit_length())


def tokenize(lm: LM, prompts: Any, thinking: bool | None) -> list[list[int]]:
    """Token ids of prompts: a text (encoded as is), a list of ids, or a list of chat messages.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, or no tokenizer for a text.
    """
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)):
        prompts = [prompts]
    if len(prompts) == 0:
        raise ValueError("no prompts given")
    rows = []
    for i, prompt in enumerate(prompts):
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if (chat or isinstance(prompt, str)) and lm.tokenizer is None:
            raise ValueError(
                f"prompt {i} is text, but {lm.id} was loaded without a tokenizer; give token ids"
            )
        if chat:
            ids = lm.tokenizer.encode_chat(prompt, thinking=thinking)  # type: ignore[union-attr]
        elif isinstance(prompt, str):
            ids = lm.tokenizer.encode(prompt)  # type: ignore[union-attr]
        else:
            ids = [int(t) for t in prompt]
        if thinking is not None and not chat:
            raise ValueError("thinking applies to chat messages; this prompt is plain text or token ids")
        if not ids:
            raise ValueError(f"prompt {i} is empty: it has no tokens")
        for t in ids:
            if not 0 <= t < lm.config.vocab:
                raise ValueError(
                    f"prompt {i}: token id {t} is outside the vocabulary (0..{lm.config.vocab - 1})"
                )
        rows.append(ids)
    return rows


def prepare(
    lm: LM, prompts: Any, *, width: int, max_new_tokens: Any = 128, temperature: Any = 0.0, top_k: Any = 0,
    top_p: Any = 1.0, min_p: Any = 0.0, seed: Any = 0, stop: Any = (), stop_ids: Sequence[int] | None = None,
    logprobs: Any = False, thinking: bool | None = None, size: int | None = None, chunk: int | None = None,
) -> Batch:  # fmt: skip
    """Arrays of one batch; every parameter is checked here, on the host.

    Raises:
      ValueError: a parameter out of range, naming it. CacheFull: a prompt that does not fit, naming it.
    """
    rows = tokenize(lm, prompts, thinking)
    count = len(rows)
    ways = lm.model.rules.data
    batch = bucket(count, 1)
    batch = -(-batch // ways) * ways
    if chunk is None:
        chunk = 128 if lm.model.setting.attention.platform == "cpu" else 256
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if stop_ids is None:
        tokenizer_eos = () if lm.tokenizer is None else lm.tokenizer.eos
        stop_ids = sorted({*lm.config.eos, *tokenizer_eos})
    for t in stop_ids:
        if not isinstance(t, int | np.integer) or not 0 <= t < lm.config.vocab:
            raise ValueError(f"stop_ids: {t!r} is not a token id (0..{lm.config.vocab - 1})")
    stops = _stops(stop, count)
    if any(stops) and lm.tokenizer is None:
        raise ValueError(f"stop: {lm.id} was loaded without a tokenizer, so no text is made; use stop_ids")
    limit = lm.config.vocab if lm.tokenizer is None else lm.tokenizer.vocab

    def fill(name: str, value: Any) -> Any:
        """Extend per-prompt values over the idle rows."""
        if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
            if len(value) != count:
                raise ValueError(f"{name}: {len(value)} values for {count} prompts")
            return np.asarray([*value, *[value[-1]] * (batch - count)])
        return value

    sampling = Sampling.create(
        batch, temperature=fill("temperature", temperature), top_k=fill("top_k", top_k), top_p=fill("top_p", top_p),
        min_p=fill("min_p", min_p), seed=fill("seed", seed), max_new=fill("max_new_tokens", max_new_tokens),
        stop_ids=list(stop_ids) or -1,
    )  # fmt: skip
    wanted = [bool(x) for x in np.broadcast_to(fill("logprobs", logprobs), (batch,))]
    max_new = [int(x) for x in np.asarray(sampling.max_new)[:count]]
    need = [len(r) + n + width for r, n in zip(rows, max_new, strict=True)]
    if size is None:
        size = bucket(max(need))
    size = -(-size // chunk) * chunk
    for i, (row, n) in enumerate(zip(rows, need, strict=True)):
        what = f"prompt {i} has {len(row)} tokens; with max_new_tokens {max_new[i]} and width {width}"
        if n > size:
            raise CacheFull(f"{what} it needs {n} cache slots, but size is {size}")
        if len(row) + max_new[i] > lm.config.max_positions:
            raise CacheFull(f"{what} it exceeds the {lm.config.max_positions} positions {lm.id} was made for")
    tokens = np.zeros((batch, size), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    length = np.asarray([*map(len, rows), *[1] * (batch - count)], np.int32)
    program = SamplerProgram.of(sampling, limit=limit, logprobs=any(wanted))
    return Batch(
        count, tokens, length, np.arange(batch) >= count, sampling, program, stops, tuple(wanted),
        tuple(max_new), chunk,
    )  # fmt: skip


def _stops(stop: Any, count: int) -> tuple[tuple[str, ...], ...]:
    """Stop strings per prompt: one string, strings for all, or one list of strings per prompt."""
    if stop is None or isinstance(stop, str):
        stop = () if stop is None else (stop,)
    nested = any(isinstance(s, list | tuple) for s in stop)
    if nested and len(stop) != count:
        raise ValueError(f"stop: {len(stop)} lists of stop strings for {count} prompts")
    each = (
        [tuple(s) if isinstance(s, list | tuple) else (s,) for s in stop] if nested else [tuple(stop)] * count
    )
    for strings in each:
        for s in strings:
            if not isinstance(s, str) or not s:
                raise ValueError(f"stop: {s!r} is not a non-empty string")
    return tuple(each)
