"""Drafters from and to their published formats, and what is refused, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.checkpoints import dflash
from kvjax.checkpoints.drafters import is_drafter, load_drafter, save_drafter
from kvjax.checkpoints.table import CheckpointError
from kvjax.config import ConfigError
from tests.decode import dflash_golden as golden


def config_of(name: str) -> dict[str, Any]:
    return json.loads((golden.ROOT / name / "drafter" / "config.json").read_text())


def copy(name: str, tmp_path: Path, change=None, tensors=None) -> Path:
    """The golden drafter with its config.json, or its tensors, changed in place."""
    out = tmp_path / "drafter"
    shutil.copytree(golden.ROOT / name / "drafter", out)
    if change is not None:
        config = config_of(name)
        change(config)
        (out / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        held = load_file(out / "model.safetensors")
        tensors(held)
        save_file(held, out / "model.safetensors")
    return out


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Every tensor bit for bit under its published name, the same configuration, and the same again."""
    drafter, lm = golden.drafter(name), golden.target(name)
    out = save_drafter(drafter, tmp_path / "out")
    published = load_file(golden.ROOT / name / "drafter" / "model.safetensors")
    published.pop("embed_tokens.weight", None)  # the target's
    written = load_file(out / "model.safetensors")
    assert written.keys() == published.keys()
    for tensor, value in published.items():
        assert written[tensor].dtype == value.dtype
        np.testing.assert_array_equal(written[tensor], value, err_msg=tensor)
    again = load_drafter(out, lm)
    assert again.model is drafter.model  # the same configuration is the same object: nothing compiles twice
    assert is_drafter(out) and not is_drafter(golden.ROOT / name / "target")


def test_the_published_format_is_written() -> None:
    """Field for field, so that other readers of it find what they look for."""
    for name in golden.PUBLIC:
        given, written = config_of(name), dflash.to_hf(golden.drafter(name).model.drafter)
        assert {k: written[k] for k in given} == given
    assert len(load_file(golden.ROOT / "dflash-b" / "drafter" / "model.safetensors")) == 58  # 5 layers


def test_where_fields_stand_makes_no_difference() -> None:
    plain = dflash.from_hf(config_of("dflash-a"))
    moved = config_of("dflash-a")
    moved["dflash_config"]["block_size"] = moved.pop("block_size")
    top = config_of("dflash-a")
    top |= top.pop("dflash_config")
    both = config_of("dflash-a")
    both["dflash_config"]["block_size"] = 8
    assert dflash.from_hf(moved) == dflash.from_hf(top) == dflash.from_hf(both) == plain
    for name in ("dflash-sliding", "dflash-both-ways", "dflash-causal", "dflash-own-head"):
        config = dflash.from_hf(config_of(name))
        assert dflash.from_hf(dflash.to_hf(config)) == config


