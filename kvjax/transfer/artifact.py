"""A fitted map on disk: manifest.json, weights.safetensors, SHA256SUMS. What does not belong together is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from kvjax.config import RopeConfig
from kvjax.lm import LM
from kvjax.resources import packaged_maps
from kvjax.transfer import hidden
from kvjax.transfer.calibrate import fingerprint
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import DTYPES, LayerMap, Mapper, converted

FORMAT = 1
MANIFEST, WEIGHTS, SUMS = "manifest.json", "weights.safetensors", "SHA256SUMS"
RIDGE = "ridge * mean variance of an input's own block (kind of row, source layer), added to the covariance per row"


class ArtifactError(ValueError):
    """A stored map that is damaged or does not fit; the message names the file or field."""


@dataclasses.dataclass(frozen=True)
class Party:
    """One model of the pair, as far as a cache depends on it."""

    id: str
    revision: str | None
    weights: str
    tokenizer: str
    geometry: Geometry

    @classmethod
    def of(cls, lm: LM) -> Party:
        tokenizer = lm.tokenizer.hash if lm.tokenizer else ""
        return cls(lm.id, lm.revision, fingerprint(lm), tokenizer, Geometry.of(lm.config))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Where a map came from. method, options: how it was made. calibration: data, rows and `longest`, the longest
    text it was fitted on, in tokens. metrics: on held-out text."""

    source: Party
    target: Party
    method: str
    options: dict[str, Any]
    calibration: dict[str, Any]
    metrics: dict[str, Any]

    @property
    def longest(self) -> int:
        return int(self.calibration["longest"])


