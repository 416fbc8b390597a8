"""Tiny random checkpoints written with the safetensors and gguf libraries, not with the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers

from kvjax.checkpoints.load import table_rows
from kvjax.config import ModelConfig

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def hf_config(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    """A `config.json` dictionary: V 64, D 32, L 2, N 4, K 2, H 8, F 48."""
    base = {
        "model_type": kind,
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    return base | changes


def tensors(config: dict[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random HF tensors of `config`; every element of every tensor is different with high probability."""
    rng = np.random.default_rng(seed)
    rows = table_rows(ModelConfig.from_hf(config))
    pairs = (pair for row in rows for pair in zip(row.hf, row.shapes, strict=True))
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in pairs}


def write(directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray], shards: int = 1) -> Path:
    """An HF directory of one file, or of several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.numpy.save_file(weights, directory / "model.safetensors")
        return directory
    place = {}
    for i, names in enumerate(np.array_split(sorted(weights), shards), 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        safetensors.numpy.save_file({n: weights[n] for n in names}, directory / file)
        place |= dict.fromkeys(map(str, names), file)
    index = {"metadata": {}, "weight_map": place}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_tokenizer(directory: Path, size: int = 60, **settings: Any) -> Path:
    """A byte-level tokenizer of `size` tokens: <unk> <s> </s>, then letters, then fillers."""
    letters = "abcdefghijklmnopqrstuvwxyzĠĊ[]"
    names = ["<unk>", "<s>", "</s>", *letters]
    names += [f"filler{i}" for i in range(size - len(names))]
    vocab = {name: i for i, name in enumerate(names[:size])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    base = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(base | settings))
    return directory


_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """What llama.cpp calls an HF tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def interleave(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Llama q or k the way GGUF orders them: element i of the first half beside that of the second."""
    out = np.empty_like(x)
    width = len(x) // heads
    for head in range(heads):
        for i in range(width // 2):
            out[head * width + 2 * i] = x[head * width + i]
            out[head * width + 2 * i + 1] = x[head * width + width // 2 + i]
    return out


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    tokens: bool = False,
) -> Path:
    """A GGUF file of `weights`; matrices in `kind`, vectors in F32. `metadata` adds uint32 or float32 keys."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in (metadata or {}).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    if tokens:
        names = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzĠ", "ab", "Ġab"]
        names += [f"[PAD{i}]" for i in range(config["vocab_size"] - len(names))]
        control = gguf.TokenType.CONTROL
        types = [control] * 3 + [gguf.TokenType.NORMAL] * 29
        types += [gguf.TokenType.UNUSED] * (len(names) - len(types))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(names)
        writer.add_token_types(types)
        writer.add_token_merges(["a b", "Ġ ab"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
    for name, x in weights.items():
        if arch == "llama" and ".q_proj." in name:
            x = interleave(x, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            x = interleave(x, config["num_key_value_heads"])
        if x.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), x.astype(np.float32))
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(gguf_name(name), x.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(x, kind), raw_dtype=kind)
    for name, x in (extra or {}).items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BF16 = ml_dtypes.bfloat16
