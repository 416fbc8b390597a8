"""DFlash as a draft source: a block in one forward pass of a drafter that reads the target's features."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache import KVCache, commit
from kvjax.decode.state import Commit, Draft, View
from kvjax.models.drafter import DrafterModel, DrafterParams


@dataclasses.dataclass(frozen=True)
class DFlash:
    """Drafts a whole block, of which the first `width` rows are verified.

    A narrower block would be another input to a drafter that looks both ways, so the block is always the one it was
    trained on. Drafts are the likeliest tokens at every temperature. The state is a cache of context rows,
    filled exactly as far as the target's; the block's own rows are never kept.
    """

    drafter: DrafterModel
    width: int

    def __post_init__(self) -> None:
        if not 2 <= self.width <= self.drafter.drafter.block:
            raise ValueError(
                f"width {self.width}: this drafter's blocks have {self.drafter.drafter.block} rows, of which 2 or more"
                " can be verified"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.drafter.taps

    def init(self, params: DrafterParams, batch: int, size: int) -> KVCache:
        return self.drafter.cache(batch, size)

    def propose(self, params: DrafterParams, state: KVCache, view: View) -> tuple[Draft, KVCache]:
        hidden = self.drafter.block(params, view.anchor, view.pos, state)
        tokens, score = self.drafter.choose(params, hidden[:, 1 : self.width], view.program.limit)
        known = jnp.ones_like(view.anchor, jnp.float32)[:, None]
        return Draft(
            jnp.concatenate([view.anchor[:, None], tokens], axis=1),
            score=jnp.concatenate([known, score], axis=1),
        ), state

    def absorb(self, params: DrafterParams, state: KVCache, rows: Commit) -> KVCache:
        """Rows that were rejected are written too, beyond `filled`, where the next round's go."""
        assert rows.taps is not None
        new = self.drafter.context(params, rows.taps, rows.pos)
        return commit(state, new, rows.count, rules=self.drafter.rules, at=rows.at)
