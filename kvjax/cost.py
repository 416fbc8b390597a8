"""The ledger: flops and bytes of one step, worked out from a configuration alone. No JAX here.

A step brings `rows` new tokens per sequence to a cache of `context` tokens: a prefill chunk, a round of plain
decoding (1 row) or a verified block (W rows). Counted are the products, two flops per multiply-add; norms, rotary
embedding, softmax and sampling are left out (under 2 % of a step). New rows meet each other in a dense product, so
nothing is taken off for causality among them. Bytes are the least that must cross the memory bus: each weight
once, each visible cache slot once, each new slot once. Activations are listed beside them and not among them: how
many stay on chip is the compiler's affair.

Everything can be had per device of a (`data`, `model`) mesh by giving a `Layout`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from kvjax.config import ModelConfig

COMPONENTS = ("embed", "norms", "projections", "attention", "mlp", "head")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on its devices.

    data, model: mesh sizes. kv_heads: K', stored KV heads (None: as in the configuration). split_heads: False where
    attention is replicated over `model`.
    """

    data: int = 1
    model: int = 1
    kv_heads: int | None = None
    split_heads: bool = True

    @property
    def heads_over(self) -> int:
        """Devices the KV heads are spread over."""
        return self.model if self.split_heads else 1


@dataclasses.dataclass(frozen=True)
class Part:
    """What one component costs. Bytes; `activations` is each product's input and output once."""

    flops: int = 0
    weight_bytes: int = 0
    kv_read: int = 0
    kv_write: int = 0
    activations: int = 0

    @property
    def bytes(self) -> int:
        """The least that must cross the memory bus."""
        return self.weight_bytes + self.kv_read + self.kv_write

    def __add__(self, other: Part) -> Part:
        return Part(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one step costs one device, by component (`COMPONENTS`, or what a map has) and as a whole.

    reduced: bytes of the partial sums that `model` devices add up between them (o_proj, down_proj).
    """

    parts: Mapping[str, Part]
    reduced: int = 0

    def _sum(self, field: str) -> int:
        return sum(getattr(part, field) for part in self.parts.values())

    @property
    def flops(self) -> int:
        return self._sum("flops")

    @property
    def weight_bytes(self) -> int:
        return self._sum("weight_bytes")

    @property
    def kv_read(self) -> int:
        return self._sum("kv_read")

    @property
    def kv_write(self) -> int:
        return self._sum("kv_write")

    @property
    def activations(self) -> int:
        return self._sum("activations")

    @property
    def bytes(self) -> int:
        """The least that must cross the memory bus: weights, cache read, cache written."""
        return self._sum("bytes")

    def seconds(self, peak_flops: float, bandwidth: float) -> float:
        """Roofline time: the larger of products at `peak_flops` flop/s and bytes at `bandwidth` bytes/s."""
        return max(self.flops / peak_flops, self.bytes / bandwidth)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes one device holds between steps: parameters, KV cache, and the token buffer of the batch."""

    weights: int
    cache: int
    tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.tokens


def parameters(config: ModelConfig, layout: Layout = Layout()) -> dict[str, int]:
    """Number of stored parameters on one device, by component."""
    d, f, h, n = config.hidden, config.intermediate, config.head_dim, config.num_heads
    kv, split, layers = layout.kv_heads or config.num_kv_heads, layout.heads_over, config.num_layers
    qkv = (n + 2 * kv) * h // split
    projections = d * qkv + d * n * h // split + (qkv if config.qkv_bias else 0) + (d if config.o_bias else 0)
    mlp = 3 * d * f // layout.model + (2 * f // layout.model + d if config.mlp_bias else 0)
    norms = 2 * d + (2 * h if config.qk_norm else 0)
    table = config.vocab * d // layout.model
    return {
        "embed": table, "norms": layers * norms + d, "projections": layers * projections, "attention": 0,
        "mlp": layers * mlp, "head": 0 if config.tie else table,
    }  # fmt: skip


def memory(
    config: ModelConfig, *, batch: int, size: int, dtype_bytes: int = 2, kv_bytes: int | None = None,
    layout: Layout = Layout(),
) -> Memory:  # fmt: skip
    """What one device holds for `batch` sequences of `size` cache slots."""
    kv = layout.kv_heads or config.num_kv_heads
    local = share(batch, layout.data)
    slots = 2 * config.num_layers * local * kv // layout.heads_over * size * config.head_dim
    weights = sum(parameters(config, layout).values()) * dtype_bytes
    return Memory(weights, slots * (kv_bytes or dtype_bytes), local * size * 4)


def step_cost(
    config: ModelConfig, *, batch: int, rows: int, context: int, head: bool = True, dtype_bytes: int = 2,
    kv_bytes: int | None = None, layout: Layout = Layout(),
) -> Cost:  # fmt: skip
    """What a step of `rows` new tokens in each of `batch` sequences costs one device.

    Args:
      context: cache slots that come before the new rows (a sliding window sees fewer).
      head: False for a prefill chunk, which computes no logits and therefore needs no more of its last layer than
        the new keys and values.
      dtype_bytes, kv_bytes: of weights and activations, and of the cache (default the same).
    """
    d, f, h, n = config.hidden, config.intermediate, config.head_dim, config.num_heads
    layers, kv, split, m = (
        config.num_layers,
        layout.kv_heads or config.num_kv_heads,
        layout.heads_over,
        layout.model,
    )
    wide = kv_bytes or dtype_bytes
    batch = share(batch, layout.data)
    tokens, whole = batch * rows, layers if head else layers - 1  # layers that are computed to their end
    # slots the block of rows sees, by layer
    seen = [context if w is None else min(context, w - 1 + rows) for w in config.windows]
    stored = parameters(config, layout)

    qkv, out, slot = (n + 2 * kv) * h // split, n * h // split, kv * h // split
    unused = d * out + (d if config.o_bias else 0)  # o_proj of a last layer that ends at its keys and values
    projections = Part(
        flops=2 * tokens * d * (layers * qkv + whole * out),
        weight_bytes=(stored["projections"] - (layers - whole) * unused) * dtype_bytes,
        activations=tokens * (layers * (d + qkv) + whole * (out + d)) * dtype_bytes,
    )
    attention = Part(
        flops=sum(4 * tokens * out * (s + rows) for s in seen[:whole]),
        kv_read=sum(2 * batch * slot * s for s in seen[:whole]) * wide,
        kv_write=layers * 2 * tokens * slot * wide,
        activations=whole * tokens * 2 * out * dtype_bytes,
    )
    mlp = Part(
        flops=whole * 6 * tokens * d * f // m,
        weight_bytes=stored["mlp"] // layers * whole * dtype_bytes,
        activations=whole * tokens * (2 * d + 3 * f // m) * dtype_bytes,
    )
    ends = Part()
    if head:
        vocab = config.vocab // m
        ends = Part(
            flops=2 * tokens * d * vocab, weight_bytes=vocab * d * dtype_bytes,
            activations=tokens * (d * dtype_bytes + 4 * vocab),
        )  # fmt: skip
    parts = {
        "embed": Part(weight_bytes=tokens * d * dtype_bytes, activations=tokens * d * dtype_bytes),
        "norms": Part(weight_bytes=stored["norms"] * dtype_bytes),
        "projections": projections, "attention": attention, "mlp": mlp, "head": ends,
    }  # fmt: skip
    sums = whole * ((split > 1) + (m > 1))
    return Cost(parts, reduced=sums * tokens * d * dtype_bytes)


def prefill_steps(
    config: ModelConfig, *, batch: int, length: int, chunk: int, span: tuple[int, int] | None = None,
    dtype_bytes: int = 2, layout: Layout = Layout(),
) -> list[Cost]:  # fmt: skip
    """The chunks in which `length` tokens are read into an empty cache; span: (first, end), through these layers only,
    from their hidden states where first is not 0."""
    first, end = span or (0, config.num_layers)
    part = dataclasses.replace(config, num_layers=end - first, windows=config.windows[first:end])
    how = {"batch": batch, "rows": chunk, "head": False, "dtype_bytes": dtype_bytes, "layout": layout}
    steps = [step_cost(part, context=i * chunk, **how) for i in range(-(-length // chunk))]  # type: ignore[arg-type]
    if first:
        steps = [dataclasses.replace(step, parts={**step.parts, "embed": Part()}) for step in steps]
    return steps


def total(costs: Iterable[Cost]) -> Cost:
    """What several steps cost together."""
    parts: dict[str, Part] = {}
    reduced = 0
    for cost in costs:
        for name, part in cost.parts.items():
            parts[name] = parts.get(name, Part()) + part
        reduced += cost.reduced
    return Cost(parts, reduced)


def share(batch: int, data: int) -> int:
    """Sequences a device has of a batch. Raises ValueError where they do not divide."""
    if batch < 1 or batch % data:
        raise ValueError(f"batch {batch} does not divide over a data axis of {data}")
    return batch // data
