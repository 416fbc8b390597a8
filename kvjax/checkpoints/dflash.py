"""DFlash checkpoints: z-lab's config.json and tensor names, and the layout of vllm-project/speculators.

Both hold the same drafter. z-lab's has no head and no embedding of its own. A speculators file nests the geometry,
counts a tap from the layer it enters (one more than the layer it leaves), and may bring a head over part of the
vocabulary, with `d2t` (token id minus row) and `t2d` (which ids have a row).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints import qwen
from kvjax.checkpoints.table import Row, expand
from kvjax.config import ConfigError, ModelConfig, known_fields
from kvjax.models.drafter import DrafterConfig

_NAME = "DFlashDraftModel"
# Either at the top level or in `dflash_config`; "block_size" moved there with Qwen3.5.
_INNER = ("block_size", "mask_token_id", "target_layer_ids")
_OUTER = (*_INNER, "dflash_config", "num_target_layers", "target_hidden_size", "is_causal", "auto_map")
# Of a speculators file: with the values under which nothing changes, or None for any.
_SPECULATORS: dict[str, tuple[Any, ...] | None] = {
    "speculators_model_type": ("dflash",),
    "architectures": (["DFlashSpeculator"], ["DFlashDraftModel"]),
    "sample_from_anchor": (False, None),
    "shift_label": (False, None),
    "projector_type": ("dflash", None),
    "transformer_layer_config": None, "draft_vocab_size": None, "block_size": None, "target_hidden_size": None,
    "aux_hidden_state_layer_ids": None, "mask_token_id": None, "sliding_window_non_causal": None,
    "speculators_config": None, "speculators_version": None, "transformers_version": None, "dtype": None,
    "torch_dtype": None, "tie_word_embeddings": None, "auto_map": None, "model_type": None,
    # of training
    "pure_draft_prefix_len": None, "emb_dim": None, "gru_hidden_dim": None, "lambda_base_start": None,
    "lambda_base_decay_ratio": None, "auf": None,
}  # fmt: skip


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is a block drafter's, of whatever variant."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("DFlash" in str(n) for n in names)
    return named or "dflash_config" in config or "speculators_model_type" in config


def from_hf(config: Mapping[str, Any]) -> DrafterConfig:
    """Read a drafter's config.json.

    Raises:
      ConfigError: a variant that is not implemented, or a field that is missing, mistyped or not known, by name.
    """
    if "speculators_model_type" in config:
        config, head = _from_speculators(config)
    else:
        head = None
    names = config.get("architectures")
    if names != [_NAME]:
        raise ConfigError(f"architectures: {names!r} is not implemented (known: {_NAME})")
    if config.get("model_type") != "qwen3":
        raise ConfigError(
            f"model_type: {config.get('model_type')!r} is not implemented for drafters (known: qwen3)"
        )
    inner = config.get("dflash_config", {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"dflash_config: expected an object, got {inner!r}")
    unknown = [f"dflash_config.{name}" for name in inner if name not in _INNER]
    unknown += [name for name in config if name not in _OUTER and name not in known_fields()]
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: not known, so it cannot be ruled out that it matters"
        )

    def either(name: str) -> Any:
        found = [source[name] for source in (config, inner) if source.get(name) is not None]
        if not found:
            raise ConfigError(f"{name}: missing, at the top level and in dflash_config")
        if any(value != found[0] for value in found):
            raise ConfigError(f"{name}: {found[0]!r} contradicts dflash_config.{name} {found[1]!r}")
        return found[0]

    block, mask, taps = (
        _integer(either("block_size"), "block_size"),
        either("mask_token_id"),
        either("target_layer_ids"),
    )
    mask = _integer(mask, "mask_token_id")
    if not isinstance(taps, list):
        raise ConfigError(f"target_layer_ids: expected a list, got {taps!r}")
    taps = tuple(_integer(tap, "target_layer_ids") for tap in taps)
    geometry = {k: v for k, v in config.items() if k not in _OUTER} | {"architectures": None}
    model = ModelConfig.from_hf(geometry)
    if config.get("target_hidden_size") not in (None, model.hidden):
        raise ConfigError(
            f"target_hidden_size: {config['target_hidden_size']!r} is not hidden_size {model.hidden}; embedding and"
            " head are shared, so other sizes are not implemented"
        )
    causal = config.get("is_causal")
    if causal is not None and not isinstance(causal, bool):
        raise ConfigError(f"is_causal: expected true or false, got {causal!r}")
    layers = config.get("num_target_layers")
    return DrafterConfig(
        model, taps, block, mask,
        causal=() if causal is None else (causal,) * model.num_layers,
        head=head if head != model.vocab else None,
        target_layers=None if layers is None else _integer(layers, "num_target_layers"),
    )  # fmt: skip


def to_hf(config: DrafterConfig) -> dict[str, Any]:
    """The config.json that `from_hf`, and the readers of the published files, read back into the same drafter."""
    out = config.model.to_hf()
    rope = out.pop("rope_parameters")
    out["rope_theta"] = rope.pop("rope_theta")
    out["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    sliding = tuple(w is not None for w in config.model.windows)
    if config.causal != sliding and len(set(config.causal)) > 1:
        raise ConfigError("is_causal: one value per model in the published format, not one per layer")
    if config.head is not None:
        return _to_speculators(config, out, sliding)
    out |= {
        "architectures": [_NAME],
        "auto_map": {"AutoModel": f"dflash.{_NAME}"},
        "block_size": config.block,
        "dflash_config": {"mask_token_id": config.mask_id, "target_layer_ids": list(config.taps)},
    }
    if config.target_layers is not None:
        out["num_target_layers"] = config.target_layers
    if config.causal != sliding:
        out["is_causal"] = config.causal[0]
    return out


def rows(config: DrafterConfig, stored: int) -> tuple[Row, ...]:
    """The checkpoint table: 3 + 11 L tensors without a prefix, and the head if it has one of its own."""
    d = config.model.hidden
    own = [
        Row(("fc.weight",), ((d, len(config.taps) * d),), "fc", (None, None)),
        Row(("hidden_norm.weight",), ((d,),), "hidden_norm", (None,)),
    ]
    if config.head is not None:
        own.append(Row(("lm_head.weight",), ((config.head, d),), "own_head", (None, None)))
    shared = [row for row in qwen.table(config.model, stored) if row.ours not in ("embed", "lm_head")]
    bare = [dataclasses.replace(row, hf=tuple(n.removeprefix("model.") for n in row.hf)) for row in shared]
    return expand([*own, *bare], config.model.num_layers)


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: expected an integer, got {value!r}")
    return value


def _from_speculators(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The same drafter in z-lab's spelling, and the rows of its head."""
    for name, value in config.items():
        if name not in _SPECULATORS:
            raise ConfigError(f"{name}: not known, so it cannot be ruled out that it matters")
        allowed = _SPECULATORS[name]
        if allowed is not None and value not in allowed:
            raise ConfigError(f"{name}: {value!r} is not implemented (known: {allowed[0]!r})")
    geometry = config.get("transformer_layer_config")
    if not isinstance(geometry, Mapping):
        raise ConfigError(f"transformer_layer_config: expected an object, got {geometry!r}")
    taps = config.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list):
        raise ConfigError(f"aux_hidden_state_layer_ids: expected a list, got {taps!r}")
    taps = [_integer(tap, "aux_hidden_state_layer_ids") - 1 for tap in taps]
    if -1 in taps:
        raise ConfigError("aux_hidden_state_layer_ids: 0, the embedding, is not implemented")
    flat = {k: v for k, v in geometry.items() if k not in ("architectures", "is_causal")} | {
        "architectures": [_NAME],
        "dflash_config": {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": taps},
        "block_size": config.get("block_size"),
        "target_hidden_size": config.get("target_hidden_size"),
    }
    # Full layers look both ways in this format whatever sliding ones do.
    if config.get("sliding_window_non_causal"):
        flat["is_causal"] = False
    return flat, _integer(config.get("draft_vocab_size"), "draft_vocab_size")


def _to_speculators(
    config: DrafterConfig, geometry: dict[str, Any], sliding: tuple[bool, ...]
) -> dict[str, Any]:
    if any(causal and not slides for causal, slides in zip(config.causal, sliding)):
        raise ConfigError("is_causal: full layers look both ways in the speculators format")
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": geometry,
        "draft_vocab_size": config.head,
        "block_size": config.block,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "mask_token_id": config.mask_id,
        "sliding_window_non_causal": any(sliding) and not any(config.causal),
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block - 1}],
        },
    }
