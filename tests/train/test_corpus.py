"""The corpus: only pinned bytes, nothing twice across splits, the same result every time. pip takes its packages
from a directory, so no test needs a network."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvjax.resources import config_path
from train import corpus
from train.corpus import SPLITS, CorpusError, Document, Documents, Recipe, Sieve

BUILD = dict(
    out="corpus", recipe=Path("recipe.toml"), manifest=Path("manifest.json"), cache="cache", stdlib="lib"
)

OSI = "Classifier: License :: OSI Approved ::"


def source(seed: str, lines: int = 60) -> str:
    """Python text no other seed shares a line with."""
    return "".join(f"def {seed}_function_number_{i}(value): return value\n" for i in range(lines))


def wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str | bytes],
    *,
    about: str = "Licence: see there",
    version: str = "1.0",
) -> Path:
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{OSI} MIT License\n"
    members = dict(files) | {
        f"{info}/METADATA": meta + f"Description-Content-Type: text/markdown\n\n{about}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, value in members.items():
            data = value.encode() if isinstance(value, str) else value
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{member},sha256={digest},{len(data)}\n"
            archive.writestr(zipfile.ZipInfo(member), data)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record + f"{info}/RECORD,,\n")
    return path


def recipe_text() -> str:
    """The real recipe's rules with three small packages."""
    text = config_path(corpus.RECIPE).read_text("utf-8")
    for package in ("alpha", "beta", "gamma"):
        text = re.sub(r"^packages = \[[^]]*\]", f'packages_ = ["{package}"]', text, count=1, flags=re.M)
    return text.replace("packages_", "packages")


def fill(folder: Path) -> None:
    """An index of three packages, a library and a recipe."""
    for name in ("index", "lib"):
        (folder / name).mkdir()
    (folder / "recipe.toml").write_text(recipe_text())
    (folder / "lib" / "os.py").write_text(source("os"))
    for name in ("test/support.py", "lib2to3/main.py", "_sysconfigdata_x.py"):  # the recipe leaves them out
        (folder / "lib" / name).parent.mkdir(exist_ok=True)
        (folder / "lib" / name).write_text(source(f"lib{len(name)}"))
    planted, latin = source("shared", 30), b"\xe9" * 300
    alpha = {
        "a.py": source("alpha"),
        "shared.py": planted,
        "latin.py": latin,
        "z.py": source("alpha") + "x = 1\n",
    }
    beta = {
        "b.py": source("beta"),
        "partly.py": source("partly", 50) + planted,
        "both.py": source("both", 60) + source("of", 30),
    }
    gamma = {
        "c.py": source("gamma"),
        "hardly.py": source("hardly", 200) + planted,
        "copy.py": planted,
        "of.py": source("of", 30) + source("rest", 400),
    }
    wheel(folder / "index", "alpha", {f"alpha/{k}": v for k, v in alpha.items()}, about=source("about"))
    wheel(folder / "index", "beta", {f"beta/{k}": v for k, v in beta.items()})
    wheel(folder / "index", "gamma", {f"gamma/{k}": v for k, v in gamma.items()})


