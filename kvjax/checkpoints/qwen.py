"""Checkpoint table of Qwen2, Qwen2.5 and Qwen3: Llama's, with norms on q and k in Qwen3."""

from __future__ import annotations

from kvjax.checkpoints import llama
from kvjax.checkpoints.table import Row
from kvjax.config import ModelConfig


def table(config: ModelConfig, stored: int | None = None) -> tuple[Row, ...]:
    """Rows of a Qwen decoder; see `llama.table`. Which biases exist is part of `config`."""
    rows = llama.table(config, stored)
    if not config.qk_norm:
        return rows
    shape = (config.head_dim,)
    return rows + tuple(
        Row((f"model.layers.{{i}}.self_attn.{x}.weight",), (shape,), f"layers.{{i}}.attn.{x}", (None,))
        for x in ("q_norm", "k_norm")
    )
