"""The checkpoint table: one invertible row per parameter leaf.

A row names the Hugging Face tensors a leaf is made of, the leaf's dotted path, the operation that joins
them and the leaf's logical axes. The same rows load, export and decide the sharding. `match` compares a
table with what a file holds and reports everything that is wrong at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_SHOWN = 40
_CHUNK = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the tensor and the fault."""

    @classmethod
    def collect(cls, source: str, problems: Sequence[str]) -> CheckpointError:
        """One error for all `problems` of `source`, at most the first 40 spelled out."""
        if len(problems) == 1:
            return cls(f"{source}: {problems[0]}")
        lines = [f"{source}: {len(problems)} problems", *problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"... and {len(problems) - _SHOWN} more")
        return cls("\n  ".join(lines))


def empty(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX on CPU takes over without copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


class Op(Protocol):
    """How HF tensors become one leaf. `split(join(parts))` gives back `parts`."""

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]: ...

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray: ...

    def split(self, leaf: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]: ...


@dataclasses.dataclass(frozen=True)
class Identity:
    """The tensor as published."""

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        (part,) = parts
        return part

    def split(self, leaf: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
        return (leaf.reshape(shapes[0]),)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Equal tensors stacked on a new leading axis."""

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (len(shapes), *shapes[0])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(parts, out=empty((len(parts), *parts[0].shape), parts[0].dtype))

    def split(self, leaf: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
        return tuple(leaf)


@dataclasses.dataclass(frozen=True)
class Columns:
    """[D, N*H] -> [D, heads, N*H/heads]: the input columns of o_proj by stored KV head."""

    heads: int

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        rows, columns = shapes[0]
        return (rows, self.heads, columns // self.heads)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        (part,) = parts
        return part.reshape(part.shape[0], self.heads, -1)

    def split(self, leaf: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
        return (leaf.reshape(shapes[0]),)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """q [N*H, ...], k and v [K*H, ...] -> [K', (G'+2)*H, ...]: per stored KV head its q, k and v rows.

    `stored` K' is a multiple of `kv_heads` K; each of the K heads is then kept K'/K times in a row, which
    matches query heads in published order: head n belongs to stored head n // G'. `split` drops copies.
    """

    kv_heads: int
    stored: int

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        (q, *rest), (k, *_) = shapes[:2]
        return (self.stored, q // self.stored + 2 * (k // self.kv_heads), *rest)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        q, k, v = parts
        copies, rest = self.stored // self.kv_heads, q.shape[1:]
        q = q.reshape(self.stored, -1, *rest)
        k, v = (np.repeat(x.reshape(self.kv_heads, -1, *rest), copies, axis=0) for x in (k, v))
        out = empty((self.stored, q.shape[1] + 2 * k.shape[1], *rest), q.dtype)
        return np.concatenate((q, k, v), axis=1, out=out)

    def split(self, leaf: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
        copies = self.stored // self.kv_heads
        q, k = shapes[0][0] // self.stored, shapes[1][0] // self.kv_heads
        kept = leaf[::copies]
        parts = leaf[:, :q], kept[:, q : q + k], kept[:, q + k :]
        return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


@dataclasses.dataclass(frozen=True)
class Row:
    """HF tensors `hf` of shapes `shapes` -> leaf `ours`. `{i}` in both names stands for the layer."""

    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ours: str
    axes: tuple[str | None, ...]
    op: Op = Identity()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self.op.shape(self.shapes)


def expand(rows: Sequence[Row], num_layers: int) -> tuple[Row, ...]:
    """Rows with the layer filled in: rows without `{i}` once, the others once per layer, layer by layer."""
    layered = [row for row in rows if "{i}" in row.ours]
    before = [row for row in rows if row not in layered]
    out = list(before)
    for i in range(num_layers):
        for row in layered:
            hf = tuple(name.replace("{i}", str(i)) for name in row.hf)
            out.append(dataclasses.replace(row, hf=hf, ours=row.ours.replace("{i}", str(i))))
    return tuple(out)


@dataclasses.dataclass(frozen=True)
class Info:
    """What a file says about one tensor. `label` is the tensor's own name in `file`."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    label: str


