"""Write the golden checkpoints: tiny random Hugging Face models and what transformers computes with them.

    python tests/golden/make.py [--out DIR] [NAME ...]

Needs the `parity` extra. Each directory gets the checkpoint (config.json, model.safetensors or shards with
an index, tokenizer) and expected.safetensors:

    input_ids [B, T] int32    random ids the tokenizer knows
    logits [B, T, V] float32  of the stored (rounded) weights, computed in float32 with eager attention
    tokens [B, n] int32       greedy continuation over the ids the tokenizer knows, never stopping

Everything is drawn by numpy from the seed in the table, so a regeneration gives the same weights on any
machine and version. Prompts are redrawn until no greedy step is a near-tie or the end token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
BATCH, LENGTH, NEW = 2, 32, 12
KNOWN = 320  # ids of the tokenizer; Qwen models get a larger vocabulary, as the published ones have
GAP = 5e-3  # smallest distance between the two best logits of a greedy step

# head_dim H, heads N, KV heads K: groups 1 to 8, K in {1, 2, 3, 4, 8}. D, F and V divide by 8 (meshes).
# `old`: the config.json is rewritten in the spelling of transformers 4. `store`: dtype of the weights.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
YARN4 = YARN | {"factor": 4.0, "original_max_position_embeddings": 128}
WINDOW = {"use_sliding_window": True, "sliding_window": 12}
FIRST_FULL = WINDOW | {"max_window_layers": 1}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BIASES = {"attention_bias": True, "mlp_bias": True}


def row(kind: str, D: int, L: int, N: int, K: int, H: int, F: int, **more: Any) -> dict[str, Any]:
    return {"type": kind, "D": D, "L": L, "N": N, "K": K, "H": H, "F": F, **more}


MODELS: dict[str, dict[str, Any]] = {
    "llama1-old": row("llama", 128, 2, 4, 4, 32, 96, old=True, store="float32", bare=True),
    "llama2-f16": row("llama", 64, 2, 2, 2, 128, 128, old=True, store="float16"),
    "llama3-sharded": row("llama", 64, 2, 16, 8, 32, 128, theta=500000.0, shards="150KB"),
    "llama31-rope": row("llama", 64, 2, 8, 2, 64, 128, rope=LLAMA3),
    "llama32-tied": row("llama", 96, 2, 6, 3, 32, 128, tie=True, rope=LLAMA3 | {"factor": 32.0}),
    "smollm-tied-old": row("llama", 96, 3, 3, 1, 32, 128, tie=True, old=True),
    "llama-bias": row("llama", 64, 2, 8, 1, 32, 128, extra=BIASES),
    "llama-linear-old": row("llama", 64, 2, 4, 2, 64, 128, old="type", rope=LINEAR),
    "llama-yarn": row("llama", 80, 2, 5, 1, 64, 128, rope=YARN),
    "llama-h80": row("llama", 96, 2, 6, 3, 80, 96),
    "llama-h96": row("llama", 64, 2, 4, 4, 96, 96),
    "qwen2-untied": row("qwen2", 64, 2, 14, 2, 32, 128, theta=1000000.0),
    "qwen2-tied-old": row("qwen2", 64, 3, 4, 2, 32, 128, tie=True, theta=1000000.0, old=True),
    "qwen2-window": row("qwen2", 64, 3, 4, 1, 64, 96, extra=FIRST_FULL),
    "qwen2-yarn-old": row("qwen2", 64, 2, 6, 1, 80, 96, old="type", rope=YARN4),
    "qwen3-untied": row("qwen3", 64, 2, 4, 1, 128, 96, theta=1000000.0),
    "qwen3-tied": row("qwen3", 64, 2, 16, 2, 32, 128, theta=1000000.0, tie=True),
    "qwen3-bias": row("qwen3", 64, 2, 6, 2, 96, 96, old=True, extra={"attention_bias": True}),
    "qwen3-window": row("qwen3", 64, 3, 4, 4, 64, 96, tie=True, extra=MIXED),
    "qwen3-yarn": row("qwen3", 64, 2, 8, 8, 32, 96, rope=YARN | {"attention_factor": 1.25}),
}


def config_of(name: str) -> Any:
    """The transformers configuration of a golden model."""
    spec = MODELS[name]
    llama = spec["type"] == "llama"
    rope = spec.get("rope") or {"rope_type": "default", "rope_theta": spec.get("theta", 10000.0)}
    return AutoConfig.for_model(
        spec["type"],
        vocab_size=KNOWN if llama else KNOWN + 16,
        hidden_size=spec["D"],
        num_hidden_layers=spec["L"],
        num_attention_heads=spec["N"],
        num_key_value_heads=spec["K"],
        head_dim=spec["H"],
        intermediate_size=spec["F"],
        rms_norm_eps=1e-5 if llama else 1e-6,
        max_position_embeddings=512,
        tie_word_embeddings=spec.get("tie", False),
        rope_parameters=dict(rope),
        bos_token_id=KNOWN - 4 if llama else None,
        eos_token_id=KNOWN - 3 if llama else [KNOWN - 3, KNOWN - 2],
        **spec.get("extra", {}),
    )


def fill(model: torch.nn.Module, seed: int, tie: bool) -> None:
    """Random weights that give logits of standard deviation about 2 and attention far from uniform."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            draw = rng.standard_normal(tuple(param.shape))
            if "norm" in name:
                draw = 1.0 + 0.2 * draw
            elif name.endswith("bias"):
                # Published Qwen2 key biases are large; they must not be lost in a fused product.
                draw = draw * (3.0 if "k_proj" in name else 0.3)
            elif "embed_tokens" in name:
                draw = draw * (2.0 / param.shape[1] ** 0.5 if tie else 1.0)
            elif "lm_head" in name:
                draw = draw * (2.0 / param.shape[1] ** 0.5)
            else:
                draw = draw / param.shape[1] ** 0.5
            param.copy_(torch.from_numpy(draw.astype(np.float32)))


