"""`TrainState` and the jitted optax step: clipping, accumulation, AdamW on a schedule, a latch against NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.config import OptimizerConfig

Loss = Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
"""(params, batch, key) -> (summed loss, its weight, further sums over the same weight), all float32 scalars."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: the trained leaves, float32. optimizer: optax's state. step: int32, steps taken. key: the run's.

    healthy: False from the first step whose loss or gradient was not finite; that step and all later ones leave
    params and optimizer as they were, so what is saved then is the state the offending step started from.
    """

    params: Any
    optimizer: Any
    step: jax.Array
    key: jax.Array
    healthy: jax.Array


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then cosine or constant-then-linear ("wsd") down to floor * rate."""
    warmup = min(config.warmup, steps)
    up = optax.linear_schedule(0.0, config.rate, max(warmup, 1))
    rest = max(steps - warmup, 1)
    if config.schedule == "cosine":
        return optax.join_schedules(
            [up, optax.cosine_decay_schedule(config.rate, rest, config.floor)], [warmup]
        )
    decay = min(max(int(config.decay * steps), 1), rest)
    down = optax.linear_schedule(config.rate, config.floor * config.rate, decay)
    return optax.join_schedules(
        [up, optax.constant_schedule(config.rate), down], [warmup, max(steps - decay, warmup)]
    )


def optimizer(config: OptimizerConfig, steps: int, decayed: Any) -> optax.GradientTransformation:
    """Global-norm clipping and AdamW; `decayed` marks the leaves that get weight decay (same tree as params)."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config, steps), b1=config.b1, b2=config.b2, eps=config.eps,
            weight_decay=config.weight_decay, mask=decayed,
        ),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """A linear change of parameters: `apply(arrays, tree)` carries a tree like the parameters from the coordinates the
    optimizer works in to those of the parameters."""

    arrays: Any
    apply: Callable[[Any, Any], Any]


def within(coordinates: Coordinates, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` in these coordinates. Its arrays are part of the state, so a resumed run goes on in the same ones. Weight
    decay, if `inner` has any, is that of the parameters."""

    def init(params: Any) -> tuple[Any, Any]:
        return coordinates.arrays, inner.init(params)

    def update(grads: Any, state: tuple[Any, Any], params: Any = None) -> tuple[Any, tuple[Any, Any]]:
        arrays, moments = state

        def forward(tree: Any) -> Any:
            return coordinates.apply(arrays, tree)

        (turned,) = jax.linear_transpose(forward, grads)(grads)
        updates, moments = inner.update(turned, moments, params)
        return forward(updates), (arrays, moments)

    return optax.GradientTransformation(init, update)


def create(params: Any, transform: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step. `params` keep their sharding, and so do the moments."""
    moments = jax.jit(transform.init)(params)
    zero, true = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return TrainState(params, moments, zero, jax.random.key_data(jax.random.key(seed)), true)


def make_step(
    loss: Loss, transform: optax.GradientTransformation, rate: optax.Schedule, accumulate: int = 1
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted step (state donated, batch) -> (state, metrics).

    loss: a function, or a `jax.tree_util.Partial` over frozen arrays (a target's weights, say), which then are
      arguments of the compiled step instead of constants in it.
    accumulate: with more than 1, every leaf of the batch leads with that many parts, whose gradients are summed
      before one update; loss and gradient are means over the whole weight, whatever the parts.

    Metrics: loss, grad_norm (before clipping), rate, healthy, and the loss's own means.
    """

    def step(state: TrainState, batch: Any, loss: Loss) -> tuple[TrainState, dict[str, jax.Array]]:
        def total(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            value, weight, more = loss(params, batch, key)
            return value, (weight, more)

        gradient = jax.value_and_grad(total, has_aux=True)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        if accumulate == 1:
            (value, (weight, more)), grads = gradient(state.params, batch, key)
        else:

            def part(carry: Any, inputs: Any) -> tuple[Any, None]:
                index, piece = inputs
                (value, aux), grads = gradient(state.params, piece, jax.random.fold_in(key, index))
                return jax.tree.map(jnp.add, carry, (value, aux, grads)), None

            first = jax.tree.map(lambda x: x[0], batch)
            (value, aux), grads = gradient(state.params, first, jax.random.fold_in(key, 0))
            rest = (jnp.arange(1, accumulate), jax.tree.map(lambda x: x[1:], batch))
            (value, (weight, more), grads), _ = jax.lax.scan(part, (value, aux, grads), rest)
        grads = jax.tree.map(lambda g: g / weight, grads)
        norm = optax.tree.norm(grads)
        healthy = state.healthy & jnp.isfinite(value) & jnp.isfinite(norm)
        updates, moments = transform.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jnp.where(healthy, new, old)  # noqa: E731
        params = jax.tree.map(keep, params, state.params)
        moments = jax.tree.map(keep, moments, state.optimizer)
        metrics = {"loss": value / weight, "grad_norm": norm, "rate": rate(state.step), "healthy": healthy}
        metrics |= {name: x / weight for name, x in more.items()}
        return TrainState(params, moments, state.step + healthy, state.key, healthy), metrics

    frozen = loss if isinstance(loss, jax.tree_util.Partial) else jax.tree_util.Partial(loss)
    jitted = jax.jit(step, donate_argnums=0)
    return lambda state, batch: jitted(state, batch, frozen)
