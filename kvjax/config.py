"""Frozen, hashable model configurations, read from Hugging Face `config.json` dictionaries.

Both spellings in use are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5), `torch_dtype` and `dtype`. A field that would change the computation and that this
code does not implement is refused by name; a field it has never heard of is named in a warning.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

_log = logging.getLogger(__name__)


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

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope_type: {self.kind!r} is not implemented (known: {', '.join(ROPE_KINDS)})")
        read = _Reader(dataclasses.asdict(self), "rope ")
        if read.number("theta") <= 1.0:
            raise ConfigError(f"rope_theta: must be greater than 1, got {self.theta!r}")
        if read.number("factor") < 1.0:
            raise ConfigError(f"rope factor: must be at least 1, got {self.factor!r}")
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            read.number(name)
        if self.kind in ("llama3", "yarn"):
            read.integer("original_max")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor: must be above low_freq_factor, got {self.high_freq_factor!r} "
                f"and {self.low_freq_factor!r}"
            )
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"rope beta_fast: must not be below beta_slow, got {self.beta_fast!r} and {self.beta_slow!r}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry and variant switches of one dense decoder (Llama, Qwen2, Qwen3).

    Axis letters: V `vocab`, D `hidden`, L `num_layers`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
    F `intermediate`. `windows[l]` is the sliding window of layer l in tokens, None for full attention
    (an empty tuple is filled with None). A window of w lets a query at p see keys p-w+1 .. p.
    `dtype` is the dtype the checkpoint was published in.

    Raises:
      ConfigError: sizes that contradict each other; the message uses the Hugging Face field names.
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

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type: {self.model_type!r} is not implemented (known: {', '.join(MODEL_TYPES)})"
            )
        for field, hf_name in _SIZES.items():
            _Reader({hf_name: getattr(self, field)}).integer(hf_name)
        _Reader({"rms_norm_eps": self.eps}).number("rms_norm_eps")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {self.num_kv_heads} does not divide "
                f"num_attention_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: rotary embedding needs an even size, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: {self.dtype!r} is not supported (known: {', '.join(DTYPES)})")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ConfigError(
                f"layer_types: {len(self.windows)} entries for num_hidden_layers {self.num_layers}"
            )
        for window in self.windows:
            if window is not None:
                _Reader({"sliding_window": window}).integer("sliding_window")

    @property
    def groups(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` dictionary.

        Fields that may be missing take the defaults of the model's own configuration class in
        transformers; the sizes and `rms_norm_eps` may not be missing.

        Raises:
          ConfigError: unknown `model_type`, rope type, quantisation or activation, a missing or
            mistyped field, or sizes that contradict each other. The message names the field.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"config: expected a JSON object, got {type(config).__name__}")
        read = _Reader(config)
        kind = read.text("model_type")
        if kind not in MODEL_TYPES:
            raise ConfigError(f"model_type: {kind!r} is not implemented (known: {', '.join(MODEL_TYPES)})")
        _refuse(config, kind)
        llama = kind == "llama"
        heads = read.integer("num_attention_heads")
        hidden = read.integer("hidden_size")
        layers = read.integer("num_hidden_layers", limit=_MAX_LAYERS)
        max_positions = read.integer("max_position_embeddings", 2048 if llama else 32768)
        attention_bias = kind != "qwen2" and read.flag("attention_bias", False)
        return cls(
            model_type=kind,
            vocab=read.integer("vocab_size"),
            hidden=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(read, kind, heads),
            head_dim=_head_dim(read, kind, hidden, heads),
            intermediate=read.integer("intermediate_size"),
            rope=_rope(config, max_positions),
            eps=read.number("rms_norm_eps"),
            max_positions=max_positions,
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=llama and read.flag("mlp_bias", False),
            qk_norm=kind == "qwen3",
            tie=read.flag("tie_word_embeddings", False),
            windows=_windows(read, kind, layers),
            dtype=_dtype(read),
            eos=_ids(config.get("eos_token_id", 2 if llama else None), "eos_token_id"),
            bos=next(iter(_ids(config.get("bos_token_id", 1 if llama else None), "bos_token_id")), None),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary transformers reads back into the same model.

        Written in the transformers 5 spelling; `from_hf(c.to_hf()) == c`.

        Raises:
          ConfigError: a combination of switches that no class of this `model_type` in transformers has.
        """
        kind = self.model_type
        switches = (self.qkv_bias, self.o_bias, self.mlp_bias, self.qk_norm)
        possible = {
            "llama": self.qkv_bias == self.o_bias and not self.qk_norm,
            "qwen2": switches == (True, False, False, False),
            "qwen3": self.qkv_bias == self.o_bias and self.qk_norm and not self.mlp_bias,
        }
        if not possible[kind]:
            raise ConfigError(
                f"model_type: {kind} in transformers has no variant with "
                f"(qkv_bias, o_bias, mlp_bias, qk_norm) = {switches}"
            )
        out: dict[str, Any] = {
            "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind] + "ForCausalLM"],
            "model_type": kind,
            **{hf_name: getattr(self, field) for field, hf_name in _SIZES.items()},
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tie,
            "rope_parameters": _rope_to_hf(self.rope),
            "attention_dropout": 0.0,
            "bos_token_id": self.bos,
            "eos_token_id": self.eos[0] if len(self.eos) == 1 else list(self.eos) or None,
            "dtype": self.dtype,
            "use_cache": True,
        }
        if kind != "qwen2":
            out["attention_bias"] = self.qkv_bias
        sizes = {w for w in self.windows if w is not None}
        if kind == "llama":
            out["mlp_bias"] = self.mlp_bias
            if sizes:
                raise ConfigError("sliding_window: llama in transformers has no sliding window")
            return out
        if len(sizes) > 1:
            raise ConfigError(f"sliding_window: one size per model, got {sorted(sizes)}")
        out["use_sliding_window"] = bool(sizes)
        out["sliding_window"] = next(iter(sizes), None)
        out["max_window_layers"] = next((i for i, w in enumerate(self.windows) if w), self.num_layers)
        out["layer_types"] = [_FULL if w is None else _SLIDING for w in self.windows]
        return out


