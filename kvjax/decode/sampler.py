"""From logits to tokens, row by row: greedy and sampled rows in one program.

A token at absolute position p of a row with seed s is argmax(filtered(logits / T) + gumbel(key, s, p)): an exact
draw (Gumbel-max) whose noise depends on the seed and the position alone, not on the batch, the round or the
drafts. A run is therefore identical with and without drafts.
"""

from __future__ import annotations

import dataclasses

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

    greedy: no row samples. sort: some row uses top_k or top_p. limit: ids >= limit are never chosen (rows of a
    padded vocabulary that the tokenizer lacks); None allows all. logprobs: return log p of the chosen tokens.
    """

    greedy: bool = True
    sort: bool = False
    limit: int | None = None
    logprobs: bool = False

    @classmethod
    def of(cls, sampling: Sampling, *, limit: int | None = None, logprobs: bool = False) -> SamplerProgram:
        """The smallest program that serves these (host) parameters."""
        greedy = not np.any(np.asarray(sampling.temperature) > 0)
        active = np.asarray(sampling.temperature) > 0
        sort = bool(np.any(active & ((np.asarray(sampling.top_k) > 0) | (np.asarray(sampling.top_p) < 1))))
        return cls(bool(greedy), sort, limit, logprobs)


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
    if program.sort:
        order = -jnp.sort(-z, axis=-1)
        rank = jnp.arange(z.shape[-1])
        k = jnp.where(sampling.top_k > 0, sampling.top_k, z.shape[-1])[:, None, None]
        order = jnp.where(rank < k, order, -jnp.inf)
        p = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        inside = (rank < k) & (
            (before < sampling.top_p[:, None, None]) | (sampling.top_p >= 1)[:, None, None]
        )
        edge = jnp.min(jnp.where(inside & (order > -jnp.inf), order, jnp.inf), axis=-1, keepdims=True)
        keep = z >= edge
    # log(0) is -inf: min_p 0 keeps everything.
    floor = z.max(-1, keepdims=True) + jnp.log(sampling.min_p)[:, None, None]
    return jnp.where(keep & (z >= floor), z, -jnp.inf)


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
