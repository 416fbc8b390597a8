"""Cross-entropy of the language-model head, without ever holding the logits of all rows.

Logits are made a few hundred rows at a time and turned into loss and gradients at once, so memory does not grow with
T * V and the head's product is not repeated in the backward pass. On a mesh the vocabulary is split over `model`:
each device normalises with its neighbours' sums (the vocabulary-parallel loss of Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kvjax.sharding import Rules
from kvjax.typing import Array, Float, Int

ROWS = 512  # of logits at a time: 8 MB at a vocabulary of 4,096


def cross_entropy(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], labels: Int[Array, "B T"],
    weights: Float[Array, "B T"], rules: Rules,
) -> Float[Array, ""]:  # fmt: skip
    """Sum over rows of weight * -log softmax(head @ hidden)[label], in nats, float32.

    Gradients flow to `hidden` and `head`; products run in their dtype, sums in float32.
    """
    return _cross_entropy(hidden, head, labels, weights, rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(hidden, head, labels, weights, rules):
    return _run(hidden, head, labels, weights, rules, gradients=False)


def _forward(hidden, head, labels, weights, rules):
    loss, *gradients = _run(hidden, head, labels, weights, rules, gradients=True)
    return loss, gradients


def _backward(rules, gradients, cotangent):
    by_hidden, by_head = gradients
    scale = lambda g: (g * cotangent).astype(g.dtype)  # noqa: E731
    return scale(by_hidden), scale(by_head), None, None


_cross_entropy.defvjp(_forward, _backward)


def _run(hidden, head, labels, weights, rules: Rules, *, gradients: bool):
    rows, head_spec = rules.spec("batch", None), rules.spec("vocab", None)
    x = rules.spec("batch", None, None)
    results = (rules.spec(), x, head_spec) if gradients else rules.spec()
    local = functools.partial(_local, mesh=rules.mesh is not None, gradients=gradients)
    return rules.local(local, (x, head_spec, rows, rows), results)(hidden, head, labels, weights)


def _local(hidden, head, labels, weights, *, mesh: bool, gradients: bool):
    """One device's rows against its part of the vocabulary."""
    vocab, width = head.shape
    rows = labels.size
    count = max(rows // ROWS, 1)
    while rows % count:
        count -= 1
    x, y, w = hidden.reshape(count, -1, width), labels.reshape(count, -1), weights.reshape(count, -1)
    over_vocab = (lambda v, f: f(v, "model")) if mesh else (lambda v, f: v)
    first = jax.lax.axis_index("model") * vocab if mesh else 0

    def chunk(carry, inputs):
        loss, by_head = carry
        x, y, w = inputs
        logits = jax.lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        top = over_vocab(logits.max(-1), jax.lax.pmax)
        total = over_vocab(jnp.exp(logits - top[:, None]).sum(-1), jax.lax.psum)
        lse = top + jnp.log(total)
        right = y[:, None] - first == jnp.arange(vocab)
        label = over_vocab(jnp.where(right, logits, 0).sum(-1), jax.lax.psum)
        loss = loss + ((lse - label) * w).sum()
        if not gradients:
            return (loss, by_head), None
        slope = ((jnp.exp(logits - lse[:, None]) - right) * w[:, None]).astype(x.dtype)
        by_x = jax.lax.dot_general(slope, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        by_head = by_head + jax.lax.dot_general(
            slope, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (loss, by_head), over_vocab(by_x, jax.lax.psum).astype(x.dtype)

    start = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32) if gradients else None)
    (loss, by_head), by_hidden = jax.lax.scan(chunk, start, (x, y, w))
    over_data = (lambda v: jax.lax.psum(v, "data")) if mesh else (lambda v: v)
    loss = over_data(loss)
    if not gradients:
        return loss
    return loss, by_hidden.reshape(hidden.shape), over_data(by_head).astype(head.dtype)
