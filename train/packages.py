"""Where the corpus comes from: a recipe, pinned wheels and the standard library, read as files and never run.

pip fetches the wheels, with the user's index, proxy and certificates. They are read as archives, member by member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from tqdm import tqdm

from kvjax.resources import config_path

RECIPE = "mini/corpus.toml"
SPLITS = ("train", "selection", "confirmation")


class CorpusError(ValueError):
    """A recipe, a package or a corpus that cannot be used; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parsed `corpus.toml`; `digest` changes with its meaning, not with its comments."""

    tables: Mapping[str, Any]
    digest: str

    @classmethod
    def load(cls, path: Path | None = None) -> Recipe:
        """Raises CorpusError for a malformed recipe or a package in two splits."""
        source = path or config_path(RECIPE)
        try:
            tables = tomllib.loads(source.read_text("utf-8"))
            listed = [
                canonicalize_name(Requirement(r).name)
                for x in SPLITS
                for r in tables["splits"][x]["packages"]
            ]
        except (tomllib.TOMLDecodeError, KeyError, InvalidRequirement) as error:
            raise CorpusError(f"{source}: {type(error).__name__}: {error}") from None
        if twice := sorted(name for name, times in Counter(listed).items() if times > 1):
            raise CorpusError(f"{source}: listed twice: {', '.join(twice)}")
        canonical = json.dumps(tables, sort_keys=True, separators=(",", ":"))
        return cls(tables, hashlib.sha256(canonical.encode()).hexdigest())

    def match(self, patterns: str, path: str) -> bool:
        """Whether `path` fits one of the regular expressions under this key of [files]."""
        return any(re.search(pattern, path) for pattern in self.tables["files"][patterns])


def wheel_files(path: Path, recipe: Recipe) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel that the recipe's path rules take, and its long description; nothing is unpacked.

    Raises:
      CorpusError: a damaged archive, or a member whose name leads out of it.
    """
    limit = recipe.tables["filters"]["max_bytes"]
    with _reading(path), zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            name = info.filename
            if name.startswith("/") or "\\" in name or "\n" in name or ".." in name.split("/"):
                raise CorpusError(f"{path.name}: member {name!r} leads out of the archive")
            if ".dist-info/" in name or info.is_dir() or not _wanted(recipe, name):
                continue
            yield name, archive.read(info) if info.file_size <= limit else b" " * (limit + 1)
    text = metadata(path).get("description") or ""
    suffix = "md" if "markdown" in (metadata(path).get("description_content_type") or "") else "rst"
    yield f"DESCRIPTION.{suffix}", text.encode()


