"""State of a batch while it decodes, and the protocol of draft sources."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from kvjax.cache import KVCache
from kvjax.decode.sampler import SamplerProgram, Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """One frozen pytree, donated at every call.

    The last committed token of a row is its anchor: it has no K/V yet, so cache.filled = length - 1. Slots of
    `tokens` at and beyond `length` are garbage.
    """

    cache: KVCache
    draft: Any  # the draft source's own state
    tokens: jax.Array  # [B, S] int32, prompt and answer
    length: jax.Array  # [B] int32, committed tokens
    prompt: jax.Array  # [B] int32, prompt length
    done: jax.Array  # [B] bool
    rounds: jax.Array  # [B] int32, rounds in which the row emitted
    accepted: jax.Array  # [B] int32, emitted tokens that were drafts
    drafted: jax.Array  # [B, S] bool, which: a text that is cut counts what it keeps
    logprobs: jax.Array | None  # [B, S] float32 by position, or None


class View(NamedTuple):
    """What a draft source may look at (read-only)."""

    anchor: jax.Array  # [B] int32
    pos: jax.Array  # [B] int32, the anchor's position
    tokens: jax.Array  # [B, S] int32
    cache: KVCache
    sampling: Sampling
    program: SamplerProgram
    key: jax.Array


class Commit(NamedTuple):
    """Rows that just became part of a row's context: `count[b]` of these T, in this order."""

    tokens: jax.Array  # [B, T] int32
    count: jax.Array  # [B] int32
    pos: jax.Array  # [B, T] int32
    taps: jax.Array | None  # [B, T, len(taps) * D]
    at: jax.Array | None  # a prompt chunk: its first position, the same for all rows; a verified block: None


class Draft(NamedTuple):
    """tokens: [B, W] int32, the anchor first; parent: [B, W] int32 for a tree, None for a chain;
    score: [B, W] float32 confidence or None."""

    tokens: jax.Array
    parent: jax.Array | None = None
    score: jax.Array | None = None


class DraftSource(Protocol):
    """Proposes blocks. Implementations are frozen dataclasses (static); arrays are `params` and `state`."""

    @property
    def width(self) -> int:
        """W: rows of a round, anchor included."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `absorb` needs."""
        ...

    def init(self, params: Any, batch: int, size: int) -> Any:
        """Empty state for `batch` rows of `size` slots."""
        ...

    def propose(self, params: Any, state: Any, view: View) -> tuple[Draft, Any]:
        """A draft behind the anchor, from committed text alone, and the state with scratch written."""
        ...

    def absorb(self, params: Any, state: Any, commit: Commit) -> Any:
        """Take up rows that became context."""
        ...
