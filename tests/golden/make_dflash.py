"""Write the golden drafters of the variants: sliding layers, an explicit `is_causal`, a head of its own.

    python tests/golden/make_dflash.py [--out DIR] [NAME ...]

dflash-a to -c were computed by the published reference implementation and are not made here. These are computed by
the target and drafter below, written from the papers and the published readers' description of each variant, in
float64 numpy, without any cache: every round reads the whole text again. tests/decode/test_dflash_parity.py holds both
to dflash-a to -c first. Nothing of the library is used.

Each directory gets `target/`, `drafter/`, `expected.json` and `rounds.safetensors`, as README.md says.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
NEW, RECORDED, GAP = 24, 4, 2e-4

TARGET: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "attention_bias": False, "hidden_act": "silu", "model_type": "qwen3",
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    # Sliding layers look only backwards inside the block unless the file says otherwise; block_size inside.
    "dflash-sliding": {
        "layers": [SLIDING, FULL, SLIDING], "window": 9, "block": 8, "taps": [3, 1], "inner": True, "theta": 1e4,
    },
    # A window smaller than the block, both ways; tap and mask fields at the top level.
    "dflash-both-ways": {
        "layers": [SLIDING, SLIDING, FULL], "window": 5, "block": 8, "taps": [0, 2, 4], "causal": False,
        "outer": True, "theta": 1e6,
    },
    "dflash-causal": {"layers": [FULL, FULL], "block": 6, "taps": [1, 2], "causal": True, "theta": 1e6},
    # speculators: taps counted from the layer they enter, a head over 7 of 12 ids.
    "dflash-own-head": {
        "layers": [FULL, SLIDING], "window": 6, "block": 8, "taps": [1, 3], "head": [0, 1, 3, 4, 7, 9, 11],
        "theta": 1e6, "tie": False,
    },
}  # fmt: skip


# --- the drafter, again -------------------------------------------------------------------------------------------


class Layers:
    """Qwen3 layers in float64. c: their config.json; w: tensors, whose names begin with `prefix`."""

    def __init__(self, c: dict[str, Any], w: dict[str, np.ndarray], prefix: str) -> None:
        self.c, self.w, self.prefix = c, {k: v.astype(np.float64) for k, v in w.items()}, prefix

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        root = np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / root * self.w[f"{name}.weight"]

    def heads(self, rows: np.ndarray, name: str) -> np.ndarray:
        return (rows @ self.w[f"{name}_proj.weight"].T).reshape(len(rows), -1, self.c["head_dim"])

    def turned(self, x: np.ndarray, pos: np.ndarray) -> np.ndarray:
        """x [T, heads, H] rotated by its positions; feature i goes with i + H/2."""
        half = x.shape[-1] // 2
        angle = pos[:, None] * self.c["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def layer(self, i: int, x: np.ndarray, context: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """x [T, D]: the last rows of a text; context [n, D]: what stands for the n before; seen: [T, n + T]."""
        at, n = f"{self.prefix}layers.{i}", len(context)
        a = self.norm(x, f"{at}.input_layernorm")
        both, pos = np.concatenate([context, a]), np.arange(n + len(x))
        q = self.turned(self.norm(self.heads(a, f"{at}.self_attn.q"), f"{at}.self_attn.q_norm"), pos[n:])
        k = self.turned(self.norm(self.heads(both, f"{at}.self_attn.k"), f"{at}.self_attn.k_norm"), pos)
        v = self.heads(both, f"{at}.self_attn.v")
        k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / self.c["head_dim"] ** 0.5
        p = np.exp(np.where(seen, scores, -np.inf) - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + out @ self.w[f"{at}.self_attn.o_proj.weight"].T
        m = self.norm(x, f"{at}.post_attention_layernorm")
        gate = m @ self.w[f"{at}.mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (m @ self.w[f"{at}.mlp.up_proj.weight"].T)
        return x + hidden @ self.w[f"{at}.mlp.down_proj.weight"].T


class Target(Layers):
    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        super().__init__(config, load_file(directory / "model.safetensors"), "model.")
        self.embed = self.w["model.embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.embed)

    def read(self, text: list[int], taps: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(logits [T, V], outputs of the layers `taps` side by side [T, len(taps) * D])."""
        x, none = self.embed[text], np.zeros((0, self.c["hidden_size"]))
        outputs = []
        for i in range(self.c["num_hidden_layers"]):
            x = self.layer(i, x, none, np.tri(len(text), dtype=bool))
            outputs.append(x)
        return self.norm(x, "model.norm") @ self.head.T, np.concatenate([outputs[t] for t in taps], axis=-1)


