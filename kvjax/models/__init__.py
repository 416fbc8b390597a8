"""Models as static definitions over a tuple of parameter leaves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kvjax import cache as kv_cache
from kvjax.attention import Choice, MaskSpec
from kvjax.cache import KVCache
from kvjax.config import ModelConfig
from kvjax.models.decoder import AXES, Decoder, Output
from kvjax.models.layers import Setting
from kvjax.sharding import Rules
from kvjax.typing import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Everything static about one model: hashable by identity, so it is a static jit argument.

    `names` are the dotted leaf paths in the order of `Params`.
    """

    config: ModelConfig
    setting: Setting
    names: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    graph: Any
    tree: Any

    @property
    def rules(self) -> Rules:
        return self.setting.rules

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.setting.dtype)

    def bind(self, params: Params) -> Decoder:
        """The Flax module over these leaves (inside a trace)."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params))

    def axes(self, name: str) -> tuple[str | None, ...]:
        """Logical axes of the leaf `name`."""
        return AXES[name.rsplit(".", 1)[-1]]

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, dtype and (on a mesh) sharding of every leaf, in `names` order."""
        return tuple(
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.rules.sharding(*self.axes(n)))
            for n, s in zip(self.names, self.shapes, strict=True)
        )

    def init(self, seed: int = 0) -> Params:
        """Random parameters (tests, plans, training): the same model on every mesh."""
        plain = self if self.rules.mesh is None else build(self.config, None, self.setting.dtype)

        def make() -> Params:
            module = Decoder(plain.config, plain.setting, nnx.Rngs(seed))
            return tuple(jax.tree.leaves(nnx.state(module)))

        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            params = jax.jit(make)()
        if self.rules.mesh is None:
            return params
        return tuple(
            jax.device_put(regroup(name, np.asarray(x), self.config, self.rules.kv_heads), leaf.sharding)
            for name, x, leaf in zip(self.names, params, self.abstract(), strict=True)
        )

    def cache(self, batch: int, size: int) -> KVCache:
        """An empty cache (inside jit). See `kvjax.cache.empty`."""
        return kv_cache.empty(self.config, self.rules, batch, size, self.dtype)

    def forward(
        self, params: Params, inputs: jax.Array, pos: jax.Array, cache: KVCache | None = None,
        mask: MaskSpec = MaskSpec(), *, taps: tuple[int, ...] = (), logits: bool = True, at: jax.Array | None = None,
        span: tuple[int, int] | None = None,
    ) -> Output:  # fmt: skip
        """See `Decoder.__call__`. Pure; call it inside jit (and inside `rules.context()` on a mesh)."""
        for tap in taps:
            if not 0 <= tap < self.config.num_layers:
                raise ValueError(f"tap {tap} is not a layer of this model (0..{self.config.num_layers - 1})")
        if span is not None and (logits or not 0 <= span[0] < span[1] <= self.config.num_layers):
            raise ValueError(
                f"span {span}: layers (first, end) of {self.config.num_layers}, and without logits"
            )
        return self.bind(params)(inputs, pos, cache, mask, taps=taps, logits=logits, at=at, span=span)

    def hidden(
        self, params: Params, inputs: jax.Array, pos: jax.Array, *, remat: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """For training: (normed last hidden state [B, T, D], the head's weight [V, D]). See `Decoder.hidden`."""
        decoder = self.bind(params)
        return decoder.hidden(inputs, pos, remat=remat), decoder.head


@functools.lru_cache(maxsize=64)
def build(
    config: ModelConfig, mesh: Mesh | None = None, dtype: str = "float32", attention: str | None = None,
    device: Any = None, train: bool = False,
) -> Model:  # fmt: skip
    """The static model of `config`: the same object for the same arguments, so a model loaded twice compiles once.

    Args:
      mesh: (`data`, `model`) mesh, or None for one device.
      dtype: of weights, activations and cache: "float32" or "bfloat16".
      attention: name of an attention backend; None takes the first that supports this.
      device: a device of the kind it will run on; default the mesh's first, or JAX's first.
      train: products in the order that is fast for gradients (`Model.hidden`); the parameters are the same.

    Raises:
      MeshError, ValueError: see `Rules.create` and `Choice.backend`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {dtype!r} is not supported; use float32 or bfloat16")
    device = device or (mesh.devices.flat[0] if mesh is not None else jax.devices()[0])
    rules = Rules.create(config, mesh)
    choice = Choice(device.platform, device.device_kind, attention)
    if attention is not None:  # a named backend fails here, not in the middle of a request
        kv, h = rules.kv_heads, config.head_dim
        choice.backend(*(jax.ShapeDtypeStruct((1, kv, r, h), dtype) for r in (config.num_heads // kv, 256)))
    setting = Setting(rules, dtype, choice, train)
    return Model(config, setting, *outline(lambda: Decoder(config, setting, nnx.Rngs(0))))


def outline(
    make: Callable[[], nnx.Module],
) -> tuple[tuple[str, ...], tuple[jax.ShapeDtypeStruct, ...], Any, Any]:
    """(names, shapes, graph, tree) of the module `make` builds, whose arrays are not computed."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        abstract = nnx.eval_shape(make)
    graph, state = nnx.split(abstract)
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(".".join(_key(k) for k in path if _key(k)) for path, _ in paths)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in paths)
    return names, shapes, graph, tree


def regroup(name: str, x: np.ndarray, config: ModelConfig, stored: int) -> np.ndarray:
    """A leaf laid out for K KV heads, laid out for `stored` = K * repeats of them (host)."""
    repeats, h = stored // config.num_kv_heads, config.head_dim
    leaf = name.rsplit(".", 1)[-1]
    if repeats == 1 or leaf not in ("qkv_proj", "qkv_bias", "o_proj"):
        return x
    if leaf == "o_proj":
        return x.reshape(x.shape[0], stored, -1)
    q, k, v = np.split(x, [config.groups * h, (config.groups + 1) * h], axis=1)
    q = q.reshape(stored, -1, *x.shape[2:])
    return np.concatenate([q, np.repeat(k, repeats, axis=0), np.repeat(v, repeats, axis=0)], axis=1)


def _key(key: Any) -> str:
    text = str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
    return "" if text in ("value", "raw_value") else text.lstrip(".")
