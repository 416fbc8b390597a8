"""Documents to batches of token blocks, with grain: shuffle, tokenise, pack, batch, and a position to resume from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from kvjax.typing import Texts
from train.config import TrainError

Encode = Callable[[str], list[int]]
STREAMS = 64
"""Documents that are read at the same time, a block from each in turn: a batch from one document teaches little."""


def blocks(documents: Texts, encode: Encode, *, length: int, batch: int, seed: int) -> grain.IterDataset:
    """Endless batches {"tokens": [batch, length + 1] int32}: documents in a new order every epoch, end to end.

    A block may begin inside a document, and holds the `length` inputs of a step and their successors.

    Raises:
      TrainError: no documents.
    """
    if not len(documents):
        raise TrainError("no documents to train on")
    streams = min(STREAMS, len(documents))
    order = grain.MapDataset.source(documents).seed(seed).shuffle()
    packed = [_pack(order[i::streams], encode, length) for i in range(streams)]
    mixed = grain.experimental.InterleaveIterDataset(packed, cycle_length=streams, num_make_iter_threads=0)
    return mixed.batch(batch, drop_remainder=True)


def _pack(order: grain.MapDataset, encode: Encode, length: int) -> grain.IterDataset:
    encoded = order.repeat().map(lambda text: {"tokens": np.asarray(encode(text), np.int32)})
    stream = encoded.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packed = grain.experimental.ConcatThenSplitIterDataset(stream, length_struct={"tokens": length + 1})
    return packed.map(lambda block: {"tokens": block["tokens"]})


class Batches:
    """An iterator over a grain dataset whose position can be saved as JSON and taken up again."""

    def __init__(self, dataset: grain.IterDataset, position: str | None = None) -> None:
        self._iterator = iter(dataset)
        if position is not None:
            self._iterator.set_state(json.loads(position, object_hook=_with_tuples))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def position(self) -> str:
        """JSON of where the next batch comes from."""
        return json.dumps(self._iterator.get_state())


def _with_tuples(state: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and grain tells "nothing is left of this document" by comparing a slice with (-1, -1)."""
    slices = state.get("remainder_slices")
    if slices is not None:
        state["remainder_slices"] = {name: tuple(ends) for name, ends in slices.items()}
    return state


def held_out(documents: Texts, encode: Encode, *, length: int, tokens: int) -> tuple[np.ndarray, float]:
    """The first blocks of `documents`, in order: ([blocks, length + 1] int32, bytes per predicted token).

    About `tokens` tokens, or all there are; for watching a run, not for reporting.

    Raises:
      TrainError: the documents do not fill one block.
    """
    ids: list[int] = []
    size = 0
    for i in range(len(documents)):
        text = documents[i]
        if len(ids) >= tokens + length:
            break
        ids += encode(text)
        size += len(text.encode())
    count = min(len(ids), tokens + length) // (length + 1)
    if not count:
        raise TrainError(
            f"the held-out documents hold {len(ids)} tokens, fewer than one block of {length + 1}"
        )
    block = np.asarray(ids[: count * (length + 1)], np.int32).reshape(count, length + 1)
    return block, size / len(ids)
