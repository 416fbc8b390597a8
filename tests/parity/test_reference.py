"""Configurations, rotary frequencies and golden files against a live transformers (extra `parity`)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load_file

from kvjax.config import ModelConfig

pytestmark = pytest.mark.parity
GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(p.parent.name for p in GOLDEN.glob("*/config.json"))
MEANT = [
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "layer_types", "bos_token_id",
    "eos_token_id", "hidden_act", "dtype",
]  # fmt: skip


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"parity_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """The script that wrote the golden files."""
    return _module(GOLDEN / "make.py")


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    return {k: v for f in directory.glob("model*.safetensors") for k, v in load_file(f).items()}


def _rope(config) -> tuple[np.ndarray, float]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = LlamaRotaryEmbedding(config)
    return module.inv_freq.numpy(), module.attention_scaling


@pytest.mark.parametrize("name", NAMES)
def test_a_written_configuration_means_the_same_to_transformers(name, tmp_path):
    from transformers import AutoConfig

    ours = ModelConfig.from_hf(json.loads((GOLDEN / name / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(ours.to_hf()))
    original, written = AutoConfig.from_pretrained(GOLDEN / name), AutoConfig.from_pretrained(tmp_path)
    assert type(original) is type(written)
    for field in MEANT:
        if field == "head_dim" and ours.model_type == "qwen2" and not hasattr(original, field):
            continue  # qwen2 derives it when absent
        assert getattr(written, field, None) == getattr(original, field, None), field
    for mine, theirs in zip(_rope(written), _rope(original)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(_module(GOLDEN.parent / "test_config.py").models())
def test_any_written_configuration_comes_back_through_transformers(ours):
    from transformers import AutoConfig

    # transformers' Llama insists on this even when head_dim is given.
    ours = dataclasses.replace(ours, hidden=ours.hidden * ours.num_heads)
    theirs = AutoConfig.for_model(**ours.to_hf())
    assert ModelConfig.from_hf(json.loads(theirs.to_json_string())) == ours


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_read_as_transformers_reads_them(name):
    from transformers import AutoConfig

    ours = ModelConfig.from_hf(json.loads((GOLDEN / name / "config.json").read_text()))
    theirs = AutoConfig.from_pretrained(GOLDEN / name)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.max_positions, ours.eps, ours.tie) == (
        theirs.max_position_embeddings, theirs.rms_norm_eps, theirs.tie_word_embeddings,
    )  # fmt: skip
    assert ours.eos == tuple(np.atleast_1d(theirs.eos_token_id).tolist()) and ours.bos == theirs.bos_token_id
    assert f"torch.{ours.dtype}" == str(theirs.dtype)
    types = getattr(theirs, "layer_types", ["full_attention"] * theirs.num_hidden_layers)
    assert ours.windows == tuple(theirs.sliding_window if t == "sliding_attention" else None for t in types)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_missing_fields_take_the_defaults_of_the_class(kind):
    from transformers import AutoConfig

    given = {
        "model_type": kind, "vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    for extra in ({}, {"use_sliding_window": True}):
        if extra and kind == "llama":
            continue
        theirs, ours = AutoConfig.for_model(**given, **extra), ModelConfig.from_hf(given | extra)
        assert ours.max_positions == theirs.max_position_embeddings
        assert ours.head_dim == getattr(theirs, "head_dim", 32)
        assert (ours.bos, ours.tie) == (theirs.bos_token_id, theirs.tie_word_embeddings)
        assert ours.eos == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        types = getattr(theirs, "layer_types", ["full_attention"] * 30)
        assert ours.windows == tuple(
            theirs.sliding_window if t == "sliding_attention" else None for t in types
        )
        assert ours.qkv_bias == (kind == "qwen2" or theirs.attention_bias)


def test_rope_reference_is_what_transformers_computes(make, tmp_path):
    make.write_ropes(tmp_path / "rope.json")
    fresh, kept = (json.loads((d / "rope.json").read_text()) for d in (tmp_path, GOLDEN))
    assert len(fresh) == len(kept)
    for a, b in zip(fresh, kept):
        assert (a["rope_parameters"], a["head_dim"]) == (b["rope_parameters"], b["head_dim"])
        np.testing.assert_allclose(a["inv_freq"], b["inv_freq"], rtol=1e-6)
        assert a["attention_factor"] == pytest.approx(b["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_are_what_the_script_writes(name, make, tmp_path):
    out = tmp_path / name
    make.build(name, out)
    kept = GOLDEN / name
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in kept.iterdir())
    fresh, old = _tensors(out), _tensors(kept)
    assert fresh.keys() == old.keys()
    for tensor, value in old.items():
        assert fresh[tensor].dtype == value.dtype and (fresh[tensor] == value).all(), tensor
    fresh, old = (load_file(d / "expected.safetensors") for d in (out, kept))
    np.testing.assert_array_equal(fresh["input_ids"], old["input_ids"])
    np.testing.assert_array_equal(fresh["tokens"], old["tokens"])
    np.testing.assert_allclose(fresh["logits"], old["logits"], atol=1e-5)
    fresh, old = (json.loads((d / "config.json").read_text()) for d in (out, kept))
    assert ModelConfig.from_hf(fresh) == ModelConfig.from_hf(old)
    assert ("rope_parameters" in fresh, "dtype" in fresh) == ("rope_parameters" in old, "dtype" in old)
    assert json.loads((out / "tokenizer.json").read_text()) == json.loads(
        (kept / "tokenizer.json").read_text()
    )
