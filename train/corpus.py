"""A corpus anyone can rebuild: pinned wheels and the standard library, split by package.

`configs/mini/corpus.toml` says what is taken and what is left out; `manifest.json` beside it pins every file
by SHA-256 and records what came out, so a rebuild checks itself.

A split on disk: see `kvjax.documents`. Names are `package/path`, and documents are sorted by them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvjax.documents import split_files
from kvjax.report import Report
from kvjax.resources import config_path
from train.packages import SPLITS, CorpusError, Recipe, fetch, pins, stdlib_files, tree_hash, wheel_files

MANIFEST = "mini/manifest.json"
HOW_TO_PIN = "run `kvjax corpus DIRECTORY --pin`"
STDLIB = "cpython"  # the standard library's name among the packages
_NUMBER = re.compile(r"\\x[0-9a-fA-F]{2}|0[xX][0-9a-fA-F]+|\d+")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text on its way into a split; `kind` is "code", "docs" or "tests"."""

    name: str
    text: str
    kind: str

    @property
    def size(self) -> int:
        return len(self.text.encode())


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
    """Build the corpus in `out`, if it is the manifest's: one bar a split, and when one is missed nothing is written.

    With `pin` the newest versions are taken and the manifest is written anew, without bars; with `keep` too,
    packages that are pinned already stay at their versions.

    Raises:
      CorpusError: names the file that is missing, damaged or not the pinned one.
    """
    rules = Recipe.load(recipe)
    store = Path(cache).expanduser() if cache else Path.home() / ".cache" / "kvjax" / "corpus"
    target = manifest or Path(str(config_path("mini"))) / "manifest.json"
    old = read_manifest(target) if target.exists() or not pin else {}
    library = stdlib_files(rules, Path(stdlib).expanduser() if stdlib else None)
    tree = {"version": rules.tables["stdlib"]["version"], "files": len(library), "sha256": tree_hash(library)}
    if pin:
        have = {p["name"]: p for group in old.get("packages", {}).values() for p in group} if keep else {}
        new: dict[str, Any] = {"recipe": rules.digest, "stdlib": tree, "packages": pins(rules, store, have)}
    else:
        if missing := {"recipe", "stdlib", "packages", "splits"} - set(old):
            raise CorpusError(f"{target}: has no {', '.join(sorted(missing))}; {HOW_TO_PIN}")
        new = {key: old[key] for key in ("recipe", "stdlib", "packages")}
        if rules.digest != new["recipe"]:
            raise CorpusError(f"{target.name}: was made from another recipe; {HOW_TO_PIN}")
        if tree != new["stdlib"]:
            raise CorpusError(
                f"the standard library here is not the pinned one ({tree}, pinned {new['stdlib']}); give --stdlib "
                f"DIR, the library of an unpatched CPython {new['stdlib']['version']}"
            )
    report = Report("corpus", {"recipe": rules.digest, "standard library": tree["version"]})
    splits = _split(rules, new["packages"], library, store, report)
    new["splits"] = {name: _summary(documents) for name, documents in splits.items()}
    if not pin:
        for split, summary in new["splits"].items():
            compare(report, split, summary, old["splits"].get(split, {}))
        if not report.ok:
            return report
    for split, documents in splits.items():
        write(Path(out) / split, documents)
    if pin:
        if old.get("splits") == new["splits"]:
            new["tokenizers"] = old.get("tokenizers", {})
        replace_file(target, (json.dumps(new, indent=1) + "\n").encode())
    replace_file(Path(out) / "report.json", (report.as_json() + "\n").encode())
    return report


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises CorpusError where it is not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CorpusError(f"{path}: not JSON: {error}") from None


def compare(report: Report, what: str, found: Mapping[str, Any], pinned: Mapping[str, Any]) -> None:
    """Add a bar: none of the figures differs from the manifest's. Those that do are rows of the table `differs`."""
    wrong = [key for key, value in found.items() if value != pinned.get(key)]
    for key in wrong:
        report.row("differs", of=what, figure=key, found=found[key], pinned=pinned.get(key, "nothing"))
    report.bar(f"{what}: {', '.join(found)} that differ from the manifest", len(wrong), "==", 0)


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


def write(path: Path, documents: Sequence[Document]) -> None:
    """Write one split's three files below `path`'s name, each whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data, index, names = split_files(path)
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
