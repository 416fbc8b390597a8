"""A model small enough to compile in a second, with logits spread like a real one's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig, RopeConfig
from kvjax.lm import LM
from kvjax.models import Model, build
from kvjax.typing import Params

TINY = ModelConfig(
    model_type="llama",
    vocab=48,
    hidden=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=48,
    rope=RopeConfig(theta=10000.0),
    eps=1e-5,
    max_positions=512,
    tie=True,
)


def config(**changes: Any) -> ModelConfig:
    """TINY with some fields changed."""
    if "num_layers" in changes and "windows" not in changes:
        changes["windows"] = ()
    return dataclasses.replace(TINY, **changes)


def weights(model: Model, seed: int = 0) -> Params:
    """Random leaves drawn by numpy (no program is compiled): logits of standard deviation about 2."""
    rng = np.random.default_rng(seed)
    leaves = []
    for name, leaf in zip(model.names, model.shapes):
        draw = rng.standard_normal(leaf.shape)
        last = name.rsplit(".", 1)[-1]
        if "norm" in last:
            draw = 1 + 0.2 * draw
        elif last.endswith("bias"):
            draw = 0.3 * draw
        elif last in ("embed", "lm_head"):
            draw = draw * 2 / model.config.hidden**0.5
        elif last == "o_proj":
            draw = draw / np.prod(leaf.shape[1:]) ** 0.5
        else:
            draw = draw / leaf.shape[-1] ** 0.5
        leaves.append(jax.device_put(draw.astype(leaf.dtype)))
    return tuple(leaves)


def language_model(seed: int = 0, dtype: str = "float32", **changes: Any) -> LM:
    """A bundle without a tokenizer."""
    model = build(config(**changes), dtype=dtype)
    return LM(model, weights(model, seed), None, model.config, f"tiny-{seed}")


def one_shot(lm: LM, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a single call without a cache: what every way of decoding is held against."""
    return np.asarray(_one_shot(lm.model, lm.params, np.asarray(tokens, np.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _one_shot(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return model.forward(params, tokens, pos).logits
