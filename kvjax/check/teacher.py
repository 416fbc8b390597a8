"""Teacher-forced logits: of the model without a cache, of a float32 referee, and of a program of one width."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import commit
from kvjax.check.programs import read
from kvjax.decode.sources import Stateless
from kvjax.lm import LM
from kvjax.models import Model, build

NEUTRAL = 64  # positions at which two programs are compared


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Logits of whole texts in one forward without a cache: nothing in common with the decoding loop."""

    model: Model
    params: Any
    precision: str | None = None

    @classmethod
    def referee(cls, lm: LM) -> Teacher:
        """Float32 weights and activations, products in full float32, plain XLA attention."""
        rules = lm.model.rules
        model = build(lm.config, rules.mesh, "float32", "xla")
        with rules.context():
            params = tuple(x.astype(jnp.float32) for x in lm.params)
        return cls(model, params, "highest")

    def logits(self, texts: np.ndarray, first: Sequence[int], count: int) -> np.ndarray:
        """[B, count, V] float32: after texts[b, first[b] + j]. texts: [B, T]; B a multiple of the mesh's data axis."""
        precise = (
            contextlib.nullcontext()
            if self.precision is None
            else jax.default_matmul_precision(self.precision)
        )
        with self.model.rules.context(), precise:
            return np.asarray(_whole(self.model, count, self.params, texts, np.asarray(first, np.int32)))

    def at(self, text: np.ndarray, position: int) -> np.ndarray:
        """[V] float32: the logits that decide the token at `position` of text [T]."""
        ways = self.model.rules.data
        return self.logits(np.broadcast_to(text, (ways, len(text))), [position - 1] * ways, 1)[0, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _whole(model: Model, count: int, params: Any, texts: jax.Array, first: jax.Array) -> jax.Array:
    texts, first = model.rules.reshard(texts, "batch", None), model.rules.reshard(first, "batch")
    pos = jnp.broadcast_to(jnp.arange(texts.shape[1], dtype=jnp.int32), texts.shape)
    pos = model.rules.reshard(pos, "batch", None)
    logits = model.rules.reshard(model.forward(params, texts, pos).logits, "batch", None, None)

    def take(logits, first):
        return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count))(logits, first)

    rules = model.rules
    return rules.local(take, rules.rows((logits, first)), rules.spec("batch", None, None))(logits, first)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _block(model: Model, params: Any, cache: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
    """A round's forward over given ids [B, W], all of which are kept."""
    ids = model.rules.reshard(ids, "batch", None)
    pos = cache.filled[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
    out = model.forward(params, ids, pos, cache)
    assert out.cache is not None
    count = model.rules.reshard(jnp.full(ids.shape[:1], ids.shape[1], jnp.int32), "batch")
    return model.rules.reshard(out.logits, "batch", None, None), commit(
        out.cache, None, count, rules=model.rules
    )


def neutral(lm: LM, texts: np.ndarray, prefix: np.ndarray, width: int, span: int, chunk: int) -> np.ndarray:
    """[64, V] float32: logits of the program of `width` on given text.

    texts: [B, S]; prefix: [B], tokens read by prefill; the `span` tokens behind them are run in rounds of `width`.
    """
    batch = len(texts)
    state = read(lm, chunk, Stateless(), (), texts, (prefix + 1).astype(np.int32), np.zeros(batch, bool))
    cache, blocks = state.cache, []
    with lm.model.rules.context():
        for first in range(0, span, width):
            ids = np.zeros((batch, width), np.int32)
            for b in range(batch):
                known = texts[b, prefix[b] + first : prefix[b] + min(first + width, span)]
                ids[b, : len(known)] = known
            logits, cache = _block(lm.model, lm.params, cache, ids)
            blocks.append(np.asarray(logits))
    every = np.concatenate(blocks, axis=1)[:, :span].reshape(batch * span, -1)
    return every[:: max(1, len(every) // NEUTRAL)][:NEUTRAL]
