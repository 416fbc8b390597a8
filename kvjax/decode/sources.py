"""Draft sources that need no model: none, junk, oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.decode.state import Commit, Draft, View


@dataclasses.dataclass(frozen=True)
class Stateless:
    """Base of sources that look at nothing but each row's own text (so they run shard by shard, with
    `view.cache` None)."""

    width: int = 1
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")

    def init(self, params: Any, batch: int, size: int) -> tuple[()]:
        return ()

    def absorb(self, params: Any, state: Any, commit: Commit) -> Any:
        return state

    def propose(self, params: Any, state: Any, view: View) -> tuple[Draft, Any]:
        """Plain decoding: the anchor alone."""
        if self.width != 1:
            raise ValueError("plain decoding has width 1; give a draft source for more")
        return Draft(view.anchor[:, None]), state


Plain = Stateless


@dataclasses.dataclass(frozen=True)
class Junk(Stateless):
    """Drafts that depend on the position alone: a round of this width with next to no acceptance.

    It is the plain baseline of a width: the same program as any other source's verification.
    """

    vocab: int = 2

    def propose(self, params: Any, state: Any, view: View) -> tuple[Draft, Any]:
        step = jnp.arange(1, self.width, dtype=jnp.uint32)
        mixed = (view.pos.astype(jnp.uint32)[:, None] + step) * jnp.uint32(2654435761)
        tokens = ((mixed >> 8) % jnp.uint32(self.vocab)).astype(jnp.int32)
        return Draft(jnp.concatenate([view.anchor[:, None], tokens], axis=1)), state


@dataclasses.dataclass(frozen=True)
class Oracle(Stateless):
    """Drafts read from a known answer: params is tokens [B, S] by position.

    every: corrupt each `every`-th position (0: none), so that acceptance stops at known places.
    """

    every: int = 0

    def propose(self, params: Any, state: Any, view: View) -> tuple[Draft, Any]:
        at = view.pos[:, None] + jnp.arange(1, self.width)
        tokens = jnp.take_along_axis(params, jnp.minimum(at, params.shape[1] - 1), axis=1)
        if self.every:
            tokens = jnp.where(at % self.every == 0, tokens ^ 1, tokens)
        return Draft(jnp.concatenate([view.anchor[:, None], tokens], axis=1)), state