def only_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pinned")
    fill(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        only_index(monkeypatch, folder)
        corpus.build(**BUILD, pin=True)
    return folder


@pytest.fixture
def pinned(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a copy of what `fill` makes, pinned and built."""
    folder = shutil.copytree(once, tmp_path / "place")
    only_index(monkeypatch, folder)
    return folder


def names(place: Path, split: str) -> list[str]:
    return list(Documents(place / "corpus" / split).names)


def test_near_duplicates_across_splits_are_dropped(pinned: Path):
    assert names(pinned, "train") == ["alpha/DESCRIPTION.md", "alpha/alpha/a.py", "alpha/alpha/shared.py",
                                      "cpython/os.py"]  # fmt: skip
    assert names(pinned, "selection") == ["beta/beta/b.py"]
    # hardly.py shares 26 of 226 windows with train, of.py 26 of 426 with selection's both.py
    assert names(pinned, "confirmation") == ["gamma/gamma/c.py", "gamma/gamma/hardly.py", "gamma/gamma/of.py"]
    report = json.loads((pinned / "corpus" / "report.json").read_text())
    left_out = {(r["split"], r["reason"]): r["files"] for r in report["tables"]["left out"]}
    assert left_out["selection", "duplicates across"] == 2
    assert left_out["confirmation", "duplicates across"] == 1
    assert left_out["train", "duplicates within"] == 1
    assert report["tables"]["not UTF-8"] == [{"split": "train", "file": "alpha/alpha/latin.py"}]


def test_a_rebuild_gives_the_same_bytes(pinned: Path):
    first = {p.name: p.read_bytes() for p in (pinned / "corpus").iterdir()}
    assert len(first) == 10
    manifest = (pinned / "manifest.json").read_bytes()
    corpus.build(**BUILD)
    assert {p.name: p.read_bytes() for p in (pinned / "corpus").iterdir()} == first
    assert (pinned / "manifest.json").read_bytes() == manifest
    record = json.loads(manifest)["splits"]["train"]
    documents = Documents(pinned / "corpus" / "train")
    assert (record["documents"], record["bytes"]) == (len(documents), documents.bytes)
    pairs = [(name, documents[i].encode()) for i, name in enumerate(documents.names)]
    assert record["sha256"] == corpus.tree_hash(pairs)


def test_a_rebuild_works_without_an_index(pinned: Path):
    for path in (pinned / "index").iterdir():
        path.unlink()
    corpus.build(**BUILD)
    (pinned / "cache" / "beta-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CorpusError, match=r"beta-1\.0-py3-none-any\.whl: pip cannot fetch it"):
        corpus.build(**BUILD)


@pytest.mark.parametrize("where", ["cache", "index"])
def test_a_wrong_hash_is_an_error_naming_the_file(pinned: Path, where: str):
    cached = pinned / "cache" / "beta-1.0-py3-none-any.whl"
    if where == "index":
        cached.unlink()
    wheel(pinned / where, "beta", {"beta/b.py": source("other")})
    with pytest.raises(CorpusError, match=r"beta-1\.0-py3-none-any\.whl"):
        corpus.build(**BUILD)
    assert cached.exists() == (where == "cache")
    assert not list((pinned / "cache").glob(".*"))


def test_what_differs_is_named_and_nothing_is_written(pinned: Path):
    manifest = json.loads((pinned / "manifest.json").read_text())
    manifest["splits"]["selection"]["documents"] = 7
    (pinned / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="selection: documents 1, pinned 7"):
        corpus.build(**{**BUILD, "out": "elsewhere"})
    assert not (pinned / "elsewhere").exists()


def test_a_manifest_without_results_is_refused(pinned: Path):
    (pinned / "manifest.json").write_text("{}")
    with pytest.raises(CorpusError, match="has no packages, recipe, splits, stdlib; run"):
        corpus.build(**BUILD)


def test_another_recipe_or_library_is_refused(pinned: Path):
    (pinned / "lib" / "os.py").write_text(source("patched"))
    with pytest.raises(CorpusError, match="not the pinned one.*--stdlib"):
        corpus.build(**BUILD)
    (pinned / "recipe.toml").write_text(recipe_text().replace("across = 0.2", "across = 0.3"))
    with pytest.raises(CorpusError, match="another recipe; run"):
        corpus.build(**BUILD)
    with pytest.raises(CorpusError, match="no standard library"):
        corpus.build(**{**BUILD, "stdlib": "index"})


def test_another_interpreter_is_told_what_to_do(pinned: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "3.12.1")
    with pytest.raises(
        CorpusError, match=r"this is CPython 3\.12\.1; give --stdlib DIR, the lib/python3\.11"
    ):
        corpus.build(**{**BUILD, "stdlib": None}, pin=True)


def test_pin_takes_the_newest_or_keeps(pinned: Path):
    manifest = pinned / "manifest.json"
    first = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**first, "tokenizers": {"mini": 1}}))
    wheel(pinned / "index", "beta", {"beta/b.py": source("other")}, version="1.1")
    corpus.build(**BUILD, pin=True, keep=True)
    assert json.loads(manifest.read_text()) == {**first, "tokenizers": {"mini": 1}}
    corpus.build(**BUILD, pin=True)
    new = json.loads(manifest.read_text())
    assert new["packages"]["selection"][0]["version"] == "1.1"
    assert "tokenizers" not in new  # they belonged to another corpus
    assert new["splits"]["train"] == first["splits"]["train"] != new["splits"]["selection"]


def test_the_command_prints_one_line_for_an_error(pinned: Path):
    result = CliRunner().invoke(corpus.main, ["build", "--out", "corpus", "--stdlib", "index"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "no standard library" in result.output


def damaged(data: bytes) -> bytes:
    return data[:60] + bytes(200) + data[260:]


@pytest.mark.parametrize(
    "spoil", [damaged, lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"no archive"]
)
def test_corrupt_archives(tmp_path: Path, spoil: Callable[[bytes], bytes]):
    path = wheel(tmp_path, "alpha", {"alpha/a.py": source("alpha", 300)})
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CorpusError, match=r"^alpha-1\.0-py3-none-any\.whl: cannot be read"):
        list(corpus.wheel_files(path, Recipe.load()))


@pytest.mark.parametrize("member", ["../evil.py", "/etc/evil.py", "a/../../evil.py", "a\\evil.py", "a\nb.py"])
def test_members_that_lead_out(tmp_path: Path, member: str):
    path = wheel(tmp_path, "alpha", {member: source("evil")})
    with pytest.raises(CorpusError, match=r"alpha-1\.0.*leads out of the archive"):
        list(corpus.wheel_files(path, Recipe.load()))


def test_path_rules(tmp_path: Path):
    out = ["pip/_vendor/x.py", "a/vendored/x.py", "a/third_party/x.py", "a/x_pb2.py", "a/parsetab.py", "a/x.txt",
           "a/.hidden.py", "LICENSE.md", "alpha-1.0.dist-info/README.md"]  # fmt: skip
    files = dict.fromkeys([*out, "a/x.py", "docs/y.rst", "a/vendors.py"], source("x"))
    path = wheel(tmp_path, "alpha", files, about="Words.")
    found = dict(corpus.wheel_files(path, Recipe.load()))
    assert set(found) == {"DESCRIPTION.md", "a/x.py", "docs/y.rst", "a/vendors.py"}
    assert found["DESCRIPTION.md"] == b"Words."


@pytest.mark.parametrize(
    "text, reason",
    [
        ("x = 1\n", "size"),
        ("x = 1\n" * 9000, "size"),
        (f"x = '{'a' * 1001}'\n" + source("x"), "long lines"),
        (f"x = '{'a' * 150}'\n" * 20, "long lines"),
        ("x = 0xdeadbeef, 0x12345678, 99\n" * 20, "numbers"),
        (r"x = '\x00\x01\x02\x03'" + "\n" + (r"'\xff\xfe\xaa'" + "\n") * 40, "numbers"),
        ("# привет, мир\n" + "имя = 1\n" * 60, "not ASCII"),
        ("a\0b\n" + source("x"), "not ASCII"),
        (source("x") + "# under the GNU Lesser General Public\n# License\n", "copyleft"),
        ("# This file is auto-generated.\n" + source("x"), "generated"),
        (b"# caf\xe9\n" + source("x").encode(), "not UTF-8"),
        (source("x"), None),
    ],
)
def test_content_rules(text: str | bytes, reason: str | None):
    sieve = Sieve(Recipe.load())
    kept = sieve.documents("p", [("a.py", text if isinstance(text, bytes) else text.encode())])
    assert dict(sieve.dropped) == ({reason: 1} if reason else {})
    assert len(kept) == (reason is None)
    assert sieve.not_utf8 == (["p/a.py"] if reason == "not UTF-8" else [])


def test_texts_are_normalized_and_told_apart():
    raw = b"\xef\xbb\xbf" + source("x").encode().replace(b"\n", b"\r\n") + b"if x:\r\n\ty\r"
    files = [("a.py", raw), ("tests/b.py", raw), ("test_c.py", raw), ("tests/d.rst", raw)]
    found = Sieve(Recipe.load()).documents("p", files)
    assert {d.name: d.kind for d in found} == {
        "p/a.py": "code", "p/test_c.py": "tests", "p/tests/b.py": "tests", "p/tests/d.rst": "docs",
    }  # fmt: skip
    assert found[0].text == source("x") + "if x:\n\ty\n"


def test_limit_cuts_the_package_and_its_tests():
    documents = [Document(f"p/{i:03}.py", "x" * 1000, "tests" if i % 2 else "code") for i in range(200)]
    all_tests = corpus.limit(documents, 10**9, 0.2)
    assert [sum(d.kind == kind for d in all_tests) for kind in ("code", "tests")] == [100, 25]
    cut = corpus.limit(list(reversed(documents)), 50_000, 0.2)
    assert [sum(d.kind == kind for d in cut) for kind in ("code", "tests")] == [40, 10]
    assert cut == sorted(cut, key=lambda d: d.name)
    assert cut != documents[:50] and cut == corpus.limit(documents, 50_000, 0.2)


def meta(folder: Path, lines: str) -> Path:
    path = folder / "p-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "p-1.0.dist-info/METADATA", f"Metadata-Version: 2.4\nName: p\nVersion: 1.0\n{lines}\n"
        )
    return path


@pytest.mark.parametrize(
    "lines, expected",
    [
        ("License-Expression: MIT OR GPL-3.0-only", "MIT OR GPL-3.0-only"),
        ("License-Expression: MIT AND GPL-3.0-only", None),
        ("License-Expression: (MIT OR GPL-3.0-only) AND BSD-3-Clause", None),
        ("License-Expression: GPL-3.0-or-later", None),
        (f"{OSI} MIT License", "MIT"),
        (f"{OSI} BSD License\nLicense: BSD-3-Clause", "BSD-3-Clause"),
        (f"{OSI} BSD License\nLicense: see the file", "BSD"),
        (f"{OSI} MIT License\n{OSI} GNU General Public License v3 (GPLv3)", None),
        (f"{OSI} GNU General Public License v3 (GPLv3)\nLicense: MIT", None),
        ("License: Apache License 2.0", "Apache-2.0"),
        ("License: do what you like", None),
        ("", None),
    ],
)
def test_licences(tmp_path: Path, lines: str, expected: str | None):
    path = meta(tmp_path, lines)
    if expected:
        assert corpus.licence(path, Recipe.load()) == expected
    else:
        with pytest.raises(CorpusError, match=r"p-1\.0.*is not an allowed one"):
            corpus.licence(path, Recipe.load())


def test_a_package_in_two_splits_is_refused(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text().replace('"gamma"', '"Alpha"'))
    with pytest.raises(CorpusError, match="listed twice: alpha"):
        Recipe.load(path)


def test_documents(tmp_path: Path):
    corpus.write(tmp_path / "s", [Document("p/a.py", "é = 1\n", "code"), Document("p/b.py", "\ty\n", "code")])
    documents = Documents(tmp_path / "s.bin")
    assert (len(documents), documents.bytes, documents.names) == (2, 10, ("p/a.py", "p/b.py"))
    assert list(documents) == ["é = 1\n", "\ty\n"] and documents[-1] == documents[np.int64(1)] == "\ty\n"
    with pytest.raises(IndexError, match="document 2 of 2"):
        documents[2]
    sent = pickle.dumps(documents)
    assert len(sent) < 500 and list(pickle.loads(sent)) == list(documents)
    assert not list(tmp_path.glob(".*"))


def test_documents_that_are_not_utf8_are_named(tmp_path: Path):
    corpus.write(tmp_path / "s", [Document("p/a.py", "aé", "code"), Document("p/b.py", "b", "code")])
    (tmp_path / "s.bin").write_bytes(b"a\xe9ab")
    documents = Documents(tmp_path / "s")
    assert documents[1] == "b"
    with pytest.raises(CorpusError, match=r"s\.bin: document 0 \(p/a\.py\) is not UTF-8"):
        documents[0]


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("s.bin", b"short", r"offsets end at 10, s\.bin has 5 bytes"),
        ("s.bin", b"", "not a corpus split"),
        ("s.bin", None, "not a corpus split"),
        ("s.names.txt", b"p/a.py\n", "1 names for 2 documents"),
        ("s.names.txt", b"\xff\n", "not a corpus split"),
        ("s.index.npy", b"", "not a corpus split"),
        ("s.index.npy", np.array([0, 7, 10], np.int32), "not int64 offsets"),
        ("s.index.npy", np.array([0, 11, 10]), "offsets end"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, data: bytes | np.ndarray | None, message: str):
    corpus.write(tmp_path / "s", [Document("p/a.py", "é = 1\n", "code"), Document("p/b.py", "\ty\n", "code")])
    path = tmp_path / name
    if data is None:
        path.unlink()
    elif isinstance(data, bytes):
        path.write_bytes(data)
    else:
        np.save(path, data)
    with pytest.raises(CorpusError, match=message):
        Documents(tmp_path / "s")


def test_the_manifest_fits_the_recipe():
    recipe, manifest = Recipe.load(), json.loads(config_path(corpus.MANIFEST).read_text("utf-8"))
    assert manifest["recipe"] == recipe.digest
    for split in SPLITS:
        assert sorted(recipe.tables["splits"][split]["packages"]) == [
            p["name"] for p in manifest["packages"][split]
        ]
        assert all(re.fullmatch("[0-9a-f]{64}", p["sha256"]) for p in manifest["packages"][split])
    assert "://" not in json.dumps(manifest)
