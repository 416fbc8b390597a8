"""From a source cache to a decoding state of the target: mapped rows, and what is recomputed natively around them.

Three programs, each compiled once per (batch, size): `map_chunk` maps a chunk of rows (with the first layers exact, if
asked for), `redo_head` recomputes the first rows, `read_tail` reads the last rows over the mapped ones.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.attention import MaskSpec
from kvjax.cache import KVCache, commit
from kvjax.decode.state import DecodeState
from kvjax.models import Model
from kvjax.transfer.mapper import Mapper, map_rows
from kvjax.typing import Array, Int, Params


@dataclasses.dataclass(frozen=True)
class Repair:
    """What the target computes itself. tail: last prompt tokens, at least 1 (the last token is always read natively,
    for its logits). head: first tokens (attention sink, bos, template). layers: first layers, of all tokens; they need
    no mapped input, since they follow from the token embeddings."""

    tail: int = 1
    head: int = 0
    layers: int = 0

    def __post_init__(self) -> None:
        if self.tail < 1:
            raise ValueError(
                f"repair.tail must be at least 1 (the last prompt token is read natively), got {self.tail}"
            )
        if self.head < 0 or self.layers < 0:
            raise ValueError(
                f"repair.head and repair.layers must not be negative, got {self.head} and {self.layers}"
            )

    def share(self, length: int, layers: int) -> float:
        """Cost as a share of a native prefill of `length` tokens through `layers` layers, attention's square aside."""
        native = min(self.tail + self.head, length)
        return (native * layers + (length - native) * min(self.layers, layers)) / (length * layers)


def mapped_end(length: Int[Array, " B"], repair: Repair) -> Int[Array, " B"]:
    """[B] tokens [0, end) are mapped; the rest of the prompt is read natively."""
    return jnp.maximum(length - repair.tail, 0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("state",))
def map_chunk(
    model: Model, repair: Repair, chunk: int, params: Params, mapper: Mapper, source: KVCache, state: DecodeState,
    index: Int[Array, ""],
) -> DecodeState:  # fmt: skip
    """Map rows [index * chunk, (index + 1) * chunk) of every prompt that has them; source: its cache, S slots too."""
    first = index * chunk
    ids = jax.lax.dynamic_slice_in_dim(state.tokens, first, chunk, axis=1)
    pos = jnp.broadcast_to(first + jnp.arange(chunk, dtype=jnp.int32), ids.shape)
    pos = model.rules.reshard(pos, "batch", None)
    rows = map_rows(mapper, source, first, pos, rules=model.rules, choice=model.setting.attention)
    cache = state.cache
    if repair.layers:
        out = model.forward(params, ids, pos, cache, MaskSpec(), logits=False, at=first, depth=repair.layers)
        assert out.cache is not None
        cache = out.cache
        rows = (*out.rows, *rows[repair.layers :])
    count = jnp.clip(mapped_end(state.length, repair) - first, 0, chunk)
    cache = commit(cache, rows, count, rules=model.rules, at=first)
    return dataclasses.replace(state, cache=cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("state",))
def redo_head(model: Model, repair: Repair, params: Params, state: DecodeState) -> DecodeState:
    """Recompute rows [0, head) natively, in place. Slots that were not filled stay so."""
    ids = state.tokens[:, : repair.head]
    pos = jnp.broadcast_to(jnp.arange(repair.head, dtype=jnp.int32), ids.shape)
    pos = model.rules.reshard(pos, "batch", None)
    out = model.forward(params, ids, pos, state.cache, MaskSpec(), logits=False, at=jnp.int32(0))
    assert out.cache is not None
    return dataclasses.replace(state, cache=dataclasses.replace(out.cache, filled=state.cache.filled))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("state",))
def read_tail(model: Model, repair: Repair, params: Params, state: DecodeState) -> DecodeState:
    """Read the last tail - 1 tokens before the anchor natively, each prompt from where its mapped rows end."""
    width = repair.tail - 1
    start = state.cache.filled
    pos = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    ids = jnp.take_along_axis(state.tokens, pos, axis=1)
    out = model.forward(params, ids, pos, state.cache, MaskSpec(), logits=False)
    assert out.cache is not None
    count = jnp.clip(state.length - 1 - start, 0, width)
    return dataclasses.replace(state, cache=commit(out.cache, None, count, rules=model.rules))


def hand_over(
    model: Model, repair: Repair, chunk: int, params: Params, mapper: Mapper, source: KVCache, state: DecodeState,
    longest: int,
) -> DecodeState:  # fmt: skip
    """All of it: `state` (begun, nothing read) with its prompt in place, ready for rounds. longest: of the prompts."""
    for i in range(-(-max(longest - repair.tail, 0) // chunk)):
        state = map_chunk(model, repair, chunk, params, mapper, source, state, jnp.int32(i))
    if repair.head:
        state = redo_head(model, repair, params, state)
    if repair.tail > 1:
        state = read_tail(model, repair, params, state)
    return state
