"""Timing of the compiled programs as they are served: decode rounds by width, prefill, and the memory limit.

Everything alternates and is reported as a median with its range, because machines drift; a ratio is formed from
figures of one run.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Junk, Plain
from kvjax.decode.state import DecodeState, DraftSource
from kvjax.lm import LM


def streaming_read(nbytes: int = 1 << 29) -> float:
    """GB/s of host memory read by all cores together (one pass over `nbytes` of float32)."""
    block = _stream_block(nbytes)
    parts = np.array_split(block, os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        began = time.perf_counter()
        list(pool.map(np.sum, parts))
        return block.nbytes / 1e9 / (time.perf_counter() - began)


_blocks: dict[int, np.ndarray] = {}


def _stream_block(nbytes: int) -> np.ndarray:
    if nbytes not in _blocks:
        _blocks[nbytes] = np.ones(nbytes // 4, np.float32)
    return _blocks[nbytes]


def median(values: list[float]) -> float:
    return statistics.median(values)


@dataclasses.dataclass
class Stepper:
    """Decode rounds of one width at a fixed context: each `step` runs `rounds` rounds and returns ms per round."""

    lm: LM
    width: int
    size: int
    context: int
    chunk: int = 128
    source: DraftSource = dataclasses.field(init=False)
    state: DecodeState = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        model = self.lm.model
        self.source = Plain() if self.width == 1 else Junk(width=self.width, vocab=self.lm.config.vocab)
        self.sampling = Sampling.create(1, max_new=self.size)
        self.program = SamplerProgram.of(self.sampling)
        self.tokens = (
            np.random.default_rng(0).integers(0, self.lm.config.vocab, (1, self.size)).astype(np.int32)
        )
        self.length = np.asarray([self.context], np.int32)
        self.prefill()
        with model.rules.context():
            self.rounds(1)

    def prefill(self) -> float:
        """Seconds to read the context (chunk by chunk, as served)."""
        model = self.lm.model
        with model.rules.context():
            began = time.perf_counter()
            state = loop.start(
                model, self.source, self.program, (), self.tokens, self.length, np.zeros(1, bool)
            )
            for i in range(-(-(self.context - 1) // self.chunk)):
                state = loop.prefill(model, self.source, self.chunk, self.lm.params, (), state, np.int32(i))
            self.state = jax.block_until_ready(state)
            return time.perf_counter() - began

    def rounds(self, count: int) -> float:
        """Milliseconds per round over `count` rounds. The context grows by about one token a round."""
        model = self.lm.model
        with model.rules.context():
            began = time.perf_counter()
            self.state = loop.rounds(
                model, self.source, self.program, self.lm.params, (), self.state, self.sampling,
                np.zeros(2, np.uint32), np.int32(count), np.full(1, -1, np.int32),
            )  # fmt: skip
            jax.block_until_ready(self.state)
            return (time.perf_counter() - began) / count * 1e3


def alternate(repeats: int, **timed: Callable[[], Any]) -> dict[str, list[Any]]:
    """Run the named callables in turn, `repeats` times each: their results in order."""
    results: dict[str, list[Any]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, run in timed.items():
            results[name].append(run())
    return results


def bytes_per_token(lm: LM, context: int) -> int:
    """Bytes a single-row step must read: every weight once (a tied embedding once), and the valid cache."""
    weights = sum(p.nbytes for n, p in zip(lm.model.names, lm.params) if n != "embed" or lm.config.tie)
    config, item = lm.config, lm.model.dtype.itemsize
    return weights + 2 * config.num_layers * context * lm.model.rules.kv_heads * config.head_dim * item
