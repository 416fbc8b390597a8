"""Where parameters, cache, queries and logits lie on a mesh, counted in bytes; and the meshes that are refused."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import Oracle, build, make_mesh
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.models import regroup
from kvjax.sharding import MeshError, Rules
from tests.sharding import tiny
from tests.sharding.tiny import CONFIGS, SIZE, WIDTH

GOLDEN = Path(__file__).parent.parent / "golden"

# (model, mesh): stored KV heads K', and whether attention is sharded
HEADS = {
    ("k8", (1, 1)): (8, True), ("k8", (2, 2)): (8, True), ("k8", (1, 8)): (8, True),
    ("k3", (1, 1)): (3, True), ("k3", (2, 2)): (3, False), ("k3", (1, 8)): (3, False),
    ("k2", (2, 2)): (2, True), ("k2", (2, 4)): (4, True), ("k2", (1, 8)): (8, True),
    ("k2-n6", (2, 2)): (2, True), ("k2-n6", (2, 4)): (2, False), ("k2-n6", (1, 8)): (2, False),
}  # fmt: skip

SHARDED = {  # by the last part of the leaf's name; everything else is on every device
    "embed": P("model", None),
    "lm_head": P("model", None),
    "gate_up_proj": P(None, "model", None),
    "gate_up_bias": P(None, "model"),
    "down_proj": P(None, "model"),
}
ATTENTION = {
    "qkv_proj": P("model", None, None),
    "qkv_bias": P("model", None),
    "o_proj": P(None, "model", None),
}


def bytes_by_device(arrays) -> list[int]:
    held: dict[int, int] = dict.fromkeys(range(8), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return [n for n in held.values() if n]


def on_layouts(test):
    cases = [pytest.param(n, m, *rest, id=f"{n}-{m[0]}x{m[1]}") for (n, m), rest in HEADS.items()]
    return pytest.mark.parametrize("name, mesh, stored, sharded", cases)(test)


@on_layouts
def test_parameters(name, mesh, stored, sharded):
    lm = tiny.place(name, make_mesh(*mesh))
    m = mesh[1]
    assert lm.model.rules.kv_heads == stored
    expected = 0.0
    for path, x in zip(lm.model.names, lm.params):
        leaf = path.rsplit(".", 1)[-1]
        spec = SHARDED.get(leaf) or (ATTENTION.get(leaf) if sharded else None) or P(*(None,) * x.ndim)
        assert x.sharding.is_equivalent_to(NamedSharding(lm.model.rules.mesh, spec), x.ndim), path
        expected += x.nbytes / (m if any(spec) else 1)
    assert bytes_by_device(lm.params) == [expected] * (mesh[0] * m)


@on_layouts
def test_cache(name, mesh, stored, sharded):
    """Each device holds its part of the batch and of the stored heads: total / (data * model)."""
    model, batch = build(CONFIGS[name], make_mesh(*mesh)), 4
    with model.rules.context():
        cache = jax.jit(lambda: model.cache(batch, SIZE))()
    total = 2 * CONFIGS[name].num_layers * batch * stored * SIZE * CONFIGS[name].head_dim * 4
    slabs = (*cache.k, *cache.v)
    assert sum(x.nbytes for x in slabs) == total
    part = total // (mesh[0] * (mesh[1] if sharded else 1))
    assert bytes_by_device(slabs) == [part] * (mesh[0] * mesh[1])
    spec = P("data", "model" if sharded else None, None, None)
    assert all(x.sharding.is_equivalent_to(NamedSharding(model.rules.mesh, spec), 4) for x in slabs)


def inner_inputs(jaxpr, name: str) -> list[list]:
    """Types of the inputs of every equation called `name`, also inside other equations."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            found.append([v.aval for v in equation.invars])
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns") and equation.primitive.name != name:
                    found += inner_inputs(inner, name)
    return found


def forwarded(name: str, mesh: tuple[int, int], rows: int):
    """A traced forward of `rows` tokens behind a cache: (model, its program, output types)."""
    model = build(CONFIGS[name], make_mesh(*mesh))
    rules = model.rules
    with rules.context():
        ids, cache = (
            jax.ShapeDtypeStruct((4, rows), jnp.int32, sharding=rules.sharding("batch", None)),
            jax.eval_shape(lambda: model.cache(4, SIZE)),
        )
        program, out = jax.make_jaxpr(
            lambda p, ids, cache: model.forward(p, ids, cache.filled[:, None] + jnp.arange(rows), cache),
            return_shape=True,
        )(model.abstract(), ids, cache)
    return model, program, out


@on_layouts
@pytest.mark.parametrize("rows", [1, 32], ids=["decode", "chunk"])
def test_queries_rows_and_logits(name, mesh, stored, sharded, rows):
    """Explicit sharding would let a product come out replicated: what attention is given is checked here.

    N=16 over K=2 on 8 devices and K=8 on 8 devices are among the cases.
    """
    config = CONFIGS[name]
    model, program, out = forwarded(name, mesh, rows)
    heads = "model" if sharded else None
    calls = inner_inputs(program.jaxpr, "shard_map")
    assert len(calls) == config.num_layers
    for types in calls:
        by_shape = {}
        for aval in types:
            by_shape.setdefault(aval.shape, []).append(aval.sharding.spec)
        groups = config.num_heads // stored
        queries = by_shape[4, rows, stored, groups, config.head_dim]
        assert queries == [P("data", None, heads, None, None)]
        assert by_shape[4, stored, SIZE, config.head_dim] == [P("data", heads, None, None)] * 2
        assert by_shape[4, stored, rows, config.head_dim] == [P("data", heads, None, None)] * 2
    for k, v in out.rows:
        assert k.sharding.spec == v.sharding.spec == P("data", heads, None, None)
    assert out.logits.shape == (4, rows, config.vocab)
    assert out.logits.sharding.spec == P("data", None, "model")


