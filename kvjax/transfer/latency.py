"""What a hand-off costs: time to first token by prompt length, natively, warm and cold; and flops of a repair.

Native: the target reads the prompt. Warm: the source's cache is there, and is mapped and repaired. Cold: the source
reads first. All three are the programs that `serve` runs, for one prompt, and end with the first token.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.bench import alternate, median
from kvjax.cache import KVCache
from kvjax.config import ModelConfig
from kvjax.cost import step_cost
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Plain
from kvjax.decode.state import DecodeState
from kvjax.lm import LM
from kvjax.transfer.mapper import Mapper
from kvjax.transfer.repair import Repair, hand_over


@dataclasses.dataclass
class Prompt:
    """One prompt of `length` random tokens; each method takes seconds and returns them. size: cache slots, the next
    multiple of `chunk`."""

    source: LM
    target: LM
    mapper: Mapper
    repair: Repair
    length: int
    chunk: int = 128

    def __post_init__(self) -> None:
        self.size = (self.length // self.chunk + 1) * self.chunk
        vocab = min(self.source.config.vocab, self.target.config.vocab)
        self.tokens = np.random.default_rng(0).integers(0, vocab, (1, self.size)).astype(np.int32)
        self.sampling = Sampling.create(1, max_new=1)
        self.read()

    def native(self) -> float:
        began = time.perf_counter()
        self._first(self._prefilled(self.target, self.length - 1))
        return time.perf_counter() - began

    def read(self) -> float:
        """The source's part."""
        began = time.perf_counter()
        self.cache: KVCache = self._prefilled(self.source, max(self.length - self.repair.tail, 0)).cache
        jax.block_until_ready(self.cache)
        return time.perf_counter() - began

    def warm(self) -> float:
        began = time.perf_counter()
        self._first(self._handed(self.repair))
        return time.perf_counter() - began

    def cold(self) -> float:
        return self.read() + self.warm()

    def mapping(self) -> float:
        """The map alone, of all tokens but the last."""
        began = time.perf_counter()
        jax.block_until_ready(self._handed(Repair()))
        return time.perf_counter() - began

    def _begin(self, lm: LM) -> DecodeState:
        length, idle = np.asarray([self.length], np.int32), np.zeros(1, bool)
        return loop.start(lm.model, Plain(), SamplerProgram(), (), self.tokens, length, idle)

    def _prefilled(self, lm: LM, count: int) -> DecodeState:
        with lm.model.rules.context():
            state = self._begin(lm)
            for i in range(-(-count // self.chunk)):
                state = loop.prefill(lm.model, Plain(), self.chunk, lm.params, (), state, np.int32(i))
            return state

    def _handed(self, repair: Repair) -> DecodeState:
        lm = self.target
        with lm.model.rules.context():
            state = self._begin(lm)
            return hand_over(
                lm.model, repair, self.chunk, lm.params, self.mapper, self.cache, state, self.length
            )

    def _first(self, state: DecodeState) -> None:
        lm = self.target
        with lm.model.rules.context():
            state = loop.rounds(
                lm.model, Plain(), SamplerProgram(), lm.params, (), state, self.sampling, np.zeros(2, np.uint32),
                np.int32(1), np.full(1, -1, np.int32),
            )  # fmt: skip
            jax.block_until_ready(state)


def by_length(
    source: LM, target: LM, mapper: Mapper, repair: Repair, lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row a length, medians of `repeats` alternating runs: milliseconds of native, warm and cold, their ratios
    (formed run by run), and milliseconds of the map alone per 1,000 tokens."""
    rows = []
    for length in lengths:
        prompt = Prompt(source, target, mapper, repair, length)
        timed = {k: getattr(prompt, k) for k in ("native", "warm", "cold", "mapping")}
        alternate(1, **timed)  # compiles
        found = alternate(repeats, **timed)
        ms = {f"{k} ms": 1e3 * median(found[k]) for k in ("native", "warm", "cold")}
        faster = {
            f"{k}: times faster": median([n / t for n, t in zip(found["native"], found[k], strict=True)])
            for k in ("warm", "cold")
        }
        each = 1e6 * median(found["mapping"]) / (length - 1)
        rows.append({"tokens": length, **ms, **faster, "map ms per 1,000 tokens": each})
    return rows


def break_even(rows: Sequence[dict[str, Any]], kind: str) -> float | None:
    """Prompt length from which `kind` ("warm" or "cold") stays faster than native, between measured lengths by linear
    interpolation; the shortest length where it always is, None where it is not at the longest."""
    ahead = [row["native ms"] - row[f"{kind} ms"] for row in rows]
    behind = [i for i, x in enumerate(ahead) if x < 0]
    if not behind:
        return float(rows[0]["tokens"])
    i = behind[-1]
    if i + 1 == len(rows):
        return None
    a, b = rows[i]["tokens"], rows[i + 1]["tokens"]
    return a + (b - a) * -ahead[i] / (ahead[i + 1] - ahead[i])


def told(found: float | None, rows: Sequence[dict[str, Any]]) -> str:
    """`break_even` in words."""
    if found is None:
        return f"not reached at {rows[-1]['tokens']:,} tokens"
    return f"at or below {found:,.0f} tokens" if found == rows[0]["tokens"] else f"about {found:,.0f} tokens"


def flops_share(config: ModelConfig, mapper: Mapper, repair: Repair, length: int) -> float:
    """Flops of map and repair over those of the target's prefill of `length` tokens."""
    flops = functools.partial(_prefill_flops, config)
    given = max(length - repair.tail, 0)
    mapped = sum(m.key.size + m.value.size for m in mapper.maps[repair.layers :])
    cost = 2 * mapped * given + flops(rows=length - given, context=given)
    if repair.layers:
        cost += flops(rows=given, context=0, layers=repair.layers)
    if repair.head:
        cost += flops(rows=repair.head, context=0)
    return cost / flops(rows=length, context=0)


def _prefill_flops(config: ModelConfig, *, rows: int, context: int, layers: int | None = None) -> int:
    layers = config.num_layers if layers is None else layers
    shallow = dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])
    return step_cost(shallow, batch=1, rows=rows, context=context, head=False).flops
