"""Reading and writing Hugging Face configurations."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.config import ConfigError, ModelConfig, RopeConfig

GOLDEN = sorted(p.parent for p in (Path(__file__).parent / "golden").glob("*/config.json"))
GEOMETRY = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA = {"model_type": "llama", **GEOMETRY}
QWEN2 = {"model_type": "qwen2", **GEOMETRY, "num_key_value_heads": 2}
QWEN3 = {"model_type": "qwen3", **GEOMETRY, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(base | changes)


def refused(base: dict[str, Any], *words: str, **changes: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read(base, **changes)
    for word in words:
        assert word in str(caught.value)


# Configurations as published, with what they mean.
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
PUBLISHED = [SMOLLM2_135M, QWEN3_8B, QWEN25_05B, LLAMA31_8B]


def test_published_configurations(caplog):
    with caplog.at_level(logging.WARNING):
        small, qwen3, qwen2, llama = (ModelConfig.from_hf(c) for c in PUBLISHED)
    assert not caplog.records, "published configurations must not warn"
    assert (small.head_dim, small.groups, small.tie, small.rope) == (64, 3, True, RopeConfig(theta=1e5))
    assert (small.eos, small.bos, small.dtype) == ((0,), 0, "bfloat16")
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias) == (128, True, False, False)
    assert (qwen2.head_dim, qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (64, False, True, False)
    assert qwen2.windows == (None,) * 24
    assert llama.eos == (128001, 128008, 128009)
    assert llama.rope == RopeConfig("llama3", 5e5, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_defaults_are_those_of_the_model_type():
    llama, qwen2, qwen3 = read(LLAMA), read(QWEN2), read(QWEN3)
    assert (llama.num_kv_heads, llama.max_positions, llama.eos, llama.bos) == (8, 2048, (2,), 1)
    assert (qwen2.max_positions, qwen2.eos, qwen2.bos) == (32768, (), None)
    assert (llama.head_dim, qwen2.head_dim, qwen3.head_dim) == (32, 32, 128)
    for config in (llama, qwen2, qwen3):
        assert config.rope == RopeConfig(theta=10000.0)
        assert not config.tie and not config.mlp_bias and config.dtype == "float32"
        assert config.windows == (None,) * 4
        assert hash(config) == hash(copy.deepcopy(config))


def test_null_head_dim_and_kv_heads():
    for base in (LLAMA, QWEN2, QWEN3):
        config = read(base, head_dim=None, num_key_value_heads=None)
        assert (config.head_dim, config.num_kv_heads, config.groups) == (32, 8, 1)
    refused(LLAMA, "hidden_size", "head_dim", num_attention_heads=6)
    without = {k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}
    refused(without, "num_key_value_heads", "missing")


@pytest.mark.parametrize("name", GEOMETRY)
def test_a_missing_size_is_named(name):
    for base in (LLAMA, QWEN2, QWEN3):
        refused({k: v for k, v in base.items() if k != name}, name, "missing")


@pytest.mark.parametrize("value", [None, "8", 8.0, 0, -8, True, [8], {}, 2**31])
@pytest.mark.parametrize("name", [n for n in GEOMETRY if n != "rms_norm_eps"] + ["max_position_embeddings"])
def test_a_bad_size_is_named(name, value):
    refused(QWEN3, name, **{name: value})


@pytest.mark.parametrize("value", [None, "1e-5", 0.0, -1e-5, math.nan, math.inf, True, 10**400])
def test_a_bad_epsilon_is_named(value):
    refused(LLAMA, "rms_norm_eps", rms_norm_eps=value)


def test_contradicting_sizes():
    refused(LLAMA, "num_key_value_heads", num_key_value_heads=3)
    refused(LLAMA, "num_key_value_heads", num_key_value_heads=16)
    refused(LLAMA, "head_dim", "even", head_dim=33)
    refused(LLAMA, "num_hidden_layers", num_hidden_layers=10**6)


def test_biases():
    biased = read(LLAMA, attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias
    assert read(QWEN3, attention_bias=True).o_bias
    assert read(QWEN2).qkv_bias and not read(QWEN2).o_bias
    refused(LLAMA, "attention_bias", attention_bias="yes")
    refused(QWEN3, "mlp_bias", mlp_bias=True)


@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": {}}, {"rope_theta": 5e5}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, LLAMA3 | {"rope_theta": 5e5}),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"type": "yarn"}}, YARN | {"rope_theta": 1e6}),
    ],
)  # fmt: skip
def test_both_rope_spellings_agree(old, new):
    assert read(QWEN2, **old) == read(QWEN2, rope_parameters=new)
    nested = {"full_attention": new, "sliding_attention": dict(new)}
    assert read(QWEN2, rope_parameters=nested) == read(QWEN2, rope_parameters=new)


def test_dtype_spellings():
    for name in ("float32", "bfloat16", "float16"):
        assert read(LLAMA, torch_dtype=name) == read(LLAMA, dtype=name) == read(LLAMA, dtype=f"torch.{name}")
        assert read(LLAMA, dtype=name).dtype == name
    assert read(LLAMA, dtype="bfloat16", torch_dtype="float32").dtype == "bfloat16"
    refused(LLAMA, "torch_dtype", "float8_e4m3fn", torch_dtype="float8_e4m3fn")
    refused(LLAMA, "dtype", dtype=16)


def test_yarn_attention_factor():
    derived = read(QWEN2, rope_parameters=YARN).rope
    assert derived.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0, rel=1e-12)
    assert read(QWEN2, rope_parameters=YARN | {"attention_factor": 1.5}).rope.attention_factor == 1.5
    both = read(QWEN2, rope_parameters=YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}).rope
    assert both.attention_factor == pytest.approx(
        (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1), rel=1e-12
    )
    # A null factor means the ratio of the two context lengths.
    implied = read(QWEN2, max_position_embeddings=65536, rope_parameters=YARN | {"factor": None}).rope
    assert implied.factor == 2.0


def test_original_length_falls_back_to_the_maximum():
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert read(LLAMA, rope_scaling=scaling, max_position_embeddings=4096).rope.original_max == 4096
    assert read(LLAMA, rope_scaling=scaling, original_max_position_embeddings=512).rope.original_max == 512


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", "Yarn"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_other_rope_types_are_refused_by_name(kind, spelling):
    refused(QWEN2, kind, rope_scaling={spelling: kind, "factor": 2.0})
    refused(QWEN2, kind, rope_parameters={spelling: kind, "rope_theta": 1e4})


@pytest.mark.parametrize(
    "field, scaling",
    [
        ("factor", {"rope_type": "linear"}),
        ("factor", {"rope_type": "linear", "factor": "2"}),
        ("factor", {"rope_type": "linear", "factor": 0.5}),
        ("factor", {"rope_type": "yarn", "original_max_position_embeddings": 64}),
        ("low_freq_factor", {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}),
        ("high_freq_factor", LLAMA3 | {"high_freq_factor": 1.0}),
        ("original_max_position_embeddings", LLAMA3 | {"original_max_position_embeddings": 8192.5}),
        ("beta_fast", YARN | {"beta_fast": 0.5}),
        ("attention_factor", YARN | {"attention_factor": -1.0}),
        ("truncate", YARN | {"truncate": 1}),
        ("rope_theta", YARN | {"rope_theta": math.nan}),
        ("rope_theta", {"rope_type": "default", "rope_theta": 1.0}),
        ("mrope_section", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
        ("partial_rotary_factor", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("long_factor", YARN | {"long_factor": [1.0]}),
        ("type", {"rope_type": "default", "type": "mrope"}),
    ],
)
def test_bad_rope_fields_are_named(field, scaling):
    refused(QWEN2, field, rope_parameters=scaling)


def test_contradicting_rope():
    refused(LLAMA, "rope_scaling", rope_scaling=LLAMA3, rope_parameters=LLAMA3)
    refused(LLAMA, "rope_theta", rope_theta=1e4, rope_parameters={"rope_theta": 2e4})
    refused(QWEN2, "layer types", rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    refused(LLAMA, "rope_scaling", rope_scaling="linear")


def test_windows():
    on = {"use_sliding_window": True, "sliding_window": 16}
    for base in (QWEN2, QWEN3):
        assert read(base, sliding_window=16).windows == (None,) * 4
        assert read(base, **on, max_window_layers=3).windows == (None, None, None, 16)
        assert read(base, **on).windows == (None,) * 4  # the default starts at layer 28
        assert read(base, **on | {"sliding_window": None}, max_window_layers=0).windows == (None,) * 4
        types = ["sliding_attention", "full_attention"] * 2
        assert read(base, **on, layer_types=types).windows == (16, None, 16, None)
        assert read(base, **on, layer_types=types, max_window_layers=0).windows == (16, None, 16, None)
        refused(base, "layer_types", "use_sliding_window", layer_types=types, sliding_window=16)
        refused(base, "layer_types", **on, layer_types=types[:3])
        refused(base, "chunked_attention", layer_types=["chunked_attention"] * 4)
        refused(base, "layer_types", layer_types="full_attention")
        refused(base, "layer_types", layer_types=[["full_attention"]] * 4)
        refused(base, "sliding_window", **on | {"sliding_window": -1})
        refused(base, "use_sliding_window", use_sliding_window="true")
    assert read(LLAMA, layer_types=["full_attention"] * 4) == read(LLAMA)
    refused(LLAMA, "sliding_attention", layer_types=["sliding_attention"] * 4, sliding_window=16)


@pytest.mark.parametrize(
    "name, value",
    [
        ("model_type", "mistral"), ("model_type", None), ("model_type", ["llama"]), ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}), ("compression_config", {"format": "int"}),
        ("logit_scale", 0.5), ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0),
        ("attention_multiplier", 0.1), ("residual_multiplier", 0.22), ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0), ("rope_interleaved", True), ("no_rope_layers", [0, 1]), ("num_experts", 8),
        ("num_local_experts", 8), ("partial_rotary_factor", 0.5), ("clip_qkv", 8.0), ("is_causal", False),
        ("dual_chunk_attention_config", {"chunk_size": 262144}), ("dflash_config", {"mask_token_id": 1}),
        ("architectures", ["LlamaForSequenceClassification"]), ("tie_word_embeddings", None),
        ("eos_token_id", "2"), ("eos_token_id", [2, None]), ("eos_token_id", -1), ("bos_token_id", [1, 2]),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(name, value):
    refused(LLAMA, name, **{name: value})
    if name == "quantization_config":
        refused(LLAMA, "gptq", **{name: value})
    if name == "model_type" and value:
        refused(LLAMA, str(value), **{name: value})


@pytest.mark.parametrize(
    "neutral",
    [
        {"hidden_act": "silu"}, {"logit_scale": 1.0}, {"logit_scale": None}, {"num_experts": 0},
        {"quantization_config": None}, {"no_rope_layers": []}, {"partial_rotary_factor": 1.0}, {"pretraining_tp": 2},
        {"attention_dropout": 0.1}, {"use_cache": False}, {"is_causal": True}, {"rope_interleaved": False},
    ],
)  # fmt: skip
def test_neutral_values_are_accepted_in_silence(neutral, caplog):
    with caplog.at_level(logging.WARNING):
        assert read(LLAMA, **neutral) == read(LLAMA)
    assert not caplog.records


def test_unknown_fields_are_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        read(LLAMA, brand_new_field=1)
        read(LLAMA, sliding_window=4096)
        read(QWEN2, attention_bias=False)
        read(QWEN2, rope_parameters={"rope_type": "default", "factor": 2.0})
    assert len(caplog.records) == 4
    for word, record in zip(
        ["brand_new_field", "sliding_window", "attention_bias", "factor"], caplog.records
    ):
        assert word in record.getMessage()


@pytest.mark.parametrize("config", [None, [], "llama", 3, {}])
def test_not_a_configuration(config):
    with pytest.raises(ConfigError):
        ModelConfig.from_hf(config)


def _round_trip(config: ModelConfig) -> None:
    written = config.to_hf()
    assert json.loads(json.dumps(written)) == written
    assert ModelConfig.from_hf(written) == config


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_golden_configurations_round_trip(path, caplog):
    with caplog.at_level(logging.WARNING):
        _round_trip(ModelConfig.from_hf(json.loads((path / "config.json").read_text())))
    assert not caplog.records


def test_published_configurations_round_trip():
    for config in PUBLISHED:
        _round_trip(ModelConfig.from_hf(config))


ropes = st.one_of(
    st.builds(RopeConfig, theta=st.floats(1.5, 1e7)),
    st.builds(RopeConfig, st.just("linear"), st.floats(1.5, 1e7), st.floats(1.0, 64.0)),
    st.builds(
        RopeConfig, st.just("llama3"), st.floats(1.5, 1e7), st.floats(1.0, 64.0), st.integers(1, 10**6),
        low_freq_factor=st.floats(0.1, 2.0), high_freq_factor=st.floats(2.1, 9.0),
    ),
    st.builds(
        RopeConfig, st.just("yarn"), st.floats(1.5, 1e7), st.floats(1.0, 64.0), st.integers(1, 10**6),
        beta_fast=st.floats(8.0, 64.0), beta_slow=st.floats(0.1, 8.0), attention_factor=st.floats(0.1, 4.0),
        truncate=st.booleans(),
    ),
)  # fmt: skip


@st.composite
def models(draw) -> ModelConfig:
    kind = draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    layers, kv = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    bias = draw(st.booleans())
    window = None if kind == "llama" else draw(st.one_of(st.none(), st.integers(1, 10**5)))
    return ModelConfig(
        model_type=kind,
        vocab=draw(st.integers(1, 10**6)),
        hidden=draw(st.integers(1, 10**5)),
        num_layers=layers,
        num_heads=kv * draw(st.integers(1, 8)),
        num_kv_heads=kv,
        head_dim=2 * draw(st.integers(1, 256)),
        intermediate=draw(st.integers(1, 10**5)),
        rope=draw(ropes),
        eps=draw(st.floats(1e-8, 1e-3)),
        max_positions=draw(st.integers(1, 10**7)),
        qkv_bias=kind == "qwen2" or bias,
        o_bias=kind != "qwen2" and bias,
        mlp_bias=kind == "llama" and draw(st.booleans()),
        qk_norm=kind == "qwen3",
        tie=draw(st.booleans()),
        windows=tuple(draw(st.sampled_from([None, window])) for _ in range(layers)),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        eos=tuple(draw(st.lists(st.integers(0, 10**6), max_size=3, unique=True))),
        bos=draw(st.one_of(st.none(), st.integers(0, 10**6))),
    )


@given(models())
def test_every_model_round_trips(config):
    _round_trip(config)


def test_variants_without_a_transformers_class_are_not_written():
    with pytest.raises(ConfigError, match="llama"):
        ModelConfig(**vars(read(LLAMA)) | {"qk_norm": True}).to_hf()
    with pytest.raises(ConfigError, match="qwen2"):
        ModelConfig(**vars(read(QWEN2)) | {"o_bias": True}).to_hf()
    with pytest.raises(ConfigError, match="sliding_window"):
        ModelConfig(**vars(read(LLAMA)) | {"windows": (8, None, None, None)}).to_hf()
    with pytest.raises(ConfigError, match="sliding_window"):
        ModelConfig(**vars(read(QWEN2)) | {"windows": (8, 9, None, None)}).to_hf()


junk = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-2, 300), st.floats(), st.text(max_size=8),
        st.sampled_from([10**400, "silu", "yarn", "torch.bfloat16", "full_attention", math.nan]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "quant_method", "full_attention"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=6,
)  # fmt: skip
STARTS = [
    *PUBLISHED,
    QWEN2 | {"rope_parameters": YARN | {"rope_theta": 1e6}, "use_sliding_window": True, "sliding_window": 8},
    QWEN3 | {"layer_types": ["full_attention"] * 4, "dtype": "float32"},
]
FIELDS = sorted({k for c in STARTS for k in c} | {"quantization_config", "rope_parameters", "num_experts"})


@settings(max_examples=500)
@given(st.data())
def test_mutated_configurations_never_crash(data):
    """Whatever is in the file: a configuration that holds together, or a ConfigError with a message."""
    config: dict[Any, Any] = copy.deepcopy(data.draw(st.sampled_from(STARTS)))
    for _ in range(data.draw(st.integers(1, 4))):
        where = config
        inner = [
            v
            for v in (config.get("rope_scaling"), config.get("rope_parameters"))
            if isinstance(v, dict) and v
        ]
        if inner and data.draw(st.booleans()):
            where = inner[0]
        name = data.draw(
            st.sampled_from(sorted(where, key=str)) | st.sampled_from(FIELDS) | st.text(max_size=5)
        )
        if data.draw(st.integers(0, 4)) == 0:
            where.pop(name, None)
        else:
            where[name] = data.draw(junk)
    try:
        result = ModelConfig.from_hf(config)
    except ConfigError as error:
        assert ":" in str(error) and len(str(error)) < 400
        return
    assert result.num_heads % result.num_kv_heads == 0 and result.head_dim % 2 == 0
    assert len(result.windows) == result.num_layers
    assert math.isfinite(result.eps) and math.isfinite(result.rope.theta)
    _round_trip(result)
