"""The target's own answer to a text whose beginning it did not read: logits of a suffix behind given cache rows.

What training descends on and what judging compares are the same call, differentiable in the rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import KVCache, Rows
from kvjax.models import Model
from kvjax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a text is divided: `prefix` tokens are read elsewhere but for their last `tail` (>= 1), which the target
    reads itself, as it does the `suffix` tokens that are scored."""

    prefix: int
    suffix: int
    tail: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tail <= self.prefix or self.suffix < 1:
            raise ValueError(
                f"a prefix of {self.prefix}, tail of {self.tail} and suffix of {self.suffix} tokens: the tail must be"
                " within the prefix and not empty, the suffix not empty"
            )

    @property
    def given(self) -> int:
        """Rows that come from elsewhere."""
        return self.prefix - self.tail

    @property
    def length(self) -> int:
        return self.prefix + self.suffix


def cache_of(rows: Rows, given: int, size: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A cache of `size` slots whose first `given` hold the first rows; each row array is [B, K, >= given, H]."""

    def slab(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, :, :given].astype(dtype), ((0, 0), (0, 0), (0, size - given), (0, 0)))

    batch = rows[0][0].shape[0]
    filled = jnp.full((batch,), given, jnp.int32)
    return KVCache(tuple(slab(k) for k, _ in rows), tuple(slab(v) for _, v in rows), filled)


def behind(
    model: Model, params: Params, rows: Rows | None, tokens: Int[Array, "B P+S"], cut: Cut
) -> Float[Array, "B S V"]:
    """Logits for each suffix token (row i predicts suffix token i), float32.

    Args:
      rows: per layer (k, v), rotated for positions 0.. of the target; None: no context at all, the target reads the
        tail and the suffix at their positions with nothing before them.
    """
    given = cut.given
    read = tokens[:, given : cut.length - 1]
    pos = jnp.broadcast_to(given + jnp.arange(read.shape[1], dtype=jnp.int32), read.shape)
    if rows is None:
        out = model.forward(params, read, pos)
    else:
        cache = cache_of(rows, given, cut.length, model.dtype)
        out = model.forward(params, read, pos, cache)
    assert out.logits is not None
    return out.logits[:, cut.tail - 1 :]


@functools.partial(jax.jit, static_argnums=(0, 3))
def native(
    model: Model, params: Params, tokens: Int[Array, "B P+S"], cut: Cut
) -> tuple[Float[Array, "B S V"], Rows]:
    """(logits of the suffix, rows of all tokens but the last): what reading everything gives."""
    read = tokens[:, : cut.length - 1]
    pos = jnp.broadcast_to(jnp.arange(read.shape[1], dtype=jnp.int32), read.shape)
    out = model.forward(params, read, pos)
    assert out.logits is not None
    return out.logits[:, cut.prefix - 1 :], out.rows


class Agreement(NamedTuple):
    """Per text and suffix position [B, S]: nats of the text's own token, KL(native || this) in nats, and whether the
    likeliest token is the native one."""

    nats: jax.Array
    kl: jax.Array
    top1: jax.Array


def agreement(
    logits: Float[Array, "B S V"], native: Float[Array, "B S V"], labels: Int[Array, "B S"]
) -> Agreement:
    """Compare logits with the native ones, in float32."""
    ours, theirs = jax.nn.log_softmax(logits), jax.nn.log_softmax(native)
    nats = -jnp.take_along_axis(ours, labels[..., None], -1)[..., 0]
    kl = jnp.sum(jnp.exp(theirs) * (theirs - ours), -1)
    return Agreement(nats, kl, ours.argmax(-1) == theirs.argmax(-1))


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def rollout(
    model: Model,
    params: Params,
    rows: Rows | None,
    tokens: Int[Array, "B P"],
    cut: Cut,
    steps: int,
    limit: int | None = None,
) -> tuple[Int[Array, "B R"], Float[Array, "B R V"]]:
    """Greedy continuation of the prefix behind given rows: (R = steps tokens, the logits each was taken from).

    `rows` None: the target reads the whole prefix itself. `cut.suffix` is not used. limit: ids from here on are never
    chosen (the tokenizer has no such tokens), as in `serve.generate`.
    """
    batch, given = tokens.shape[0], 0 if rows is None else cut.given
    size = cut.prefix + steps
    if rows is None:
        shape = (batch, model.rules.kv_heads, 0, model.config.head_dim)
        rows = ((jnp.zeros(shape), jnp.zeros(shape)),) * model.config.num_layers
    cache = cache_of(rows, given, size, model.dtype)
    read = tokens[:, given : cut.prefix]
    pos = jnp.broadcast_to(given + jnp.arange(read.shape[1], dtype=jnp.int32), read.shape)
    out = model.forward(params, read, pos, cache)
    assert out.cache is not None and out.logits is not None

    def step(carry: tuple[KVCache, jax.Array], at: jax.Array) -> tuple[tuple[KVCache, jax.Array], tuple]:
        cache, logits = carry
        token = logits[:, :limit].argmax(-1).astype(jnp.int32)
        cache = dataclasses.replace(cache, filled=jnp.full((batch,), at, jnp.int32))
        out = model.forward(params, token[:, None], jnp.full((batch, 1), at, jnp.int32), cache, at=at)
        assert out.cache is not None and out.logits is not None
        return (out.cache, out.logits[:, 0]), (token, logits)

    positions = cut.prefix + jnp.arange(steps, dtype=jnp.int32)
    _, (chosen, logits) = jax.lax.scan(step, (out.cache, out.logits[:, -1]), positions)
    return chosen.T, logits.transpose(1, 0, 2)
