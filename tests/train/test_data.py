"""Documents to batches: every document once an epoch, end to end, and a position that is exact wherever it is taken."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from train import data
from train.config import TrainError


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Document i is letter i, a few times."""
    lengths = random.Random(seed)
    return [chr(100 + i) * lengths.randint(1, longest) for i in range(count)]


def take(
    documents: Sequence[str], count: int, *, length: int = 4, batch: int = 2, seed: int = 1,
    position: str | None = None,
) -> tuple[list[np.ndarray], list[str]]:  # fmt: skip
    """`count` batches, and the position before each and after the last."""
    batches = data.Batches(data.blocks(documents, encode, length=length, batch=batch, seed=seed), position)
    found, places = [], [batches.position()]
    for _ in range(count):
        found.append(next(batches)["tokens"])
        places.append(batches.position())
    return found, places


def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
@example(lengths=[3, 10, 17, 4, 8], length=4, batch=2, seed=1, at=0)
@example(lengths=[3, 10, 17, 4, 8], length=4, batch=2, seed=1, at=9)
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=9), length=st.integers(1, 6),
    batch=st.integers(1, 3), seed=st.integers(0, 5), at=st.integers(0, 40),
)  # fmt: skip
def test_a_position_is_exact_wherever_it_is_taken(
    lengths: list[int], length: int, batch: int, seed: int, at: int
) -> None:
    """Also where a block ends with its document, where a document fills several blocks, and over epochs."""
    documents = [chr(100 + i) * n for i, n in enumerate(lengths)]
    how = dict(length=length, batch=batch, seed=seed)
    whole, places = take(documents, at + 6, **how)  # type: ignore[arg-type]
    rest, after = take(documents, 6, position=places[at], **how)  # type: ignore[arg-type]
    assert same(rest, whole[at:]) and after[1:] == places[at + 1 :]


@pytest.mark.parametrize("count", [5, 64, 150])
def test_every_document_is_read_whole_once_an_epoch(count: int) -> None:
    """Up to 64 streams give a block in turn; put together again, each reads its share of every epoch, in full, and
    the shares of one epoch are all documents."""
    documents = texts(count, 9)
    streams = min(data.STREAMS, count)
    assert streams == min(64, count)
    length = 2
    got, _ = take(documents, streams * 40, length=length, batch=1)
    epochs: list[list[str]] = [[], [], []]
    for i in range(streams):
        read = "".join(chr(t) for block in got[i::streams] for t in block[0])
        # The first letters are whole documents: letter i stands for document i, so runs are documents, unless the
        # same one ends an epoch and begins the next.
        share = len(range(i, count, streams))
        at = 0
        for epoch in epochs:
            for _ in range(share):
                document = documents[ord(read[at]) - 100]
                if not read.startswith(document, at):
                    raise AssertionError(f"{document!r} is not whole at {at} of {read!r}")
                epoch.append(document)
                at += len(document)
    for epoch in epochs:
        assert sorted(epoch) == sorted(documents)
    if count > 5:
        assert epochs[0] != epochs[1] != epochs[2]  # in a new order


def test_seeds_and_only_seeds_change_the_order() -> None:
    documents = texts(80, 20)
    assert same(take(documents, 30)[0], take(documents, 30)[0])
    assert not same(take(documents, 30)[0], take(documents, 30, seed=2)[0])


def test_a_batch_mixes_documents() -> None:
    """Blocks of a batch come from different streams even where documents are much longer than blocks."""
    documents = [chr(100 + i) * 500 for i in range(70)]
    for batch in take(documents, 5, length=8, batch=16)[0]:
        assert batch.shape == (16, 9) and batch.dtype == np.int32
        assert len({row[0] for row in batch}) == 16


def test_a_position_of_64_streams_is_small_and_quickly_taken_up() -> None:
    documents = texts(640, 2000)
    whole, places = take(documents, 300, length=64, batch=8)
    assert len(places[-1]) < 20_000 and isinstance(json.loads(places[-1]), dict)
    began = time.perf_counter()
    rest, _ = take(documents, 1, length=64, batch=8, position=places[299])
    assert same(rest, whole[299:])
    assert (
        time.perf_counter() - began < 5
    )  # of 0.1: it reads each stream's document again, not what came before


def test_no_documents_is_an_error() -> None:
    with pytest.raises(TrainError, match="no documents to train on"):
        data.blocks([], encode, length=4, batch=1, seed=0)


def test_errors_of_documents_come_through() -> None:
    class Bad(list):
        def __getitem__(self, index):
            raise TrainError(f"document {index} is not UTF-8")

    with pytest.raises(TrainError, match=r"document \d is not UTF-8"):
        take(Bad(["a"]), 1)


def test_held_out_blocks_are_the_first_documents_end_to_end() -> None:
    documents = ["ab", "cdé", "fgh", "ijkl", "mnop"]
    blocks, size = data.held_out(documents, encode, length=3, tokens=7)
    assert blocks.dtype == np.int32
    assert ["".join(map(chr, row)) for row in blocks] == ["abcd", "éfgh"]
    assert size == pytest.approx(13 / 12)  # é is two bytes; four documents are read to fill the two blocks
    everything, _ = data.held_out(documents, encode, length=3, tokens=10**6)
    assert len(everything) == len(list(itertools.chain(*documents))) // 4
    with pytest.raises(TrainError, match="hold 16 tokens, fewer than one block of 18"):
        data.held_out(documents, encode, length=17, tokens=100)
