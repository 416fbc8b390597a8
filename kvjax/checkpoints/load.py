"""`load`: from a directory, GGUF file, hub id or registered name to a ready `LM`."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.checkpoints import gguf, hf, llama, pull, qwen
from kvjax.checkpoints.table import CheckpointError, Row, Source, expand, leaves, match
from kvjax.config import ConfigError, ModelConfig
from kvjax.lm import LM
from kvjax.models import build
from kvjax.resources import packaged_models
from kvjax.tokenizer import Tokenizer, TokenizerError
from kvjax.typing import Params

_log = logging.getLogger("kvjax")
_TABLES = {"llama": llama.table, "qwen2": qwen.table, "qwen3": qwen.table}


@dataclasses.dataclass(frozen=True)
class Located:
    """Where a source was found: a directory or a GGUF file, and under which identity."""

    path: Path
    id: str
    revision: str | None = None


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint with everything but its weights read. `readable` are dtypes its tensors may have."""

    config: ModelConfig
    source: Source
    tokenizer: Tokenizer | None
    readable: Sequence[str]


def load(
    source: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    progress: bool | None = None,
    attention: str | None = None,
    cache_dir: str | Path | None = None,
) -> LM:
    """Load a model for use.

    Args:
      source: a Hugging Face directory, a `.gguf` file, a registered name (of a model that ships with kvjax, or is
        fetched on first use) or a hub id `organisation/name`. A path that exists wins over a hub id; a registered
        name that is also a path is refused (write `./name` for the path).
      mesh: (`data`, `model`) mesh the parameters are laid out on; None is one device.
      dtype: "float32" or "bfloat16"; None is float32 on CPU and the checkpoint's own elsewhere (bfloat16 for
        float16 and quantised ones), reported through the `kvjax` logger.
      revision: commit, branch or tag of a hub id.
      progress: a bar on stderr; None shows it on a terminal only.
      attention: name of an attention backend; None takes the first that fits.
      cache_dir: where registered models are kept (default ~/.cache/kvjax/models).

    Raises:
      CheckpointError: the source is not found or damaged, tensors are missing, extra, of wrong shape or
        dtype or not finite, or the tokenizer does not fit. All faults of a file are named at once.
      ConfigError: a configuration that is not implemented; names the field.
    """
    marks = [time.perf_counter()]
    located = locate(source, revision=revision, cache_dir=cache_dir)
    marks.append(time.perf_counter())
    opened = open_checkpoint(located.path)
    config = opened.config
    marks.append(time.perf_counter())
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    dtype = dtype or default_dtype(config.dtype, platform)
    model = build(config, mesh=mesh, dtype=dtype, attention=attention)
    rows = table_rows(config, model.rules.kv_heads)
    match(rows, opened.source, tied=config.tie, readable=opened.readable)
    abstract = dict(zip(model.names, model.abstract(), strict=True))
    agree(rows, abstract)
    marks.append(time.perf_counter())
    _log.info("%s: %s in %s on %s", located.id, config.model_type, dtype, platform)
    placed = place(rows, opened.source, dtype, abstract, progress, located.id)
    params: Params = tuple(placed[name] for name in model.names)
    marks.append(time.perf_counter())
    phases = ("find", "open", "build", "weights")
    spent = (f"{n} {b - a:.2f} s" for n, a, b in zip(phases, marks, marks[1:], strict=False))
    _log.info("%s: %s", located.id, ", ".join(spent))
    return LM(model, params, opened.tokenizer, config, located.id, located.revision)