_FULL, _SLIDING = "full_attention", "sliding_attention"
_MAX_LAYERS = 4096
_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
_REQUIRED: Any = object()

# Fields that change the computation of a decoder, with the values under which they change nothing.
_OFF = (None, False, 0)
_CHANGES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            # attention
            "attn_logit_softcapping", "attn_logit_softcap", "attention_multiplier", "query_pre_attn_scalar",
            "clip_qkv", "use_qk_norm", "qk_layernorm", "qk_norm", "attention_chunk_size",
            "attn_temperature_tuning", "dual_chunk_attention_config", "sparse_attention_config", "alibi",
            "use_bidirectional_attention", "kv_lora_rank", "q_lora_rank", "v_head_dim", "add_cross_attention",
            "use_sinks", "attention_sink_size", "num_kv_shared_layers", "per_layer_config",
            # positions
            "rope_interleave", "rope_interleaved", "no_rope_layers", "no_rope_layer_interval", "use_mrope",
            "mrope_section", "rope_local_base_freq", "swa_rope_theta",
            # mixture of experts
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok",
            "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_only_layers",
            # scales, biases and the head
            "final_logit_softcapping", "scale_depth", "use_parallel_residual", "parallel_residual",
            "bias", "qkv_bias", "use_qkv_bias", "is_encoder_decoder", "zero_centered_gamma",
            # drafters share model_type with their targets
            "dflash_config", "speculators_config", "eagle_config",
        ),
        _OFF,
    ),
    **dict.fromkeys(
        ("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier", "scale_emb",
         "lm_head_multiplier", "partial_rotary_factor", "rotary_pct"),
        (None, 1),
    ),
    "hidden_act": (None, "silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "is_causal": (None, True),
}  # fmt: skip

# Fields that were looked at and change nothing at inference.
_HARMLESS = frozenset(
    """architectures transformers_version _name_or_path name_or_path use_cache initializer_range
    attention_dropout hidden_dropout resid_pdrop pad_token_id pretraining_tp return_dict output_attentions
    output_hidden_states output_scores torchscript use_bfloat16 tf_legacy_loss pruned_heads
    chunk_size_feed_forward id2label label2id num_labels problem_type is_decoder cross_attention_hidden_size
    tie_encoder_decoder finetuning_task task_specific_params tokenizer_class prefix sep_token_id
    decoder_start_token_id max_length min_length do_sample temperature top_k top_p num_beams
    repetition_penalty early_stopping unsloth_version unsloth_fixed _commit_hash
    _attn_implementation_autoset use_flash_attn is_llama_config""".split()
)
_READ = frozenset(
    """model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size rms_norm_eps max_position_embeddings original_max_position_embeddings attention_bias
    mlp_bias tie_word_embeddings sliding_window use_sliding_window max_window_layers layer_types rope_theta
    rope_scaling rope_parameters dtype torch_dtype eos_token_id bos_token_id quantization_config
    compression_config""".split()
)
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "finetuned")


