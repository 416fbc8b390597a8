"""The corpus: only pinned bytes, nothing twice across splits, the same result every time. pip takes its packages
from a directory, so no test needs a network."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvjax import cli
from kvjax.documents import Documents
from kvjax.report import Report
from kvjax.resources import config_path
from tests.train.wheels import recipe_text, source, wheel
from train import corpus, tokenizer
from train.corpus import Document, Sieve
from train.packages import SPLITS, CorpusError, Recipe

BUILD = dict(
    out="corpus", recipe=Path("recipe.toml"), manifest=Path("manifest.json"), cache="cache", stdlib="lib"
)


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
    shutil.rmtree(pinned / "corpus")
    report = corpus.build(**BUILD)
    assert [bar.value for bar in report.bars] == [0, 0, 0] and report.ok
    written = {p.name: p.read_bytes() for p in (pinned / "corpus").iterdir()}
    assert json.loads(written.pop("report.json"))["tables"] == json.loads(first.pop("report.json"))["tables"]
    assert written == first
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
    report = corpus.build(**{**BUILD, "out": "elsewhere"})
    assert [(bar.name.partition(":")[0], bar.value, bar.ok) for bar in report.bars] == [
        ("train", 0, True), ("selection", 1, False), ("confirmation", 0, True)
    ]  # fmt: skip
    (row,) = report.tables["differs"]
    assert row == {"of": "selection", "figure": "documents", "found": 1, "pinned": 7}
    assert not (pinned / "elsewhere").exists()


@pytest.mark.parametrize("pinned_figures", [{}, {"a": 1, "b": 3}, {"a": 1, "b": 2, "c": 4}])
def test_compare(pinned_figures: dict[str, Any]):
    report = Report("")
    corpus.compare(report, "it", {"a": 1, "b": 2}, pinned_figures)
    (bar,) = report.bars
    assert (bar.value, bar.ok) == {0: (2, False), 2: (1, False), 3: (0, True)}[len(pinned_figures)]
    assert bar.name == "it: a, b that differ from the manifest"


def test_manifests_that_cannot_be_used(pinned: Path):
    (pinned / "manifest.json").write_text("{}")
    with pytest.raises(CorpusError, match="has no packages, recipe, splits, stdlib; run `kvjax corpus"):
        corpus.build(**BUILD)
    (pinned / "manifest.json").write_text("{")
    with pytest.raises(CorpusError, match=r"manifest\.json: not JSON"):
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


@pytest.fixture
def command(pinned: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`kvjax corpus` for the small recipe and small tokenizers."""
    specs = {name: tokenizer.Spec(280, spec.pattern, spec.half) for name, spec in tokenizer.SPECS.items()}
    monkeypatch.setattr(tokenizer, "SPECS", specs)
    places = {key: BUILD[key] for key in ("recipe", "manifest")}
    monkeypatch.setattr(tokenizer, "rebuild", functools.partial(tokenizer.rebuild, **places))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, ["corpus", *arguments, "--stdlib", "lib", "--cache", "cache"])

    return run


def test_the_command_pins_and_rebuilds(pinned: Path, command: Callable[..., Result]):
    result = command("made", "--pin", "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert json.loads(result.stdout)["bars"] == []
    result = command("again", "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    report = json.loads(result.stdout)
    assert report["ok"] and set(report["tables"]) == {"splits", "left out", "not UTF-8", "tokens"}
    assert [bar["name"].partition(":")[0] for bar in report["bars"]] == [
        *SPLITS, "mini tokenizer", "mini token counts", "mini-x tokenizer", "mini-x token counts",
    ]  # fmt: skip
    assert all(set(bar) == {"name", "value", "bound", "ok"} and bar["ok"] for bar in report["bars"])
    first, second = (
        {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (pinned / "made", pinned / "again")
    )
    first.pop("report.json"), second.pop("report.json")
    assert first == second and len(first) == 9 + 4
    assert len(list((pinned / "again").iterdir())) == 9 + 1 + 1
    assert "ok  train: documents, bytes, sha256 that differ" in command("again").stdout


@pytest.mark.parametrize(
    "where, key, named",
    [("splits", "selection", "selection: bytes"), ("tokenizers", "mini-x", "mini-x tokenizer: vocab 280, pinned 9")],
)  # fmt: skip
def test_the_command_names_what_differs_and_leaves_nothing(
    pinned: Path, command: Callable[..., Result], where: str, key: str, named: str
):
    assert command("made", "--pin").exit_code == 0
    manifest = json.loads((pinned / "manifest.json").read_text())
    manifest[where][key].update(bytes=9, vocab=9)
    (pinned / "manifest.json").write_text(json.dumps(manifest))
    before = {p: p.stat().st_mtime_ns for p in (pinned / "made").rglob("*")}
    for directory in ("made", "new"):
        result = command(directory, "--json")
        assert result.exit_code == 1
        report = json.loads(result.stdout)
        assert not report["ok"] and [bar["value"] for bar in report["bars"] if not bar["ok"]] == [1]
        assert result.stderr.startswith("kvjax: not what the manifest says: ") and named in result.stderr
        assert result.stderr.count("\n") == 1
    assert {p: p.stat().st_mtime_ns for p in (pinned / "made").rglob("*")} == before
    assert not (pinned / "new").exists()
    assert "MISSED" in command("new").stdout


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


def test_the_manifest_fits_the_recipe():
    recipe, manifest = Recipe.load(), json.loads(config_path(corpus.MANIFEST).read_text("utf-8"))
    assert manifest["recipe"] == recipe.digest
    for split in SPLITS:
        assert sorted(recipe.tables["splits"][split]["packages"]) == [
            p["name"] for p in manifest["packages"][split]
        ]
        assert all(re.fullmatch("[0-9a-f]{64}", p["sha256"]) for p in manifest["packages"][split])
    assert "://" not in json.dumps(manifest)