class Source(Protocol):
    """Tensors of a checkpoint under their HF names; `read` returns an array the caller owns."""

    name: str

    @property
    def tensors(self) -> Mapping[str, Info]: ...

    def read(self, name: str) -> np.ndarray: ...


# Buffers old transformers versions saved; they follow from the configuration.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def match(rows: Sequence[Row], source: Source, *, tied: bool, readable: Sequence[str]) -> None:
    """Compare expanded `rows` with the tensors of `source`.

    `tied`: the configuration says the head is the embedding; a separate head is then only accepted when it
    is the same matrix. `readable`: dtype names `source.read` can turn into floating point.

    Raises:
      CheckpointError: everything missing, extra, of wrong shape or dtype, or used twice, in one message.
    """
    problems: list[str] = []
    tensors, wanted = source.tensors, {}
    for row in rows:
        for name, shape in zip(row.hf, row.shapes, strict=True):
            if name in wanted:
                problems.append(f"tensor {name!r}: claimed by two rows of the table")
            wanted[name] = shape
            info = tensors.get(name)
            if info is None:
                problems.append(f"tensor {name!r}: missing (needed for {row.ours})")
                continue
            where = f"{info.file}: tensor {info.label!r}"
            if info.shape != shape:
                problems.append(f"{where}: shape {list(info.shape)}, the configuration needs {list(shape)}")
            if info.dtype not in readable:
                problems.append(f"{where}: dtype {info.dtype} is not read (known: {', '.join(readable)})")
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    for name, info in tensors.items():
        if name in wanted or _HARMLESS.fullmatch(name):
            continue
        if name == head and tied and embed in tensors and not problems:
            if info.shape == tensors[embed].shape and np.array_equal(source.read(head), source.read(embed)):
                continue
            problems.append(
                f"{info.file}: tensor {info.label!r} differs from {tensors[embed].label!r}, but the "
                "configuration says tie_word_embeddings; correct the configuration or drop the tensor"
            )
            continue
        if name == head and tied and embed in tensors:
            continue
        problems.append(f"{info.file}: tensor {info.label!r}: not part of this model (extra)")
    if problems:
        raise CheckpointError.collect(source.name, problems)


def leaves(rows: Sequence[Row], source: Source, dtype: str) -> Iterator[tuple[Row, np.ndarray]]:
    """Read, join and cast one leaf at a time; nothing but the current leaf is held.

    Raises:
      CheckpointError: NaN or infinite weights, found anywhere in the checkpoint, each tensor named.
    """
    target, bad = DTYPES[dtype], []
    for row in rows:
        parts = [source.read(name) for name in row.hf]
        leaf = cast(row.op.join(parts), target)
        if not finite(leaf):
            named = zip(row.hf, parts, strict=True)
            bad += [_nonfinite(source, n, p, dtype) for n, p in named if not finite(cast(p, target))]
        del parts
        if not bad:
            yield row, leaf
    if bad:
        raise CheckpointError.collect(source.name, bad)


def _nonfinite(source: Source, name: str, part: np.ndarray, dtype: str) -> str:
    info, values = source.tensors[name], part.astype(np.float32)
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    what = f"{nan} NaN and {inf} infinite values" if nan or inf else f"values beyond the range of {dtype}"
    return f"{info.file}: tensor {info.label!r}: {what} among {part.size}"


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` as contiguous `dtype`."""
    if x.dtype == dtype:
        return np.ascontiguousarray(x)
    out = empty(x.shape, dtype)
    if x.dtype == DTYPES["bfloat16"] and dtype == np.float32:
        # Its bits are the upper half of the float32's; shifting them is much faster than astype.
        np.left_shift(x.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        return out
    with np.errstate(over="ignore"):
        out[...] = x
    return out


def finite(x: np.ndarray) -> bool:
    """Whether no element is NaN or infinite: all exponent bits set, read in cache-sized pieces."""
    x = x.reshape(-1)
    bits = x.view(np.uint32 if x.dtype == np.float32 else np.uint16)
    limit = {4: 0xFF000000, 2: 0xF800 if x.dtype == np.float16 else 0xFF00}[x.dtype.itemsize]
    pieces = (bits[i : i + _CHUNK] for i in range(0, bits.size, _CHUNK))
    return all(int(np.left_shift(piece, 1).max()) < limit for piece in pieces)  # the shift drops the sign
