"""What handing a prompt over costs against reading it natively, on an accelerator that is not here.

The source has read the prompt; counted is what the target's side needs from there until it can decode (`kvjax.cost`),
and the programs that do it are compiled for the target's compiler where that is installed (`kvjax.aot`).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import jax

from kvjax import aot, cost, topology
from kvjax.config import ModelConfig
from kvjax.cost import Cost, Layout
from kvjax.plan import BYTES, CHUNK, layout_of
from kvjax.report import Report
from kvjax.sharding import MeshError, Rules
from kvjax.transfer.ledger import MapKind, handoff_steps
from kvjax.transfer.repair import SPAN, Repair


@dataclasses.dataclass(frozen=True)
class Hand:
    """What is handed over, how. k, joint, local: of the map (`kvjax.transfer.ledger.MapKind`), map_dtype: of its
    weights. length: prompt tokens; chunk: of native prefill. mesh: (`data`, `model`), default all devices on
    `model`."""

    k: int = 4
    joint: bool = True
    local: bool = False
    repair: Repair = Repair(tail=32)
    length: int = 8192
    batch: int = 1
    chunk: int = CHUNK
    mesh: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    map_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("k", "length", "batch", "chunk"):
            least = 2 if name == "length" else 1  # a single token needs no prefill
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("dtype", "map_dtype"):
            if getattr(self, name) not in BYTES:
                raise ValueError(f"{name} {getattr(self, name)!r} is not supported; use {' or '.join(BYTES)}")

    @property
    def kind(self) -> MapKind:
        return MapKind(self.k, self.joint, self.local, BYTES[self.map_dtype])

    @property
    def size(self) -> int:
        """Cache slots, as serving takes them: the power of two with room for an answer."""
        return max(self.chunk, 1 << self.length.bit_length())

    @property
    def span(self) -> int:
        """Rows mapped at once, as serving takes them on accelerators."""
        return math.gcd(self.size, SPAN * self.chunk)


def plan_transfer(
    source: ModelConfig, target: ModelConfig, on: str, hand: Hand = Hand(), *,
    names: tuple[str, str] = ("source", "target"), bar: float | None = None, compile: bool = True,
    progress: bool | None = None,
) -> Report:  # fmt: skip
    """Native prefill of the target against a hand-off, per device of `on` (a name in `kvjax.topology.TARGETS`).

    Args:
      bar: demand that flops and bytes of the hand-off are at most this share of native prefill's.

    Returns: tables "cost" (the last row, what the source's reading cost, is not part of the hand-off), "maps" (what
      other maps would take) and "compiled" (counts of one call; the ledger's are of the last, with most context).

    Raises:
      TopologyError, MeshError, CompileError: see `kvjax.plan.plan`. ValueError: a repair or k there is not.
    """
    found = topology.target(on)
    shape = hand.mesh or (1, found.devices)
    layouts = _layouts(source, target, hand, on, shape, names)
    memory = [
        cost.memory(config, batch=hand.batch, size=hand.size, dtype_bytes=BYTES[hand.dtype], layout=layout)
        for config, layout in zip((source, target), layouts, strict=True)
    ]
    how: dict[str, Any] = {"batch": hand.batch, "dtype_bytes": BYTES[hand.dtype]}
    native = cost.prefill_steps(target, length=hand.length - 1, chunk=hand.chunk, layout=layouts[1], **how)
    read = cost.prefill_steps(
        source, length=max(hand.length - hand.repair.tail, 0), chunk=hand.chunk, layout=layouts[0], **how
    )

    def steps(kind: MapKind) -> dict[str, list[Cost]]:
        return handoff_steps(
            source, target, kind, hand.repair, length=hand.length, span=hand.span, layout=layouts[1], **how
        )

    def seconds(steps: list[Cost]) -> float:
        return sum(step.seconds(found.peak_flops, found.hbm_bandwidth) for step in steps)

    phases = steps(hand.kind)
    whole = [step for calls in phases.values() for step in calls]
    report = Report(
        f"{names[0]} -> {names[1]} on {on}, {shape[0]}x{shape[1]} of {found.devices} devices",
        {
            "prompt": hand.length, "batch": hand.batch, "native_chunk": hand.chunk, "mapped_at_once": hand.span,
            "slots": hand.size, "dtype": hand.dtype, "map_dtype": hand.map_dtype,
            **{name: getattr(hand, name) for name in ("k", "joint", "local")}, **dataclasses.asdict(hand.repair),
            "target_GB": memory[1].weights / 1e9, "target_cache_GB": memory[1].cache / 1e9,
            "source_cache_GB": memory[0].cache / 1e9, "map_GB": _map_bytes(phases) / 1e9,
            "counted": "per device: the ledger's least work at the vendor's peak figures, not a measurement",
        },
    )  # fmt: skip
    base = cost.total(native)
    named = {
        "native prefill": native,
        "hand-off": whole,
        **{f"of it, {name}": calls for name, calls in phases.items()},
    }
    for what, calls in (named | {"source prefill": read}).items():
        one = cost.total(calls)
        report.row(
            "cost", what=what, calls=len(calls), TFLOP=one.flops / 1e12, GB=one.bytes / 1e9,
            roofline_ms=seconds(calls) * 1e3, share_flops=one.flops / base.flops, share_bytes=one.bytes / base.bytes,
            share_time=seconds(calls) / seconds(native),
        )  # fmt: skip
    for k in sorted(k for k in {1, 2, 4, 8, hand.k} if k <= source.num_layers):
        for joint, local in ((True, False), (False, False), (True, True), (False, True)):
            other = steps(MapKind(k, joint, local, BYTES[hand.map_dtype]))
            one = cost.total(step for calls in other.values() for step in calls)
            shares = {"share_flops": one.flops / base.flops, "share_bytes": one.bytes / base.bytes}
            within = {} if bar is None else {"within": "yes" if max(shares.values()) <= bar else "no"}
            inputs, heads = "both" if joint else "own kind", "one" if local else "all"
            report.row(
                "maps", k=k, inputs=inputs, heads=heads, map_GB=_map_bytes(other) / 1e9, **shares, **within
            )
    if bar is not None:
        one = cost.total(whole)
        report.bar("flops of the hand-off / native prefill", one.flops / base.flops, "<=", bar)
        report.bar("bytes of the hand-off / native prefill", one.bytes / base.bytes, "<=", bar)
    if compile:
        _compile(report, source, target, on, hand, shape, {"prefill": native, **phases}, progress)
    return report


def _layouts(
    source: ModelConfig,
    target: ModelConfig,
    hand: Hand,
    on: str,
    shape: tuple[int, int],
    names: tuple[str, str],
) -> tuple[Layout, Layout]:
    """Where both models lie; everything that cannot be is refused here."""
    count = topology.target(on).devices
    if shape[0] * shape[1] > count:
        raise MeshError(f"mesh {shape[0]}x{shape[1]} needs more devices than the {count} of {on}")
    mesh = jax.sharding.AbstractMesh(shape, ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
    layouts = []
    for config, name in zip((source, target), names, strict=True):
        if hand.length > config.max_positions:
            raise ValueError(
                f"{hand.length} tokens exceed the {config.max_positions} positions {name} was made for"
            )
        layouts.append(layout_of(Rules.create(config, mesh)))
    if hand.k > source.num_layers:
        raise ValueError(f"k = {hand.k}: {names[0]} has {source.num_layers} layers")
    repair = hand.repair
    if repair.layers + repair.group + bool(repair.group) > target.num_layers:
        raise ValueError(
            f"repair.layers = {repair.layers} and repair.group = {repair.group}: {names[1]} has {target.num_layers}"
            " layers, and a group begins behind a mapped one"
        )
    return layouts[0], layouts[1]


def _map_bytes(phases: dict[str, list[Cost]]) -> int:
    """Of a map's weights, on a device."""
    return sum(
        step.parts[name].weight_bytes
        for step in phases["map"][:1]
        for name in ("map", "hidden")
        if name in step.parts
    )


def _compile(
    report: Report, source: ModelConfig, target: ModelConfig, on: str, hand: Hand, mesh: tuple[int, int],
    ledger: dict[str, list[Cost]], progress: bool | None,
) -> None:  # fmt: skip
    """The table "compiled", or why there is none."""
    missing = topology.missing(on)
    if missing is not None:
        report.facts["not compiled"] = missing
        return
    request = {
        "source": source, "config": target, "target": on, "mesh": mesh, "batch": hand.batch, "size": hand.size,
        "chunk": hand.chunk, "span": hand.span, "k": hand.k, "joint": hand.joint, "local": hand.local,
        "repair": dataclasses.asdict(hand.repair), "dtype": hand.dtype, "map_dtype": hand.map_dtype,
    }  # fmt: skip
    told = aot.ask("handoff", request, progress=sys.stderr.isatty() if progress is None else progress)
    for name, said in told.items():
        steps = ledger.get(name, [])
        last = steps[-1] if steps else Cost({})
        report.row(
            "compiled", program=name, seconds=said.seconds, arguments_GB=said.arguments / 1e9,
            extra_GB=said.extra / 1e9, GFLOP=math.nan if said.flops is None else said.flops / 1e9,
            ledger_GFLOP=last.flops / 1e9, accessed_GB=(said.bytes_accessed or math.nan) / 1e9,
            ledger_GB=last.bytes / 1e9, refused=said.error or "",
        )  # fmt: skip