def locate(
    source: str | os.PathLike[str], *, revision: str | None = None, cache_dir: str | Path | None = None
) -> Located:
    """Find `source`, fetching registered names and hub ids. See `load` for the rules and the errors."""
    text = os.fspath(source)
    path = Path(text).expanduser()
    packaged = packaged_models() if isinstance(source, str) else {}
    named = isinstance(source, str) and (text in packaged or text in pull.registry())
    if named and path.exists():
        raise CheckpointError(
            f"{text!r} is a registered model and also a path here; write ./{text} for the path"
        )
    if named or path.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r}: only a hub id has revisions, {text!r} is not one")
        if named:
            return Located(packaged.get(text) or pull.pull(text, cache_dir), text)
        if path.is_file() and path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a .gguf file; for safetensors give the directory")
        return Located(path, text)
    if text.startswith((".", "~", "/")) or not isinstance(source, str) or path.suffix == ".gguf":
        raise CheckpointError(f"{path}: no such file or directory")
    if hf.is_hub_id(text):
        found, commit = hf.download(text, revision)
        return Located(found, text, commit)
    raise CheckpointError(
        f"{text!r} is neither a directory or .gguf file here, nor a registered model "
        f"({', '.join(sorted(pull.registry()))}), nor a hub id of the form organisation/name"
    )


def open_checkpoint(path: Path) -> Opened:
    """Read configuration, tokenizer and tensor headers of a directory or GGUF file; no weights.

    Raises: as `load`.
    """
    source: Source
    readable: Sequence[str]
    try:
        if path.is_file():
            file = gguf.File(path)
            config, source, readable = file.config(), file, gguf.READABLE
            tokenizer = Tokenizer.from_gguf(file.metadata, str(path))
        else:
            config = ModelConfig.from_hf(hf.read_json(path / "config.json"))
            config = _end(config, hf.generation_eos(path))
            source, readable = hf.Directory(path), hf.READABLE
            tokenizer = Tokenizer.from_directory(path)
    except (ConfigError, TokenizerError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    if tokenizer is None:
        _log.info("%s: no tokenizer; only token ids can be given", path)
    else:
        if tokenizer.vocab > config.vocab:
            raise CheckpointError(
                f"{path}: the tokenizer has ids up to {tokenizer.vocab - 1}, the model's vocabulary only "
                f"{config.vocab} entries"
            )
        config = _end(config, tokenizer.eos)
    if outside := [i for i in config.eos if i >= config.vocab]:
        raise CheckpointError(
            f"{path}: end-of-text ids {outside} lie outside the vocabulary of {config.vocab}"
        )
    return Opened(config, source, tokenizer, readable)


def table_rows(config: ModelConfig, stored: int | None = None) -> tuple[Row, ...]:
    """The table of `config` with `stored` KV heads (default K), one row per leaf."""
    return expand(_TABLES[config.model_type](config, stored), config.num_layers)


def default_dtype(published: str, platform: str) -> str:
    """float32 on CPU, elsewhere what was published, float16 in bfloat16."""
    if platform == "cpu":
        return "float32"
    return {"float16": "bfloat16"}.get(published, published)


def _end(config: ModelConfig, ids: Sequence[int]) -> ModelConfig:
    return dataclasses.replace(config, eos=tuple(sorted({*config.eos, *ids})))


def agree(rows: Sequence[Row], abstract: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Whether table and model name the same leaves and shapes; that they do is this project's business."""
    ours, wanted = {row.ours: row.shape for row in rows}, {n: tuple(s.shape) for n, s in abstract.items()}
    if ours != wanted:
        differ = sorted(n for n in {*ours, *wanted} if ours.get(n) != wanted.get(n))
        raise AssertionError(f"checkpoint table and model disagree on {differ}")


def place(
    rows: Sequence[Row],
    source: Source,
    dtype: str,
    abstract: dict[str, jax.ShapeDtypeStruct],
    progress: bool | None,
    label: str,
) -> dict[str, jax.Array]:
    """Leaves on their devices. Each is waited for before the next is read: the host holds one at a time."""
    from tqdm import tqdm

    hide = not (sys.stderr.isatty() if progress is None else progress)
    placed = {}
    with tqdm(total=len(rows), desc=f"{label} ({dtype})", unit="leaf", disable=hide, leave=False) as bar:
        for row, leaf in leaves(rows, source, dtype):
            placed[row.ours] = jax.block_until_ready(_put(leaf, abstract[row.ours].sharding))
            bar.update()
    return placed


def _put(leaf: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(leaf)
    # Each process hands over only what its own devices hold; no program is compiled.
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
