"""Load a DFlash drafter for a target, and write one in the format it was published in."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np

from kvjax.checkpoints import dflash, hf
from kvjax.checkpoints.export import NAMES, whole, write_json, write_safetensors
from kvjax.checkpoints.load import agree, locate, place
from kvjax.checkpoints.table import DTYPES, CheckpointError, cast, match
from kvjax.config import ConfigError
from kvjax.lm import LM, Drafter
from kvjax.models.drafter import build_drafter

_INTEGERS = {"BOOL": np.bool_, "U8": np.uint8, "I32": np.int32, "I64": np.int64}


def is_drafter(source: str | os.PathLike[str], *, revision: str | None = None) -> bool:
    """Whether `source` (see `load`) holds a block drafter and not a model."""
    path = locate(source, revision=revision).path
    return path.is_dir() and dflash.is_drafter(hf.read_json(path / "config.json"))


def load_drafter(
    source: str | os.PathLike[str], target: LM, *, revision: str | None = None, progress: bool | None = None
) -> Drafter:
    """Load a DFlash drafter: z-lab's format, or that of vllm-project/speculators.

    Args:
      source: as for `load`, but for GGUF files. target: the model it drafts for, whose mesh and dtype it gets.

    Raises:
      CheckpointError, ConfigError: damaged, of a variant that is not implemented, or made for another target; names
        the file and each tensor or field.
    """
    located = locate(source, revision=revision)
    path = located.path
    if path.is_file():
        raise CheckpointError(f"{path}: drafters are read from directories, not from GGUF files")
    try:
        config = dflash.from_hf(hf.read_json(path / "config.json"))
        model = build_drafter(config, target.model)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    files = hf.Directory(path)
    ids = _token_ids(files, config.head, config.model.vocab)
    _drop_shared(files, target, own_head=config.head is not None)
    rows = dflash.rows(config, model.rules.kv_heads)
    match(rows, files, tied=False, readable=hf.READABLE)
    abstract = dict(zip(model.names, model.abstract(), strict=True))
    agree(rows, abstract)
    placed = place(rows, files, str(model.dtype), abstract, progress, located.id)
    params = tuple(placed[name] for name in model.names)
    if ids is not None:
        ids = jax.device_put(ids, model.rules.sharding(None))
    return Drafter(model, params, ids, located.id, located.revision)


def save_drafter(drafter: Drafter, directory: str | Path, *, dtype: str | None = None) -> Path:
    """Write config.json and model.safetensors as they are published: z-lab's format, or speculators' with a head of
    its own. The directory is whole or absent.

    Raises:
      CheckpointError: `directory` exists and is not empty, an unknown dtype, or parameters spread over processes.
    """
    model = drafter.model
    config = model.drafter
    dtype = dtype or str(drafter.params[0].dtype)
    if dtype not in NAMES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(NAMES)}")
    leaf = dict(zip(model.names, drafter.params, strict=True))
    kind, target = NAMES[dtype], DTYPES[dtype]
    rows = dflash.rows(config, model.rules.kv_heads)
    named = [(name, kind, shape) for row in rows for name, shape in zip(row.hf, row.shapes)]
    maps = []
    if drafter.ids is not None:
        ids = np.asarray(drafter.ids, np.int64)
        t2d = np.isin(np.arange(config.model.vocab), ids)
        maps = [ids - np.arange(len(ids)), t2d]
        named += [("d2t", "I64", ids.shape), ("t2d", "BOOL", t2d.shape)]
    with whole(directory, drafter.params) as part:
        published = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
        write_json(part / "config.json", dflash.to_hf(published))
        weights = (
            cast(tensor, target)
            for row in rows
            for tensor in row.op.split(np.asarray(leaf[row.ours]), row.shapes)
        )
        write_safetensors(part / hf.SINGLE, named, (x for some in (weights, maps) for x in some))
    return Path(directory).expanduser()


def _drop_shared(files: hf.Directory, target: LM, *, own_head: bool) -> None:
    """Removes from `files` the target's embedding and head, which some files bring along.

    Raises:
      CheckpointError: what they bring is not the target's.
    """
    leaf = dict(zip(target.model.names, target.params, strict=True))
    shared = {"embed_tokens.weight": leaf["embed"]}
    if not own_head:
        shared["lm_head.weight"] = leaf.get("lm_head", leaf["embed"])
    for name, mine in shared.items():
        if name in files.tensors:
            if not np.array_equal(cast(files.read(name), np.asarray(mine).dtype), np.asarray(mine)):
                raise CheckpointError(
                    f"{files.tensors[name].file}: tensor {name!r} is not that of the target {target.id}, with which a"
                    " drafter shares it"
                )
            del files.tensors[name]


def _token_ids(files: hf.Directory, head: int | None, vocab: int) -> np.ndarray | None:
    """[head] int32: the token of each row of the drafter's own head; removes d2t and t2d from `files`.

    Raises:
      CheckpointError: they are missing, not wanted, or contradict each other.
    """
    if head is None:
        # Equal sizes: the head is the target's, whatever the file brings.
        return None
    d2t, t2d = (_integers(files, name) for name in ("d2t", "t2d"))
    for name, found, want in (("d2t", d2t, head), ("t2d", t2d, vocab)):
        if found.shape != (want,):
            raise CheckpointError(
                f"{files.name}: tensor {name!r}: shape {list(found.shape)}, the configuration needs [{want}]"
            )
    ids = np.arange(head) + d2t.astype(np.int64)
    kept = np.flatnonzero(t2d)
    if not np.array_equal(np.sort(ids), kept):
        raise CheckpointError(
            f"{files.name}: tensors 'd2t' and 't2d' contradict each other: row i of the head is token i + d2t[i], and"
            " t2d marks exactly these"
        )
    return ids.astype(np.int32)


def _integers(files: hf.Directory, name: str) -> np.ndarray:
    info = files.tensors.pop(name, None)
    if info is None:
        raise CheckpointError(f"{files.name}: tensor {name!r}: missing (draft_vocab_size needs it)")
    if info.dtype not in _INTEGERS:
        raise CheckpointError(f"{info.file}: tensor {name!r}: dtype {info.dtype} holds no integers")
    entry = hf.read_header(files.path / info.file)[name]
    with (files.path / info.file).open("rb") as f:
        f.seek(entry.begin)
        return np.frombuffer(f.read(entry.end - entry.begin), _INTEGERS[info.dtype]).reshape(entry.shape)
