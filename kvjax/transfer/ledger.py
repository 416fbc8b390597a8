"""The ledger of a hand-off: mapping, counted as `kvjax.cost` counts a step, and the target's own steps around it.

A target layer's map reads the rows of its k source layers once, for its keys and values together, and its weights once;
it writes the layer's rows. Un-rotating, centring and rotating are left out. What the devices of a mesh gather of the
source's rows from each other is not counted.
"""

from __future__ import annotations

import dataclasses

from kvjax.config import ModelConfig
from kvjax.cost import Cost, Layout, Part, prefill_steps, share, step_cost, total
from kvjax.transfer.repair import Repair

ONE = Layout()  # one device


@dataclasses.dataclass(frozen=True)
class MapKind:
    """A map, as far as its cost goes. k: source layers a target layer reads; joint: keys and values each read both;
    local: each target head reads one source head; dtype_bytes: of a weight."""

    k: int
    joint: bool = True
    local: bool = False
    dtype_bytes: int = 2


def map_cost(
    source: ModelConfig, target: ModelConfig, kind: MapKind, *, batch: int, rows: int, layers: int | None = None,
    hidden: bool = False, kv_bytes: int = 2, layout: Layout = ONE,
) -> Cost:  # fmt: skip
    """What mapping `rows` tokens of each of `batch` sequences costs one device.

    Args:
      layers: target layers that are mapped (None: all). hidden: a hidden state as well, from k layers of its own.
      kv_bytes: of both caches. layout: the target's; the devices of `model` share its heads and each read all source
        heads (of a head-local map those it needs).
    """
    tokens = share(batch, layout.data) * rows
    heads = (layout.kv_heads or target.num_kv_heads) // layout.heads_over
    layers, out, width = (
        target.num_layers if layers is None else layers,
        heads * target.head_dim,
        source.head_dim,
    )
    seen = min(heads, source.num_kv_heads) if kind.local else source.num_kv_heads
    inputs = kind.k * (2 if kind.joint else 1) * (1 if kind.local else source.num_kv_heads) * width
    weights = layers * 2 * out * inputs
    parts = {"map": Part(
        flops=2 * tokens * weights, weight_bytes=weights * kind.dtype_bytes,
        kv_read=tokens * layers * kind.k * 2 * seen * width * kv_bytes, kv_write=tokens * layers * 2 * out * kv_bytes,
        activations=tokens * layers * 2 * (inputs * kind.dtype_bytes + out * 4),
    )}  # fmt: skip
    if hidden:
        inputs = kind.k * 2 * source.num_kv_heads * width
        parts["hidden"] = Part(
            flops=2 * tokens * target.hidden * inputs, weight_bytes=target.hidden * inputs * kind.dtype_bytes,
            kv_read=tokens * inputs * kv_bytes, activations=tokens * (inputs * kind.dtype_bytes + target.hidden * 4),
        )  # fmt: skip
    return Cost(parts)


def handoff_steps(
    source: ModelConfig, target: ModelConfig, kind: MapKind, repair: Repair, *, batch: int, length: int, span: int,
    dtype_bytes: int = 2, layout: Layout = ONE,
) -> dict[str, list[Cost]]:  # fmt: skip
    """What `kvjax.transfer.repair` runs for a prompt of `length` tokens that the source has read, up to its last token
    (the first anchor): by program ("map", "head", "tail") and call. span: rows mapped at once.

    Native prefill of the same is `prefill_steps` of length - 1 tokens.
    """
    rows = max(length - repair.tail, 0)
    how = {"batch": batch, "dtype_bytes": dtype_bytes, "layout": layout}
    calls = -(-rows // span)
    mapped = map_cost(
        source, target, kind, batch=batch, rows=span, layers=target.num_layers - repair.layers - repair.group,
        hidden=repair.group > 0, kv_bytes=dtype_bytes, layout=layout,
    )  # fmt: skip
    chunks = [[mapped] for _ in range(calls)]
    first = repair.layers + 1  # where a group begins matters only to a model with windows
    spans = [(0, repair.layers)] if repair.layers else []
    spans += [(first, first + repair.group)] if repair.group else []
    for layers in spans:
        for found, step in zip(chunks, prefill_steps(target, length=rows, chunk=span, span=layers, **how)):  # type: ignore[arg-type]
            found.append(step)
    steps = {"map": [total(found) for found in chunks]}
    if repair.head:
        steps["head"] = [step_cost(target, rows=repair.head, context=0, head=False, **how)]  # type: ignore[arg-type]
    if repair.tail > 1:
        steps["tail"] = [step_cost(target, rows=repair.tail - 1, context=rows, head=False, **how)]  # type: ignore[arg-type]
    return steps
