"""Write an `LM` as a Hugging Face directory that transformers reads back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from kvjax.checkpoints.hf import INDEX, SINGLE, SIZES
from kvjax.checkpoints.load import table_rows
from kvjax.checkpoints.table import DTYPES, CheckpointError, Row, cast
from kvjax.lm import LM
from kvjax.typing import Params

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


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
    dtype = dtype or str(lm.params[0].dtype)
    if dtype not in NAMES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(NAMES)}")
    with whole(directory, lm.params) as part:
        _weights(lm, part, dtype, max_shard_bytes)
        config = dataclasses.replace(lm.config, dtype=dtype)
        write_json(part / "config.json", config.to_hf())
        ends = {"bos_token_id": config.bos, "eos_token_id": list(config.eos)}
        write_json(part / "generation_config.json", {k: v for k, v in ends.items() if v not in (None, [])})
        if lm.tokenizer is not None:
            lm.tokenizer.save(part)
    return Path(directory).expanduser()


@contextlib.contextmanager
def whole(directory: str | Path, params: Params) -> Iterator[Path]:
    """A directory to write into, which becomes `directory` at the end, or leaves no trace.

    Raises:
      CheckpointError: `directory` exists and is not empty, or `params` are spread over several processes.
    """
    directory = Path(directory).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists; nothing is overwritten")
    if not all(p.is_fully_addressable for p in params):
        raise CheckpointError("the parameters live on several processes; load on one process to export")
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.", suffix=".part"))
    try:
        part.chmod(0o755)
        yield part
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


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
        write_json(
            part / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
        )


def _write_shard(path: Path, rows: Sequence[Row], leaf: dict[str, jax.Array], dtype: str) -> int:
    """One safetensors file, a leaf at a time; returns the bytes of its tensors."""

    def parts(row: Row) -> list[np.ndarray]:
        split = row.op.split(np.asarray(leaf[row.ours]), row.shapes)
        return [cast(tensor, DTYPES[dtype]) for tensor in split]

    named = [
        (name, NAMES[dtype], shape) for row in rows for name, shape in zip(row.hf, row.shapes, strict=True)
    ]
    return write_safetensors(path, named, (tensor for row in rows for tensor in parts(row)))


def write_safetensors(
    path: Path, named: Sequence[tuple[str, str, tuple[int, ...]]], tensors: Iterable[np.ndarray]
) -> int:
    """A file of `tensors`, whose names, dtypes (as safetensors calls them) and shapes are known beforehand, so that
    one at a time need exist; returns their bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind, shape in named:
        end = at + math.prod(shape) * SIZES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            f.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return at


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