def save(directory: str | Path, mapper: Mapper, manifest: Manifest, *, dtype: str = "float32") -> Path:
    """Write the map, whole or not at all; weights in `dtype` (see `kvjax.transfer.mapper.converted`), the rest float32.

    Raises:
      ArtifactError: `directory` exists and is not empty, an unknown dtype, a geometry that is not the models', a map
        laid out for a mesh.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ArtifactError(f"{directory}: exists; nothing is overwritten")
    if dtype not in DTYPES:
        raise ArtifactError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if (mapper.source, mapper.target) != (manifest.source.geometry, manifest.target.geometry):
        raise ArtifactError("the map's geometry is not that of the models in its manifest")
    if any(m.here or m.key.shape[0] != mapper.target.kv_heads for m in mapper.maps):
        raise ArtifactError("the map is laid out for a mesh; store the one it was made from")
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.", suffix=".part"))
    try:
        part.chmod(0o755)
        local = mapper.maps[0].heads is not None
        shapes = _shapes(mapper.source, mapper.target, mapper.layers, mapper.joint, local, dtype)
        tensors = _tensors(converted(mapper, dtype), shapes) | hidden.tensors(mapper.hidden, dtype)
        safetensors.numpy.save_file(tensors, part / WEIGHTS)
        about = {"format": FORMAT, **dataclasses.asdict(manifest), "ridge": RIDGE, "joint": mapper.joint}
        about |= {
            "layers": mapper.layers,
            "local": local,
            "dtype": dtype,
            "hidden": hidden.about(mapper.hidden),
        }
        (part / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        sums = "".join(f"{_sha256(part / name)}  {name}\n" for name in (MANIFEST, WEIGHTS))
        (part / SUMS).write_text(sums, "utf-8")
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return directory


def load(directory: str | Path, *, dtype: str | None = None) -> tuple[Mapper, Manifest]:
    """Read a map; every byte is checked against SHA256SUMS.

    Args:
      directory: of the map; a bare name that is no path here may be that of one that is installed with kvjax.
      dtype: of the weights in memory (`kvjax.transfer.mapper.converted`); None keeps the file's.

    Raises:
      ArtifactError: a file or field that is missing, damaged or of an unknown format.
    """
    directory = Path(directory)
    if len(directory.parts) == 1 and not directory.exists():
        directory = packaged_maps().get(directory.name, directory)
    _check_sums(directory)
    about = json.loads((directory / MANIFEST).read_text("utf-8"))
    if about.get("format") != FORMAT:
        raise ArtifactError(f"{directory / MANIFEST}: format {about.get('format')!r} is not {FORMAT}")
    try:
        source, target = (_party(about[name]) for name in ("source", "target"))
        manifest = Manifest(
            source, target, about["method"], about["options"], about["calibration"], about["metrics"]
        )
        layers = tuple(tuple(chosen) for chosen in about["layers"])
        joint, local, stored, state = about["joint"], about["local"], about["dtype"], about.get("hidden")
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{directory / MANIFEST}: missing or unknown field {error}") from None
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    wanted = _shapes(source.geometry, target.geometry, layers, joint, local, stored)
    wanted |= hidden.shapes(state, source.geometry)
    faults = [
        f"{name}: shape {list(tensors[name].shape)}, expected {list(shape)}"
        if name in tensors
        else f"{name}: missing"
        for name, shape in wanted.items()
        if name not in tensors or tensors[name].shape != shape
    ]
    faults += [f"{name}: not expected" for name in sorted(set(tensors) - set(wanted))]
    faults += [
        f"{name}: not finite" for name, x in tensors.items() if not np.isfinite(x.astype(np.float32)).all()
    ]
    if faults:
        raise ArtifactError(f"{directory / WEIGHTS}: {'; '.join(faults)}")
    maps, out = [], (target.geometry.kv_heads, target.geometry.head_dim)
    for i in range(target.geometry.layers):
        prefix = f"layers.{i}."
        mine = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        mine |= {name: mine[name].reshape(*out, -1) for name in ("key", "value")}
        maps.append(LayerMap(**{name: jnp.asarray(x) for name, x in mine.items()}))
    part = hidden.read(state, tensors, dtype)
    mapper = Mapper(tuple(maps), source.geometry, target.geometry, layers, joint, part)
    return mapper if dtype is None else converted(mapper, dtype), manifest


def check(manifest: Manifest, source: LM, target: LM) -> None:
    """
    Raises:
      ArtifactError: the map was not made for these two models; all differing fields are named, and a swapped pair
        is recognised.
    """
    faults = [
        f"{name} {fault}"
        for name, stored, lm in (("source", manifest.source, source), ("target", manifest.target, target))
        for fault in _differences(stored, Party.of(lm))
    ]
    if not faults:
        return
    if not _differences(manifest.source, Party.of(target)) + _differences(manifest.target, Party.of(source)):
        raise ArtifactError(
            f"the map goes from {manifest.source.id} to {manifest.target.id}; source and target are swapped"
        )
    raise ArtifactError(
        f"the map from {manifest.source.id} to {manifest.target.id} was not made for {source.id} and {target.id}:"
        f" {'; '.join(faults)}"
    )


def _differences(stored: Party, given: Party) -> list[str]:
    """Ids and revisions are names; geometry, tokenizer and weights decide."""
    faults = []
    for field in dataclasses.fields(Geometry):
        a, b = getattr(stored.geometry, field.name), getattr(given.geometry, field.name)
        if a != b:
            faults.append(f"{field.name}: {a} when it was made, {b} here")
    if stored.tokenizer != given.tokenizer:
        faults.append("tokenizer: another one")
    if stored.weights != given.weights:
        faults.append(f"weights: not those of {stored.id} {stored.revision or ''}".rstrip())
    return faults


def _tensors(mapper: Mapper, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {
        f"layers.{i}.{name}": np.ascontiguousarray(np.asarray(x).reshape(shapes[f"layers.{i}.{name}"]))
        for i, part in enumerate(mapper.maps)
        for name, x in part.arrays().items()
    }


def _shapes(
    source: Geometry, target: Geometry, layers: tuple[tuple[int, ...], ...], joint: bool, local: bool, dtype: str
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Of every tensor in the file; weights stand there with their inputs' axes apart."""
    shapes: dict[str, tuple[int, ...]] = {}
    out = (target.kv_heads, target.head_dim)
    for i, chosen in enumerate(layers):
        blocks = len(chosen) * (2 if joint else 1)
        grid = (blocks, source.kv_heads, source.head_dim)
        weight = (*out, blocks, source.head_dim) if local else (*out, *grid)
        named: dict[str, tuple[int, ...]] = {
            "key": weight,
            "value": weight,
            "key_mean": grid,
            "value_mean": grid,
        }
        named |= {"key_bias": out, "value_bias": out}
        if dtype == "int8":
            named |= {"key_scale": out, "value_scale": out}
        if local:
            named["heads"] = (target.kv_heads,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in named.items()}
    return shapes


def _party(data: dict[str, Any]) -> Party:
    geometry = dict(data["geometry"])
    rope = RopeConfig(**geometry.pop("rope"))
    fields = {k: v for k, v in data.items() if k != "geometry"}
    return Party(geometry=Geometry(rope=rope, **geometry), **fields)


def _check_sums(directory: Path) -> None:
    path = directory / SUMS
    if not path.is_file():
        raise ArtifactError(f"{directory}: not a stored map ({SUMS} is missing)")
    listed = {}
    for line in path.read_text("utf-8").splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    if set(listed) != {MANIFEST, WEIGHTS}:
        raise ArtifactError(f"{path}: lists {sorted(listed)}, expected {MANIFEST} and {WEIGHTS}")
    for name, digest in listed.items():
        if not (directory / name).is_file():
            raise ArtifactError(f"{directory / name}: missing")
        if _sha256(directory / name) != digest:
            raise ArtifactError(f"{directory / name}: damaged (its SHA-256 is not the one in {SUMS})")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