def test_bfloat16_follows_the_target(tmp_path: Path) -> None:
    lm = kvjax.load(golden.ROOT / "dflash-c" / "target", dtype="bfloat16")
    drafter = load_drafter(golden.ROOT / "dflash-c" / "drafter", lm)
    assert {str(p.dtype) for p in drafter.params} == {"bfloat16"}
    out = save_drafter(drafter, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_drafter(out, golden.target("dflash-c"))
    assert {str(p.dtype) for p in again.params} == {"float32"}


def test_a_head_that_is_the_targets_may_stand_in_the_file(tmp_path: Path) -> None:
    embed = load_file(golden.ROOT / "dflash-a" / "target" / "model.safetensors")["model.embed_tokens.weight"]
    shared = {"embed_tokens.weight": embed, "lm_head.weight": embed}
    path = copy("dflash-a", tmp_path, tensors=lambda held: held.update(shared))
    assert load_drafter(path, golden.target("dflash-a")).ids is None
    for name in shared:
        other = {name: embed + 1}
        path = copy("dflash-a", tmp_path / name, tensors=lambda held: held.update(other))  # noqa: B023
        with pytest.raises(CheckpointError, match=f"{name}' is not that of the target"):
            load_drafter(path, golden.target("dflash-a"))


# --- configurations that are refused --------------------------------------------------------------------------------


def inner(name: str, value: Any):
    return lambda c: c["dflash_config"].update({name: value})


def outer(name: str, value: Any):
    return lambda c: c.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (outer("architectures", ["DFlash2DraftModel"]), r"architectures: \['DFlash2DraftModel'\] is not implemented"),
        (outer("model_type", "llama"), "model_type: 'llama' is not implemented for drafters"),
        (outer("some_new_switch", 1), "some_new_switch: not known"),
        (outer("sample_from_anchor", True), "sample_from_anchor: not known"),
        (inner("causal", False), "dflash_config.causal: not known"),
        (inner("selector_rank", 256), "dflash_config.selector_rank: not known"),
        (inner("output_multiplier", 0.2), "dflash_config.output_multiplier: not known"),
        (inner("final_logit_softcapping", 20.0), "dflash_config.final_logit_softcapping: not known"),
        (outer("attn_logit_softcapping", 20.0), "attn_logit_softcapping: 20.0 changes the computation"),
        (outer("quantization_config", {"quant_method": "fp8"}), "quantization_config: quantised"),
        (outer("target_hidden_size", 64), "target_hidden_size: 64 is not hidden_size 32"),
        (outer("is_causal", "yes"), "is_causal: expected true or false, got 'yes'"),
        (outer("dflash_config", None), "dflash_config: expected an object, got None"),
        (outer("block_size", 1), "block_size: 1 drafts nothing"),
        (outer("block_size", "8"), "block_size: expected an integer, got '8'"),
        (lambda c: c.pop("block_size"), "block_size: missing, at the top level and in dflash_config"),
        (inner("block_size", 16), "block_size: 8 contradicts dflash_config.block_size 16"),
        (lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids: missing"),
        (inner("target_layer_ids", [1, 1]), r"target_layer_ids: expected different layers, got \[1, 1\]"),
        (inner("target_layer_ids", [-1, 1]), "target_layer_ids: expected different layers"),
        (inner("target_layer_ids", 3), "target_layer_ids: expected a list, got 3"),
        (inner("target_layer_ids", [1, 6]), r"target_layer_ids: \[6\] are not layers of the target \(0..5\)"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id: missing"),
        (inner("mask_token_id", 24), "mask_token_id: 24 is outside the vocabulary of 24"),
        (inner("mask_token_id", -1), "mask_token_id: -1 is outside the vocabulary"),
        (outer("layer_types", ["sliding_attention"] * 2), "layer_types: names sliding_attention, but"),
        (outer("num_target_layers", 36), "num_target_layers: the drafter was made for 36, the target has 6"),
        (outer("vocab_size", 25), "vocab_size: the drafter was made for 25, the target has 24"),
    ],
)  # fmt: skip
def test_variants_are_refused_by_field(change, message: str, tmp_path: Path) -> None:
    path = copy("dflash-a", tmp_path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_drafter(path, golden.target("dflash-a"))
    assert str(path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (outer("sample_from_anchor", True), "sample_from_anchor: True is not implemented"),
        (outer("shift_label", True), "shift_label: True is not implemented"),
        (outer("projector_type", "domino"), "projector_type: 'domino' is not implemented"),
        (outer("speculators_model_type", "eagle3"), "speculators_model_type: 'eagle3' is not implemented"),
        (outer("a_new_one", 0), "a_new_one: not known"),
        (outer("aux_hidden_state_layer_ids", [0, 2]), "aux_hidden_state_layer_ids: 0, the embedding"),
        (outer("aux_hidden_state_layer_ids", [2, 6]), r"target_layer_ids: \[5\] are not layers"),
        (outer("draft_vocab_size", 13), "draft_vocab_size: 13 is more than vocab_size 12"),
        (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config: expected an object"),
        (lambda c: c["transformer_layer_config"].update(new=1), "new: not known"),
    ],
)
def test_speculators_variants_are_refused_by_field(change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_drafter(copy("dflash-own-head", tmp_path, change), golden.target("dflash-own-head"))


# --- tensors that are refused ---------------------------------------------------------------------------------------


def nan(held: dict[str, np.ndarray]) -> None:
    held["layers.1.mlp.up_proj.weight"][3, 4] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"tensor 'fc.weight': missing \(needed for fc\)"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :32]}), r"'fc.weight': shape \[32, 32\], .* \[32, 64\]"),
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "'layers.1.self_attn.k_norm.weight': missing"),
        (lambda t: t.update({"candidate_selector.x": t["norm.weight"]}), "'candidate_selector.x': not part of this"),
        (lambda t: t.update(d2t=np.zeros(24, np.int64)), "'d2t': not part of this model"),
        (nan, "'layers.1.mlp.up_proj.weight': 1 NaN"),
    ],
)  # fmt: skip
def test_tensors_are_refused_by_name(change, message: str, tmp_path: Path) -> None:
    path = copy("dflash-a", tmp_path, tensors=change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_drafter(path, golden.target("dflash-a"))
    assert str(path) in str(caught.value) or "model.safetensors" in str(caught.value)


def flip(held: dict[str, np.ndarray]) -> None:
    held["t2d"][2] ^= True


def twice(held: dict[str, np.ndarray]) -> None:
    held["d2t"][1] -= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "tensor 'd2t': missing"),
        (lambda t: t.pop("t2d"), "tensor 't2d': missing"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight': missing"),
        (flip, "'d2t' and 't2d' contradict each other"),
        (twice, "'d2t' and 't2d' contradict each other"),
        (lambda t: t.update(d2t=t["d2t"] + 100), "'d2t' and 't2d' contradict each other"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"'d2t': shape \[6\], the configuration needs \[7\]"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "'d2t': dtype F32 holds no integers"),
    ],
)
def test_heads_that_do_not_fit_are_refused(change, message: str, tmp_path: Path) -> None:
    path = copy("dflash-own-head", tmp_path, tensors=change)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(path, golden.target("dflash-own-head"))


def test_what_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architectures"):
        load_drafter(golden.ROOT / "dflash-a" / "target", golden.target("dflash-a"))
    with pytest.raises(ConfigError, match="dflash_config"):
        kvjax.load(golden.ROOT / "dflash-a" / "drafter")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="not from GGUF files"):
        load_drafter(tmp_path / "x.gguf", golden.target("dflash-a"))
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        save_drafter(golden.drafter("dflash-a"), golden.ROOT)
