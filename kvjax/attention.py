"""Which key a query may see, and the one call that answers it: `attend`.

A call brings T new tokens to a cache of S slots. Prefill chunks, plain decoding, chain and tree verification
and the drafter's block are all this one call, computed in one of two ways:

A chain (kind "causal") is written behind the cache first, and each row attends to the slots up to its own. The
terms of a token's sums then stand at the same slots whether its predecessors came in this call or long before,
so its bits do not depend on where rounds begin, that is on what was drafted: exactness rests on this.
Other masks attend to [cache | new rows] in two parts, each with its log-sum-exp, and merge: the cache part is the
`block_attention` kernel, the part among the new rows a small dense product under `MaskSpec`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache import View, write
from kvjax.kernels import dispatch
from kvjax.kernels.dispatch import Backend
from kvjax.sharding import Rules
from kvjax.typing import Array, Bool, Float, Int, typed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Who sees whom among the new rows. Every row also sees the valid cache slots inside its window.

    kind: "causal" (a chain: row i sees rows <= i), "block" (every row sees every row) or "tree" (row i sees
    the rows marked in `ancestors`, itself included). ancestors: [B, T, T] bool, for "tree" only.
    """

    kind: str = dataclasses.field(default="causal", metadata={"static": True})
    ancestors: Bool[Array, "B T T"] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("causal", "block", "tree"):
            raise ValueError(f"unknown mask kind {self.kind!r}; known: causal, block, tree")
        if (self.kind == "tree") != (self.ancestors is not None):
            raise ValueError("a tree mask, and only a tree mask, has `ancestors`")

    def among_rows(self, pos: Int[Array, "B T"], window: int | None) -> Bool[Array, "B T T"]:
        """[B, T, T]: may query row i (axis 1) see new row j (axis 2)."""
        batch, t = pos.shape
        if self.ancestors is not None:
            seen = self.ancestors
        else:
            order = jnp.arange(t)
            seen = order[:, None] >= order[None, :] if self.kind == "causal" else jnp.ones((t, t), bool)
            seen = jnp.broadcast_to(seen, (batch, t, t))
        if window is not None:
            # Both ways, for a block sees rows behind it as well.
            seen = seen & (jnp.abs(pos[:, :, None] - pos[:, None, :]) < window)
        return seen

    def of_cache(
        self, pos: Int[Array, "B T"], filled: Int[Array, " B"], size: int, window: int | None
    ) -> Bool[Array, "B T S"]:
        """[B, T, S]: may query row i see cache slot s. The definition the kernels are tested against."""
        slot = jnp.arange(size)
        seen = jnp.broadcast_to(slot < filled[:, None, None], (*pos.shape, size))
        if window is not None:
            seen = seen & (pos[:, :, None] - slot < window)
        return seen


