"""Prompt look-up: copy what followed the latest earlier occurrence of the last few tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.decode.sources import Stateless
from kvjax.decode.state import Draft, View


@dataclasses.dataclass(frozen=True)
class Ngram(Stateless):
    """n-gram look-up in the row's own text; the longest match up to `longest` wins, then the latest.

    Without a match the anchor is repeated (which costs nothing: the round runs anyway).
    """

    longest: int = 3

    def propose(self, params: Any, state: Any, view: View) -> tuple[Draft, Any]:
        tokens, anchor_at = view.tokens, view.pos
        size = tokens.shape[1]
        slot = jnp.arange(size)
        best = jnp.full(anchor_at.shape, -1)
        depth = jnp.ones(tokens.shape, bool)
        for n in range(1, self.longest + 1):
            # depth[s]: the n tokens ending at slot s equal the n tokens ending at the anchor.
            back = jnp.maximum(anchor_at - (n - 1), 0)
            tail = jnp.take_along_axis(tokens, back[:, None], axis=1)
            shifted = (
                tokens if n == 1 else jnp.pad(tokens, ((0, 0), (n - 1, 0)), constant_values=-1)[:, :size]
            )
            depth = depth & (shifted == tail) & (slot >= n - 1)
            earlier = depth & (slot < anchor_at[:, None])
            found = jnp.max(jnp.where(earlier, slot, -1), axis=1)
            best = jnp.where((found >= 0) & (anchor_at >= n - 1), found, best)
        ahead = best[:, None] + jnp.arange(1, self.width)
        # Copying past the anchor wraps onto the copied span itself, so a repeating text keeps repeating.
        period = jnp.maximum(anchor_at - best, 1)[:, None]
        ahead = jnp.where(
            ahead > anchor_at[:, None], best[:, None] + 1 + (ahead - best[:, None] - 1) % period, ahead
        )
        copied = jnp.take_along_axis(tokens, jnp.clip(ahead, 0, size - 1), axis=1)
        drafts = jnp.where(best[:, None] >= 0, copied, view.anchor[:, None])
        return Draft(jnp.concatenate([view.anchor[:, None], drafts], axis=1)), state
