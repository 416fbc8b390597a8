"""DFlash: a drafter that proposes a whole block in one forward pass (arXiv 2602.06036, section 3).

Its layers are the target's kind of layers. What is new is their context: outputs of a few target layers (taps) of
every committed token, reduced by `fc` and normed, become key and value rows of every layer, by the same projections
that serve the block. The block is [anchor, mask, ...]; its rows see the context and each other, and row j
predicts the token at its own position. Embedding and head are the target's.

Two calls: `context` turns taps into K/V rows, which a `KVCache` keeps; `block` runs a block behind that cache and
leaves it as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.attention import MaskSpec
from kvjax.cache import KVCache, Rows
from kvjax.config import ConfigError, ModelConfig
from kvjax.models import Model, outline
from kvjax.models.decoder import Attention, Layer
from kvjax.models.layers import Setting, linear, param, rms_norm
from kvjax.rope import cos_sin, rotate
from kvjax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Geometry of a drafter.

    model: of its layers, in the target's vocabulary. taps: target layers (0-based) whose outputs it reads, in the
    order of `fc`'s columns. block: rows of a block, anchor included. mask_id: the token that stands for "not known".
    causal: per layer, whether a row sees only the rows of its block up to itself; default: sliding layers do.
    head: rows of its own head over a part of the vocabulary; None for the target's head. target_layers: what the
    file says its target has.

    Raises:
      ConfigError: values that contradict each other; the message uses the names of the published config.json.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    block: int
    mask_id: int
    causal: tuple[bool, ...] = ()
    head: int | None = None
    target_layers: int | None = None

    def __post_init__(self) -> None:
        if not self.causal:
            object.__setattr__(self, "causal", tuple(w is not None for w in self.model.windows))
        if self.block < 2:
            raise ConfigError(
                f"block_size: {self.block} drafts nothing: a block is the anchor and its drafts"
            )
        if not 0 <= self.mask_id < self.model.vocab:
            raise ConfigError(
                f"mask_token_id: {self.mask_id} is outside the vocabulary of {self.model.vocab}"
            )
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) < len(self.taps):
            raise ConfigError(f"target_layer_ids: expected different layers, got {list(self.taps)}")
        if self.head is not None and self.head > self.model.vocab:
            raise ConfigError(f"draft_vocab_size: {self.head} is more than vocab_size {self.model.vocab}")


class DrafterParams(NamedTuple):
    """What drafting needs, as arrays: the drafter's own leaves, and what it shares with its target.

    embed: [V, D]. head: [V, D], or the drafter's own [head, D] with ids: [head] int32, the token of each row.
    """

    own: Params
    embed: jax.Array
    head: jax.Array
    ids: jax.Array | None = None


class Module(nnx.Module):
    def __init__(self, config: DrafterConfig, setting: Setting, rngs: nnx.Rngs) -> None:
        geometry = config.model
        d = geometry.hidden
        self.config, self.setting = config, setting
        self.fc = param(rngs, (d, len(config.taps) * d), setting)
        self.hidden_norm = param(rngs, (d,), setting, scale=0)
        self.layers = nnx.List([Layer(geometry, setting, rngs) for _ in range(geometry.num_layers)])
        self.norm = param(rngs, (d,), setting, scale=0)
        self.own_head = None if config.head is None else param(rngs, (config.head, d), setting)

    def context(self, taps: jax.Array, pos: jax.Array) -> Rows:
        config = self.config.model
        # A feature that overflowed costs drafts, once: left as it is, every later draft would read it.
        taps = jnp.where(jnp.isfinite(taps), taps, 0).astype(self.setting.dtype)
        with jax.named_scope("fc"):
            g = rms_norm(linear(taps, self.fc[...], self.setting), self.hidden_norm[...], config.eps)
        cos, sin = cos_sin(pos, config.rope, config.head_dim)
        return tuple(_key_value(layer.attn, g, cos, sin) for layer in self.layers)

    def block(self, x: jax.Array, pos: jax.Array, cache: KVCache | None) -> jax.Array:
        config = self.config.model
        batch, width, _ = x.shape
        cos, sin = cos_sin(pos, config.rope, config.head_dim)
        row = jnp.arange(width)
        earlier = jnp.broadcast_to(row[:, None] >= row, (batch, width, width))
        earlier = self.setting.rules.reshard(earlier, "batch", None, None)
        # In a causal layer too, the rows leave the cache alone: it is the context's.
        masks = {False: MaskSpec("block"), True: MaskSpec("tree", earlier)}
        for i, layer in enumerate(self.layers):
            view = None if cache is None else cache.view(i)
            window, mask = config.windows[i], masks[self.config.causal[i]]
            x = layer(x, cos, sin, view, pos, mask, window, None)[0]
        return rms_norm(x, self.norm[...], config.eps)


def _key_value(attn: Attention, g: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key and value rows of one layer, each [B, K', T, H], of context g [B, T, D]."""
    weight = attn.qkv_proj[...]
    width = weight.shape[1] // (attn.groups + 2)
    first = attn.groups * width
    both = linear(g, weight[:, first:], attn.setting)
    if attn.qkv_bias is not None:
        both = both + attn.qkv_bias[...][:, first:]
    k, v = both[..., :width], both[..., width:]
    if attn.k_norm is not None:
        k = rms_norm(k, attn.k_norm[...], attn.eps)
    k = rotate(k, cos[:, :, None], sin[:, :, None])
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterModel(Model):
    """The static part of a drafter; `config` is the geometry of its layers, so `cache` makes its context cache."""

    drafter: DrafterConfig

    def axes(self, name: str) -> tuple[str | None, ...]:
        own = {"fc": (None, None), "hidden_norm": (None,), "own_head": (None, None)}
        return own.get(name) or super().axes(name)

    def init(self, seed: int = 0) -> Params:
        """Random parameters."""
        if self.rules.mesh is not None:
            raise NotImplementedError("random drafters on a mesh")

        def make() -> Params:
            return tuple(jax.tree.leaves(nnx.state(Module(self.drafter, self.setting, nnx.Rngs(seed)))))

        return jax.jit(make)()

    def context(self, params: DrafterParams, taps: Float[Array, "B T TD"], pos: Int[Array, "B T"]) -> Rows:
        """K/V rows of T committed tokens, for `commit`. taps: target features of each token, by its position."""
        return self._module(params).context(taps, pos)

    def block(
        self, params: DrafterParams, anchor: Int[Array, " B"], pos: Int[Array, " B"], cache: KVCache | None
    ) -> Float[Array, "B W D"]:
        """What the head reads, of the block whose anchor stands at `pos`. Row 0, the anchor's, predicts nothing."""
        width, mask = self.drafter.block, self.drafter.mask_id
        ids = jnp.where(jnp.arange(width) == 0, anchor[:, None], mask)
        spec = self.rules.spec("batch", None, None)
        x = params.embed.at[ids].get(mode="clip", out_sharding=spec).astype(self.dtype)
        return self._module(params).block(x, pos[:, None] + jnp.arange(width, dtype=jnp.int32), cache)

    def logits(self, params: DrafterParams, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Of the head's rows, float32. Row j of a block is about position pos + j itself."""
        return linear(hidden.astype(params.head.dtype), params.head, self.setting, dtype=jnp.float32)

    def choose(
        self, params: DrafterParams, hidden: Float[Array, "B T D"], limit: int | None = None
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
        """The likeliest token of each row and its probability.

        With the head's rows spread over a mesh each device answers for its own, and two numbers a row cross it.
        limit: ids at and beyond it are never chosen.
        """
        rules = self.rules
        axis = None if params.ids is not None or rules.mesh is None else dict(rules.axes)["vocab"]

        def pick(hidden: jax.Array, head: jax.Array, ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
            logits = self.logits(params._replace(head=head), hidden)
            token = jnp.arange(head.shape[0], dtype=jnp.int32) if ids is None else ids
            if axis is not None:
                token = token + jax.lax.axis_index(axis) * head.shape[0]
            if limit is not None:
                logits = jnp.where(token < limit, logits, -jnp.inf)
            top, mass = logits.max(-1), jax.nn.logsumexp(logits, axis=-1)
            best = token[jnp.argmax(logits, axis=-1)]
            if axis is not None:
                tops, bests, masses = (jax.lax.all_gather(x, axis) for x in (top, best, mass))
                top, mass = tops.max(0), jax.nn.logsumexp(masses, axis=0)
                best = jnp.take_along_axis(bests, jnp.argmax(tops, axis=0)[None], axis=0)[0]
            return best, jnp.exp(top - mass)

        rows = rules.spec("batch", None)
        head = rules.spec("vocab" if axis else None, None)
        none = None if params.ids is None else rules.spec(None)
        local = rules.local(pick, (rules.spec("batch", None, None), head, none), (rows, rows))
        return local(hidden, params.head, params.ids)

    def _module(self, params: DrafterParams) -> Module:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params.own))


@functools.lru_cache(maxsize=64)
def build_drafter(config: DrafterConfig, target: Model) -> DrafterModel:
    """The static drafter, where and in what dtype `target` runs; the same object for the same arguments.

    Raises:
      ConfigError: it was made for another target, named by the field that differs.
    """
    check_target(config, target.config)
    rules = type(target.rules).create(config.model, target.rules.mesh)
    setting = dataclasses.replace(target.setting, rules=rules)
    parts = outline(lambda: Module(config, setting, nnx.Rngs(0)))
    return DrafterModel(config.model, setting, *parts, config)


def check_target(config: DrafterConfig, target: ModelConfig) -> None:
    """Whether a drafter reads and writes what this target has.

    Raises:
      ConfigError: naming each field that differs.
    """
    problems = [
        f"{name}: the drafter was made for {mine}, the target has {its}"
        for name, mine, its in (
            ("hidden_size", config.model.hidden, target.hidden),
            ("vocab_size", config.model.vocab, target.vocab),
            ("num_target_layers", config.target_layers, target.num_layers),
        )
        if mine not in (None, its)
    ]
    if beyond := [tap for tap in config.taps if tap >= target.num_layers]:
        problems.append(
            f"target_layer_ids: {beyond} are not layers of the target (0..{target.num_layers - 1})"
        )
    if problems:
        raise ConfigError("; ".join(problems))
