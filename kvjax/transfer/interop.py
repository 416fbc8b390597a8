"""Caches in other programs' forms: per-layer arrays, safetensors files, transformers' `DynamicCache`.

All of them are [B, K, S, H] per layer, keys rotated, as here; only the valid slots travel.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from kvjax.cache import KVCache

INDEX = "cache.json"


class InteropError(ValueError):
    """A cache that cannot be taken over; the message names the file, layer or field."""


def to_pairs(cache: KVCache) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer (key, value), each [B, K, T, H] with T the valid slots.

    Raises:
      InteropError: rows of different lengths (none of these forms can say so).
    """
    filled = np.unique(np.asarray(cache.filled))
    if len(filled) != 1:
        raise InteropError(f"rows hold {sorted(filled.tolist())} tokens; export rows of one length at a time")
    end = int(filled[0])
    return [
        (np.asarray(k[:, :, :end]), np.asarray(v[:, :, :end])) for k, v in zip(cache.k, cache.v, strict=True)
    ]


def from_pairs(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, size: int, dtype: Any = None) -> KVCache:
    """A cache of `size` slots that holds these rows; dtype None keeps theirs.

    Raises:
      InteropError: no layers, layers of different shapes, values that are not finite, or more tokens than slots.
    """
    if not len(pairs):
        raise InteropError("no layers")
    shape = np.shape(pairs[0][0])
    slabs: tuple[list[Any], list[Any]] = ([], [])
    for layer, pair in enumerate(pairs):
        for name, slab, array in zip(("key", "value"), slabs, pair, strict=True):
            x = np.asarray(array)
            if x.shape != shape or x.ndim != 4:
                raise InteropError(f"layer {layer}: {name} has shape {x.shape}, layer 0's key {shape}")
            if not np.isfinite(x.astype(np.float32)).all():
                raise InteropError(f"layer {layer}: {name} is not finite")
            if shape[2] > size:
                raise InteropError(f"{shape[2]} tokens do not fit {size} slots")
            wide = np.zeros((*shape[:2], size, shape[3]), x.dtype)
            wide[:, :, : shape[2]] = x
            slab.append(jnp.asarray(wide, dtype))
    return KVCache(tuple(slabs[0]), tuple(slabs[1]), jnp.full((shape[0],), shape[2], jnp.int32))


def save(cache: KVCache, directory: str | Path, **about: Any) -> Path:
    """One safetensors file a layer (`layer-00000.safetensors`: key, value) and cache.json, whole or not at all.

    Args:
      about: what else cache.json says, JSON values (model, revision, tokens).

    Raises:
      InteropError: `directory` exists, or see `to_pairs`.
    """
    directory = Path(directory)
    if directory.exists():
        raise InteropError(f"{directory}: exists; nothing is overwritten")
    pairs = to_pairs(cache)
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.", suffix=".part"))
    try:
        part.chmod(0o755)
        for i, (key, value) in enumerate(pairs):
            arrays = {"key": np.ascontiguousarray(key), "value": np.ascontiguousarray(value)}
            safetensors.numpy.save_file(arrays, part / f"layer-{i:05d}.safetensors")
        facts = {
            "layers": len(pairs),
            "shape": list(pairs[0][0].shape),
            "axes": "batch, kv_heads, tokens, head_dim",
        }
        (part / INDEX).write_text(json.dumps({**about, **facts}, indent=1) + "\n", "utf-8")
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return directory


def load(directory: str | Path, *, size: int, dtype: Any = None) -> tuple[KVCache, dict[str, Any]]:
    """What `save` wrote: (cache, cache.json).

    Raises:
      InteropError: a file that is missing or damaged, or see `from_pairs`.
    """
    directory = Path(directory)
    try:
        about = json.loads((directory / INDEX).read_text("utf-8"))
        pairs = []
        for i in range(about["layers"]):
            layer = safetensors.numpy.load_file(directory / f"layer-{i:05d}.safetensors")
            pairs.append((layer["key"], layer["value"]))
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise InteropError(f"{directory}: not a stored cache: {type(error).__name__}: {error}") from None
    return from_pairs(pairs, size=size, dtype=dtype), about


def to_dynamic_cache(cache: KVCache) -> Any:
    """transformers' `DynamicCache` with the same rows (float32). Needs torch and transformers.

    Raises:
      InteropError, ImportError.
    """
    import torch
    from transformers import DynamicCache

    made = DynamicCache()
    for layer, (key, value) in enumerate(to_pairs(cache)):
        rows = (torch.from_numpy(np.array(x, np.float32)) for x in (key, value))
        made.update(*rows, layer)
    return made


def from_dynamic_cache(cache: Any, *, size: int, dtype: Any = None) -> KVCache:
    """The rows of transformers' `DynamicCache`, in a cache of `size` slots.

    Raises:
      InteropError: see `from_pairs`, or a layer that is not full attention.
    """
    pairs = []
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "is_sliding", False):
            raise InteropError(f"layer {i}: a sliding-window layer keeps part of its rows only")
        pairs.append((layer.keys.float().numpy(), layer.values.float().numpy()))
    return from_pairs(pairs, size=size, dtype=dtype)
