"""GGUF files: header, metadata to ModelConfig, tensors under their Hugging Face names.

The header is parsed here with every count and offset checked against the file's size; the `gguf` package
(extra `kvjax[gguf]`) does the dequantisation, one tensor at a time on the host. Quantised weights are
dequantised once at load: that model is the model from then on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.checkpoints.table import CheckpointError, Info, empty
from kvjax.config import ModelConfig

_log = logging.getLogger("kvjax")

READABLE = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_PIECE = 1 << 17  # elements
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class _Cursor:
    """Little-endian reads that never leave the buffer."""

    def __init__(self, data: mmap.mmap | bytes, path: str) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def take(self, n: int, what: str) -> int:
        """Offset of the next `n` bytes."""
        start = self.at
        if n > self.size - start:
            raise CheckpointError(
                f"{self.path}: {what} needs {n} bytes at {start}, the file ends at {self.size}: truncated"
            )
        self.at += n
        return start

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        n = self.number("<Q", what)
        start = self.take(n, what)
        try:
            return self.data[start : start + n].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: {what}: unknown value type {kind}")
        inner, count = self.number("<I", what), self.number("<Q", what)
        if inner in _SCALARS:
            code = np.dtype(_SCALARS[inner])
            start = self.take(count * code.itemsize, what)
            return np.frombuffer(self.data, code, count, start).tolist()
        if inner != _STRING:
            raise CheckpointError(f"{self.path}: {what}: arrays of type {inner} are not supported")
        if count > (self.size - self.at) // 8:
            raise CheckpointError(f"{self.path}: {what} claims {count} strings: truncated or damaged")
        return [self.text(what) for _ in range(count)]


_Raw = tuple[str, tuple[int, ...], int]  # type name, shape, offset into the data


@dataclasses.dataclass(frozen=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    begin: int
    rows: tuple[int, ...]
    """Shape of the stored bytes: rows of whole blocks."""


class File:
    """One GGUF file: `metadata`, and tensors under HF names (a `kvjax.checkpoints.table.Source`).

    Raises:
      CheckpointError: not a whole, consistent GGUF file of version 2 or 3, or an unknown architecture.
    """

    def __init__(self, path: Path) -> None:
        _package()
        self.path, self.name = path, str(path)
        if path.stat().st_size < 24:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are no GGUF file: truncated")
        with path.open("rb") as f:
            self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, self.name)
        self.metadata, raw = self._header(cursor)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path}: one part of a split file (split.count); join the parts first")
        self.architecture = self._text("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture {self.architecture!r} is not implemented "
                f"(known: {', '.join(_ARCHITECTURES)})"
            )
        self._stored: dict[str, _Tensor] = {_hf_name(name): t for name, t in raw.items()}
        self.tensors = {_hf_name(n): Info(t.shape, t.kind, path.name, n) for n, t in raw.items()}
        self._factors = self._take_factors()

    def _header(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self.name}: does not begin with GGUF")
        cursor.at = 4
        version = cursor.number("<I", "version")
        if version not in (2, 3):
            order = "big-endian files" if version and version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(f"{self.name}: {order} are not supported (known: 2 and 3)")
        tensors, pairs = cursor.number("<Q", "tensor count"), cursor.number("<Q", "metadata count")
        metadata: dict[str, Any] = {}
        for i in range(pairs):
            key = cursor.text(f"metadata key {i}")
            if key in metadata:
                raise CheckpointError(f"{self.name}: metadata {key!r} appears twice")
            metadata[key] = cursor.value(cursor.number("<I", f"metadata {key!r}"), f"metadata {key!r}")
        raw: dict[str, _Raw] = {}
        for i in range(tensors):
            name = cursor.text(f"name of tensor {i}")
            what = f"tensor {name!r}"
            rank = cursor.number("<I", what)
            if not 1 <= rank <= 4:
                raise CheckpointError(f"{self.name}: {what} has {rank} dimensions")
            dims = tuple(cursor.number("<Q", what) for _ in range(rank))
            kind, offset = cursor.number("<I", what), cursor.number("<Q", what)
            if name in raw:
                raise CheckpointError(f"{self.name}: {what} appears twice")
            raw[name] = (self._kind(kind, what), dims[::-1], offset)
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or align < 8 or align & (align - 1):
            raise CheckpointError(f"{self.name}: general.alignment {align!r} is not a power of two from 8 on")
        return metadata, self._place(raw, -(-cursor.at // align) * align, align)

    def _kind(self, code: int, what: str) -> str:
        constants = _package().constants
        try:
            return constants.GGMLQuantizationType(code).name
        except ValueError:
            raise CheckpointError(f"{self.name}: {what} has unknown type {code}") from None

    def _place(self, raw: Mapping[str, _Raw], base: int, align: int) -> dict[str, _Tensor]:
        """Absolute byte ranges, checked against the file and against each other."""
        constants = _package().constants
        out, problems, at, before = {}, [], base, None
        for name, (kind, shape, offset) in sorted(raw.items(), key=lambda item: item[1][2]):
            block, nbytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType[kind]]
            what, begin = f"tensor {name!r}", base + offset
            if shape[-1] % block or not all(shape):
                problems.append(f"{what}: {kind} rows of {shape[-1]} are not whole blocks of {block}")
                continue
            rows = (*shape[:-1], shape[-1] // block * nbytes)
            end = begin + math.prod(rows)
            if end > len(self._data):
                problems.append(f"{what}: ends at byte {end}, the file at {len(self._data)}: truncated")
            elif begin < at:
                problems.append(f"{what}: overlaps {before!r}")
            elif offset % align:
                problems.append(f"{what}: offset {offset} is not a multiple of {align}")
            at, before = max(at, end), name
            out[name] = _Tensor(kind, shape, begin, rows)
        if problems:
            raise CheckpointError.collect(self.name, problems)
        return out

    def _text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            fault = "missing" if value is None else "not a string"
            raise CheckpointError(f"{self.name}: metadata {key!r}: {fault}")
        return value

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` dequantised to float32 (F16 and BF16 as they are), rows in HF order."""
        stored = self._stored[name]
        x = _dequantise(self._bytes(stored), stored)
        if self.architecture == "llama" and (found := re.fullmatch(r".*\.([qk])_proj\.(weight|bias)", name)):
            heads = self._count("attention.head_count_kv" if found[1] == "k" else "attention.head_count")
            x = _unpermute(x, heads)
        return x

    def _bytes(self, stored: _Tensor) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8, math.prod(stored.rows), stored.begin).reshape(stored.rows)

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{self.name}: metadata '{self.architecture}.{key}': "
                + ("missing" if value is None else f"expected one positive integer, got {str(value)[:80]}")
            )
        return value

    def _take_factors(self) -> np.ndarray | None:
        """`rope_freqs.weight` [H/2]: by what the published frequencies are divided (llama3 scaling)."""
        stored = self._stored.pop("rope_freqs.weight", None)
        self.tensors.pop("rope_freqs.weight", None)
        if stored is None:
            return None
        if stored.kind != "F32" or len(stored.shape) != 1:
            raise CheckpointError(f"{self.name}: tensor 'rope_freqs.weight' is not an F32 vector")
        return _dequantise(self._bytes(stored), stored)

    def config(self) -> ModelConfig:
        """The model's configuration from the metadata, through `ModelConfig.from_hf`.

        Raises:
          CheckpointError, kvjax.config.ConfigError: a missing or mistyped key, or one that changes the
            computation in a way that is not implemented; the message names it.
        """
        arch, meta = self.architecture, self.metadata
        known = {f"{arch}.{key}" for key in (*_SIZES.values(), *_OTHER)}
        unknown = sorted(k for k in meta if k.startswith(f"{arch}.") and k not in known and meta[k])
        if unknown:
            raise CheckpointError(f"{self.name}: metadata not implemented: {', '.join(unknown)}")
        embed = self.tensors.get("model.embed_tokens.weight")
        if embed is None or len(embed.shape) != 2:
            raise CheckpointError(f"{self.name}: tensor 'token_embd.weight': missing or not a matrix")
        fields: dict[str, Any] = {ours: self._count(key) for ours, key in _SIZES.items()}
        heads = fields["num_attention_heads"]
        fields["num_key_value_heads"] = self._count("attention.head_count_kv", heads)
        width = fields["hidden_size"] // heads
        head = self._count("attention.key_length", width)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self._count(key, head)) != head:
                raise CheckpointError(
                    f"{self.name}: metadata '{arch}.{key}' is {value}, not the head width {head}: "
                    "not implemented"
                )
        first = "model.layers.0.self_attn."
        config: dict[str, Any] = {
            **fields,
            "model_type": arch,
            "head_dim": head,
            "vocab_size": embed.shape[0],
            "rms_norm_eps": _decimal(meta.get(f"{arch}.attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(head),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "torch_dtype": self.dtype(),
            "hidden_act": "silu",
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(self.eos()) or None,
        }
        if arch != "qwen2":
            config["attention_bias"] = f"{first}o_proj.bias" in self.tensors
        if arch == "llama":
            config["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in self.tensors
        return ModelConfig.from_hf(config)

    def dtype(self) -> str:
        """What to compute in where the caller wants the checkpoint's: quantised files count as bfloat16."""
        kinds = {t.kind for t in self._stored.values() if len(t.shape) > 1}
        return "float32" if kinds == {"F32"} else "float16" if kinds == {"F16"} else "bfloat16"

    def eos(self) -> tuple[int, ...]:
        """End-of-text, end-of-turn and end-of-message ids of the metadata."""
        ids = [self.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        return tuple(sorted({i for i in ids if type(i) is int}))

    def _rope(self, head: int) -> dict[str, Any]:
        arch, meta = self.architecture, self.metadata

        def get(key: str, default: Any = None) -> Any:
            return meta.get(f"{arch}.rope.{key}", default)

        kind, theta = get("scaling.type", "none"), _decimal(get("freq_base", 10000.0))
        factor = get("scaling.factor", get("scale_linear", 1.0))
        original = get("scaling.original_context_length")
        if self._factors is not None:
            if kind not in ("none", "linear") or factor not in (0.0, 1.0):
                raise CheckpointError(
                    f"{self.name}: tensor 'rope_freqs.weight' with rope scaling {kind!r}: not implemented"
                )
            return self._llama3(self._factors, theta, head, original)
        if kind == "none" or factor in (0.0, 1.0):
            return {"rope_type": "default", "rope_theta": theta}
        out = {"rope_type": kind, "rope_theta": theta, "factor": factor}
        if kind == "yarn":
            out["original_max_position_embeddings"] = original
            for name in ("beta_fast", "beta_slow"):
                if (value := get(f"scaling.yarn_{name}")) is not None:
                    out[name] = value
        for key in ("scaling.attn_factor", "scaling.yarn_attn_factor", "scaling.yarn_ext_factor"):
            if get(key, 1.0) not in (0.0, 1.0):
                raise CheckpointError(f"{self.name}: metadata '{arch}.rope.{key}' is not implemented")
        return out

    def _llama3(self, divisors: np.ndarray, theta: float, head: int, original: int | None) -> dict[str, Any]:
        """The llama3 parameters whose frequency divisors are `rope_freqs.weight`.

        The file keeps only the divisors. The largest is the factor; the other three are those of every
        published Llama 3.1 and 3.2 model, accepted only if they give back the divisors.
        """
        low, high, original = 1.0, 4.0, original or 8192
        factor = float(divisors.max())
        wavelength = 2 * math.pi * float(theta) ** (np.arange(0, head, 2) / head)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
            raise CheckpointError(
                f"{self.name}: tensor 'rope_freqs.weight' is not the llama3 scaling with low_freq_factor 1, "
                f"high_freq_factor 4 and original_max_position_embeddings {original}: not implemented"
            )
        return {
            "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original,
        }  # fmt: skip


_SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_OTHER = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "vocab_size", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
)  # fmt: skip

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """The HF name of a GGUF tensor; an unknown one stays as it is and is then reported as extra."""
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found and found[2] in _PARTS:
        return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"
    return _WHOLE.get(name, name)


def _decimal(value: Any) -> Any:
    """A float32 as the shortest decimal that gives it: 1e-5, not 9.99999974e-6, as config.json says it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (even, odd) pairs, as GGUF keeps Llama's, back to first half, second half."""
    split = x.reshape(heads, -1, 2, *x.shape[1:])
    out = empty((heads, 2, split.shape[1], *x.shape[1:]), x.dtype)
    out[...] = np.swapaxes(split, 1, 2)
    return out.reshape(x.shape)


def _dequantise(raw: np.ndarray, stored: _Tensor) -> np.ndarray:
    plain = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(stored.kind)
    if plain is not None:
        out = empty(stored.shape, plain)
        out[...] = raw.reshape(-1).view(plain).reshape(stored.shape)
        return out
    # The package's own entry point takes 16 rows at a time; cache-sized pieces are 2-4 times faster.
    kind = getattr(_package().quants, stored.kind)
    blocks = raw.reshape(-1, kind.type_size)
    out = empty((len(blocks), kind.block_size), np.float32)
    step = _PIECE // kind.block_size
    for i in range(0, len(blocks), step):
        out[i : i + step] = kind.dequantize_blocks(blocks[i : i + step])
    return out.reshape(stored.shape)


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise CheckpointError("GGUF files need the gguf package: pip install 'kvjax[gguf]'") from error
    return gguf
