"""A conventional draft model: a smaller model of the same vocabulary, decoding W-1 tokens ahead."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.attention import MaskSpec
from kvjax.cache import KVCache, commit
from kvjax.decode.sampler import sample
from kvjax.decode.state import Commit, Draft, View
from kvjax.models import Model
from kvjax.typing import Params


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts by plain decoding of `model`; sampled rows draw with the target's own noise (same seed, same
    position), which raises agreement and stores nothing of q."""

    model: Model
    width: int
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ValueError(f"a draft model needs width >= 2, got {self.width}")

    def init(self, params: Params, batch: int, size: int) -> KVCache:
        return self.model.cache(batch, size)

    def propose(self, params: Params, state: KVCache, view: View) -> tuple[Draft, KVCache]:
        """W steps: the last one only writes the K/V of the last draft, needed if all are accepted."""
        ones = jnp.ones_like(view.pos)
        rules = self.model.rules

        def step(carry, _):
            cache, token, pos = carry
            out = self.model.forward(params, token[:, None], pos[:, None], cache)
            cache = commit(out.cache, None, ones, rules=rules)
            seen = (rules.reshard(out.logits, "batch", None, None), pos[:, None] + 1, view.sampling)
            pick = rules.local(
                lambda *seen: sample(*seen, view.program, view.key)[:, 0],
                rules.rows(seen),
                rules.spec("batch"),
            )
            return (cache, pick(*seen), pos + 1), token

        carry = (state, view.anchor, view.pos)
        (cache, _, _), tokens = jax.lax.scan(step, carry, length=self.width)
        return Draft(tokens.T), KVCache(cache.k, cache.v, state.filled)

    def absorb(self, params: Params, state: KVCache, rows: Commit) -> KVCache:
        if rows.at is None:  # propose wrote these rows already
            return KVCache(state.k, state.v, state.filled + rows.count)
        out = self.model.forward(params, rows.tokens, rows.pos, state, MaskSpec(), logits=False, at=rows.at)
        assert out.cache is not None
        return commit(out.cache, None, rows.count, rules=self.model.rules, at=rows.at)