BACKENDS = dispatch.backends("block_attention")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which backend to use, where. name None: the first of `BACKENDS` that supports the call."""

    platform: str
    device_kind: str = ""
    name: str | None = None

    def backend(self, q: Any, k: Any) -> Backend:
        """The backend for q [B, K, R, H] and k [B, K, S, H] (arrays or their shapes).

        Raises:
          ValueError: the named backend is unknown or does not support this call, with its reason.
        """
        where = {"platform": self.platform, "device_kind": self.device_kind}
        return dispatch.choose("attention", BACKENDS, q, k, name=self.name, **where)


@typed
def attend(
    q: Float[Array, "B T K G H"], k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], view: View | None,
    pos: Int[Array, "B T"], mask: MaskSpec, *, window: int | None, choice: Choice, rules: Rules,
    at: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T K G H"], View | None]:  # fmt: skip
    """Attention of T new rows over [cache | rows].

    Args:
      q: rotated queries by KV group; k, v: the new rows, in cache layout; view: the layer's cache, or None.
      pos: absolute positions of the new rows; those of a chain are consecutive.
      at: pos[:, 0] where it is the same for all rows (a prompt chunk), else None.

    Returns: [B, T, K, G, H] in q's dtype (products accumulate in float32), and for a chain with a cache the
    view with its rows written at their positions (`filled` as it was), else None.
    """
    heads, row = rules.spec("batch", "kv_heads", None, None), rules.spec("batch", None)
    queries = rules.spec("batch", None, "kv_heads", None, None)
    tree = None if mask.ancestors is None else rules.spec("batch", None, None)
    cache = None if view is None else View(heads, heads, rules.spec("batch"))  # type: ignore[arg-type]
    if mask.kind == "causal" and view is not None:
        start = None if at is None else rules.spec()
        chain = rules.local(
            functools.partial(_attend_chain, window=window, choice=choice),
            (queries, heads, heads, heads, heads, row, start),
            (queries, heads, heads),
        )
        out, slab_k, slab_v = chain(q, k, v, view.k, view.v, pos, at)
        return out, View(slab_k, slab_v, view.filled)
    local = rules.local(
        functools.partial(_attend, window=window, choice=choice),
        (queries, heads, heads, cache, row, MaskSpec(mask.kind, tree) if rules.mesh is not None else None),
        queries,
    )
    return local(q, k, v, view, pos, mask), None


def _attend_chain(q, k, v, slab_k, slab_v, pos, at, *, window, choice):
    batch, t, kv, groups, width = q.shape
    first = pos[:, 0]
    start = first if at is None else at
    put = lambda s: (write(s[0], k, start), write(s[1], v, start))  # noqa: E731
    if choice.platform == "cpu":
        # The condition always holds; a conditional is what XLA:CPU doesn't fuse into its users. It would write each
        # slab once per user, from a copy of the whole slab (measured: 43 ms a step instead of 28 at 2,048 slots).
        slab_k, slab_v = jax.lax.cond(start.reshape(-1)[0] >= 0, put, lambda s: s, (slab_k, slab_v))
    else:  # elsewhere a branch would wait for its condition in every layer
        slab_k, slab_v = put((slab_k, slab_v))
    folded = q.transpose(0, 2, 1, 3, 4).reshape(batch, kv, t * groups, width)
    lower = None
    if window is not None:
        lower = jnp.repeat(jnp.maximum(pos - window + 1, 0), groups, axis=1).astype(jnp.int32)
    run = choice.backend(folded, slab_k).run
    out, _ = run(folded, slab_k, slab_v, first + 1, lower, scale=width**-0.5, stair=groups)
    out = out.astype(q.dtype).reshape(batch, kv, t, groups, width).transpose(0, 2, 1, 3, 4)
    return out, slab_k, slab_v


def _attend(q, k, v, view, pos, mask, *, window, choice):
    batch, t, kv, groups, width = q.shape
    scale = width**-0.5
    folded = q.transpose(0, 2, 1, 3, 4).reshape(batch, kv, t * groups, width)

    seen = mask.among_rows(pos, window)
    scores = jnp.einsum("bkrh,bkth->bkrt", folded, k, preferred_element_type=jnp.float32) * scale
    scores = scores.reshape(batch, kv, t, groups, t)
    scores = jnp.where(seen[:, None, :, None, :], scores, -jnp.inf).reshape(batch, kv, t * groups, t)
    # Finite, since every row sees itself; a shift that cancels, so that gradients need not pass through it.
    top = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1)
    own = jnp.einsum("bkrt,bkth->bkrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)

    if view is not None:
        lower = None
        if window is not None:
            lower = jnp.repeat(jnp.maximum(pos - window + 1, 0), groups, axis=1).astype(jnp.int32)
        past, lse = choice.backend(folded, view.k).run(
            folded, view.k, view.v, view.filled, lower, scale=scale
        )
        # Merge: weights of the two parts relative to the larger exponent; lse is -inf for an empty cache.
        high = jnp.maximum(top, lse)
        a, b = jnp.exp(top - high), jnp.exp(lse - high)
        out = (own * a[..., None] + past * b[..., None]) / (total * a + b)[..., None]
    else:
        out = own / total[..., None]
    return out.astype(q.dtype).reshape(batch, kv, t, groups, width).transpose(0, 2, 1, 3, 4)
