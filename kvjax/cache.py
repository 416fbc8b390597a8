"""The KV cache: per-layer arrays, one way to read (`view`) and one way to write (`commit`).

A chain's rows are written while the chain attends (`kvjax.attention`), beyond `filled`, where nothing reads
them until `commit` declares them valid.

Slot s of a row holds the (rotated) key and value of the token at absolute position s. `filled[b]` slots
are valid; the rest holds finite garbage, which attention masks out. Writing never checks bounds on device
(`dynamic_update_slice` would clamp and overwrite earlier rows): `check_room` does on the host.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.config import ModelConfig
from kvjax.sharding import Rules
from kvjax.typing import Array, Float, Int

Rows = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer the new (key, value), each [B, K, T, H]: what `forward` returns and `commit` writes."""


class CacheFull(ValueError):
    """Tokens that do not fit the cache; the message gives the sizes."""


class View(NamedTuple):
    """One layer of a cache, read-only. k, v: [B, K, S, H]; filled: [B] int32."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    filled: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """k, v: tuples of L arrays [B, K, S, H]; filled: [B] int32, valid slots of each row."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    filled: jax.Array

    @property
    def size(self) -> int:
        """S, the capacity in tokens."""
        return self.k[0].shape[2]

    @property
    def batch(self) -> int:
        return self.k[0].shape[0]

    def view(self, layer: int) -> View:
        return View(self.k[layer], self.v[layer], self.filled)


@dataclasses.dataclass(frozen=True)
class CacheRecord:
    """A cache and where it came from (host side).

    Only slots [0, exact_length) were computed by `model` itself; look-ups that promise exactness use those
    alone. Extending a mapped prefix leaves `exact_length`; only native confirmation raises it.
    """

    cache: KVCache
    model: str
    revision: str | None
    tokenizer: str
    template: str | None
    dtype: str
    exact_length: int


def empty(config: ModelConfig, rules: Rules, batch: int, size: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A cache of zeros (call inside jit). k, v: L x [batch, K', size, H] of `dtype`."""
    shape = (batch, rules.kv_heads, size, config.head_dim)
    rows = [
        rules.reshard(jnp.zeros(shape, dtype), "batch", "kv_heads", None, None)
        for _ in range(2 * config.num_layers)
    ]
    filled = rules.reshard(jnp.zeros((batch,), jnp.int32), "batch")
    return KVCache(tuple(rows[: config.num_layers]), tuple(rows[config.num_layers :]), filled)


def write(
    slab: Float[Array, "B K S H"], new: Float[Array, "B K T H"], start: jax.Array
) -> Float[Array, "B K S H"]:
    """`new` in slots start..start+T-1 of `slab`; start: [] for all rows, or [B] int32. Nothing is checked."""
    new = new.astype(slab.dtype)
    if start.ndim == 0:
        return jax.lax.dynamic_update_slice(slab, new, (0, 0, start, 0))
    if slab.shape[0] == 1:
        return jax.lax.dynamic_update_slice(slab, new, (0, 0, start[0], 0))
    return jax.vmap(lambda s, n, i: jax.lax.dynamic_update_slice(s, n, (0, i, 0)))(slab, new, start)


def commit(
    cache: KVCache, rows: Rows | None, count: Int[Array, " B"], *, rules: Rules, path: Int[Array, "B T"] | None = None,
    at: Int[Array, ""] | Int[Array, " B"] | None = None,
) -> KVCache:  # fmt: skip
    """Write T new rows and declare the first `count[b]` of them valid: the only way `filled` grows.

    Args:
      rows: per layer (k, v), each [B, K, T, H]; None where `cache` holds them already (`Output.cache`).
      count: [B] int32 in [0, T]; `filled` becomes at + count where count > 0 and stays elsewhere.
      path: [B, T] int32, the order in which rows are taken (an accepted tree path); None means 0..T-1.
      at: first slot written, a scalar for all rows (prefill) or [B]; default `cache.filled`.
        at + T <= S must hold (`check_room`). Slots in [at + count, at + T) become finite garbage, so with
        count 0 `at` must not lie below `filled`.
    """
    if rows is None:
        if path is not None:
            raise ValueError("rows that are in the cache already lie in order: a path needs `rows`")
        first = cache.filled if at is None else at
        return KVCache(cache.k, cache.v, jnp.where(count > 0, first + count, cache.filled).astype(jnp.int32))
    start = at
    if start is None:
        # Rows that commit nothing write into the dead tail. It also makes the place depend on the verdict, hence
        # on every read of the cache: without that order XLA copies the whole cache to be safe.
        start = jnp.where(count > 0, cache.filled, cache.size - rows[0][0].shape[2])
    filled = jnp.where(count > 0, start + count, cache.filled).astype(jnp.int32)

    def put(cache_k, cache_v, new_k, new_v, start, path):
        def one(slab, new):
            if path is not None:
                new = jnp.take_along_axis(new, path[:, None, :, None], axis=2)
            return write(slab, new, start)

        return (
            tuple(one(slab, new) for slab, new in zip(cache_k, new_k, strict=True)),
            tuple(one(slab, new) for slab, new in zip(cache_v, new_v, strict=True)),
        )

    kv, row = rules.spec("batch", "kv_heads", None, None), rules.spec("batch")
    local = rules.local(
        put,
        (
            kv,
            kv,
            kv,
            kv,
            row if start.ndim else rules.spec(),
            None if path is None else rules.spec("batch", None),
        ),
        (kv, kv),
    )
    k, v = local(cache.k, cache.v, tuple(k for k, _ in rows), tuple(v for _, v in rows), start, path)
    return KVCache(k, v, filled)


def check_room(*, size: int, length: int, rows: int, what: str = "prompt") -> None:
    """Host-side bound: `length` tokens followed by a write of `rows` rows must fit `size` slots.

    Raises:
      CacheFull: naming the sizes.
    """
    if length + rows > size:
        raise CacheFull(
            f"{what} of {length} tokens plus {rows} rows needs {length + rows} cache slots; size is {size}"
        )