def metadata(path: Path) -> Mapping[str, Any]:
    """The wheel's core metadata. Raises CorpusError for a damaged archive or one without it."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                return parse_email(archive.read(name))[0]
    raise CorpusError(f"{path.name}: has no METADATA")


def _wanted(recipe: Recipe, path: str) -> bool:
    kind = recipe.match("code", path) or recipe.match("docs", path)
    return kind and not recipe.match("skip", path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise CorpusError(f"{path.name}: cannot be read as a wheel: {error}") from None


def stdlib_files(recipe: Recipe, directory: Path | None) -> list[tuple[str, bytes]]:
    """The standard library's files, sorted. `directory` None takes this interpreter's.

    Raises:
      CorpusError: this interpreter is not the pinned one and no directory was given, or it holds no library.
    """
    version = recipe.tables["stdlib"]["version"]
    if directory is None:
        if (platform.python_implementation(), platform.python_version()) != ("CPython", version):
            raise CorpusError(
                f"the corpus holds the standard library of CPython {version} and this is "
                f"{platform.python_implementation()} {platform.python_version()}; give --stdlib DIR, the "
                f"lib/python{version.rpartition('.')[0]} of an unpatched CPython {version}"
            )
        directory = Path(sysconfig.get_path("stdlib"))
    if not (directory / "os.py").is_file():
        raise CorpusError(f"{directory}: is no standard library (it has no os.py)")
    skip, found = recipe.tables["stdlib"]["skip"], []
    for path in sorted(directory.rglob("*.py")):
        name = path.relative_to(directory).as_posix()
        if not any(re.search(pattern, name) for pattern in skip) and _wanted(recipe, name):
            found.append((name, path.read_bytes()))
    return found


def tree_hash(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over names, sizes and contents, in the given order."""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def fetch(requirement: str, cache: Path, pin: Mapping[str, str] | None = None) -> Path:
    """The pure wheel of `requirement` in `cache`, from there or through pip; with `pin`, exactly that file.

    Raises:
      CorpusError: pip cannot get it, or its SHA-256 is not the pinned one; names the file.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if pin and (cache / pin["file"]).exists():
        return _check(cache / pin["file"], pin)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".", suffix=".part") as folder:
        lines = Path(folder) / "requirements.txt"
        lines.write_text(f"{requirement} --hash=sha256:{pin['sha256']}\n" if pin else f"{requirement}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary", ":all:", "--implementation", "py", "--abi", "none", "--platform", "any",
                   "--python-version", "3.11", "--dest", folder, "--requirement", str(lines)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            said = [x for x in done.stderr.splitlines() if "ERROR" in x] or done.stderr.splitlines()[-1:]
            what = pin["file"] if pin else requirement
            raise CorpusError(f"{what}: pip cannot fetch it: {' '.join(said) or 'no wheel came'}")
        if pin:
            _check(wheels[0], pin)
        return wheels[0].replace(cache / wheels[0].name)


def _check(path: Path, pin: Mapping[str, str]) -> Path:
    found = _sha256(path)
    if path.name != pin["file"] or found != pin["sha256"]:
        raise CorpusError(
            f"{path}: has SHA-256 {found}, pinned is {pin['sha256']} ({pin['file']}); delete it to fetch it again"
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def licence(path: Path, recipe: Recipe) -> str:
    """The licence a wheel states, as the recipe names it.

    Raises:
      CorpusError: it is not among the allowed ones, or cannot be told.
    """
    rules, meta = recipe.tables["licences"], metadata(path)
    package = canonicalize_name(meta.get("name", ""))
    stated = rules["reviewed"].get(package) or meta.get("license_expression")
    if not stated:
        kinds = [c.split(" :: ")[-1] for c in meta.get("classifiers", ()) if c.startswith("License :: ")]
        kinds = [rules["names"].get(k, k) for k in kinds if k != "OSI Approved"]
        text = (meta.get("license") or "").strip()
        text = rules["names"].get(text, text)
        # an SPDX text says more than "BSD License"; no text makes up for a classifier that is not allowed
        stated = " AND ".join(
            [text] if text in rules["allowed"] and set(kinds) <= {*rules["allowed"]} else kinds
        )
    # brackets and WITH are not taken apart: what is not plainly allowed needs a reader
    choices = [re.findall(r"[^\s()]+", part) for part in (stated or "").split(" OR ")]
    good = (all(c in rules["allowed"] for c in choice if c != "AND") and choice for choice in choices)
    if not (all(good) if "(" in stated else any(good)):
        raise CorpusError(
            f"{path.name}: licence {stated or meta.get('license') or 'unstated'!r} is not an allowed one"
        )
    return stated


def pins(
    recipe: Recipe, cache: Path, keep: Mapping[str, dict[str, str]] | None = None
) -> dict[str, list[dict[str, str]]]:
    """By split: name, version, licence, file and SHA-256 of the newest pure wheels the recipe allows, or of `keep`."""
    found: dict[str, list[dict[str, str]]] = {}
    for split in SPLITS:
        found[split] = []
        packages = sorted(recipe.tables["splits"][split]["packages"])
        for requirement in tqdm(packages, f"{split}: newest", disable=None):
            kept = (keep or {}).get(canonicalize_name(Requirement(requirement).name))
            path = (
                fetch(f"{kept['name']}=={kept['version']}", cache, kept)
                if kept
                else fetch(requirement, cache)
            )
            name, version, *_ = parse_wheel_filename(path.name)
            found[split].append(
                dict(
                    name=name,
                    version=str(version),
                    licence=licence(path, recipe),
                    file=path.name,
                    sha256=_sha256(path),
                )
            )
    return found
