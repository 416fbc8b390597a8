"""From logits to tokens, row by row: greedy and sampled rows in one program.

A token at absolute position p of a row with seed s is argmax(filtered(logits / T) + gumbel(key, s, p)): an exact
draw (Gumbel-max) whose noise depends on the seed and the position alone, not on the batch, the round or the
drafts. A run is therefore identical with and without drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Per-row parameters, each [B] (stop_ids [B, E], padded with -1). Off: top_k 0, top_p 1, min_p 0."""

    temperature: jax.Array  # float32; 0 is greedy
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    seed: jax.Array  # uint32
    max_new: jax.Array  # int32
    stop_ids: jax.Array  # int32

    @classmethod
    def create(
        cls, batch: int, *, temperature: object = 0.0, top_k: object = 0, top_p: object = 1.0, min_p: object = 0.0,
        seed: object = 0, max_new: object = 128, stop_ids: object = -1,
    ) -> Sampling:  # fmt: skip
        """Numpy arrays from scalars or [B] sequences, checked.

        Raises:
          ValueError: naming the parameter and the value that is out of range.
        """

        def row(name: str, value: object, dtype: type, low: float, high: float) -> np.ndarray:
            array = np.asarray(value)
            if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and np.dtype(dtype).kind != "f"):
                raise ValueError(
                    f"{name} must be {'a number' if dtype is np.float32 else 'an integer'}, got {value!r}"
                )
            if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
                raise ValueError(
                    f"{name} must be one value or one per prompt ({batch}), got shape {array.shape}"
                )
            if not np.all((array >= low) & (array <= high)):
                raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value!r}")
            return np.ascontiguousarray(np.broadcast_to(array, (batch,)), dtype)

        stops = np.asarray(stop_ids, np.int32)
        if stops.ndim < 2:
            stops = np.broadcast_to(stops.reshape(1, -1), (batch, max(stops.size, 1)))
        top_p_row = row("top_p", top_p, np.float32, 0.0, 1.0)
        if not np.all(top_p_row > 0):
            raise ValueError(f"top_p must lie in (0, 1], got {top_p!r}")
        return cls(
            temperature=row("temperature", temperature, np.float32, 0.0, 100.0),  # type: ignore[arg-type]
            top_k=row("top_k", top_k, np.int32, 0, 2**31 - 1),  # type: ignore[arg-type]
            top_p=top_p_row,  # type: ignore[arg-type]
            min_p=row("min_p", min_p, np.float32, 0.0, 1.0),  # type: ignore[arg-type]
            seed=row("seed", seed, np.uint32, 0, 2**32 - 1),  # type: ignore[arg-type]
            max_new=row("max_new_tokens", max_new, np.int32, 0, 2**31 - 1),  # type: ignore[arg-type]
            stop_ids=np.ascontiguousarray(stops, np.int32),  # type: ignore[arg-type]
        )


@dataclasses.dataclass(frozen=True)
class SamplerProgram:
    """The static part: what the compiled program must be able to do.

    greedy: no row samples. edges: some row uses top_k or top_p, whose edges must be found. limit: ids >= limit are
    never chosen (rows of a padded vocabulary that the tokenizer lacks); None allows all. logprobs: return log p
    of the chosen tokens.
    """

    greedy: bool = True
    edges: bool = False
    limit: int | None = None
    logprobs: bool = False

    @classmethod
    def of(cls, sampling: Sampling, *, limit: int | None = None, logprobs: bool = False) -> SamplerProgram:
        """The smallest program that serves these (host) parameters."""
        greedy = not np.any(np.asarray(sampling.temperature) > 0)
        active = np.asarray(sampling.temperature) > 0
        edges = bool(np.any(active & ((np.asarray(sampling.top_k) > 0) | (np.asarray(sampling.top_p) < 1))))
        return cls(bool(greedy), edges, limit, logprobs)


