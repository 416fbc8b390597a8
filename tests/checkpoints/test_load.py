"""`load` and `save_hf` end to end on tiny checkpoints, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tiny import BF16, hf_config, tensors, write, write_gguf, write_tokenizer

from kvjax.checkpoints import gguf
from kvjax.checkpoints.export import save_hf
from kvjax.checkpoints.load import default_dtype, load, locate, table_rows
from kvjax.checkpoints.table import CheckpointError
from kvjax.compilation import CompileCounter
from kvjax.config import ConfigError
from kvjax.lm import LM
from kvjax.sharding import make_mesh
from kvjax.tokenizer import TokenizerError


def back(lm: LM) -> dict[str, np.ndarray]:
    """HF tensors of a loaded model, gathered from wherever they are."""
    leaf = dict(zip(lm.model.names, lm.params, strict=True))
    rows = table_rows(lm.config, lm.model.rules.kv_heads)
    return {
        name: part
        for row in rows
        for name, part in zip(row.hf, row.op.split(np.asarray(leaf[row.ours]), row.shapes), strict=True)
    }


def same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(got) == set(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tie", "shards"), [(False, 1), (True, 3)])
def test_a_directory(tmp_path: Path, kind: str, tie: bool, shards: int) -> None:
    config = hf_config(kind, tie_word_embeddings=tie)
    weights = tensors(config)
    lm = load(write(tmp_path, config, weights, shards))
    same(back(lm), weights)
    assert lm.tokenizer is None and lm.id == str(tmp_path) and lm.revision is None
    assert [p.dtype for p in lm.params] == [np.float32] * len(lm.params)
    assert [p.shape for p in lm.params] == [s.shape for s in lm.model.abstract()]


@pytest.mark.parametrize("model", [1, 2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_on_a_mesh_every_device_gets_its_part(tmp_path: Path, kind: str, model: int) -> None:
    config = hf_config(kind, torch_dtype="bfloat16")
    weights = tensors(config, dtype=BF16)
    lm = load(write(tmp_path, config, weights), mesh=make_mesh(2, model), dtype="bfloat16")
    same(back(lm), weights)
    for param, struct in zip(lm.params, lm.model.abstract(), strict=True):
        assert param.sharding == struct.sharding and param.dtype == struct.dtype
    assert lm.model.rules.kv_heads == max(2, model)


def test_loading_compiles_nothing(tmp_path: Path) -> None:
    """Every eager operation would be a program of its own, and programs are counted."""
    directory = write(tmp_path, hf_config(), tensors(hf_config(), dtype=BF16))
    with CompileCounter() as counter:
        load(directory, mesh=make_mesh(1, 2))
        load(directory)
        assert counter.programs == 0
        jax.jit(lambda x: x + 1)(1)
        assert counter.programs > 0  # it does count


def test_dtype_is_float32_on_cpu_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path, hf_config(torch_dtype="bfloat16"), tensors(hf_config(), dtype=BF16))
    with caplog.at_level(logging.INFO, "kvjax"):
        lm = load(directory)
    assert lm.config.dtype == "bfloat16" and lm.params[0].dtype == np.float32
    assert "llama in float32 on cpu" in caplog.text and "weights" in caplog.text
    assert load(directory, dtype="bfloat16").params[0].dtype == BF16


@pytest.mark.parametrize(
    ("published", "platform", "expected"),
    [
        ("bfloat16", "cpu", "float32"),
        ("bfloat16", "tpu", "bfloat16"),
        ("float32", "gpu", "float32"),
        ("float16", "gpu", "bfloat16"),
    ],
)
def test_default_dtype(published: str, platform: str, expected: str) -> None:
    assert default_dtype(published, platform) == expected


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_same_model(tmp_path: Path, arch: str) -> None:
    config = hf_config(arch)
    weights = tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, tokens=True)
    lm = load(path)
    same(back(lm), weights)
    assert lm.id == str(path) and lm.config.eos == (2,) and lm.config.bos == 1
    assert lm.tokenizer is not None
    assert lm.tokenizer.decode(lm.tokenizer.encode("ab ab")) == "ab ab"
    assert lm.tokenizer.vocab == 32  # fillers of the vocabulary are not tokens


def test_eos_is_the_union_of_all_three_files(tmp_path: Path) -> None:
    write(tmp_path, hf_config(eos_token_id=[5, 6]), tensors(hf_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    write_tokenizer(tmp_path)
    assert load(tmp_path).config.eos == (2, 5, 6, 7)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, hf_config(), tensors(hf_config()))
    write_tokenizer(tmp_path, 64)
    assert load(tmp_path).tokenizer.vocab == 64
    write_tokenizer(tmp_path, 65)
    with pytest.raises(CheckpointError, match="tokenizer has ids up to 64, the model's vocabulary only 64"):
        load(tmp_path)


def test_eos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, hf_config(eos_token_id=64), tensors(hf_config()))
    with pytest.raises(CheckpointError, match=r"end-of-text ids \[64\] lie outside the vocabulary of 64"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"model_type": "mamba"}, "mamba"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"intermediate_size": 44}, r"mlp.gate_proj.weight': shape \[48, 32\], .* needs \[44, 32\]"),
    ],
)
def test_configuration_faults_name_the_file(tmp_path: Path, changes: dict, message: str) -> None:
    write(tmp_path, hf_config() | changes, tensors(hf_config()))
    with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, hf_config(), tensors(hf_config()))
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="config.json"):
        load(tmp_path)


def test_a_missing_config_and_a_damaged_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, hf_config(), tensors(hf_config()))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer.json: cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json: missing"):
        load(tmp_path)


def test_what_a_source_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        CheckpointError, match=r"registered model and also a path here; write \./smollm2-135m"
    ):
        locate("smollm2-135m")
    assert locate("./smollm2-135m").path == Path("smollm2-135m")
    assert locate("org/name").id == "org/name"
    for source in ("./none", tmp_path / "none", "none.gguf", "~/none"):
        with pytest.raises(CheckpointError, match="no such file or directory"):
            locate(source)
    with pytest.raises(CheckpointError, match="not a .gguf file; for safetensors give the directory"):
        locate("model.safetensors")
    with pytest.raises(CheckpointError, match=r"'gpt2' is neither .* registered model \(.*smollm2-135m-q4_1"):
        locate("gpt2")
    with pytest.raises(CheckpointError, match="only a hub id has revisions"):
        locate("org/name", revision="main")


def test_progress_goes_to_stderr_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        logging.getLogger("kvjax"), "handlers", []
    )  # the command line's, if a test ran it before
    directory = write(tmp_path, hf_config(), tensors(hf_config()))
    load(directory)
    assert capsys.readouterr().err == ""
    load(directory, progress=True)
    captured = capsys.readouterr()
    assert "float32" in captured.err and captured.out == ""


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_export_and_load_again(tmp_path: Path, kind: str, limit: int) -> None:
    config = hf_config(kind, tie_word_embeddings=kind == "qwen3")
    weights = tensors(config)
    write_tokenizer(write(tmp_path / "in", config, weights))
    first = load(tmp_path / "in", mesh=make_mesh(1, 4))  # every KV head stored twice; the copies are dropped
    out = save_hf(first, tmp_path / "sub" / "out", max_shard_bytes=limit)
    assert (out / "model.safetensors.index.json").exists() is (limit < 10**9)
    second = load(out)
    same(back(second), weights)
    assert second.config == dataclasses.replace(first.config, dtype="float32")
    assert second.tokenizer.hash == first.tokenizer.hash
    chat = [{"role": "user", "content": "abc"}]
    assert second.tokenizer.encode_chat(chat) == first.tokenizer.encode_chat(chat)
    assert second.tokenizer.encode("abc") == first.tokenizer.encode("abc")
    assert not list((tmp_path / "sub").glob(".*"))


def test_export_in_another_dtype(tmp_path: Path) -> None:
    weights = tensors(hf_config())
    lm = load(write(tmp_path / "in", hf_config(), weights))
    again = load(save_hf(lm, tmp_path / "out", dtype="bfloat16"))
    assert again.config.dtype == "bfloat16"
    same(back(again), {name: x.astype(BF16) for name, x in weights.items()})


def test_export_overwrites_nothing_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(write(tmp_path / "in", hf_config(), tensors(hf_config())))
    with pytest.raises(CheckpointError, match="exists; nothing is overwritten"):
        save_hf(lm, tmp_path / "in")
    with pytest.raises(CheckpointError, match="dtype 'int8' is not one of"):
        save_hf(lm, tmp_path / "out", dtype="int8")

    def fail(self: object) -> dict:
        raise OSError("disk full")

    monkeypatch.setattr(type(lm.config), "to_hf", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(lm, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_transformers_reads_the_export(tmp_path: Path, kind: str, limit: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = hf_config(kind, tie_word_embeddings=kind == "llama", eos_token_id=[2, 5])
    weights = tensors(config)
    write_tokenizer(write(tmp_path / "in", config, weights))
    lm = load(tmp_path / "in")
    out = save_hf(lm, tmp_path / "out", max_shard_bytes=limit)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    state = model.state_dict()
    for name, x in weights.items():
        np.testing.assert_array_equal(state[name].numpy(), x, err_msg=name)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 5]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("abc ab") == lm.tokenizer.encode("abc ab")
    chat = [{"role": "user", "content": "abc"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == lm.tokenizer.render(chat)


def test_quantised_gguf_on_a_mesh(tmp_path: Path) -> None:
    config = hf_config(hidden_size=64, head_dim=16, intermediate_size=96)
    path = write_gguf(tmp_path / "m.gguf", config, tensors(config), kind=Kind.Q8_0)
    file = gguf.File(path)
    lm = load(path, mesh=make_mesh(1, 2))
    same(back(lm), {name: file.read(name) for name in file.tensors})


PEAK = """
import resource, sys, threading, time
import jax
from kvjax.checkpoints.load import load
def now():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
import gguf.quants, jax.numpy, tqdm  # what loading imports is not part of the question
jax.devices()
before, peak, done = now(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, now())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
lm = load(sys.argv[1], dtype="float32")
done = True
thread.join()
print(peak - before, sum(p.nbytes for p in lm.params), max(p.nbytes for p in lm.params))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_host_memory_stays_near_one_tensor_above_the_weights(tmp_path: Path) -> None:
    """80 MB of float32 weights from a bfloat16 file, the largest leaf 8 MB, and room for small things."""
    config = hf_config(
        hidden_size=512, intermediate_size=2048, head_dim=128, vocab_size=512, num_hidden_layers=5
    )
    directory = write(tmp_path, config, tensors(config, dtype=BF16))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PEAK, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    over, weights, largest = map(int, done.stdout.split())
    assert weights > 9 * largest
    assert over < weights + 2 * largest + 24 * 2**20, (over, weights, largest)
