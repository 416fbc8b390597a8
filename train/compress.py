"""What general-purpose compressors make of a split: `gzip -9` and `xz -9e`, document by document and in one piece.

The sizes are those of the files the commands would write. That includes each format's own header and check: 18 bytes
of gzip (no file name, as with `gzip -n`), 60 to 70 bytes of xz, which weigh on short documents. The `lzma2` codec is
xz's coding alone, without its container, so that a reader sees how much that is.
"""

from __future__ import annotations

import dataclasses
import gzip
import lzma
from collections.abc import Callable, Mapping

import numpy as np
from tqdm import tqdm

from kvjax.typing import Texts

_PRESET = 9 | lzma.PRESET_EXTREME


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 9, mtime=0)


def _xz(data: bytes) -> bytes:
    return lzma.compress(data, lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=_PRESET)


def _lzma2(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": _PRESET}]
    return lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


GZIP, XZ, LZMA2 = "gzip -9", "xz -9e", "lzma2 of xz -9e, no container"
CODECS: Mapping[str, Callable[[bytes], bytes]] = {GZIP: _gzip, XZ: _xz, LZMA2: _lzma2}


@dataclasses.dataclass(frozen=True)
class Compressed:
    """One codec's result in bits. each: [N] float64, of every document on its own. whole: of all documents end to end,
    in their order, where later ones profit from earlier ones."""

    each: np.ndarray
    whole: float


def compress(
    documents: Texts, codecs: Mapping[str, Callable[[bytes], bytes]] = CODECS
) -> dict[str, Compressed]:
    """Every codec's result on the UTF-8 bytes of `documents`."""
    data = [documents[i].encode() for i in range(len(documents))]
    every, found = b"".join(data), {}
    for name, codec in codecs.items():
        each = [8.0 * len(codec(text)) for text in tqdm(data, name, unit="document", disable=None)]
        found[name] = Compressed(np.array(each), 8.0 * len(codec(every)))
    return found
