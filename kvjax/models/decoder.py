"""One dense decoder for Llama 1-3.2, Qwen2/2.5 (qkv bias) and Qwen3 (q/k norm).

Weights keep the published [out, in] layout. q, k and v are fused by KV group: `qkv_proj[k]` holds the rows of
KV head k's G query heads, then its key rows, then its value rows, so that sharding over `model` keeps whole
groups together. Flax NNX defines the modules; what crosses a jit boundary is a tuple of leaves
(`kvjax.models.Model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.attention import MaskSpec, attend
from kvjax.cache import KVCache, Rows, View
from kvjax.config import ModelConfig
from kvjax.models.layers import Setting, linear, param, rms_norm
from kvjax.rope import cos_sin, rotate

AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "lm_head": ("vocab", None),
    "norm": (None,),
    "input_layernorm": (None,),
    "post_attention_layernorm": (None,),
    "qkv_proj": ("kv_heads", None, None),
    "qkv_bias": ("kv_heads", None),
    "q_norm": (None,),
    "k_norm": (None,),
    "o_proj": (None, "kv_heads", None),
    "o_bias": (None,),
    "gate_up_proj": (None, "ffn", None),
    "gate_up_bias": (None, "ffn"),
    "down_proj": (None, "ffn"),
    "down_bias": (None,),
}
"""Logical axes of every leaf, by the last part of its name."""


class Output(NamedTuple):
    """logits: [B, T, V] float32 or None; rows: per layer (k, v), each [B, K', T, H];
    taps: [B, T, len(taps) * D] or None; cache: after a chain, the cache with its rows in place beyond `filled`
    (for `commit` with rows None), else None."""

    logits: jax.Array | None
    rows: Rows
    taps: jax.Array | None
    cache: KVCache | None = None


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, setting: Setting, rngs: nnx.Rngs) -> None:
        d, h, kv = config.hidden, config.head_dim, setting.rules.kv_heads
        groups = config.num_heads // kv
        self.groups, self.eps, self.setting = groups, config.eps, setting
        self.qkv_proj = param(rngs, (kv, (groups + 2) * h, d), setting)
        self.qkv_bias = param(rngs, (kv, (groups + 2) * h), setting) if config.qkv_bias else None
        self.q_norm = param(rngs, (h,), setting, scale=0) if config.qk_norm else None
        self.k_norm = param(rngs, (h,), setting, scale=0) if config.qk_norm else None
        self.o_proj = param(rngs, (d, kv, groups * h), setting)
        self.o_bias = param(rngs, (d,), setting) if config.o_bias else None

    def __call__(self, x, cos, sin, view: View | None, pos, mask: MaskSpec, window: int | None, at):
        setting = self.setting
        q, k, v = self.heads(x, cos, sin)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        with jax.named_scope("attention"):
            out, written = attend(
                q, k, v, view, pos, mask, window=window, choice=setting.attention, rules=setting.rules, at=at
            )
            out = linear(out.reshape(*out.shape[:3], -1), self.o_proj[...], setting, reduced=True)
        if self.o_bias is not None:
            out = out + self.o_bias[...]
        return out, (k, v), written

    def heads(self, x, cos, sin):
        """Rotated queries [B, T, K', G', H] and keys [B, T, K', H], and values [B, T, K', H]."""
        setting, g = self.setting, self.groups
        batch, t, _ = x.shape
        with jax.named_scope("qkv"):
            kv, rows = self.qkv_proj.shape[0], self.qkv_proj.shape[1]
            width = rows // (g + 2)
            if setting.train:
                cuts = (slice(0, g * width), slice(g * width, (g + 1) * width), slice((g + 1) * width, None))
                parts = [linear(x, self.qkv_proj[...][:, cut], setting) for cut in cuts]
                if self.qkv_bias is not None:
                    parts = [part + self.qkv_bias[...][:, cut] for part, cut in zip(parts, cuts)]
                q, k, v = parts
                q = q.reshape(batch, t, kv, g, width)
            else:
                qkv = linear(x, self.qkv_proj[...], setting)
                if self.qkv_bias is not None:
                    qkv = qkv + self.qkv_bias[...]
                qkv = qkv.reshape(batch, t, kv, g + 2, width)
                q, k, v = qkv[:, :, :, :g], qkv[:, :, :, g], qkv[:, :, :, g + 1]
            if self.q_norm is not None and self.k_norm is not None:
                q = rms_norm(q, self.q_norm[...], self.eps)
                k = rms_norm(k, self.k_norm[...], self.eps)
        with jax.named_scope("rope"):
            q = rotate(q, cos[:, :, None, None], sin[:, :, None, None])
            k = rotate(k, cos[:, :, None], sin[:, :, None])
        return q, k, v


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, setting: Setting, rngs: nnx.Rngs) -> None:
        d, f = config.hidden, config.intermediate
        self.setting = setting
        self.gate_up_proj = param(rngs, (2, f, d), setting)
        self.down_proj = param(rngs, (d, f), setting)
        self.gate_up_bias = param(rngs, (2, f), setting) if config.mlp_bias else None
        self.down_bias = param(rngs, (d,), setting) if config.mlp_bias else None

    def __call__(self, x):
        with jax.named_scope("mlp"):
            if self.setting.train:
                gate, up = (linear(x, self.gate_up_proj[...][i], self.setting) for i in (0, 1))
                if self.gate_up_bias is not None:
                    gate, up = gate + self.gate_up_bias[...][0], up + self.gate_up_bias[...][1]
            else:
                both = linear(x, self.gate_up_proj[...], self.setting)
                if self.gate_up_bias is not None:
                    both = both + self.gate_up_bias[...]
                gate, up = both[:, :, 0], both[:, :, 1]
            out = linear(jax.nn.silu(gate) * up, self.down_proj[...], self.setting, reduced=True)
        return out if self.down_bias is None else out + self.down_bias[...]


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, setting: Setting, rngs: nnx.Rngs) -> None:
        self.eps = config.eps
        self.input_layernorm = param(rngs, (config.hidden,), setting, scale=0)
        self.attn = Attention(config, setting, rngs)
        self.post_attention_layernorm = param(rngs, (config.hidden,), setting, scale=0)
        self.mlp = MLP(config, setting, rngs)

    def __call__(self, x, cos, sin, view, pos, mask, window, at):
        normed = rms_norm(x, self.input_layernorm[...], self.eps)
        out, rows, written = self.attn(normed, cos, sin, view, pos, mask, window, at)
        x = x + out
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm[...], self.eps)), rows, written


class Decoder(nnx.Module):
    """The whole model."""

    def __init__(self, config: ModelConfig, setting: Setting, rngs: nnx.Rngs) -> None:
        self.config, self.setting = config, setting
        self.embed = param(rngs, (config.vocab, config.hidden), setting)
        self.layers = nnx.List([Layer(config, setting, rngs) for _ in range(config.num_layers)])
        self.norm = param(rngs, (config.hidden,), setting, scale=0)
        self.lm_head = None if config.tie else param(rngs, (config.vocab, config.hidden), setting)

    def __call__(
        self, inputs: jax.Array, pos: jax.Array, cache: KVCache | None, mask: MaskSpec, *,
        taps: tuple[int, ...] = (), logits: bool = True, at: jax.Array | None = None,
        span: tuple[int, int] | None = None,
    ) -> Output:  # fmt: skip
        """T new tokens behind the cache, which stays valid as it is.

        Args:
          inputs: ids [B, T] int32, or embeddings [B, T, D].
          pos: [B, T] int32 absolute positions. cache: what precedes them; None for nothing.
          taps: 0-based layers whose outputs are returned, concatenated in the order given.
          logits: compute the head (float32) for all T rows.
          at: pos[:, 0] as a scalar where all rows share it.
          span: (first, end): run layers first..end-1 only, on `inputs` as they enter layer `first`, without the head.
            `rows` are those layers'; the others' slots of the cache are left alone.
        """
        first, end = span or (0, len(self.layers))
        rows, put, tapped = [], [], {}
        for i, _, x, new, written in self._walk(self._embed(inputs), pos, cache, mask, at, (first, end)):
            rows.append(new)
            put += [] if written is None else [written]
            if i in taps:
                tapped[i] = x
        out = None
        if logits:
            with jax.named_scope("head"):
                normed = rms_norm(x, self.norm[...], self.config.eps)
                out = linear(normed, self.head, self.setting, dtype=jnp.float32)
        features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
        after = None
        if cache is not None and put:
            k, v = list(cache.k), list(cache.v)
            k[first:end], v[first:end] = [w.k for w in put], [w.v for w in put]
            after = KVCache(tuple(k), tuple(v), cache.filled)
        return Output(out, tuple(rows), features, after)

    def hidden(self, inputs: jax.Array, pos: jax.Array, *, remat: bool = False) -> jax.Array:
        """What the head reads, [B, T, D], of whole sequences that nothing precedes; for training.

        remat: keep only the layers' inputs for the backward pass, and compute the rest again there.
        """
        *_, last = self._walk(self._embed(inputs), pos, remat=remat)
        return rms_norm(last[2], self.norm[...], self.config.eps)

    def queries(self, inputs: jax.Array, pos: jax.Array) -> tuple[jax.Array, ...]:
        """Per layer the rotated queries [B, T, K', G', H] of whole sequences, to measure what a cache does to them."""
        config, found = self.config, []
        cos, sin = cos_sin(pos, config.rope, config.head_dim)
        for i, x, *_ in self._walk(self._embed(inputs), pos):
            layer = self.layers[i]
            # The layer computes the same projection again; compiled together it is one.
            found.append(layer.attn.heads(rms_norm(x, layer.input_layernorm[...], config.eps), cos, sin)[0])
        return tuple(found)

    def _walk(
        self, x: jax.Array, pos: jax.Array, cache: KVCache | None = None, mask: MaskSpec = MaskSpec(),
        at: jax.Array | None = None, span: tuple[int, int] | None = None, remat: bool = False,
    ) -> Iterator[tuple[int, jax.Array, jax.Array, tuple[jax.Array, jax.Array], View | None]]:  # fmt: skip
        """The layers of `span`, one after the other: (layer, its input, its output, its rows, its view of the cache
        with them written or None)."""
        config = self.config
        cos, sin = cos_sin(pos, config.rope, config.head_dim)
        for i in range(*span or (0, len(self.layers))):
            view = None if cache is None else cache.view(i)
            window = config.windows[i] if config.windows else None

            def run(x: jax.Array, layer: Layer = self.layers[i], view=view, window=window):
                return layer(x, cos, sin, view, pos, mask, window, at)

            before = x
            x, rows, written = (jax.checkpoint(run) if remat else run)(x)
            yield i, before, x, rows, written

    @property
    def head(self) -> jax.Array:
        """[V, D]: the head's weight, the embedding where they are tied."""
        return (self.embed if self.lm_head is None else self.lm_head)[...]

    def _embed(self, inputs: jax.Array) -> jax.Array:
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            return inputs.astype(self.setting.dtype)
        spec = self.setting.rules.spec("batch", None, None)
        return self.embed[...].at[inputs].get(mode="clip", out_sharding=spec)
