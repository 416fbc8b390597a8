"""Checkpoint table of Llama; Qwen adds to it."""

from __future__ import annotations

from kvjax.checkpoints.table import Columns, Grouped, Row, Stack
from kvjax.config import ModelConfig


def table(config: ModelConfig, stored: int | None = None) -> tuple[Row, ...]:
    """Rows of a decoder whose cache holds `stored` KV heads (K', a multiple of K; default K).

    Axis letters: V D L N K H F of `config`. Weights keep the published [out, in] layout.
    """
    v, d, f, h, n, k = (
        config.vocab,
        config.hidden,
        config.intermediate,
        config.head_dim,
        config.num_heads,
        config.num_kv_heads,
    )
    stored = stored or k
    if stored % k or n % stored:
        raise ValueError(f"{stored} stored KV heads: must be a multiple of {k} and divide {n} query heads")
    layer, qkv = "model.layers.{i}", Grouped(k, stored)
    attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"

    def one(hf: str, ours: str, shape: tuple[int, ...], *axes: str | None) -> Row:
        return Row((hf,), (shape,), ours, axes or (None,) * len(shape))

    def fused(kind: str, *inner: int) -> Row:
        names = tuple(f"{attn}.{x}_proj.{kind}" for x in "qkv")
        shapes = ((n * h, *inner), (k * h, *inner), (k * h, *inner))
        ours = "layers.{i}.attn." + ("qkv_proj" if kind == "weight" else "qkv_bias")
        return Row(names, shapes, ours, ("kv_heads", None, *(None for _ in inner)), qkv)

    def pair(kind: str, ours: str, *inner: int) -> Row:
        names = (f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}")
        axes = (None, "ffn", *(None for _ in inner))
        return Row(names, ((f, *inner),) * 2, f"layers.{{i}}.mlp.{ours}", axes, Stack())

    norms = ("input_layernorm", "post_attention_layernorm")
    rows = [
        one("model.embed_tokens.weight", "embed", (v, d), "vocab", None),
        one("model.norm.weight", "norm", (d,)),
        *(one(f"{layer}.{x}.weight", f"layers.{{i}}.{x}", (d,)) for x in norms),
        fused("weight", d),
        Row(
            (f"{attn}.o_proj.weight",),
            ((d, n * h),),
            "layers.{i}.attn.o_proj",
            (None, "kv_heads", None),
            Columns(stored),
        ),
        pair("weight", "gate_up_proj", d),
        one(f"{mlp}.down_proj.weight", "layers.{i}.mlp.down_proj", (d, f), None, "ffn"),
    ]
    if not config.tie:
        rows.append(one("lm_head.weight", "lm_head", (v, d), "vocab", None))
    if config.qkv_bias:
        rows.append(fused("bias"))
    if config.o_bias:
        rows.append(one(f"{attn}.o_proj.bias", "layers.{i}.attn.o_bias", (d,)))
    if config.mlp_bias:
        rows.append(pair("bias", "gate_up_bias"))
        rows.append(one(f"{mlp}.down_proj.bias", "layers.{i}.mlp.down_bias", (d,)))
    return tuple(rows)
