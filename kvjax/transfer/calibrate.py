"""One streaming pass of calibration text through both models, into moments. Resumable, in bounded memory."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.lm import LM
from kvjax.models import Model
from kvjax.transfer.geometry import Geometry, content
from kvjax.transfer.moments import (
    CalibrationError,
    Moments,
    Statistics,
    abstract,
    memory,
    statistics,
    update,
)
from kvjax.typing import Array, Float, Int, Params, Texts

log = logging.getLogger("kvjax")


def blocks(texts: Texts, lm: LM, *, length: int, limit: int | None = None) -> Iterator[np.ndarray]:
    """[length] int32 token blocks, each from the start of one text (special tokens in front as the tokenizer puts
    them); texts that are shorter are left out. At most `limit` blocks.

    A cache is mapped from position 0, so it is fitted on texts that begin there.
    """
    if lm.tokenizer is None:
        raise CalibrationError(f"{lm.id} has no tokenizer")
    found = 0
    for i in range(len(texts)):
        if found == limit:
            return
        ids = lm.tokenizer.encode(texts[i])
        if len(ids) >= length:
            found += 1
            yield np.asarray(ids[:length], np.int32)


def same_tokens(source: LM, target: LM) -> None:
    """
    Raises:
      CalibrationError: the two models do not read the same token ids.
    """
    a, b = (lm.tokenizer.hash if lm.tokenizer else None for lm in (source, target))
    if a is None or a != b:
        raise CalibrationError(
            f"{source.id} and {target.id} have different tokenizers; rows of their caches do not correspond"
        )


@functools.partial(jax.jit, static_argnums=0)
def features(model: Model, params: Params, ids: Int[Array, "B T"]) -> Float[Array, "B T L 2 K H"]:
    """Content features of whole texts: what the cache holds after reading `ids`."""
    return _read(model, params, ids, ())[0]


@functools.partial(jax.jit, static_argnums=(0, 3))
def features_and_hidden(
    model: Model, params: Params, ids: Int[Array, "B T"], entering: int
) -> tuple[Float[Array, "B T L 2 K H"], Float[Array, "B T D"]]:
    """(`features`, the hidden state that enters layer `entering` >= 1)."""
    found, state = _read(model, params, ids, (entering - 1,))
    assert state is not None
    return found, state


def _read(
    model: Model, params: Params, ids: jax.Array, taps: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    pos = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    out = model.forward(params, ids, pos, logits=False, taps=taps)
    return content(out.rows, pos, Geometry.of(model.config)), out.taps


def collect(
    source: LM, target: LM, texts: Texts, *, length: int = 512, batch: int = 4, sequences: int = 200,
    every: int = 1, joint: bool = True, hidden: int | None = None, keep: Path | None = None,
    progress: bool | None = None,
) -> Statistics:  # fmt: skip
    """Moments of both models' caches over `sequences` texts of `length` tokens.

    Args:
      every: take one token in so many (neighbouring tokens tell much the same).
      hidden: also take in the hidden state that enters this target layer (`kvjax.transfer.fit.fit_hidden`).
      keep: a file the moments are saved in about once a minute and at the end; a pass that was interrupted goes on
        from it, and a finished one is read back. It is refused if it was made with other models or options.

    Raises:
      CalibrationError: different tokenizers, no text of `length` tokens, rows that are not finite (over 1 %), a
        hidden state there is not.
    """
    same_tokens(source, target)
    geometries = Geometry.of(source.config), Geometry.of(target.config)
    how: dict[str, Any] = {
        "joint": joint,
        "hidden": None if hidden is None else (hidden, target.config.hidden),
    }
    size = memory(*geometries, **how)
    log.info(
        "moments of %s and %s take %.2f GB, twice that while they are updated",
        source.id,
        target.id,
        size / 1e9,
    )
    asked = {"length": length, "batch": batch, "every": every, "joint": joint}
    asked |= {} if hidden is None else {"hidden": hidden}
    tag = identity(source, target, texts=texts, **asked)
    moments, done = _restore(keep, tag, abstract(*geometries, **how))
    weight = jnp.broadcast_to((jnp.arange(length) % every == every - 1).astype(jnp.float32), (batch, length))
    bar = tqdm(
        total=sequences, initial=min(done * batch, sequences), unit="text", desc="moments",
        disable=not sys.stderr.isatty() if progress is None else not progress,
    )  # fmt: skip
    saved, group, taken = time.monotonic(), [], 0
    with bar:
        for block in blocks(texts, target, length=length, limit=sequences):
            group.append(block)
            if len(group) < batch:
                continue
            ids, group, taken = jnp.asarray(np.stack(group)), [], taken + 1
            if taken <= done:
                continue
            x, state = features(source.model, source.params, ids), None
            if hidden is None:
                y = features(target.model, target.params, ids)
            else:
                y, state = features_and_hidden(target.model, target.params, ids, hidden)
            moments = update(moments, x, y, weight, state)
            bar.update(batch)
            if keep is not None and time.monotonic() - saved > 60:
                _save(keep, tag, moments, taken)
                saved = time.monotonic()
    if not taken:
        raise CalibrationError(f"fewer than {batch} texts have {length} tokens")
    if keep is not None and taken > done:
        _save(keep, tag, moments, taken)
    return statistics(moments, *geometries)


def identity(source: LM, target: LM, *, texts: Texts, **options: Any) -> str:
    """JSON of what decides the moments."""
    digest = hashlib.sha256(str(len(texts)).encode())
    for i in {0, len(texts) // 2, len(texts) - 1}:
        digest.update(texts[i].encode())
    models = {
        name: {
            "id": lm.id,
            "config": hashlib.sha256(repr(lm.config).encode()).hexdigest(),
            "weights": fingerprint(lm),
        }
        for name, lm in (("source", source), ("target", target))
    }
    return json.dumps({**models, **options, "texts": digest.hexdigest()}, sort_keys=True)


_FINGERPRINTS: weakref.WeakKeyDictionary[LM, str] = weakref.WeakKeyDictionary()


def fingerprint(lm: LM) -> str:
    """A hash of a sample of every weight, the same on any device and mesh: tells two checkpoints apart. Taken once of
    a loaded model."""
    if lm in _FINGERPRINTS:
        return _FINGERPRINTS[lm]
    digest = hashlib.sha256()
    for name, leaf in zip(lm.model.names, lm.params, strict=True):
        flat = leaf.reshape(-1)
        some = np.asarray(flat[:: max(flat.size // 64, 1)][:64], np.float32)
        digest.update(name.encode() + str(leaf.shape).encode() + some.tobytes())
    return _FINGERPRINTS.setdefault(lm, digest.hexdigest())


def _save(path: Path, tag: str, moments: Moments, taken: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    leaves: dict[str, Any] = {f"m{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(moments))}
    leaves |= {"tag": np.array(tag), "taken": np.array(taken)}
    with part.open("wb") as f:
        np.savez(f, **leaves)
    part.replace(path)


def _restore(path: Path | None, tag: str, shapes: Moments) -> tuple[Moments, int]:
    if path is None or not path.exists():
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), 0
    try:
        with np.load(path, allow_pickle=False) as stored:
            old, taken = str(stored["tag"]), int(stored["taken"])
            leaves = [stored[f"m{i}"] for i in range(len(stored.files) - 2)]
    except Exception as error:  # zipfile, NumPy and OSError each have their own kinds
        raise CalibrationError(f"{path}: not stored moments: {error}") from None
    if old != tag:
        a, b = json.loads(old), json.loads(tag)
        differing = [key for key in sorted(set(a) | set(b)) if a.get(key) != b.get(key)]
        raise CalibrationError(
            f"{path}: made with other {', '.join(differing)}; remove it or name another file"
        )
    log.info("%s: going on after %d batches", path, taken)
    return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(x) for x in leaves]), taken
