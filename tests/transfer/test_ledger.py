"""The ledger of a hand-off against what XLA compiled and a map's own leaves; its command, without a compiler."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from kvjax import cost, models, plan
from kvjax.cli import main
from kvjax.config import ModelConfig
from kvjax.cost import Layout
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram
from kvjax.decode.sources import Plain
from kvjax.sharding import MeshError, Rules, make_mesh
from kvjax.transfer import select, shapes
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.ledger import MapKind, handoff_steps, map_cost
from kvjax.transfer.plan import Hand, plan_transfer
from kvjax.transfer.repair import Repair, map_chunk, read_tail

SIZE, SPAN = 512, 128


def config_of(name: str, layers: int) -> ModelConfig:
    return dataclasses.replace(plan.find(name)[1], num_layers=layers, windows=(), vocab=1024)


@pytest.mark.parametrize(
    ("kind", "repair"),
    [
        (MapKind(2), Repair(tail=5)),
        (MapKind(2, joint=False), Repair(tail=5)),
        (MapKind(3, local=True), Repair(tail=5)),
        (MapKind(1, joint=False, local=True), Repair(tail=17)),
        (MapKind(2), Repair(tail=5, layers=1)),
        (MapKind(2), Repair(tail=5, layers=1, group=1)),
    ],
    ids=["both", "separate", "local", "local-separate", "first-layer", "group"],
)
def test_flops_are_those_of_the_compiled_programs(kind: MapKind, repair: Repair) -> None:
    """Within 5 % of XLA's own count, real widths, few layers; the tail over a full cache."""
    source, target = config_of("llama-3.1-minitron-4b", 3), config_of("llama-3.1-8b", 4)
    reader, model = (models.build(c, None, "float32", attention="xla") for c in (source, target))
    hidden = (2, target.hidden) if repair.group else None
    mapper = shapes.abstract(
        Geometry.of(source), Geometry.of(target), select.matching(3, 4, kind.k), joint=kind.joint, local=kind.local,
        dtype="float32", reader=reader.rules, rules=model.rules, hidden=hidden,
    )  # fmt: skip
    repair.check(mapper, target)
    tokens, row = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, SIZE), (1,)))
    start = lambda m, *a: loop.begin(m, Plain(), SamplerProgram(), (), *a)  # noqa: E731
    idle = jax.ShapeDtypeStruct((1,), bool)
    state, cache = (jax.eval_shape(lambda *a, m=m: start(m, *a), tokens, row, idle) for m in (model, reader))
    args = (
        model,
        repair,
        SPAN,
        model.abstract(),
        mapper,
        cache.cache,
        state,
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    counted = map_chunk.lower(*args).compile().cost_analysis()["flops"]
    # XLA attends over the whole slab, so the call that is compared is the last one of a full cache.
    steps = handoff_steps(
        source, target, dataclasses.replace(kind, dtype_bytes=4), repair, batch=1, length=SIZE + repair.tail, span=SPAN,
        dtype_bytes=4,
    )  # fmt: skip
    assert len(steps["map"]) == SIZE // SPAN
    ours = steps["map"][-1]
    assert ours.flops == pytest.approx(counted, rel=0.05)
    assert ours.flops < counted, "the ledger leaves out rotations, norms and softmax"
    if repair != Repair(tail=17):
        return
    counted = read_tail.lower(model, repair, model.abstract(), state).compile().cost_analysis()["flops"]
    tail = cost.step_cost(target, batch=1, rows=16, context=SIZE - 16, head=False, dtype_bytes=4)
    assert tail.flops == pytest.approx(counted, rel=0.05)
    steps = handoff_steps(source, target, kind, repair, batch=1, length=SIZE + 1, span=SPAN, dtype_bytes=4)
    assert steps["tail"] == [tail]


@pytest.mark.parametrize("shape", [None, (1, 2), (2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_bytes_are_those_of_the_leaves(shape, joint: bool, local: bool) -> None:
    """Weights as a device of the mesh holds them, rows as both caches hold them."""
    source, target = config_of("qwen3-4b", 5), config_of("qwen3-32b", 6)
    rules = models.build(
        target, None if shape is None else make_mesh(*shape), "bfloat16", attention="xla"
    ).rules
    mapper = shapes.abstract(
        Geometry.of(source), Geometry.of(target), select.matching(5, 6, 3), joint=joint, local=local, dtype="bfloat16",
        reader=Rules.create(source, rules.mesh), rules=rules, hidden=(4, target.hidden),
    )  # fmt: skip
    here = lambda x: int(np.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape))) * 2  # noqa: E731
    layout = plan.layout_of(rules)
    kind = MapKind(3, joint, local)
    found = map_cost(source, target, kind, batch=2, rows=64, hidden=True, layout=layout)
    assert found.parts["map"].weight_bytes == sum(here(m.key) + here(m.value) for m in mapper.maps)
    assert mapper.hidden is not None and found.parts["hidden"].weight_bytes == here(mapper.hidden.weight)
    one = map_cost(source, target, kind, batch=2, rows=64, hidden=True)
    assert found.parts["map"].flops * layout.data * layout.model == one.parts["map"].flops
    assert found.kv_write * layout.data * layout.model == one.kv_write == 2 * 64 * 2 * 6 * 1024 * 2
    # Three layers' keys and values a target layer; a device reads all heads but those a head-local map leaves out.
    split = layout.model if local else 1
    assert found.parts["map"].kv_read * layout.data * split == 2 * 64 * 6 * 3 * 2 * 1024 * 2


def test_repairing_everything_costs_native_prefill() -> None:
    """All layers of all tokens, in the same chunks: the same products, and nothing is mapped."""
    source, target = config_of("qwen3-0.6b", 4), config_of("qwen3-1.7b", 4)
    steps = handoff_steps(source, target, MapKind(2), Repair(layers=4), batch=1, length=1025, span=256)
    native = cost.total(cost.prefill_steps(target, batch=1, length=1024, chunk=256))
    found = cost.total(steps["map"])
    assert set(steps) == {"map"} and found.flops == native.flops and found.bytes == native.bytes
    grouped = handoff_steps(source, target, MapKind(2), Repair(group=2), batch=1, length=1025, span=256)[
        "map"
    ]
    two = cost.prefill_steps(target, batch=1, length=1024, chunk=256, span=(1, 3))
    rest = map_cost(source, target, MapKind(2), batch=1, rows=256, layers=2, hidden=True)
    assert [step.flops for step in grouped] == [step.flops + rest.flops for step in two]
    assert two[0].parts["embed"].bytes == 0


def test_a_head_and_a_tail_are_steps_of_the_target() -> None:
    source, target = config_of("qwen3-0.6b", 4), config_of("qwen3-1.7b", 4)
    steps = handoff_steps(source, target, MapKind(2), Repair(tail=32, head=4), batch=3, length=1000, span=512)
    assert [len(steps[name]) for name in ("map", "head", "tail")] == [2, 1, 1]
    assert steps["tail"] == [cost.step_cost(target, batch=3, rows=31, context=968, head=False)]
    assert steps["head"] == [cost.step_cost(target, batch=3, rows=4, context=0, head=False)]
    with pytest.raises(ValueError, match="batch 3 does not divide over a data axis of 2"):
        map_cost(source, target, MapKind(1), batch=3, rows=8, layout=Layout(2, 1))


# --- the command --------------------------------------------------------------------------------------------------

LLAMA = ("llama-3.1-minitron-4b", "llama-3.1-8b", "--on", "v5p-8", "--mesh", "1x1", "--ledger", "--json")


def run(*args: str):
    return CliRunner().invoke(main, ["plan-transfer", *args])


def test_eight_layers_of_their_own_kind_cost_a_tenth_and_of_both_kinds_more() -> None:
    """Minitron-4B to Llama-3.1-8B, 8K tokens, tail 32, on one chip; the other table's figures are the same ones."""
    kept = run(*LLAMA, "-k", "8", "--separate", "--bar", "0.1")
    assert kept.exit_code == 0, kept.output
    told = json.loads(kept.stdout)
    assert [bar["ok"] for bar in told["bars"]] == [True, True]
    native, whole, *phases = told["tables"]["cost"]
    assert native["share_flops"] == native["share_bytes"] == native["share_time"] == 1
    assert sum(row["TFLOP"] for row in phases[:2]) == pytest.approx(whole["TFLOP"])
    assert whole["share_flops"] == told["bars"][0]["value"] == pytest.approx(0.0726, abs=1e-3)
    maps = {(m["k"], m["inputs"], m["heads"]): m for m in told["tables"]["maps"]}
    assert maps[8, "own kind", "all"]["share_bytes"] == whole["share_bytes"]
    assert maps[8, "own kind", "all"]["within"] == "yes" and maps[8, "both", "all"]["within"] == "no"
    missed = run(*LLAMA, "-k", "8", "--bar", "0.1")
    assert missed.exit_code == 1
    first, second = json.loads(missed.stdout)["bars"]
    assert not first["ok"] and first["value"] == maps[8, "both", "all"]["share_flops"]
    assert second["value"] == maps[8, "both", "all"]["share_bytes"]


def test_without_a_bar_nothing_is_demanded_and_text_says_what_it_is() -> None:
    told = run("qwen3-0.6b", "qwen3-1.7b", "--on", "v5e-4", "--ledger")
    assert told.exit_code == 0, told.output
    for words in (
        "qwen3-0.6b -> qwen3-1.7b on v5e-4, 1x4",
        "native prefill",
        "hand-off",
        "not a measurement",
    ):
        assert words in told.stdout
    assert "bars" not in told.stdout and "within" not in told.stdout


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mesh": (2, 16)}, MeshError, "mesh 2x16 needs more devices than the 16 of v5p-32"),
        ({"mesh": (1, 8), "k": 29}, ValueError, "k = 29: a has 28 layers"),
        (
            {"mesh": (1, 8), "length": 50_000},
            ValueError,
            "50000 tokens exceed the 40960 positions a was made for",
        ),
        (
            {"mesh": (1, 8), "repair": Repair(layers=27, group=1)},
            ValueError,
            "b has 28 layers, and a group begins",
        ),
        ({"mesh": (2, 8), "batch": 3}, ValueError, "batch 3 does not divide over a data axis of 2"),
    ],
    ids=str,
)
def test_refusals(options, error, words) -> None:
    source, target = plan.find("qwen3-0.6b")[1], plan.find("qwen3-1.7b")[1]
    with pytest.raises(error, match=words):
        plan_transfer(source, target, "v5p-32", Hand(**options), names=("a", "b"), compile=False)


def test_hand_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        Hand(k=0)
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        Hand(length=1)
    with pytest.raises(ValueError, match="map_dtype 'int8' is not supported"):
        Hand(map_dtype="int8")
    assert (Hand(length=8192).size, Hand(length=8192).span, Hand(length=100).span) == (16384, 1024, 256)