def known_fields() -> frozenset[str]:
    """The fields of a `config.json` that `ModelConfig.from_hf` reads, refuses by value, or knows to be harmless."""
    return _READ | _HARMLESS | _CHANGES.keys()


class _Reader:
    """Typed access to a dictionary; every error names the field. `where` prefixes the name."""

    def __init__(self, config: Mapping[str, Any], where: str = "") -> None:
        self.config, self.where = config, where

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        if name in self.config:
            return self.config[name]
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}{name}: missing")
        return default

    def integer(self, name: str, default: Any = _REQUIRED, limit: int = 2**31 - 1) -> int:
        """A positive integer, at most `limit`."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self.where}{name}: expected a positive integer, got {_show(value)}")
        if value > limit:
            raise ConfigError(f"{self.where}{name}: {_show(value)} is more than {limit}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A positive finite number."""
        value = self.value(name, default)
        if not isinstance(value, bool) and isinstance(value, (int, float)):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
            if math.isfinite(value) and value > 0:
                return value
        raise ConfigError(f"{self.where}{name}: expected a positive finite number, got {_show(value)}")

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}{name}: expected true or false, got {_show(value)}")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self.value(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}{name}: expected a string, got {_show(value)}")
        return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _neutral(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `allowed`; an empty list or object switches nothing on either."""
    if isinstance(value, (list, tuple, Mapping)):
        return not value
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def _refuse(config: Mapping[str, Any], kind: str) -> None:
    """Raise for what is not implemented, warn for what is not known."""
    for name in ("quantization_config", "compression_config"):
        quant = config.get(name)
        if quant:
            method = quant.get("quant_method", "unnamed") if isinstance(quant, Mapping) else quant
            raise ConfigError(f"{name}: quantised checkpoints ({_show(method)}) are not supported")
    for name, allowed in _CHANGES.items():
        if name in config and not _neutral(config[name], allowed):
            raise ConfigError(f"{name}: {_show(config[name])} changes the computation and is not implemented")
    if kind != "llama" and config.get("mlp_bias"):
        raise ConfigError(f"mlp_bias: {_show(config['mlp_bias'])} is not implemented for {kind}")
    architectures = config.get("architectures")
    if architectures:
        if not isinstance(architectures, (list, tuple)):
            raise ConfigError(f"architectures: expected a list, got {_show(architectures)}")
        if not any(isinstance(a, str) and a.endswith("ForCausalLM") for a in architectures):
            raise ConfigError(f"architectures: {_show(architectures)} is not a causal language model")
    unknown = [str(k) for k in config if k not in _READ and k not in _HARMLESS and k not in _CHANGES]
    if kind == "qwen2" and "attention_bias" in config:
        unknown.append("attention_bias (qwen2 always has q, k, v biases)")
    if kind == "llama":
        unknown += [
            f"{k} (llama has no sliding window)"
            for k in ("sliding_window", "use_sliding_window")
            if config.get(k)
        ]
    if unknown:
        _log.warning("config fields not used: %s", ", ".join(sorted(unknown)))


def _kv_heads(read: _Reader, kind: str, heads: int) -> int:
    # A missing entry means 32 in transformers' Qwen classes, whatever the model: not a value to guess.
    value = read.value("num_key_value_heads", None if kind == "llama" else _REQUIRED)
    return heads if value is None else read.integer("num_key_value_heads")


def _head_dim(read: _Reader, kind: str, hidden: int, heads: int) -> int:
    value = read.value("head_dim", 128 if kind == "qwen3" else None)
    if value is not None:
        return read.integer("head_dim", value)
    if hidden % heads:
        raise ConfigError(
            f"hidden_size: {hidden} is not a multiple of num_attention_heads {heads} "
            f"and head_dim is not given"
        )
    return hidden // heads


def _dtype(read: _Reader) -> str:
    name = "dtype" if read.config.get("dtype") is not None else "torch_dtype"
    if read.config.get(name) is None:
        return "float32"
    value = read.text(name).removeprefix("torch.")
    if value not in DTYPES:
        raise ConfigError(f"{name}: {_show(value)} is not supported (known: {', '.join(DTYPES)})")
    return value


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) and name == "eos_token_id" else [value]
    for v in values:
        if isinstance(v, bool) or not isinstance(v, int) or v < 0:
            raise ConfigError(f"{name}: expected token ids, got {_show(value)}")
    return tuple(dict.fromkeys(values))


def _windows(read: _Reader, kind: str, layers: int) -> tuple[int | None, ...]:
    types = read.value("layer_types", None)
    if types is not None and not (
        isinstance(types, (list, tuple)) and all(isinstance(t, str) for t in types)
    ):
        raise ConfigError(f"layer_types: expected a list of strings, got {_show(types)}")
    for t in types or ():
        if t not in (_FULL, _SLIDING) or (kind == "llama" and t != _FULL):
            raise ConfigError(f"layer_types: {t!r} is not implemented for {kind}")
    if types is not None and len(types) != layers:
        raise ConfigError(f"layer_types: {len(types)} entries for num_hidden_layers {layers}")
    if kind == "llama":
        return ()
    window = None
    if read.flag("use_sliding_window", False) and read.value("sliding_window", 4096) is not None:
        window = read.integer("sliding_window", 4096)
    if types is None:
        first = read.value("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigError(f"max_window_layers: expected an integer, got {_show(first)}")
        return tuple(None if i < first else window for i in range(layers))
    if window is None and _SLIDING in types:
        raise ConfigError(
            "layer_types: names sliding_attention, but use_sliding_window and sliding_window give no window"
        )
    return tuple(window if t == _SLIDING else None for t in types)


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """`rope_theta` + `rope_scaling`, or `rope_parameters`, flat or equal for every layer type."""
    for name in ("rope_scaling", "rope_parameters"):
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            raise ConfigError(f"{name}: expected an object, got {_show(config[name])}")
    if config.get("rope_scaling") and config.get("rope_parameters"):
        raise ConfigError(
            "rope_scaling: given together with rope_parameters; one of the two spellings is expected"
        )
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    entry = config.get(name) or {}
    if entry and all(v is None or isinstance(v, Mapping) for v in entry.values()):
        variants = list(entry.values())
        if any(v != variants[0] for v in variants) or variants[0] is None:
            raise ConfigError(
                f"{name}: differs between layer types ({', '.join(map(str, entry))}), not implemented"
            )
        entry = variants[0]
    read = _Reader(entry, f"{name}.")
    for other in ("rope_theta", "original_max_position_embeddings"):
        if config.get(other) is not None and entry.get(other) is not None and config[other] != entry[other]:
            raise ConfigError(
                f"{other}: {_show(config[other])} contradicts {name}.{other} {_show(entry[other])}"
            )
    kind = read.text("rope_type", entry.get("type", "default"))
    if "type" in entry and entry["type"] != kind:
        raise ConfigError(f"{name}.type: {_show(entry['type'])} contradicts rope_type {kind!r}")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{name}.rope_type: {kind!r} is not implemented (known: {', '.join(ROPE_KINDS)})")
    if not _neutral(entry.get("partial_rotary_factor"), (None, 1)):
        raise ConfigError(
            f"{name}.partial_rotary_factor: {_show(entry['partial_rotary_factor'])} is not implemented"
        )
    known = (*_ROPE_COMMON, "partial_rotary_factor", *{k for keys in _ROPE_KEYS.values() for k in keys})
    for key in entry:
        if key not in known:
            raise ConfigError(f"{name}.{key}: not known for rope_type {kind!r}")
    unused = [
        k
        for k in entry
        if k not in _ROPE_COMMON and k not in _ROPE_KEYS[kind] and k != "partial_rotary_factor"
    ]
    if unused:
        _log.warning("%s fields not used by rope_type %s: %s", name, kind, ", ".join(sorted(unused)))

    theta = (
        read.number("rope_theta") if "rope_theta" in entry else _Reader(config).number("rope_theta", 10000.0)
    )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, read.number("factor"))
    top = config.get("original_max_position_embeddings")
    original = read.integer("original_max_position_embeddings", max_positions if top is None else top)
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            read.number("factor"),
            original,
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
        )
    present = _Reader({k: v for k, v in entry.items() if v is not None}, f"{name}.")
    read.value("factor")
    factor = present.number("factor", max_positions / original)
    if "attention_factor" in present.config:
        attention_factor = present.number("attention_factor")
    elif "mscale" in present.config and "mscale_all_dim" in present.config:
        attention_factor = _mscale(factor, present.number("mscale")) / _mscale(
            factor, present.number("mscale_all_dim")
        )
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=present.number("beta_fast", 32.0),
        beta_slow=present.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=present.flag("truncate", True),
    )


def _mscale(factor: float, weight: float) -> float:
    """Temperature of YaRN (arXiv 2309.00071, section 3.4), as a factor on cos and sin."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        out["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }
    return out | {name: getattr(rope, name) for name in names.get(rope.kind, ())}
