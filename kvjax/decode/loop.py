"""The decoding loop: three compiled programs per (batch, size, source), and one pure function over them.

`start` makes the state, `prefill` reads one chunk of the prompt, `rounds` decodes until all rows are done or a
limit is reached. Batch generation, streaming and a server call the same three, so they emit the same tokens.

A prompt of n tokens leaves n - 1 in the cache: its last token is the first anchor. Prefill therefore never
computes the head, and the first round is a round like any other. Chunks start at absolute multiples of the
chunk length, so a row's K/V bits do not depend on how a prefix came to be there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.attention import MaskSpec
from kvjax.cache import commit
from kvjax.decode.sampler import SamplerProgram, Sampling, log_probability, sample
from kvjax.decode.sources import Stateless
from kvjax.decode.state import Commit, DecodeState, DraftSource, View
from kvjax.decode.verify import verify
from kvjax.models import Model
from kvjax.typing import Array, Int, Params


class Decoded(NamedTuple):
    """What `generate` returns. tokens: [B, S]; length, prompt, rounds, accepted: [B] int32;
    done: [B] bool; logprobs: [B, S] or None."""

    tokens: jax.Array
    length: jax.Array
    prompt: jax.Array
    rounds: jax.Array
    accepted: jax.Array
    done: jax.Array
    logprobs: jax.Array | None


def begin(
    model: Model, source: DraftSource, program: SamplerProgram, draft_params: Any, tokens: Int[Array, "B S"],
    length: Int[Array, " B"], idle: Any,
) -> DecodeState:  # fmt: skip
    """Empty caches around prompts. tokens: [B, S], right-padded; length: [B] >= 1; idle: [B] bool, rows that
    only fill up the batch."""
    batch, size = tokens.shape
    tokens, length, idle = (_by_row(model, x) for x in (tokens, length, idle))
    zero = jnp.zeros_like(length)
    logprobs = jnp.zeros_like(tokens, jnp.float32) if program.logprobs else None
    return DecodeState(
        cache=model.cache(batch, size), draft=source.init(draft_params, batch, size), tokens=tokens, length=length,
        prompt=length, done=idle, rounds=zero, accepted=zero, drafted=jnp.zeros_like(tokens, bool), logprobs=logprobs,
    )  # fmt: skip


def read_chunk(
    model: Model, source: DraftSource, chunk: int, params: Params, draft_params: Any, state: DecodeState,
    index: Int[Array, ""],
) -> DecodeState:  # fmt: skip
    """Prefill tokens [index * chunk, (index + 1) * chunk) of every row that has them."""
    first = index * chunk
    ids = jax.lax.dynamic_slice_in_dim(state.tokens, first, chunk, axis=1)
    pos = jnp.broadcast_to(first + jnp.arange(chunk, dtype=jnp.int32), ids.shape)
    pos = _by_row(model, pos)
    count = jnp.clip(state.length - 1 - first, 0, chunk)
    out = model.forward(params, ids, pos, state.cache, MaskSpec(), taps=source.taps, logits=False, at=first)
    assert out.cache is not None
    cache = commit(out.cache, None, count, rules=model.rules, at=first)
    rows = Commit(ids, count, pos, out.taps, at=first)
    return dataclasses.replace(state, cache=cache, draft=source.absorb(draft_params, state.draft, rows))


def one_round(
    model: Model, source: DraftSource, program: SamplerProgram, params: Params, draft_params: Any,
    state: DecodeState, sampling: Sampling, key: jax.Array,
) -> DecodeState:  # fmt: skip
    """Propose, forward W rows, verify, commit, absorb. Rows that are done run along and change nothing."""
    rules, width = model.rules, source.width
    view = View(_anchor(model, state), state.length - 1, state.tokens, state.cache, sampling, program, key)
    if isinstance(source, Stateless):
        own = jax.tree.map(lambda x: _by_row(model, x), draft_params)
        sight = (own, view._replace(cache=None, program=None, key=None))  # type: ignore[arg-type]
        propose = rules.local(
            lambda p, v: source.propose(p, (), v)[0].tokens, rules.rows(sight), rules.spec("batch", None)
        )
        draft = propose(*sight)
        draft_state = state.draft
    else:
        proposal, draft_state = source.propose(draft_params, state.draft, view)
        if proposal.parent is not None:
            raise NotImplementedError("tree drafts: the loop verifies chains")
        draft = proposal.tokens

    pos = view.pos[:, None] + jnp.arange(width, dtype=jnp.int32)
    out = model.forward(params, draft, pos, state.cache, MaskSpec(), taps=source.taps)
    logits = rules.reshard(out.logits, "batch", None, None)

    def judge(
        logits, draft, pos, sampling, tokens, length, prompt, done, rounds, accepted, drafted, logprobs
    ):
        target = sample(logits, pos + 1, sampling, program, key)
        room = sampling.max_new - (length - prompt)
        verdict = verify(draft, target, stop_ids=sampling.stop_ids, room=room, done=done)
        put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        # Written past `length` as well: garbage there by contract, overwritten by the next round.
        tokens = put(tokens, target, length)
        drafted = put(drafted, jnp.arange(width) < verdict.accepted[:, None], length)
        if logprobs is not None:
            logprobs = put(logprobs, log_probability(logits, target), length)
        return (
            tokens, length + verdict.count, verdict.done, rounds + (verdict.count > 0),
            accepted + verdict.accepted, drafted, logprobs, verdict.count,
        )  # fmt: skip

    seen = (logits, draft, pos, sampling, state.tokens, state.length, state.prompt, state.done, state.rounds,
            state.accepted, state.drafted, state.logprobs)  # fmt: skip
    result = seen[4], seen[5], seen[7], seen[8], seen[9], seen[10], seen[11], seen[5]
    judged = rules.local(judge, rules.rows(seen), rules.rows(result))(*seen)
    tokens, length, done, rounds, accepted, drafted, logprobs, count = judged

    assert out.cache is not None
    cache = commit(out.cache, None, count, rules=rules)
    draft_state = source.absorb(draft_params, draft_state, Commit(draft, count, pos, out.taps, at=None))
    return dataclasses.replace(
        state, cache=cache, draft=draft_state, tokens=tokens, length=length, done=done, rounds=rounds,
        accepted=accepted, drafted=drafted, logprobs=logprobs,
    )  # fmt: skip


def many_rounds(
    model: Model, source: DraftSource, program: SamplerProgram, params: Params, draft_params: Any,
    state: DecodeState, sampling: Sampling, key: jax.Array, limit: Int[Array, ""], cut: Int[Array, " B"],
) -> DecodeState:  # fmt: skip
    """At most `limit` rounds. cut: [B] int32; a row with cut >= 0 is ended at that length first (a stop string
    found on the host), its cache rolled back with it."""
    cut = _by_row(model, cut)
    sampling = jax.tree.map(lambda x: _by_row(model, x), sampling)
    length = jnp.where(cut >= 0, jnp.minimum(cut, state.length), state.length)
    filled = jnp.minimum(state.cache.filled, jnp.maximum(length - 1, 0))
    done = state.done | (cut >= 0) | (length - state.prompt >= sampling.max_new)
    state = dataclasses.replace(
        state, length=length, done=done, cache=dataclasses.replace(state.cache, filled=filled)
    )

    def body(carry):
        state, n = carry
        return one_round(model, source, program, params, draft_params, state, sampling, key), n + 1

    state, _ = jax.lax.while_loop(lambda c: (c[1] < limit) & ~jnp.all(c[0].done), body, (state, jnp.int32(0)))
    return state


def generate(
    model: Model, params: Params, tokens: Int[Array, "B S"], length: Int[Array, " B"], key: jax.Array, *,
    sampling: Sampling, source: DraftSource, draft_params: Any = (), program: SamplerProgram, chunk: int,
) -> Decoded:  # fmt: skip
    """Prompts to answers: a pure function of arrays for use inside `jax.jit`, `jax.export` or AOT.

    Args:
      tokens: [B, S] int32 prompts, right-padded to the cache size S, a multiple of `chunk`.
      length: [B] int32 >= 1. Nothing is checked on device: length + max_new + W <= S is the caller's duty
        (`kvjax.cache.check_room`).
      key: a typed PRNG key (`jax.random.key`).

    On a mesh call it under `model.rules.context()`.
    """
    idle = jnp.zeros(length.shape, bool)
    state = begin(model, source, program, draft_params, tokens, length, idle)
    chunks = (jnp.max(length) - 1 + chunk - 1) // chunk
    state = jax.lax.fori_loop(
        0, chunks, lambda i, s: read_chunk(model, source, chunk, params, draft_params, s, i), state
    )
    cut = jnp.full_like(state.length, -1)
    limit = jnp.int32(2**31 - 1)
    state = many_rounds(model, source, program, params, draft_params, state, sampling, key, limit, cut)
    return decoded(state)


def decoded(state: DecodeState) -> Decoded:
    """The answer's part of a state."""
    return Decoded(
        state.tokens, state.length, state.prompt, state.rounds, state.accepted, state.done, state.logprobs
    )


start = functools.partial(jax.jit, static_argnums=(0, 1, 2))(begin)
prefill = functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("state",))(read_chunk)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("state",))
def rounds(model, source, program, params, draft_params, state, sampling, key_data, limit, cut):
    """`many_rounds`, jitted and donating; key_data: [2] uint32 (a raw key, so that the host makes no array)."""
    key = jax.random.wrap_key_data(key_data)
    return many_rounds(model, source, program, params, draft_params, state, sampling, key, limit, cut)


def _by_row(model: Model, x: jax.Array) -> jax.Array:
    """An array that leads with the batch, laid out along `data`."""
    return model.rules.reshard(x, "batch", *(None,) * (x.ndim - 1))


def _anchor(model: Model, state: DecodeState) -> jax.Array:
    seen = (state.tokens, state.length)
    take = lambda t, n: jnp.take_along_axis(t, jnp.maximum(n - 1, 0)[:, None], axis=1)[:, 0]  # noqa: E731
    return model.rules.local(take, model.rules.rows(seen), model.rules.spec("batch"))(*seen)
