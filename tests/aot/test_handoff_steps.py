"""The programs of a hand-off through the real TPU and GPU compilers: real widths, few layers; nothing runs here."""

from __future__ import annotations

import dataclasses

import pytest

from kvjax import aot, cost, plan, topology
from kvjax.config import ModelConfig
from kvjax.plan import layout_of
from kvjax.sharding import Rules, make_mesh
from kvjax.transfer.ledger import MapKind, handoff_steps
from kvjax.transfer.plan import Hand, plan_transfer
from kvjax.transfer.repair import Repair

pytestmark = pytest.mark.aot
SIZE, CHUNK, SPAN = 8192, 256, 1024


def config_of(name: str, layers: int) -> ModelConfig:
    return dataclasses.replace(plan.find(name)[1], num_layers=layers, windows=(), vocab=16384)


def need(request, target: str) -> None:
    """Skip where the compiler is missing, unless these tests were asked for by name: then they fail."""
    lacking = topology.missing(target)
    if lacking is not None and "aot" not in (request.config.getoption("-m") or ""):
        pytest.skip(lacking)


@pytest.mark.parametrize(
    ("pair", "target", "mesh", "kind", "repair"),
    [
        (("llama-3.1-minitron-4b", "llama-3.1-8b"), "v5e-4", (1, 4), MapKind(2), Repair(tail=32)),
        (
            ("llama-3.1-minitron-4b", "llama-3.1-8b"),
            "v5p-8",
            (1, 1),
            MapKind(2, joint=False),
            Repair(tail=32),
        ),
        (("qwen3-0.6b", "qwen3-1.7b"), "v5e-4", (2, 2), MapKind(2, local=True), Repair(tail=32)),
        (("qwen3-4b", "qwen3-32b"), "v5p-16", (1, 8), MapKind(2), Repair(tail=32, head=4, layers=1, group=1)),
        (("llama-3.1-minitron-4b", "llama-3.1-8b"), "h100", (1, 1), MapKind(2), Repair(tail=32)),
    ],
    ids=["tensor-parallel", "one-chip", "head-local", "all-repairs", "gpu"],
)
def test_programs_compile(request, pair, target: str, mesh, kind: MapKind, repair: Repair) -> None:
    """The state is written in place, source rows are gathered by chunk, and flops are the ledger's."""
    need(request, target)
    source, config = config_of(pair[0], 3), config_of(pair[1], 4)
    batch = 2 * mesh[0]
    text = ""

    def inspect(name, program) -> None:
        nonlocal text
        if name == "map" and not repair.layers:  # libtpu cannot print a chunk's forward on every mesh
            text = program.as_text()

    found = aot.compile_handoff(
        source, config, target, mesh=mesh, batch=batch, size=SIZE, chunk=CHUNK, span=SPAN, k=kind.k, joint=kind.joint,
        local=kind.local, repair=dataclasses.asdict(repair), dtype="bfloat16", map_dtype="bfloat16",
        inspect=inspect,
    )  # fmt: skip
    rules = Rules.create(config, make_mesh(*mesh, devices=topology.devices(target)))
    layout = layout_of(rules)
    steps = handoff_steps(
        source, config, kind, repair, batch=batch, length=SIZE + repair.tail, span=SPAN, layout=layout
    )
    assert set(found) == {"prefill", *steps}
    held = cost.memory(config, batch=batch, size=SIZE, layout=layout)
    for name, said in found.items():
        assert said.error is None and said.aliased >= held.cache, name
        assert said.outputs - said.aliased < 4096, f"{name}: part of the state is not updated in place"
    # XLA counts attention without a kernel over the whole slab, and a kernel as it declares itself: over the slots of
    # the last call.
    for name in ("map", "tail"):
        said = found[name]
        if said.flops is not None:
            assert steps[name][-1].flops == pytest.approx(said.flops, rel=0.05), name
    moved = [line for line in text.splitlines() if "all-gather" in line]
    assert not [line for line in moved if f",{SIZE}," in line], "the whole cache is gathered"
    if mesh[1] == 1 or kind.local:  # heads line up
        assert not moved


def test_through_the_child_process(request) -> None:
    """`kvjax plan-transfer` as the command runs it."""
    need(request, "v5e-4")
    source, target = config_of("qwen3-0.6b", 2), config_of("qwen3-1.7b", 2)
    hand = Hand(k=1, length=2000, repair=Repair(tail=8))
    report = plan_transfer(source, target, "v5e-4", hand, bar=1.0, progress=False)
    rows = {row["program"]: row for row in report.tables["compiled"]}
    assert set(rows) == {"prefill", "map", "tail"} and report.ok
    for name in ("map", "tail"):
        assert rows[name]["ledger_GFLOP"] == pytest.approx(rows[name]["GFLOP"], rel=0.05)
        assert rows[name]["refused"] == ""