def test_a_round_moves_no_cache():
    """In the compiled round nothing as large as one device's slab of the cache travels between devices."""
    lm = tiny.place("k2", make_mesh(1, 8))
    model, source, batch, size = lm.model, Oracle(width=WIDTH), 2, 1024
    tokens, length = np.zeros((batch, size), np.int32), np.full(batch, 5, np.int32)
    table, program = np.zeros((batch, size), np.int32), SamplerProgram()
    with model.rules.context():
        state = jax.eval_shape(
            lambda t, n: loop.begin(model, source, program, table, t, n, np.zeros(batch, bool)),
            tokens,
            length,
        )
        text = loop.rounds.lower(
            model, source, program, lm.params, table, state, Sampling.create(batch), np.zeros(2, np.uint32),
            np.int32(8), np.full(batch, -1, np.int32),
        ).compile().as_text()  # fmt: skip
    moved = re.findall(
        r"= (?:\()?\w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)", text
    )
    elements = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in moved]
    slab = batch * 1 * size * CONFIGS["k2"].head_dim
    assert elements, "a round sums over `model`: no communication at all means the text was not understood"
    assert max(elements) <= batch * WIDTH * CONFIGS["k2"].vocab < slab


@pytest.mark.parametrize("name, mesh", [("k3", (2, 2)), ("k2-n6", (1, 8))])
def test_replicated_attention_is_said_once(name, mesh, caplog):
    config, m = CONFIGS[name], mesh[1]
    build.cache_clear()  # said when a model is built, not again for the same one
    with caplog.at_level(logging.WARNING, logger="kvjax"):
        forwarded(name, mesh, 1)
    said = [r.getMessage() for r in caplog.records if "replicated" in r.getMessage()]
    assert len(said) == 1
    for number in (config.num_heads, config.num_kv_heads, m):
        assert re.search(rf"\b{number}\b", said[0])


def test_sharded_attention_says_nothing(caplog):
    build.cache_clear()
    with caplog.at_level(logging.WARNING, logger="kvjax"):
        build(CONFIGS["k2"], make_mesh(1, 8))
    assert not caplog.records


def test_init_is_the_same_model_on_every_mesh():
    plain, meshed = build(CONFIGS["k2"]), build(CONFIGS["k2"], make_mesh(1, 8))
    for name, a, b in zip(plain.names, plain.init(3), meshed.init(3)):
        assert np.array_equal(regroup(name, np.asarray(a), CONFIGS["k2"], 8), np.asarray(b)), name


@pytest.mark.parametrize(
    "golden, mesh",
    [("llama3-sharded", (1, 8)), ("qwen2-untied", (2, 2)), ("llama-bias", (1, 8)), ("qwen3-tied", (2, 4))],
)
def test_a_checkpoint_loads_alike_on_a_mesh(golden, mesh):
    """Every leaf, brought together again, is the leaf of a load without a mesh, bit by bit."""
    alone = kvjax.load(GOLDEN / golden, progress=False)
    lm = kvjax.load(GOLDEN / golden, mesh=make_mesh(*mesh), progress=False)
    stored = lm.model.rules.kv_heads
    for name, a, b, spec in zip(lm.model.names, alone.params, lm.params, lm.model.abstract()):
        assert np.array_equal(regroup(name, np.asarray(a), lm.config, stored), np.asarray(b)), name
        assert b.sharding == spec.sharding
    held = bytes_by_device(lm.params)
    assert max(held) < sum(x.nbytes for x in lm.params)
    assert len(set(held)) == 1


@pytest.mark.parametrize("field, letter", [("intermediate", "F"), ("vocab", "V")])
def test_a_width_that_does_not_divide_is_named(field, letter):
    config = dataclasses.replace(CONFIGS["k8"], **{field: 100})
    with pytest.raises(MeshError, match=rf"{field} \({letter}\) = 100 .*model axis, 8"):
        build(config, make_mesh(1, 8))
    assert build(config, make_mesh(2, 4)).rules.kv_heads == 8


def test_wrong_axis_names_are_named():
    mesh = jax.make_mesh((2, 4), ("x", "model"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(MeshError, match=r"\('x', 'model'\).*\('data', 'model'\)"):
        build(CONFIGS["k8"], mesh)


def test_axes_that_are_not_explicit_are_named():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(MeshError, match="Auto.*make_mesh"):
        build(CONFIGS["k8"], mesh)


@pytest.mark.parametrize("data, model", [(3, 3), (1, 9), (16, 1)])
def test_too_few_devices_are_counted(data, model):
    with pytest.raises(MeshError, match=rf"mesh {data}x{model} needs {data * model} devices, 8 are present"):
        make_mesh(data, model)


@pytest.mark.parametrize("data, model", [(0, 1), (2, -1)])
def test_axes_without_devices_are_refused(data, model):
    with pytest.raises(MeshError, match=f"{data}x{model}"):
        make_mesh(data, model)


def test_two_axes_on_one_are_refused():
    rules = Rules.create(CONFIGS["k8"], make_mesh(2, 4))
    with pytest.raises(MeshError, match="ffn.*vocab"):
        rules.spec("ffn", "vocab")
    with pytest.raises(KeyError, match="heads"):
        rules.spec("heads")
