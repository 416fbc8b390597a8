"""Write an `LM` as a Hugging Face directory that transformers reads back."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from kvjax.checkpoints.hf import INDEX, SINGLE
from kvjax.checkpoints.load import table_rows
from kvjax.checkpoints.table import DTYPES, CheckpointError, Row, cast
from kvjax.lm import LM

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def save_hf(
    lm: LM, directory: str | Path, *, dtype: str | None = None, max_shard_bytes: int = 5_000_000_000
) -> Path:
    """Write config, weights (sharded above `max_shard_bytes`), tokenizer and generation config.

    Everything is written beside `directory` first and renamed at the end, so it is whole or absent.

    Args:
      dtype: of the weights in the file; None keeps the parameters' own.

    Raises:
      CheckpointError: `directory` exists and is not empty, an unknown dtype, or parameters spread over
        several processes.
    """
    directory = Path(directory).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists; nothing is overwritten")
    dtype = dtype or str(lm.params[0].dtype)
    if dtype not in _NAMES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(_NAMES)}")
    if not all(p.is_fully_addressable for p in lm.params):
        raise CheckpointError("the parameters live on several processes; load on one process to export")
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.", suffix=".part"))
    try:
        part.chmod(0o755)
        _weights(lm, part, dtype, max_shard_bytes)
        config = dataclasses.replace(lm.config, dtype=dtype)
        _write_json(part / "config.json", config.to_hf())
        ends = {"bos_token_id": config.bos, "eos_token_id": list(config.eos)}
        _write_json(part / "generation_config.json", {k: v for k, v in ends.items() if v not in (None, [])})
        if lm.tokenizer is not None:
            lm.tokenizer.save(part)
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return directory


def _weights(lm: LM, part: Path, dtype: str, limit: int) -> None:
    rows = table_rows(lm.config, lm.model.rules.kv_heads)
    leaf = dict(zip(lm.model.names, lm.params, strict=True))
    size = DTYPES[dtype].itemsize
    shards: list[list[Row]] = [[]]
    filled = 0
    for row in rows:
        need = sum(math.prod(shape) for shape in row.shapes) * size
        if shards[-1] and filled + need > limit:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += need
    count, total = len(shards), 0
    place: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = SINGLE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        total += _write_shard(part / name, shard, leaf, dtype)
        place |= {hf: name for row in shard for hf in row.hf}
    if count > 1:
        _write_json(
            part / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
        )


def _write_shard(path: Path, rows: Sequence[Row], leaf: dict[str, jax.Array], dtype: str) -> int:
    """One safetensors file, a leaf at a time; returns the bytes of its tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for row in rows:
        for name, shape in zip(row.hf, row.shapes, strict=True):
            end = at + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for row in rows:
            for tensor in row.op.split(np.asarray(leaf[row.ours]), row.shapes):
                f.write(cast(tensor, DTYPES[dtype]).reshape(-1).view(np.uint8).data)
    return at


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
