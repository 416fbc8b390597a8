"""What the corpus is made of: wheels that are damaged, hostile or under a licence that is not allowed are refused."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.wheels import OSI, recipe_text, source, wheel
from train import packages
from train.packages import CorpusError, Recipe


def damaged(data: bytes) -> bytes:
    return data[:60] + bytes(200) + data[260:]


@pytest.mark.parametrize(
    "spoil", [damaged, lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"no archive"]
)
def test_corrupt_archives(tmp_path: Path, spoil: Callable[[bytes], bytes]):
    path = wheel(tmp_path, "alpha", {"alpha/a.py": source("alpha", 300)})
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CorpusError, match=r"^alpha-1\.0-py3-none-any\.whl: cannot be read"):
        list(packages.wheel_files(path, Recipe.load()))


@pytest.mark.parametrize("member", ["../evil.py", "/etc/evil.py", "a/../../evil.py", "a\\evil.py", "a\nb.py"])
def test_members_that_lead_out(tmp_path: Path, member: str):
    path = wheel(tmp_path, "alpha", {member: source("evil")})
    with pytest.raises(CorpusError, match=r"alpha-1\.0.*leads out of the archive"):
        list(packages.wheel_files(path, Recipe.load()))


def test_path_rules(tmp_path: Path):
    out = ["pip/_vendor/x.py", "a/vendored/x.py", "a/third_party/x.py", "a/x_pb2.py", "a/parsetab.py", "a/x.txt",
           "a/.hidden.py", "LICENSE.md", "alpha-1.0.dist-info/README.md"]  # fmt: skip
    files = dict.fromkeys([*out, "a/x.py", "docs/y.rst", "a/vendors.py"], source("x"))
    path = wheel(tmp_path, "alpha", files, about="Words.")
    found = dict(packages.wheel_files(path, Recipe.load()))
    assert set(found) == {"DESCRIPTION.md", "a/x.py", "docs/y.rst", "a/vendors.py"}
    assert found["DESCRIPTION.md"] == b"Words."


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
        assert packages.licence(path, Recipe.load()) == expected
    else:
        with pytest.raises(CorpusError, match=r"p-1\.0.*is not an allowed one"):
            packages.licence(path, Recipe.load())


def test_a_package_in_two_splits_is_refused(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text().replace('"gamma"', '"Alpha"'))
    with pytest.raises(CorpusError, match="listed twice: alpha"):
        Recipe.load(path)


def test_another_interpreter_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.12.1")
    with pytest.raises(
        CorpusError, match=r"this is CPython 3\.12\.1; give --stdlib DIR, the lib/python3\.11"
    ):
        packages.stdlib_files(Recipe.load(), None)
