"""Checkpoints written by `save_hf`, opened by transformers (extra `parity`)."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax.sharding import make_mesh

pytestmark = pytest.mark.parity
GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(p.parent.name for p in GOLDEN.glob("*/config.json"))
BOUND = 1e-4
STORED = {"llama1-old": np.dtype("float32"), "llama2-f16": np.dtype("float16")}
TEXT = "The king of England, für 日本語\n<|end|> 12"


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    return {k: v for f in directory.glob("model*.safetensors") for k, v in load_file(f).items()}


def _reference_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_from_an_export(name, tmp_path):
    out = kvjax.save_hf(kvjax.load(GOLDEN / name, dtype="float32"), tmp_path / name)
    original, exported = _tensors(GOLDEN / name), _tensors(out)
    assert exported.keys() == original.keys()
    for tensor, value in original.items():
        assert exported[tensor].dtype == np.float32
        np.testing.assert_array_equal(exported[tensor], value.astype(np.float32), err_msg=tensor)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    assert np.abs(_reference_logits(out, expected["input_ids"]) - expected["logits"]).max() <= BOUND


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_dtype_survives_bit_for_bit(name, tmp_path):
    """float32 on the way, the published dtype at both ends; the export loads again."""
    dtype = STORED.get(name, np.dtype(ml_dtypes.bfloat16))
    lm = kvjax.load(GOLDEN / name, dtype="float32")
    out = kvjax.save_hf(lm, tmp_path / name, dtype=dtype.name)
    original, exported = _tensors(GOLDEN / name), _tensors(out)
    assert exported.keys() == original.keys()
    for tensor, value in original.items():
        assert exported[tensor].dtype == value.dtype == dtype
        assert (exported[tensor].view(np.uint8) == value.view(np.uint8)).all(), tensor
    again = kvjax.load(out, dtype="float32")
    assert again.config == lm.config
    assert all((a == b).all() for a, b in zip(again.params, lm.params, strict=True))


@pytest.mark.parametrize(
    "name", ["llama3-sharded", "llama32-tied", "qwen3-tied", "qwen2-untied", "llama-bias"]
)
def test_an_export_from_a_mesh_is_the_plain_checkpoint(name, tmp_path):
    """KV heads stored several times on the mesh are written once, and shards hold everything."""
    lm = kvjax.load(GOLDEN / name, mesh=make_mesh(1, 8), dtype="float32")
    out = kvjax.save_hf(lm, tmp_path / name, dtype="bfloat16", max_shard_bytes=100_000)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    original, exported = _tensors(GOLDEN / name), _tensors(out)
    assert exported.keys() == original.keys()
    assert all((exported[k] == v).all() for k, v in original.items())
    expected = load_file(GOLDEN / name / "expected.safetensors")
    assert np.abs(_reference_logits(out, expected["input_ids"]) - expected["logits"]).max() <= BOUND


@pytest.mark.parametrize("name", ["llama31-rope", "qwen3-tied"])
def test_tokenizer_and_end_tokens_survive(name, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    out = kvjax.save_hf(kvjax.load(GOLDEN / name), tmp_path / name)
    before, after = (AutoTokenizer.from_pretrained(d) for d in (GOLDEN / name, out))
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert (after.eos_token, after.bos_token, after.pad_token) == (
        before.eos_token, before.bos_token, before.pad_token,
    )  # fmt: skip
    turns = [{"role": "user", "content": "hi"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert after.apply_chat_template(turns, **options) == before.apply_chat_template(turns, **options)
    ends = [
        np.atleast_1d(GenerationConfig.from_pretrained(d).eos_token_id).tolist() for d in (GOLDEN / name, out)
    ]
    assert ends[0] == ends[1]