def old_spelling(config: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    key = "type" if spec["old"] == "type" else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config.pop("layer_types", None)
    if spec.get("bare"):  # as the first Llama conversions: no rope fields, heads and sizes left to defaults
        del config["rope_theta"], config["rope_scaling"], config["attention_bias"], config["mlp_bias"]
        config["head_dim"] = config["num_key_value_heads"] = None
    return config


def load_reference(directory: Path) -> Any:
    """The stored checkpoint in float32 with eager attention."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@torch.no_grad()
def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.float().numpy()


def continue_greedily(model: Any, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """Tokens [B, n] and the smallest gap between the two best logits. Recomputes the prefix each step."""
    eos = set(np.atleast_1d(model.config.eos_token_id).tolist())
    gap, start = np.inf, ids.shape[1]
    for _ in range(NEW):
        last = logits_of(model, ids)[:, -1, :KNOWN]
        best = np.sort(last, axis=-1)
        gap = min(gap, float((best[:, -1] - best[:, -2]).min()))
        step = last.argmax(axis=-1)
        if eos & set(step.tolist()):
            gap = 0.0
        ids = np.concatenate([ids, step[:, None].astype(np.int32)], axis=1)
    return ids[:, start:], gap


def build(name: str, out: Path) -> None:
    """Write the golden directory `out`."""
    spec = MODELS[name]
    seed = zlib.crc32(name.encode())
    model = AutoModelForCausalLM.from_config(config_of(name))
    fill(model, seed, spec.get("tie", False))
    model.to(getattr(torch, spec.get("store", "bfloat16")))
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out, max_shard_size=spec.get("shards", "5GB"))
    config = json.loads((out / "config.json").read_text())
    if spec.get("old"):
        config = old_spelling(config, spec)
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    write_tokenizer(out, spec["type"])

    reference, rng = load_reference(out), np.random.default_rng(seed + 1)
    for _ in range(100):
        ids = rng.integers(0, KNOWN - 4, size=(BATCH, LENGTH), dtype=np.int32)
        tokens, gap = continue_greedily(reference, ids)
        if gap >= GAP:
            break
    else:
        raise SystemExit(f"{name}: no prompt without a near-tie")
    logits = logits_of(reference, ids)
    expected = {"input_ids": ids, "logits": logits, "tokens": tokens.astype(np.int32)}
    save_file(expected, out / "expected.safetensors")
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{name:18} {size / 1e3:7.0f} kB  logit std {logits.std():.2f}  smallest greedy gap {gap:.3f}")


# Frequent English pairs, in the order they are merged; Ġ stands for a leading space.
MERGES = """Ġ t|h e|i n|r e|Ġ a|o n|e r|Ġt he|Ġ s|a t|Ġ w|o u|e n|i s|Ġ o|i t|e s|Ġ c|o r|a n|Ġ b|e d|Ġ f|
in g|Ġ p|a r|Ġt o|a l|Ġo f|a s|Ġa n|Ġ in|Ġ m|i c|l e|r o|Ġ h|Ġan d|i on|Ġ d|l l|en t|o m|Ġ n|Ġ l|v e|Ġ is|s t|a c|
Ġ y|Ġ I|e l|Ġ re|u r|Ġ g|o w|Ġ on|i d|Ġy ou|Ġf or""".replace("\n", "").split("|")
SPECIALS = ["<|start|>", "<|end|>", "<|turn|>", "<|pad|>"]
CHAT = (
    "{%- for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}"
)
THINK = (
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
)


def write_tokenizer(out: Path, kind: str) -> None:
    """A byte-level BPE tokenizer of KNOWN ids; only Llama's puts a start token before every text."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(m.split(" ")) for m in MERGES]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    if tokenizer.get_vocab_size() != KNOWN:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {KNOWN}")
    llama = kind == "llama"
    if llama:
        start = SPECIALS[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A",
            pair=f"{start} $A $B",
            special_tokens=[(start, tokenizer.token_to_id(start))],
        )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0] if llama else None,
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[3],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": ("{{ bos_token }}" if llama else "")
        + CHAT
        + ("" if llama else THINK)
        + "{%- endif %}",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


