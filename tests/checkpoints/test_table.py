"""The table: its operations are inverses, its leaves are the model's, its errors name everything."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BF16, hf_config, tensors, write

from kvjax.checkpoints.hf import READABLE, Directory
from kvjax.checkpoints.load import table_rows
from kvjax.checkpoints.table import DTYPES, CheckpointError, Grouped, cast, finite, leaves, match
from kvjax.config import ModelConfig
from kvjax.models import build
from kvjax.sharding import make_mesh


@st.composite
def configs(draw: st.DrawFn) -> tuple[dict, int]:
    """An HF configuration and a number of stored KV heads."""
    kv = draw(st.sampled_from([1, 2, 3, 8]))
    copies = draw(st.sampled_from([1, 2, 4]))
    heads = kv * copies * draw(st.sampled_from([1, 2, 3]))
    kind = draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    changes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([2, 6, 8])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if kind != "qwen2":
        changes["attention_bias"] = draw(st.booleans())
    if kind == "llama":
        changes["mlp_bias"] = draw(st.booleans())
    return hf_config(kind, **changes), kv * copies


@settings(max_examples=60, deadline=None)
@given(configs())
def test_split_undoes_join(case: tuple[dict, int]) -> None:
    config, stored = case
    weights = tensors(config)
    seen = set()
    for row in table_rows(ModelConfig.from_hf(config), stored):
        leaf = row.op.join([weights[name] for name in row.hf])
        assert leaf.shape == row.shape
        assert len(row.axes) == leaf.ndim
        for name, part in zip(row.hf, row.op.split(leaf, row.shapes), strict=True):
            np.testing.assert_array_equal(part, weights[name])
            seen.add(name)
    assert seen == set(weights)


@pytest.mark.parametrize(("heads", "kv", "stored"), [(6, 2, 2), (8, 2, 4), (8, 1, 8), (4, 4, 4)])
def test_grouped_puts_each_heads_own_keys_beside_it(heads: int, kv: int, stored: int) -> None:
    h, d = 3, 5
    q = np.arange(heads * h * d).reshape(heads * h, d)
    k, v = (
        10_000 + np.arange(kv * h * d).reshape(kv * h, d),
        20_000 + np.arange(kv * h * d).reshape(kv * h, d),
    )
    leaf = Grouped(kv, stored).join((q, k, v))
    per = heads // stored
    for n in range(heads):  # query head n reads KV head n // G
        group, within = divmod(n, per)
        np.testing.assert_array_equal(leaf[group, within * h : (within + 1) * h], q[n * h : (n + 1) * h])
        of = n // (heads // kv)
        np.testing.assert_array_equal(leaf[group, per * h : (per + 1) * h], k[of * h : (of + 1) * h])
        np.testing.assert_array_equal(leaf[group, (per + 1) * h :], v[of * h : (of + 1) * h])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("model", [1, 2, 4])
def test_leaves_are_those_of_the_model(kind: str, model: int) -> None:
    config = ModelConfig.from_hf(hf_config(kind, **({"attention_bias": True} if kind != "qwen2" else {})))
    built = build(config, mesh=make_mesh(1, model))
    rows = {row.ours: row for row in table_rows(config, built.rules.kv_heads)}
    assert set(rows) == set(built.names)
    for name, struct in zip(built.names, built.abstract(), strict=True):
        assert rows[name].shape == struct.shape
        assert rows[name].axes == built.axes(name)


def test_impossible_head_copies_are_refused() -> None:
    config = ModelConfig.from_hf(hf_config())
    for stored in (3, 8):
        with pytest.raises(ValueError, match=f"{stored} stored KV heads"):
            table_rows(config, stored)


def check(directory: Directory, config: dict) -> None:
    parsed = ModelConfig.from_hf(config)
    match(table_rows(parsed), directory, tied=parsed.tie, readable=READABLE)


def test_all_faults_are_named_at_once(tmp_path) -> None:
    config = hf_config()
    weights = tensors(config)
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
    weights["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 32), np.int8)
    weights["model.layers.7.mlp.up_proj.weight"] = np.zeros((2,), np.float32)
    write(tmp_path, config, weights)
    with pytest.raises(CheckpointError) as caught:
        check(Directory(tmp_path), config)
    text = str(caught.value)
    assert str(tmp_path) in text and "4 problems" in text
    assert "'model.norm.weight': missing (needed for norm)" in text
    assert "'model.layers.1.mlp.up_proj.weight': shape [3, 4], the configuration needs [48, 32]" in text
    assert "'model.layers.0.self_attn.k_proj.weight': dtype I8 is not read" in text
    assert "'model.layers.7.mlp.up_proj.weight': not part of this model (extra)" in text
    assert "model.safetensors: tensor" in text


def test_rotary_buffers_are_harmless(tmp_path) -> None:
    config = hf_config()
    weights = tensors(config)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    check(Directory(write(tmp_path, config, weights)), config)


def test_a_tied_head_may_be_stored_but_not_differ(tmp_path) -> None:
    config = hf_config(tie_word_embeddings=True)
    weights = tensors(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    check(Directory(write(tmp_path / "same", config, weights)), config)
    weights["lm_head.weight"][3, 4] += 1
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs .* tie_word_embeddings"):
        check(Directory(write(tmp_path / "other", config, weights)), config)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_weights_are_named(tmp_path, dtype, value: float) -> None:
    config = hf_config()
    weights = tensors(config, dtype=dtype)
    weights["model.layers.1.self_attn.v_proj.weight"][5, 7] = value
    weights["model.norm.weight"][0] = value
    source = Directory(write(tmp_path, config, weights))
    with pytest.raises(CheckpointError, match="2 problems") as caught:
        list(leaves(table_rows(ModelConfig.from_hf(config)), source, "bfloat16"))
    text = str(caught.value)
    for name, size in (("model.layers.1.self_attn.v_proj.weight", 512), ("model.norm.weight", 32)):
        what = "1 NaN and 0 infinite" if math.isnan(value) else "0 NaN and 1 infinite"
        assert f"model.safetensors: tensor {name!r}: {what} values among {size}" in text


def test_values_beyond_the_target_dtype_are_named(tmp_path) -> None:
    config = hf_config()
    weights = tensors(config)
    weights["model.norm.weight"][0] = 1e6
    source = Directory(write(tmp_path, config, weights))
    rows = table_rows(ModelConfig.from_hf(config))
    with pytest.raises(CheckpointError, match="'model.norm.weight': values beyond the range of float16"):
        list(leaves(rows, source, "float16"))
    assert len(list(leaves(rows, source, "bfloat16"))) == len(rows)


@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(DTYPES)))
def test_finite_agrees_with_numpy_on_every_bit_pattern(bits: int, dtype: str) -> None:
    kind = np.uint32 if dtype == "float32" else np.uint16
    x = np.array([1, bits % 2 ** (8 * kind(0).itemsize), 2], kind).view(DTYPES[dtype])
    assert finite(x) == bool(np.isfinite(x.astype(np.float64)).all())


@pytest.mark.parametrize("source", sorted(DTYPES))
@pytest.mark.parametrize("target", sorted(DTYPES))
def test_cast_rounds_like_numpy(source: str, target: str) -> None:
    x = np.random.default_rng(0).standard_normal((7, 9), np.float32).astype(DTYPES[source])
    got = cast(x.T, DTYPES[target])
    assert got.flags.c_contiguous and got.dtype == DTYPES[target]
    np.testing.assert_array_equal(got, x.T.astype(DTYPES[target]))
    np.testing.assert_array_equal(np.asarray(jax.device_put(got)), got)
