"""From a source cache to a decoding state of the target: mapped rows, and what is recomputed natively around them.

Three programs, each compiled once per (batch, size): `map_chunk` maps a chunk of rows (and computes first layers
and a layer group, if asked for), `redo_head` recomputes the first rows, `read_tail` reads the last rows over the mapped
ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from kvjax.attention import MaskSpec
from kvjax.cache import KVCache, commit
from kvjax.config import ModelConfig
from kvjax.decode.state import DecodeState
from kvjax.models import Model
from kvjax.transfer.hidden import map_hidden
from kvjax.transfer.mapper import Mapper, map_rows
from kvjax.typing import Array, Float, Int, Params

SPAN = 4  # prefill chunks that are mapped at once on accelerators


@dataclasses.dataclass(frozen=True)
class Repair:
    """What the target computes itself. tail: last prompt tokens, at least 1 (the last token is always read natively,
    for its logits). head: first tokens (attention sink, bos, template). layers: first layers, of all tokens; they need
    no mapped input, since they follow from the token embeddings. group: so many layers, of all tokens, from the one
    whose input the map gives (`Mapper.hidden`)."""

    tail: int = 1
    head: int = 0
    layers: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if self.tail < 1:
            raise ValueError(
                f"repair.tail must be at least 1 (the last prompt token is read natively), got {self.tail}"
            )
        for name in ("head", "layers", "group"):
            if getattr(self, name) < 0:
                raise ValueError(f"repair.{name} must not be negative, got {getattr(self, name)}")

    def check(self, mapper: Mapper, config: ModelConfig) -> None:
        """
        Raises:
          ValueError: layers the target has not, or a group the map does not lead to.
        """
        if self.layers > config.num_layers:
            raise ValueError(f"repair.layers = {self.layers}: the target has {config.num_layers} layers")
        if not self.group:
            return
        if mapper.hidden is None:
            raise ValueError(
                f"repair.group = {self.group}: the map has no hidden state for a group to begin with (fit one)"
            )
        first, width = mapper.hidden.entering, len(mapper.hidden.bias)
        if width != config.hidden:
            raise ValueError(f"the map's hidden state is {width} wide, the target's {config.hidden}")
        if not self.layers < first or first + self.group > config.num_layers:
            raise ValueError(
                f"repair.group = {self.group} from layer {first}: it must begin behind the {self.layers} first layers"
                f" that are computed anyway, and end within the target's {config.num_layers}"
            )

    def share(self, length: int, layers: int) -> float:
        """Cost as a share of a native prefill of `length` tokens through `layers` layers, attention's square and the
        map aside."""
        native = min(self.tail + self.head, length)
        return (native * layers + (length - native) * min(self.layers + self.group, layers)) / (
            length * layers
        )


def mapped_end(length: Int[Array, " B"], repair: Repair) -> Int[Array, " B"]:
    """[B] tokens [0, end) are mapped; the rest of the prompt is read natively."""
    return jnp.maximum(length - repair.tail, 0)


def span(model: Model, chunk: int, size: int) -> int:
    """Rows that are mapped at once. On accelerators several prefill chunks, where the slots divide: each pass reads the
    whole map from memory, and rows do not wait for each other. On CPU one: nothing is mapped beyond the last chunk."""
    return chunk if model.setting.attention.platform == "cpu" else math.gcd(size, SPAN * chunk)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("state",))
def map_chunk(
    model: Model, repair: Repair, chunk: int, params: Params, mapper: Mapper, source: KVCache, state: DecodeState,
    index: Int[Array, ""],
) -> DecodeState:  # fmt: skip
    """Map rows [index * chunk, (index + 1) * chunk) of every prompt that has them; source: its cache, S slots too."""
    first = index * chunk
    ids = jax.lax.dynamic_slice_in_dim(state.tokens, first, chunk, axis=1)
    pos = _positions(model, first, ids)
    rows = list(map_rows(mapper, source, first, pos, rules=model.rules, choice=model.setting.attention))
    native = [((0, repair.layers), ids)] if repair.layers else []
    if repair.group:
        hidden = _hidden(model, mapper, source, first, pos)
        entering = mapper.hidden.entering  # type: ignore[union-attr]
        native.append(((entering, entering + repair.group), hidden))
    cache = state.cache
    for layers, inputs in native:
        out = model.forward(params, inputs, pos, cache, MaskSpec(), logits=False, at=first, span=layers)
        assert out.cache is not None
        cache, rows[slice(*layers)] = out.cache, out.rows
    count = jnp.clip(mapped_end(state.length, repair) - first, 0, chunk)
    cache = commit(cache, tuple(rows), count, rules=model.rules, at=first)
    return dataclasses.replace(state, cache=cache)


def _positions(model: Model, first: jax.Array | int, ids: jax.Array) -> Int[Array, "B T"]:
    pos = jnp.broadcast_to(first + jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return model.rules.reshard(pos, "batch", None)


def _hidden(
    model: Model, mapper: Mapper, source: KVCache, first: jax.Array, pos: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """What enters the group, of the rows from slot `first`; on a mesh of all their heads on every device."""
    assert mapper.hidden is not None

    def cut(z: jax.Array) -> jax.Array:
        z = jax.lax.dynamic_slice_in_dim(z, first, pos.shape[1], axis=2)
        z = model.rules.reshard(z, "batch", None, None, None)
        return z[:, :: z.shape[1] // mapper.source.kv_heads]  # heads that are stored more than once

    rows = tuple((cut(source.k[i]), cut(source.v[i])) for i in mapper.hidden.layers)
    return map_hidden(mapper.hidden, rows, pos, mapper.source)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("state",))
def redo_head(model: Model, repair: Repair, params: Params, state: DecodeState) -> DecodeState:
    """Recompute rows [0, head) natively, in place. Slots that were not filled stay so."""
    ids = state.tokens[:, : repair.head]
    pos = _positions(model, 0, ids)
    out = model.forward(params, ids, pos, state.cache, MaskSpec(), logits=False, at=jnp.int32(0))
    assert out.cache is not None
    return dataclasses.replace(state, cache=dataclasses.replace(out.cache, filled=state.cache.filled))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("state",))
def read_tail(model: Model, repair: Repair, params: Params, state: DecodeState) -> DecodeState:
    """Read the last tail - 1 tokens before the anchor natively, each prompt from where its mapped rows end."""
    rules, width = model.rules, repair.tail - 1
    start = state.cache.filled
    pos = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    take = rules.local(
        lambda tokens, pos: jnp.take_along_axis(tokens, pos, axis=1),
        rules.rows((state.tokens, pos)),
        rules.rows(pos),
    )
    ids = take(state.tokens, pos)
    out = model.forward(params, ids, pos, state.cache, MaskSpec(), logits=False)
    assert out.cache is not None
    count = jnp.clip(state.length - 1 - start, 0, width)
    return dataclasses.replace(state, cache=commit(out.cache, None, count, rules=rules))


def hand_over(
    model: Model, repair: Repair, chunk: int, params: Params, mapper: Mapper, source: KVCache, state: DecodeState,
    longest: int,
) -> DecodeState:  # fmt: skip
    """All of it: `state` (begun, nothing read) with its prompt in place, ready for rounds. chunk: rows mapped at once
    (`span`); longest: of the prompts."""
    for i in range(-(-max(longest - repair.tail, 0) // chunk)):
        state = map_chunk(model, repair, chunk, params, mapper, source, state, jnp.int32(i))
    return finish(model, repair, params, state)


def finish(model: Model, repair: Repair, params: Params, state: DecodeState) -> DecodeState:
    """What follows when all rows are mapped: the first and the last tokens, read natively."""
    if repair.head:
        state = redo_head(model, repair, params, state)
    if repair.tail > 1:
        state = read_tail(model, repair, params, state)
    return state
