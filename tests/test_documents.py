"""Texts on disk: splits of a corpus, folders, JSONL."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from kvjax.documents import Documents, DocumentsError, read
from train.corpus import Document, write


def test_documents(tmp_path: Path):
    write(tmp_path / "s", [Document("p/a.py", "é = 1\n", "code"), Document("p/b.py", "\ty\n", "code")])
    documents = Documents(tmp_path / "s.bin")
    assert (len(documents), documents.bytes, documents.names) == (2, 10, ("p/a.py", "p/b.py"))
    assert list(documents) == ["é = 1\n", "\ty\n"] and documents[-1] == documents[np.int64(1)] == "\ty\n"
    with pytest.raises(IndexError, match="document 2 of 2"):
        documents[2]
    sent = pickle.dumps(documents)
    assert len(sent) < 500 and list(pickle.loads(sent)) == list(documents)
    assert not list(tmp_path.glob(".*"))


def test_documents_that_are_not_utf8_are_named(tmp_path: Path):
    write(tmp_path / "s", [Document("p/a.py", "aé", "code"), Document("p/b.py", "b", "code")])
    (tmp_path / "s.bin").write_bytes(b"a\xe9ab")
    documents = Documents(tmp_path / "s")
    assert documents[1] == "b"
    with pytest.raises(DocumentsError, match=r"s\.bin: document 0 \(p/a\.py\) is not UTF-8"):
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
    write(tmp_path / "s", [Document("p/a.py", "é = 1\n", "code"), Document("p/b.py", "\ty\n", "code")])
    path = tmp_path / name
    if data is None:
        path.unlink()
    elif isinstance(data, bytes):
        path.write_bytes(data)
    else:
        np.save(path, data)
    with pytest.raises(DocumentsError, match=message):
        Documents(tmp_path / "s")


def test_folders_and_jsonl_are_texts_too(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "deep" / "a.py").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert list(read(tmp_path)) == ["two", "one"]
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "x"}\n\n{"text": "é", "id": 1}\n', "utf-8")
    assert list(read(lines)) == ["x", "é"]
    write(tmp_path / "s", [Document("p/a.py", "é = 1\n", "code")])
    assert list(read(tmp_path / "s")) == ["é = 1\n"]


def test_texts_that_cannot_be_read_are_named(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n')
    with pytest.raises(DocumentsError, match=r"bad\.jsonl: line 2 is not"):
        read(tmp_path / "bad.jsonl")
    with pytest.raises(DocumentsError, match="not a corpus split"):
        read(tmp_path / "nothing")
    folder = tmp_path / "f"
    folder.mkdir()
    with pytest.raises(DocumentsError, match="files below it"):
        read(folder)
    (folder / "x.py").write_bytes(b"\xff\xfe")
    with pytest.raises(DocumentsError, match=r"x\.py: not a UTF-8 text"):
        read(folder)
