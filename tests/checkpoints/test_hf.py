"""Directories of safetensors: what is read is what was written, and every damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import BF16, hf_config, tensors, write

from kvjax.checkpoints import hf
from kvjax.checkpoints.hf import READABLE, Directory, read_header
from kvjax.checkpoints.load import table_rows
from kvjax.checkpoints.table import CheckpointError, match
from kvjax.config import ModelConfig


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_tensors_come_back_as_written(tmp_path: Path, shards: int, dtype) -> None:
    weights = tensors(hf_config(), dtype=dtype)
    source = Directory(write(tmp_path, hf_config(), weights, shards))
    assert set(source.tensors) == set(weights)
    for name, x in weights.items():
        got = source.read(name)
        assert got.dtype == x.dtype and source.tensors[name].shape == x.shape
        np.testing.assert_array_equal(got, x)
        got[...] = 0  # the caller owns it


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = hf_config(num_hidden_layers=1)
    directory = write(tmp_path_factory.mktemp("whole"), config, tensors(config))
    return (directory / "model.safetensors").read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2**20))
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, whole: bytes, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        read_header(path)


def test_truncation_names_the_tensors_that_are_lost(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"tensor '.+': ends at byte \d+, the file at \d+: truncated"):
        read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), min_size=1, max_size=3))
def test_bit_flips_in_the_header_never_go_unnoticed(tmp_path: Path, whole: bytes, flips) -> None:
    """Either the file is refused by name, or what the table sees is unchanged (a flip undone by another)."""
    length = int.from_bytes(whole[:8], "little")
    data = bytearray(whole)
    for at, bit in flips:
        data[at % (8 + length)] ^= 1 << bit
    (tmp_path / "model.safetensors").write_bytes(data)
    config = ModelConfig.from_hf(hf_config(num_hidden_layers=1))
    try:
        source = Directory(tmp_path)
        match(table_rows(config), source, tied=False, readable=READABLE)
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
    else:
        (tmp_path / "model.safetensors").write_bytes(whole)
        same = Directory(tmp_path)
        assert all(source._at[name] == same._at[name] for name in same.tensors)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(
                        st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]), x, max_size=3),
                    max_leaves=12))  # fmt: skip
def test_any_json_header_is_judged_without_crashing(tmp_path: Path, header) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        entries = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert all(entry.begin == entry.end for entry in entries.values())  # no data follows


def header(path: Path, value: object, data: int = 8) -> Path:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": F32, "b": F32}, "tensor 'b': overlaps 'a'"),
        ({"a": F32}, "4 unexplained bytes after the last tensor"),
        ({"a": F32 | {"data_offsets": [4, 8]}}, "tensor 'a': 4 unexplained bytes before it"),
        ({"a": F32 | {"shape": [3]}}, "tensor 'a': F32 .3. needs 12 bytes, data_offsets hold 4"),
        ({"a": F32 | {"shape": [-1]}}, "tensor 'a': .-1. is not a list of sizes"),
        ({"a": F32 | {"dtype": "F33"}}, "tensor 'a': unknown dtype 'F33'"),
        ({"a": F32 | {"data_offsets": [8, 4]}}, "tensor 'a': data_offsets .8, 4. are not a range"),
        ({"a": F32 | {"more": 1}}, "tensor 'a': its header entry needs exactly"),
        (b'{"a": 1, "a": 2}', "damaged: 'a' appears twice"),
        (b"[" * 200_000, "the header is damaged"),
        ([], "the header is not an object"),
    ],
)
def test_impossible_headers(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(header(tmp_path / "x.safetensors", value))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, hf_config(), tensors(hf_config()), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors: missing shard"):
        Directory(tmp_path)


def test_an_index_that_contradicts_its_files(tmp_path: Path) -> None:
    write(tmp_path, hf_config(), tensors(hf_config()), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = files[0]  # it lies in the second
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Directory(tmp_path)
    assert f"{files[0]}: tensor 'model.norm.weight'" in str(caught.value)
    assert f"{files[1]}: tensor 'model.norm.weight': not in model.safetensors.index.json" in str(caught.value)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_cannot_point_outside(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Directory(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        Directory(tmp_path)


def test_pickles_are_refused_with_reason_and_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin: refused: .*pickle.*runs .*save_pretrained"
    ):
        Directory(tmp_path)


def test_empty_gguf_and_doubled_directories(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        Directory(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match="give the path of the GGUF file itself"):
        Directory(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    with pytest.raises(CheckpointError, match="holds both"):
        Directory(tmp_path)


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (3, (3,)), ([3, 1], (3, 1)), ("x", None), ([1.5], None), (-1, None)]
)
def test_generation_eos(tmp_path: Path, value: object, ids: tuple[int, ...] | None) -> None:
    assert hf.generation_eos(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    if ids is None:
        with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id"):
            hf.generation_eos(tmp_path)
    else:
        assert hf.generation_eos(tmp_path) == ids


def fill_cache(cache: Path, repo: str, commit: str, revision: str) -> Path:
    """The layout huggingface_hub keeps: a snapshot per commit, and refs to it."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / revision).write_text(commit)
    return root / "snapshots" / commit


OFFLINE = """
from kvjax.checkpoints import hf
for arguments in (("org/name",), ("org/name", "{commit}"), ("org/name", "v2"), ("org/none",), ("org/bin",)):
    try:
        print(*hf.download(*arguments))
    except hf.CheckpointError as error:
        print(error)
"""


def test_hub_ids_come_from_the_cache_when_offline(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    commit = "a" * 40
    snapshot = write(fill_cache(tmp_path, "org/name", commit, "main"), hf_config(), tensors(hf_config()))
    pickled = fill_cache(tmp_path, "org/bin", "b" * 40, "main")
    pickled.mkdir(parents=True)
    (pickled / "config.json").write_text("{}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    code = OFFLINE.replace("{commit}", commit)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("org/", "/"))]
    assert lines[0] == lines[1] == f"{snapshot} {commit}"
    assert lines[2].startswith("org/name at revision v2: cannot be fetched from the hub")
    assert lines[3].startswith("org/none: cannot be fetched from the hub")
    assert lines[4].startswith("org/bin: has no safetensors; pickled weights")


@pytest.mark.parametrize(
    ("text", "good"),
    [("a/b", True), ("Qwen/Qwen3-0.6B", True), ("a", False), ("a/b/c", False), ("./b", False), ("a/", False)],
)
def test_hub_id_form(text: str, good: bool) -> None:
    assert hf.is_hub_id(text) is good