class Drafter(Layers):
    def __init__(self, directory: Path, target: Target) -> None:
        config = json.loads((directory / "config.json").read_text())
        w = load_file(directory / "model.safetensors")
        super().__init__(config.get("transformer_layer_config", config), w, "")
        inner = config.get("dflash_config", {})
        self.embed, self.head, self.ids = target.embed, target.head, np.arange(len(target.head))
        self.block = config.get("block_size") or inner["block_size"]
        self.mask = inner.get("mask_token_id", config.get("mask_token_id"))
        self.taps = inner.get("target_layer_ids", config.get("target_layer_ids"))
        types = self.c["layer_types"]
        if "speculators_model_type" in config:
            self.taps = [k - 1 for k in config["aux_hidden_state_layer_ids"]]
            self.causal = [t == SLIDING and not config["sliding_window_non_causal"] for t in types]
            if config["draft_vocab_size"] != self.c["vocab_size"]:
                self.head, self.ids = (
                    self.w["lm_head.weight"],
                    np.arange(config["draft_vocab_size"]) + w["d2t"],
                )
        else:
            said = config.get("is_causal")
            self.causal = [t == SLIDING if said is None else said for t in types]
        self.windows = [self.c["sliding_window"] if t == SLIDING else None for t in types]

    def draft(self, features: np.ndarray, anchor: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(hidden [B, D], logits [B, rows of the head], ids [B]) behind the text whose features are [n, T*D]."""
        n, block = len(features), self.block
        x = self.embed[[anchor] + [self.mask] * (block - 1)]
        g = self.norm(features.astype(np.float64) @ self.w["fc.weight"].T, "hidden_norm")
        distance = np.arange(n, n + block)[:, None] - np.arange(n + block)
        for i, (window, causal) in enumerate(zip(self.windows, self.causal)):
            seen = distance >= 0 if causal else np.ones_like(distance, bool)
            if window is not None:
                seen = seen & (np.abs(distance) < window)
            x = self.layer(i, x, g, seen)
        hidden = self.norm(x, "norm")
        logits = hidden @ self.head.T
        return hidden, logits, self.ids[logits.argmax(-1)]


# --- making ---------------------------------------------------------------------------------------------------------


def write(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], rng, extra=()) -> None:
    """A checkpoint of random weights: attention far from uniform, logits of standard deviation about 2."""
    tensors = {}
    for name, shape in sorted(shapes.items()):
        draw = rng.standard_normal(shape)
        if "norm" in name:
            draw = 1 + 0.2 * draw
        elif "embed" in name or "lm_head" in name:
            draw = draw * 2 / shape[1] ** 0.5
        else:
            draw = draw / shape[1] ** 0.5
        tensors[name] = draw.astype(np.float32)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors | dict(extra), directory / "model.safetensors")


def layer_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    one = {
        "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (k, d), "self_attn.v_proj": (k, d), "self_attn.o_proj": (d, q),
        "self_attn.q_norm": (h,), "self_attn.k_norm": (h,), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }  # fmt: skip
    layers = range(config["num_hidden_layers"])
    return {f"{prefix}layers.{i}.{name}.weight": shape for i in layers for name, shape in one.items()}


def build(name: str, out: Path) -> None:
    spec = MODELS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    v, d = TARGET["vocab_size"], TARGET["hidden_size"]
    tie = spec.get("tie", True)
    target = TARGET | {
        "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tie, "rope_theta": spec["theta"],
        "rope_scaling": None, "torch_dtype": "float32", "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip
    shapes = layer_shapes(target, "model.") | {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    write(out / "target", target, shapes if tie else shapes | {"lm_head.weight": (v, d)}, rng)

    types = spec["layers"]
    geometry = TARGET | {
        "num_hidden_layers": len(types), "layer_types": types, "tie_word_embeddings": False,
        "use_sliding_window": SLIDING in types, "sliding_window": spec.get("window"), "max_window_layers": len(types),
        "rope_theta": spec["theta"], "rope_scaling": None, "dtype": "float32",
    }  # fmt: skip
    shapes = layer_shapes(geometry, "") | {
        "fc.weight": (d, len(spec["taps"]) * d),
        "hidden_norm.weight": (d,),
    }
    shapes["norm.weight"] = (d,)
    fields: dict[str, Any] = {"mask_token_id": v - 1, "target_layer_ids": spec["taps"]}
    extra: dict[str, np.ndarray] = {}
    if "head" in spec:
        ids = np.asarray(spec["head"])
        shapes["lm_head.weight"] = (len(ids), d)
        embed = load_file(out / "target" / "model.safetensors")["model.embed_tokens.weight"]
        extra = {
            "embed_tokens.weight": embed, "d2t": (ids - np.arange(len(ids))).astype(np.int64),
            "t2d": np.isin(np.arange(v), ids),
        }  # fmt: skip
        config = {
            "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"],
            "transformer_layer_config": geometry, "draft_vocab_size": len(ids), "block_size": spec["block"],
            "mask_token_id": v - 1, "aux_hidden_state_layer_ids": [t + 1 for t in spec["taps"]],
            "sliding_window_non_causal": False, "sample_from_anchor": False, "target_hidden_size": None,
        }  # fmt: skip
    else:
        config = geometry | {
            "architectures": ["DFlashDraftModel"],
            "num_target_layers": target["num_hidden_layers"],
        }
        if spec.get("inner"):
            config["dflash_config"] = fields | {"block_size": spec["block"]}
        elif spec.get("outer"):
            config |= fields | {"block_size": spec["block"]}
        else:
            config |= {"block_size": spec["block"], "dflash_config": fields}
        if "causal" in spec:
            config["is_causal"] = spec["causal"]
    write(out / "drafter", config, shapes, rng, extra.items())
    expect(out, rng)


def expect(out: Path, rng: np.random.Generator) -> None:
    """expected.json and rounds.safetensors, for prompts whose decisions are no near-ties."""
    target = Target(out / "target")
    drafter = Drafter(out / "drafter", target)
    kept: list[dict[str, Any]] = []
    tensors: dict[str, np.ndarray] = {}
    lengths = [11, 3, 24, 17, 1]  # shorter than the block and than the window, and longer
    for _ in range(2000):
        ids = rng.integers(0, len(target.embed) - 1, lengths[len(kept)]).tolist()
        text, known, committed, rounds, gap = list(ids), 0, [], [], np.inf
        text.append(int(target.read(text, drafter.taps)[0][-1].argmax()))
        while len(text) - len(ids) < NEW and gap >= GAP:
            features = target.read(text[:-1], drafter.taps)[1]
            hidden, scores, guess = drafter.draft(features, text[-1])
            block = [text[-1], *guess[1:].tolist()]
            verify = target.read([*text[:-1], *block], drafter.taps)[0][len(text) - 1 :]
            for rows in (scores[1:], verify):
                top = np.sort(rows, axis=-1)
                gap = min(gap, float((top[:, -1] - top[:, -2]).min()))
            own = verify.argmax(-1)
            n = int(np.cumprod(own[:-1] == block[1:]).sum()) + 1
            rounds.append((len(text) - 1, features[known:], hidden, scores, block, verify))
            known = len(text) - 1
            text += own[:n].tolist()
            committed.append(n)
        # A random drafter is rarely right: insist on one prompt with blocks accepted in part.
        if gap < GAP or (not kept and max(committed) < 3):
            continue
        for j, (start, taps, hidden, scores, block, verify) in enumerate(rounds[:RECORDED]):
            parts = {"start": start, "taps": taps, "draft_hidden": hidden, "draft_logits": scores, "block": block,
                     "verify_logits": verify}  # fmt: skip
            for what, x in parts.items():
                whole = np.asarray(x)[None]
                kind = np.int64 if whole.dtype.kind == "i" else np.float32
                tensors[f"p{len(kept)}.r{j}.{what}"] = whole.astype(kind)
        output = text[len(ids) : len(ids) + NEW]
        kept.append({"ids": ids, "max_new_tokens": NEW, "output": output, "committed_per_round": committed})
        print(out.name, len(ids), committed, f"smallest gap {gap:.1e}", flush=True)
        if len(kept) == len(lengths):
            break
    else:
        raise SystemExit(f"{out.name}: {len(kept)} of {len(lengths)} prompts without a near-tie")
    source = "the target and drafter of tests/golden/make_dflash.py (float64)"
    lines = ",\n".join("  " + json.dumps(entry) for entry in kept)
    (out / "expected.json").write_text(f'{{"source": {json.dumps(source)},\n "prompts": [\n{lines}\n]}}\n')
    save_file(tensors, out / "rounds.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    for name in args.names or MODELS:
        shutil.rmtree(args.out / name, ignore_errors=True)
        build(name, args.out / name)


if __name__ == "__main__":
    main()