# Rotary parameters whose frequencies are kept in rope.json: published ones and the corners of each formula.
LONG = YARN | {"rope_theta": 1000000.0, "original_max_position_embeddings": 32768, "factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    LINEAR,
    LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192, "factor": 32.0},
    LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
    LONG,
    LONG | {"attention_factor": 0.75, "beta_fast": 16.0, "beta_slow": 2.0},
    LONG | {"mscale": 1.0, "mscale_all_dim": 0.7, "factor": 40.0, "original_max_position_embeddings": 4096},
    YARN | {"truncate": False},
    YARN | {"rope_theta": 10.0, "original_max_position_embeddings": 32768},  # a ramp past the last pair
    YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},  # a ramp of no width
]


def write_ropes(out: Path) -> None:
    """rope.json: the frequencies and attention factors of ROPES by transformers' own functions."""
    rows = []
    for parameters in ROPES:
        for head_dim in (32, 80, 128):
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=131072,
                rope_parameters=dict(parameters),
            )
            module = LlamaRotaryEmbedding(config)
            rows.append(
                {
                    "rope_parameters": parameters,
                    "head_dim": head_dim,
                    "attention_factor": float(module.attention_scaling),
                    "inv_freq": [float(f"{x:.9g}") for x in module.inv_freq.tolist()],
                }
            )
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    unknown = set(args.names) - set(MODELS)
    if unknown:
        parser.error(f"unknown golden models: {', '.join(sorted(unknown))}")
    if not args.names:
        write_ropes(args.out / "rope.json")
    for name in args.names or MODELS:
        with tempfile.TemporaryDirectory(dir=args.out) as scratch:
            build(name, Path(scratch) / name)
            shutil.rmtree(args.out / name, ignore_errors=True)
            shutil.move(Path(scratch) / name, args.out / name)


if __name__ == "__main__":
    main()