def noise(
    key: jax.Array, seed: Int[Array, " B"], pos: Int[Array, "B W"], vocab: int
) -> Float[Array, "B W V"]:
    """Gumbel noise of each (row, position): [B, W, V] float32."""

    def one(seed, pos):
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.fold_in(key, seed), pos), (vocab,), jnp.float32
        )

    return jax.vmap(lambda s, p: jax.vmap(lambda q: one(s, q))(p))(seed, pos)


def filtered(
    logits: Float[Array, "B W V"], sampling: Sampling, program: SamplerProgram
) -> Float[Array, "B W V"]:
    """logits / T with everything outside top-k, then top-p of the rest, then min-p at -inf (float32).

    Temperature comes first, as in transformers. A tie at the edge of top-k or top-p keeps all tied ids.
    """
    warm = sampling.temperature > 0
    z = logits / jnp.where(warm, sampling.temperature, 1.0)[:, None, None]
    keep = jnp.ones(z.shape, bool)
    if program.edges:
        keep = _inside(z, sampling.top_k[:, None], sampling.top_p[:, None])
    # log(0) is -inf: min_p 0 keeps everything.
    floor = z.max(-1, keepdims=True) + jnp.log(sampling.min_p)[:, None, None]
    return jnp.where(keep & (z >= floor), z, -jnp.inf)


def _inside(z: Float[Array, "B W V"], top_k: Int[Array, "B 1"], top_p: Float[Array, "B 1"]) -> jax.Array:
    """[B, W, V] bool: within top-k, and within top-p of that.

    The edges are found bit by bit, each by 32 passes of counting or summing: as exact as a sort, and 6 times
    faster (measured on CPU, V = 49,152: 1.6 instead of 10.4 ms a row).
    """
    z = jnp.where(z == 0, 0.0, z)  # -0.0 and 0.0 are one value, but two orders below
    bits = jax.lax.bitcast_convert_type(z, jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # as integers, in the order of z
    vocab = z.shape[-1]

    def mass(p: jax.Array) -> jax.Array:
        # XLA:CPU adds columns side by side, but the elements of one row one after the other.
        return (p.reshape(*p.shape[:-1], -1, 64).sum(-2) if vocab % 64 == 0 else p).sum(-1)

    def edge(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """[B, W] uint32: the largest value for which enough(value) holds; it must hold for all smaller ones."""

        def bit(i, found):
            higher = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
            return jnp.where(enough(higher), higher, found)

        return jax.lax.fori_loop(0, 32, bit, jnp.zeros(z.shape[:-1], jnp.uint32))

    first = edge(lambda at: (order >= at[..., None]).astype(jnp.int32).sum(-1) >= top_k)
    first = jnp.where(top_k > 0, first, 0)
    p = jnp.where(order >= first[..., None], jnp.exp(z - z.max(-1, keepdims=True)), 0.0)
    p = p / mass(p)[..., None]
    second = edge(lambda at: mass(jnp.where(order >= at[..., None], p, 0.0)) >= top_p)
    second = jnp.where(top_p < 1, second, 0)
    return order >= jnp.maximum(first, second)[..., None]


def sample(
    logits: Float[Array, "B W V"],
    pos: Int[Array, "B W"],
    sampling: Sampling,
    program: SamplerProgram,
    key: jax.Array,
) -> Int[Array, "B W"]:
    """The token each row puts at position `pos`. logits: [B, W, V] float32, raw."""
    if program.limit is not None and program.limit < logits.shape[-1]:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < program.limit, logits, -jnp.inf)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if program.greedy:
        return best
    z = filtered(logits, sampling, program) + noise(key, sampling.seed, pos, logits.shape[-1])
    return jnp.where(sampling.temperature[:, None] > 0, jnp.argmax(z, axis=-1).astype(jnp.int32), best)


def log_probability(logits: Float[Array, "B W V"], tokens: Int[Array, "B W"]) -> Float[Array, "B W"]:
    """Raw log p of `tokens`, before temperature and filters (float32 log-softmax)."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
