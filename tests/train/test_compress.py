"""Compressed sizes are those of the files the commands write, and the parts of them that are named are there."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from train.compress import CODECS, GZIP, LZMA2, XZ, compress

CODE = Path(__file__).read_text("utf-8")
TEXTS = [CODE, "x = 1\n", CODE[: len(CODE) // 2] + "é\n"]


@pytest.fixture(scope="module")
def found():
    return compress(TEXTS)


@pytest.mark.parametrize("codec, command", [(GZIP, ["gzip", "-9", "-n"]), (XZ, ["xz", "-9e", "-T1"])])
def test_sizes_are_those_of_the_command(found, codec: str, command: list[str]):
    if not shutil.which(command[0]):
        pytest.skip(f"needs the {command[0]} command")
    written = [
        subprocess.run(command, input=t.encode(), capture_output=True, check=True).stdout for t in TEXTS
    ]
    # deflate differs by a few bytes between zlib's builds, LZMA2 hardly ever
    np.testing.assert_allclose(found[codec].each, [8 * len(w) for w in written], rtol=0.01, atol=16)


def test_nothing_is_lost():
    data = CODE.encode()
    assert gzip.decompress(CODECS[GZIP](data)) == data
    assert lzma.decompress(CODECS[XZ](data)) == data
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    assert lzma.decompress(CODECS[LZMA2](data), lzma.FORMAT_RAW, filters=filters) == data


def test_only_the_container_is_between_xz_and_its_coding(found):
    extra = (found[XZ].each - found[LZMA2].each) / 8
    assert ((extra >= 52) & (extra <= 72)).all(), extra
    assert 0 < found[GZIP].each[1] / 8 - len("x = 1\n") <= 18 + 5


def test_one_piece_profits_from_repetition(found):
    """The third document is half of the first, so all in one piece cost little more than the first."""
    for codec in CODECS:
        assert found[codec].each.dtype == np.float64 and found[codec].each.shape == (3,)
        assert found[codec].each[0] < found[codec].whole < 1.25 * found[codec].each[0]
        assert found[codec].whole < found[codec].each.sum() * 0.85


def test_codecs_are_what_they_are_called(found):
    """-9e beats the fastest preset on the same text by more than rounding."""
    every = "".join(TEXTS * 3).encode()
    assert len(CODECS[XZ](every)) <= len(lzma.compress(every, preset=0))
    assert len(CODECS[GZIP](every)) < len(gzip.compress(every, 1))
    assert CODECS[XZ](b"")[7] == lzma.CHECK_CRC64
