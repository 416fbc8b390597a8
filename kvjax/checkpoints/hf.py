"""Hugging Face checkpoints: directories of safetensors files, and hub ids.

The safetensors header is read and validated here, so that a truncated or damaged file is refused with the
name of the tensor before any weight is used, and one tensor at a time is read from disk.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.table import DTYPES, CheckpointError, Info, empty

# safetensors' dtype names: bytes per element, and our name for those that weights may have.
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
READABLE = tuple(_FLOATS)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
_UNWANTED = ("consolidated*", "*/*")  # second copies of the weights in other layouts


@dataclasses.dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file with absolute byte ranges.

    Raises:
      CheckpointError: not a whole, consistent safetensors file; names the file and the tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{path}: the header claims {length} bytes, the file has {size}: truncated or not safetensors"
            )
        raw = f.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {_short(error)}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not an object")
    header.pop("__metadata__", None)
    base = 8 + length
    problems: list[str] = []
    entries: dict[str, _Entry] = {}
    for name, value in header.items():
        try:
            entries[name] = _entry(value, base)
        except CheckpointError as error:
            problems.append(f"tensor {name!r}: {error}")
    problems += _layout(entries, base, size)
    if problems:
        raise CheckpointError.collect(str(path), problems)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"{next(k for k in names if names.count(k) > 1)!r} appears twice")
    return out


def _short(error: object) -> str:
    return str(error)[:200]


def _entry(value: Any, base: int) -> _Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError("its header entry needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise CheckpointError(f"unknown dtype {_short(dtype)!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(f"{_short(numbers)} is not a list of sizes")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"data_offsets {offsets} are not a range")
    needed = math.prod(shape) * SIZES[dtype]
    if needed != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{dtype} {shape} needs {needed} bytes, data_offsets hold {offsets[1] - offsets[0]}"
        )
    return _Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _layout(entries: Mapping[str, _Entry], base: int, size: int) -> list[str]:
    """Tensors must follow each other without gap or overlap up to the end of the file."""
    problems, at, before = [], base, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            problems.append(f"tensor {name!r}: ends at byte {entry.end}, the file at {size}: truncated")
        elif entry.begin < at:
            problems.append(f"tensor {name!r}: overlaps {before!r}")
        elif entry.begin > at:
            problems.append(f"tensor {name!r}: {entry.begin - at} unexplained bytes before it")
        at, before = max(at, entry.end), name
    if not problems and at != size:
        problems.append(f"{size - at} unexplained bytes after the last tensor")
    return problems


class Directory:
    """The tensors of a local Hugging Face directory (a `kvjax.checkpoints.table.Source`).

    Raises:
      CheckpointError: no safetensors, a missing shard, an index that contradicts its files, a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self.tensors: dict[str, Info] = {}
        self._at: dict[str, tuple[Path, _Entry]] = {}
        problems: list[str] = []
        for file, expected in self._files().items():
            try:
                entries = read_header(path / file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for name in sorted(expected - entries.keys()) if expected is not None else ():
                problems.append(f"{file}: tensor {name!r}: {INDEX} places it here, the file does not hold it")
            for name, entry in entries.items():
                if expected is not None and name not in expected:
                    problems.append(f"{file}: tensor {name!r}: not in {INDEX}")
                self._at[name] = (path / file, entry)
                self.tensors[name] = Info(entry.shape, entry.dtype, file, name)
        if problems:
            raise CheckpointError.collect(self.name, problems)

    def _files(self) -> dict[str, set[str] | None]:
        """Shard file -> the tensors the index places there (None without an index)."""
        single, index = (self.path / SINGLE).exists(), (self.path / INDEX).exists()
        if single and index:
            raise CheckpointError(f"{self.name}: holds both {SINGLE} and {INDEX}; remove the one not meant")
        if single:
            return {SINGLE: None}
        if not index:
            raise CheckpointError(self._explain())
        weights = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(f, str) for f in weights.values()):
            raise CheckpointError(f"{self.path / INDEX}: weight_map is not an object of file names")
        files: dict[str, set[str] | None] = {}
        problems = []
        for file in sorted(set(weights.values())):
            if Path(file).name != file:
                problems.append(f"{INDEX}: {file!r} is not a plain file name")
            elif not (self.path / file).is_file():
                problems.append(f"{file}: missing shard, named by {INDEX}")
            files[file] = {name for name, f in weights.items() if f == file}
        if problems:
            raise CheckpointError.collect(self.name, problems)
        return files

    def _explain(self) -> str:
        names = sorted(p.name for p in self.path.iterdir())
        pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        ggufs = [n for n in names if n.endswith(".gguf")]
        if pickles:
            return (
                f"{self.path / pickles[0]}: refused: it is a Python pickle, and opening a pickle runs "
                "whatever code its author put in. Convert it where you trust it (in transformers, "
                "from_pretrained then save_pretrained writes safetensors) or take a safetensors revision."
            )
        if ggufs:
            return f"{self.name}: holds {', '.join(ggufs)}; give the path of the GGUF file itself"
        return f"{self.name}: neither {SINGLE} nor {INDEX} is there"

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as an array of its own dtype that the caller owns."""
        path, entry = self._at[name]
        out = empty(entry.shape, DTYPES[_FLOATS[entry.dtype]])
        with path.open("rb") as f:
            f.seek(entry.begin)
            got = f.readinto(out.reshape(-1).view(np.uint8).data)
        if got != out.nbytes:
            raise CheckpointError(f"{path}: tensor {name!r}: {got} of {out.nbytes} bytes left: truncated")
        return out


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file when it is anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {_short(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def generation_eos(directory: Path) -> tuple[int, ...]:
    """End-of-text ids `generation_config.json` names; empty when there is no such file."""
    path = directory / "generation_config.json"
    if not path.exists():
        return ()
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{path}: eos_token_id: expected ids, got {_short(value)}")
    return tuple(ids)


def download(repo: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Fetch a hub repository's weights, configuration and tokenizer into the hub cache.

    `HF_HUB_OFFLINE`, `HF_HOME` and the tokens of huggingface_hub apply as everywhere else.
    Returns the snapshot directory and its commit.

    Raises:
      CheckpointError: not found, no access, or offline and not cached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
            )
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(f"{repo}{at}: cannot be fetched from the hub: {_short(error)}") from error
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{repo}: has no safetensors; pickled weights (.bin) are not read, because opening a pickle runs "
            "whatever code its author put in. Take a revision with safetensors or convert it yourself."
        )
    return path, path.name if path.parent.name == "snapshots" else revision


def is_hub_id(text: str) -> bool:
    """Whether `text` looks like `organisation/name`."""
    parts = text.split("/")
    return len(parts) == 2 and all(p and not p.startswith((".", "~")) for p in parts)
