"""GGUF: dequantised as the reference does, in HF row order, with damage and unknown metadata named."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf as package
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import hf_config, tensors, write_gguf

from kvjax.checkpoints import gguf
from kvjax.checkpoints.load import table_rows
from kvjax.checkpoints.table import CheckpointError, match
from kvjax.config import ConfigError, ModelConfig, RopeConfig
from kvjax.tokenizer import TokenizerError

WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 1}
PYTHON_QUANTISERS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@pytest.mark.parametrize("kind", PYTHON_QUANTISERS, ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_equal_the_reference_in_hf_order(tmp_path: Path, kind: Kind, arch: str) -> None:
    """Quantising is by row, so permuting rows before it and undoing that after must change nothing."""
    biases = {"attention_bias": True} if arch != "qwen2" else {}
    config = hf_config(arch, **WIDE, **biases)
    weights = tensors(config)
    file = gguf.File(write_gguf(tmp_path / "m.gguf", config, weights, kind=kind))
    assert set(file.tensors) == set(weights)
    for name, x in weights.items():
        got = file.read(name)
        expected = x
        if x.ndim > 1:
            expected = package.quants.dequantize(package.quants.quantize(x, kind), kind)
        np.testing.assert_array_equal(got.astype(np.float32), expected, err_msg=name)
        assert got.shape == x.shape
        got[...] = 0  # the caller owns it


@pytest.mark.parametrize("name", [k for k in gguf.READABLE if k not in ("F32", "F16", "BF16")])
def test_every_readable_type_equals_the_reference_on_random_blocks(name: str) -> None:
    kind = Kind[name]
    block, nbytes = package.GGML_QUANT_SIZES[kind]
    rows, blocks = 37, 3
    raw = np.random.default_rng(0).integers(0, 256, (rows, blocks * nbytes), np.uint8)
    stored = gguf._Tensor(name, (rows, blocks * block), 0, raw.shape)
    with np.errstate(all="ignore"):
        got, expected = gguf._dequantise(raw, stored), package.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(got, expected)


def test_q4_1_by_hand(tmp_path: Path) -> None:
    """One block: d = 0.5, m = -2, low nibbles first."""
    raw = struct.pack("<ee", 0.5, -2.0) + bytes(i | ((15 - i) << 4) for i in range(16))
    stored = gguf._Tensor("Q4_1", (1, 32), 0, (1, 20))
    got = gguf._dequantise(np.frombuffer(raw, np.uint8).reshape(1, 20), stored)
    np.testing.assert_array_equal(got[0], [0.5 * q - 2 for q in [*range(16), *reversed(range(16))]])


def test_pieces_join_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(1).integers(0, 120, (50, 34), np.uint8)
    stored = gguf._Tensor("Q8_0", (50, 32), 0, (50, 34))
    whole = gguf._dequantise(raw, stored)
    monkeypatch.setattr(gguf, "_PIECE", 32 * 7)
    np.testing.assert_array_equal(gguf._dequantise(raw, stored), whole)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
def test_configuration_is_that_of_config_json(tmp_path: Path, arch: str, tie: bool) -> None:
    biases = {"attention_bias": True} if arch != "qwen2" else {}
    config = hf_config(arch, tie_word_embeddings=tie, rope_theta=5e5, **biases)
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    file = gguf.File(write_gguf(tmp_path / "m.gguf", config, tensors(config), metadata=ids))
    assert file.config() == ModelConfig.from_hf(config)
    rows = table_rows(file.config())
    match(rows, file, tied=tie, readable=gguf.READABLE)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q8_0, "bfloat16")]
)  # fmt: skip
def test_dtype(tmp_path: Path, kind: Kind, dtype: str) -> None:
    config = hf_config(**WIDE)
    assert gguf.File(write_gguf(tmp_path / "m.gguf", config, tensors(config), kind=kind)).dtype() == dtype


def llama3_divisors(
    theta: float, head: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """llama3 scaling element by element: long waves divided by `factor`, short ones kept, a ramp between."""
    out = []
    for i in range(head // 2):
        wave = 2 * np.pi * theta ** (2 * i / head)
        if wave < original / high:
            out.append(1.0)
        elif wave > original / low:
            out.append(factor)
        else:
            s = (original / wave - low) / (high - low)
            out.append(1 / ((1 - s) / factor + s))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path, factor: float) -> None:
    config = hf_config(rope_theta=5e5, head_dim=64, num_hidden_layers=1)
    divisors = llama3_divisors(5e5, 64, factor, 1.0, 4.0, 8192)
    assert 1 < len(set(divisors.tolist())) < 32
    extra = {"rope_freqs.weight": divisors}
    file = gguf.File(write_gguf(tmp_path / "m.gguf", config, tensors(config), extra=extra))
    parsed = file.config()
    assert parsed.rope == RopeConfig(
        "llama3", theta=5e5, factor=factor, original_max=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    match(table_rows(parsed), file, tied=False, readable=gguf.READABLE)
    for spoiled in (divisors * 1.5, divisors[:-1], llama3_divisors(5e5, 64, factor, 1.0, 2.0, 8192)):
        path = write_gguf(tmp_path / "s.gguf", config, tensors(config), extra={"rope_freqs.weight": spoiled})
        with pytest.raises(CheckpointError, match="s.gguf: tensor 'rope_freqs.weight' is not the llama3"):
            gguf.File(path).config()


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, RopeConfig(theta=1e4)),
        ({"llama.rope.scaling.type": "none"}, RopeConfig(theta=1e4)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeConfig("linear", theta=1e4, factor=4.0),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict, rope: RopeConfig) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_config(), tensors(hf_config()), metadata=metadata)
    assert gguf.File(path).config().rope == rope


def test_yarn_scaling(tmp_path: Path) -> None:
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32,
    }
    config = hf_config("qwen3")
    path = write_gguf(tmp_path / "m.gguf", config, tensors(config), metadata=metadata)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    expected = ModelConfig.from_hf(config | {"rope_scaling": scaling})
    assert gguf.File(path).config().rope == expected.rope


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count' is 4, not the head width 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
          "llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.attn_factor": 2.0},
         "attn_factor' is not implemented"),
    ],
)  # fmt: skip
def test_metadata_that_changes_the_computation_is_refused(
    tmp_path: Path, metadata: dict, message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_config(), tensors(hf_config()), metadata=metadata)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        gguf.File(path).config()


def test_unknown_architecture_and_type(tmp_path: Path) -> None:
    writer = package.GGUFWriter(tmp_path / "g.gguf", "gemma3")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="g.gguf: general.architecture 'gemma3' is not implemented"):
        gguf.File(tmp_path / "g.gguf")
    config = hf_config(hidden_size=256, head_dim=64, intermediate_size=256, num_hidden_layers=1)
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors(config), extra={"odd.weight": np.zeros(4, np.float32)}
    )
    data = path.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")
    path.write_bytes(data)
    file = gguf.File(path)
    with pytest.raises(CheckpointError) as caught:
        match(table_rows(file.config()), file, tied=False, readable=gguf.READABLE)
    for part in (
        "'model.layers.0.mlp.up_proj.weight': missing",
        "'odd.weight': not part",
        "'blk.0.ffn_xx.weight'",
    ):
        assert part in str(caught.value)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_config(), tensors(hf_config()), metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match="m.gguf: one part of a split file"):
        gguf.File(path)


def test_a_type_nobody_dequantises_is_refused_by_name(tmp_path: Path) -> None:
    config = hf_config(num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, tensors(config), extra={"x.weight": np.zeros(4, np.int32)})
    data = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16  # rank, two dimensions
    assert struct.unpack_from("<I", data, at)[0] == Kind.F32
    path.write_bytes(data[:at] + struct.pack("<I", Kind.I32) + data[at + 4 :])
    file = gguf.File(path)
    with pytest.raises(CheckpointError, match="m.gguf: tensor 'blk.0.ffn_up.weight': dtype I32 is not read"):
        match(table_rows(file.config()), file, tied=False, readable=gguf.READABLE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A file with a tokenizer, and where its tensor data begins."""
    config = hf_config(num_hidden_layers=1)
    path = write_gguf(tmp_path_factory.mktemp("g") / "m.gguf", config, tensors(config), tokens=True)
    return path.read_bytes(), package.GGUFReader(path).data_offset


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2**20))
def test_truncated_files_are_refused_by_name(tmp_path: Path, whole: tuple[bytes, int], cut: int) -> None:
    path = tmp_path / "m.gguf"
    # The writer pads the end; cutting only padding loses nothing.
    path.write_bytes(whole[0][: cut % (len(whole[0]) - 32)])
    with pytest.raises(CheckpointError, match="m.gguf: "):
        gguf.File(path)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_damaged_headers_are_refused_by_name_or_read(
    tmp_path: Path, whole: tuple[bytes, int], edits, flip
) -> None:
    """No crash, hang or huge allocation, whatever bytes the header holds."""
    from kvjax.tokenizer import Tokenizer

    data = bytearray(whole[0])
    for at, value in edits:
        at %= whole[1]
        data[at] = data[at] ^ (1 << value % 8) if flip else value
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    try:
        file = gguf.File(path)
        config = file.config()
        match(table_rows(config), file, tied=config.tie, readable=gguf.READABLE)
        Tokenizer.from_gguf(file.metadata, str(path))
    except (CheckpointError, TokenizerError) as error:
        assert "m.gguf" in str(error)
    except ConfigError:
        pass  # names the field; `load` adds the file
    else:
        assert all(file.read(name).shape == info.shape for name, info in file.tensors.items())


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_config(), tensors(hf_config()))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'kvjax\[gguf\]'"):
        gguf.File(path)


def test_smollm2_weights_equal_the_package(smollm2: Path) -> None:
    file = gguf.File(smollm2)
    config = file.config()
    assert (config.num_layers, config.num_kv_heads, config.rope.theta, config.tie) == (30, 3, 1e5, True)
    match(table_rows(config), file, tied=True, readable=gguf.READABLE)
    reference = {t.name: t for t in package.GGUFReader(smollm2).tensors}
    for ours, theirs in (
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ):
        tensor = reference[theirs]
        expected = package.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read(ours), expected)
