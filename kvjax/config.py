"""Frozen, hashable model configurations, read from Hugging Face `config.json` dictionaries.

Both spellings in use are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5), `torch_dtype` and `dtype`. A field that would change the computation and that this
code does not implement is refused by name; nothing is ignored silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters. Positions are tokens; `theta` is the base of the angles.

    `original_max` is the context length before scaling (llama3, yarn). `attention_factor` multiplies
    cos and sin (yarn only; 1.0 elsewhere). See `kvjax.rope` for the formulas and their sources.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry and variant switches of one dense decoder (Llama, Qwen2, Qwen3).

    Axis letters: V `vocab`, D `hidden`, L `num_layers`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
    F `intermediate`. `windows[l]` is the sliding window of layer l in tokens, None for full attention.
    `dtype` is the dtype the checkpoint was published in.
    """

    model_type: str
    vocab: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    rope: RopeConfig
    eps: float
    max_positions: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: str = "float32"
    eos: tuple[int, ...] = ()
    bos: int | None = None

    @property
    def groups(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` dictionary.

        Raises:
          ConfigError: unknown `model_type`, rope type, quantisation or activation, a missing or
            mistyped field, or sizes that contradict each other. The message names the field.
        """
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary transformers reads back into the same model."""
        raise NotImplementedError
