"""Texts to calibrate, train and judge on: a split of a corpus, a folder of text files, a JSONL file.

A split is three files: `<split>.bin` (the documents' UTF-8 bytes, one after another), `<split>.index.npy` (int64
offsets, one more than documents) and `<split>.names.txt` (a name a line).
"""

from __future__ import annotations

import json
import operator
from pathlib import Path

import numpy as np

from kvjax.typing import Texts

TEXT_FILES = (".txt", ".md", ".rst", ".py")


class DocumentsError(ValueError):
    """Texts that cannot be read; the message names the file and the document."""


def read(path: str | Path) -> Texts:
    """The texts of `path`: a split (`DIR/train`), a JSONL file whose lines have a "text", or a folder of text files
    (.txt, .md, .rst, .py, sorted by path).

    Raises:
      DocumentsError: nothing there, not UTF-8, or a line without a text.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_FILES and p.is_file())
        if not files:
            raise DocumentsError(f"{path}: no {', '.join(TEXT_FILES)} files below it")
        return [_utf8(p) for p in files]
    if path.suffix == ".jsonl":
        return [_line(path, i, line) for i, line in enumerate(_utf8(path).splitlines(), 1) if line.strip()]
    return Documents(path)


def _utf8(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentsError(f"{path}: not a UTF-8 text: {error}") from None


def _line(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DocumentsError(f'{path}: line {number} is not a JSON object with a "text"')
    return text


class Documents:
    """Random access to one split: `docs[i]` is a text. Picklable; only the path travels.

    `names` say where each text is from; `bytes` is the size of all texts in UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is the split's `.bin` file, or the same without the suffix.

        Raises:
          DocumentsError: a file is missing or damaged, or the three do not belong together.
        """
        self.path = Path(str(path).removesuffix(".bin"))
        data, index, names = split_files(self.path)
        try:
            self._offsets = np.load(index, allow_pickle=False)
            self.names = tuple(names.read_text("utf-8").split("\n")[:-1])
            self._data = np.memmap(data, dtype=np.uint8, mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DocumentsError(f"{self.path}: not a corpus split: {error}") from None
        offsets = self._offsets
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0:
            raise DocumentsError(f"{index}: not int64 offsets that begin with 0")
        if (np.diff(offsets) < 0).any() or offsets[-1] != len(self._data):
            raise DocumentsError(
                f"{index}: offsets end at {offsets[-1]}, {data.name} has {len(self._data)} bytes"
            )
        if len(self.names) != len(self):
            raise DocumentsError(f"{names}: {len(self.names)} names for {len(self)} documents")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        """The text of one document.

        Raises:
          DocumentsError: its bytes are not UTF-8.
        """
        i = operator.index(index)
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path}: document {index} of {len(self)}")
        try:
            return self._data[self._offsets[i] : self._offsets[i + 1]].tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DocumentsError(
                f"{self.path}.bin: document {i} ({self.names[i]}) is not UTF-8: {error}"
            ) from None

    @property
    def bytes(self) -> int:
        return int(self._offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """[documents] int64: bytes of each."""
        return np.diff(self._offsets)

    def __reduce__(self) -> tuple[type[Documents], tuple[Path]]:
        return Documents, (self.path,)


def split_files(path: Path) -> tuple[Path, Path, Path]:
    """The three files of a split."""
    data, index, names = (path.parent / (path.name + end) for end in (".bin", ".index.npy", ".names.txt"))
    return data, index, names
