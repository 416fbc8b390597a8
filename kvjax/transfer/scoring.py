"""The target's own answer to a text whose beginning it did not read: logits of a suffix behind given cache rows.

What training descends on and what judging compares are the same calls, differentiable in the rows.
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

Queries = tuple[jax.Array, ...]
"""Per layer rotated queries, [B, T, K, G, H]."""


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


def positions(tokens: jax.Array, start: int = 0) -> Int[Array, "B T"]:
    """Those of tokens [B, T] that begin at `start`."""
    return jnp.broadcast_to(start + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def first(rows: Rows, count: int) -> Rows:
    """The first `count` rows of each layer."""
    return tuple((k[:, :, :count], v[:, :, :count]) for k, v in rows)


def read(model: Model, params: Params, tokens: Int[Array, "B T"]) -> Rows:
    """The rows a model's cache holds after reading `tokens` from position 0; of no tokens, no rows."""
    if not tokens.shape[1]:
        shape = (tokens.shape[0], model.rules.kv_heads, 0, model.config.head_dim)
        return ((jnp.zeros(shape, model.dtype),) * 2,) * model.config.num_layers
    return model.forward(params, tokens, positions(tokens), logits=False).rows


def cache_of(rows: Rows, size: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A cache of `size` slots whose first hold `rows`, each [B, K, T, H]."""
    batch, _, given, _ = rows[0][0].shape

    def slab(x: jax.Array) -> jax.Array:
        return jnp.pad(x.astype(dtype), ((0, 0), (0, 0), (0, size - given), (0, 0)))

    filled = jnp.full((batch,), given, jnp.int32)
    return KVCache(tuple(slab(k) for k, _ in rows), tuple(slab(v) for _, v in rows), filled)


def behind(
    model: Model, params: Params, rows: Rows, tokens: Int[Array, "B P+S"], cut: Cut
) -> Float[Array, "B S V"]:
    """Logits for each suffix token (row i predicts suffix token i), float32: the model reads the tail and the suffix
    behind `rows`, whatever these are and however many ([B, K, T, H], rotated for positions 0..T-1)."""
    given = rows[0][0].shape[2]
    ids = tokens[:, cut.given : cut.length - 1]
    cache = cache_of(rows, given + ids.shape[1], model.dtype)
    out = model.forward(params, ids, positions(ids, given), cache, at=jnp.int32(given))
    assert out.logits is not None
    return out.logits[:, cut.tail - 1 :]


@functools.partial(jax.jit, static_argnums=(0, 3))
def native(
    model: Model, params: Params, tokens: Int[Array, "B P+S"], cut: Cut
) -> tuple[Float[Array, "B S V"], Rows]:
    """(logits of the suffix, rows of all tokens but the last): what reading everything gives."""
    ids = tokens[:, : cut.length - 1]
    out = model.forward(params, ids, positions(ids))
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
    rows: Rows,
    tokens: Int[Array, "B P"],
    cut: Cut,
    steps: int,
    limit: int | None = None,
) -> tuple[Int[Array, "B R"], Float[Array, "B R V"]]:
    """Greedy continuation of the prefix behind given rows, as in `behind`: (R = steps tokens, the logits each was taken
    from).

    `cut.suffix` is not used. limit: ids from here on are never chosen (the tokenizer has no such tokens), as in
    `serve.generate`.
    """
    batch, _, given, _ = rows[0][0].shape
    ids = tokens[:, cut.given : cut.prefix]
    cache = cache_of(rows, given + cut.tail + steps, model.dtype)
    out = model.forward(params, ids, positions(ids, given), cache, at=jnp.int32(given))
    assert out.cache is not None and out.logits is not None

    def step(carry: tuple[KVCache, jax.Array], at: jax.Array) -> tuple[tuple[KVCache, jax.Array], tuple]:
        cache, logits = carry
        token = logits[:, :limit].argmax(-1).astype(jnp.int32)
        cache = dataclasses.replace(cache, filled=jnp.full((batch,), at, jnp.int32))
        out = model.forward(params, token[:, None], jnp.full((batch, 1), at, jnp.int32), cache, at=at)
        assert out.cache is not None and out.logits is not None
        return (out.cache, out.logits[:, 0]), (token, logits)

    following = given + cut.tail + jnp.arange(steps, dtype=jnp.int32)
    _, (chosen, logits) = jax.lax.scan(step, (out.cache, out.logits[:, -1]), following)
    return chosen.T, logits.transpose(1, 0, 2)


def attended(model: Model, queries: Queries, rows: Rows, start: int) -> tuple[jax.Array, ...]:
    """Per layer [B, K, G, T, H] float32: what queries [B, T, K, G, H] at positions start.. get from rows 0..."""
    found = []
    for layer, (q, (k, v)) in enumerate(zip(queries, rows, strict=True)):
        at, slot = start + jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[2])[None]
        seen = slot <= at
        if (window := model.config.windows[layer]) is not None:
            seen &= at - slot < window
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        scores = jnp.einsum("btkgh,bksh->bkgts", q, k, precision="highest") * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        found.append(jnp.einsum("bkgts,bksh->bkgth", weights, v, precision="highest"))
    return tuple(found)


def attended_pairs(
    model: Model, queries: Queries, truth: Rows, rows: Rows, start: int
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Per layer (native, given) attention outputs (`attended`): over `truth`, and over `truth` whose first rows are
    replaced by `rows`. This is where an error in a cache row does its harm, or does none."""

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return jnp.concatenate(
            [part.astype(jnp.float32), whole[:, :, part.shape[2] :].astype(jnp.float32)], 2
        )

    mixed = tuple((put(k, a), put(v, b)) for (k, v), (a, b) in zip(truth, rows, strict=True))
    return tuple(zip(*(attended(model, queries, x, start) for x in (truth, mixed)), strict=True))


def cosines(pairs: tuple[tuple[jax.Array, jax.Array], ...]) -> Float[Array, "B L"]:
    """Cosine of the two outputs in each pair, mean over queries and heads."""
    norm = functools.partial(jnp.linalg.norm, axis=-1)
    each = [jnp.sum(a * b, -1) / jnp.maximum(norm(a) * norm(b), 1e-30) for a, b in pairs]
    return jnp.stack([x.mean((1, 2, 3)) for x in each], 1)


def attention_error(pairs: tuple[tuple[jax.Array, jax.Array], ...]) -> Float[Array, " B"]:
    """Squared error of the second output of each pair over the squared first, mean over layers."""
    share = [jnp.sum((a - b) ** 2, (1, 2, 3, 4)) / jnp.sum(a**2, (1, 2, 3, 4)) for a, b in pairs]
    return jnp.mean(jnp.stack(share), 0)
