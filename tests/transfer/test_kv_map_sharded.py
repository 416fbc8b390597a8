"""Mapping on meshes of fake devices: the same rows, and what travels between devices."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import build, make_mesh
from kvjax.attention import Choice
from kvjax.cache import KVCache
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram
from kvjax.decode.sources import Plain
from kvjax.sharding import MeshError, Rules
from kvjax.transfer import artifact
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import LayerMap, Mapper, converted, map_rows
from kvjax.transfer.placing import place
from kvjax.transfer.repair import Repair, hand_over
from tests.sharding import tiny
from tests.sharding.tiny import CONFIGS

BATCH, SIZE, ROWS, START = 4, 64, 8, 16
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
IDENTITY = tuple(range(8))
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)  # pairs trade places

# source, target, mesh, heads of the first layer (None: a full map), does anything travel
CASES = [
    ("k8", "k8", (1, 8), None, True),
    ("k8", "k8", (2, 4), None, True),
    ("k8", "k8", (1, 8), IDENTITY, False),
    ("k8", "k8", (2, 4), SWAPPED, False),
    ("k8", "k8", (1, 8), SWAPPED, True),
    ("k2", "k2", (1, 8), (0, 1), False),  # every head is stored four times
    ("k2", "k2", (1, 8), None, True),
    ("k2", "k8", (1, 8), (0, 0, 0, 0, 1, 1, 1, 1), False),
    ("k2", "k8", (1, 8), None, True),
    ("k8", "k2", (1, 8), (0, 4), True),  # each is wanted on four devices and stored on one
    ("k8", "k2", (1, 8), None, True),
    ("k3", "k8", (1, 8), None, False),  # the source's heads are on every device
    ("k8", "k3", (1, 8), None, True),
]


def mapper(source: str, target: str, heads: tuple[int, ...] | None, joint: bool = True) -> Mapper:
    a, b = Geometry.of(CONFIGS[source]), Geometry.of(CONFIGS[target])
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    blocks = a.layers * (2 if joint else 1)
    inner = blocks * a.head_dim * (1 if heads else a.kv_heads)
    maps = [
        LayerMap(
            *(draw(b.kv_heads, b.head_dim, inner) * inner**-0.5 for _ in range(2)),
            *(draw(blocks, a.kv_heads, a.head_dim) for _ in range(2)),
            *(draw(b.kv_heads, b.head_dim) for _ in range(2)),
            jnp.asarray(heads, jnp.int32) if heads else None,
        )
        for _ in range(b.layers)
    ]
    return Mapper(tuple(maps), a, b, (tuple(range(a.layers)),) * b.layers, joint)


def cache(name: str, rules: Rules) -> KVCache:
    config = CONFIGS[name]
    rng = np.random.default_rng(1)
    slabs = []
    for _ in range(2 * config.num_layers):
        x = rng.normal(size=(BATCH, config.num_kv_heads, SIZE, config.head_dim)).astype(np.float32)
        x = np.repeat(x, rules.kv_heads // config.num_kv_heads, axis=1)
        slabs.append(jax.device_put(x, rules.sharding("batch", "kv_heads", None, None)))
    filled = jax.device_put(np.full(BATCH, SIZE, np.int32), rules.sharding("batch"))
    return KVCache(tuple(slabs[: config.num_layers]), tuple(slabs[config.num_layers :]), filled)


def mapped(made: Mapper, source: str, target: str, mesh, index) -> tuple[list[np.ndarray], str]:
    """(rows, text of the compiled program)."""
    a, b = (Rules.create(CONFIGS[n], mesh) for n in (source, target))
    pos = jax.device_put(np.tile(np.arange(ROWS, dtype=np.int32) + 40, (BATCH, 1)), b.sharding("batch", None))
    with b.context():
        run = jax.jit(lambda m, c, i, p: map_rows(m, c, i, p, rules=b, choice=Choice("cpu")))
        program = run.lower(place(made, a, b), cache(source, a), index, pos).compile()
        rows = program(place(made, a, b), cache(source, a), index, pos)
    return [np.asarray(x) for x in jax.tree.leaves(rows)], program.as_text()


@pytest.mark.parametrize(
    "source, target, shape, heads, travels", CASES, ids=lambda v: str(v).replace(" ", "")
)
def test_rows_are_those_of_one_device(source, target, shape, heads, travels) -> None:
    """And only a chunk's source rows travel: nothing where devices store what their heads read."""
    made = mapper(source, target, heads)
    mesh = make_mesh(*shape)
    rules = Rules.create(CONFIGS[target], mesh)
    want, _ = mapped(made, source, target, None, jnp.int32(START))
    got, text = mapped(made, source, target, mesh, jnp.int32(START))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(np.repeat(a, rules.kv_heads // a.shape[1], axis=1), b, atol=1e-5)
    found = [name for name in COLLECTIVES if name in text]
    assert found == (["all-gather"] if travels else [])
    stored = Rules.create(CONFIGS[source], mesh).kv_heads
    sizes = [
        int(np.prod([int(n) for n in shape.split(",")]))
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text)
    ]
    assert bool(sizes) is travels
    assert all(n == BATCH // shape[0] * stored * ROWS * CONFIGS[source].head_dim for n in sizes)


@pytest.mark.parametrize("heads", [None, IDENTITY], ids=["full", "local"])
def test_gathered_slots_and_int8_on_a_mesh(heads) -> None:
    made = converted(mapper("k8", "k8", heads, joint=False), "int8")
    index = np.random.default_rng(2).integers(0, SIZE, (BATCH, ROWS)).astype(np.int32)
    want, _ = mapped(made, "k8", "k8", None, jnp.asarray(index))
    mesh = make_mesh(2, 4)
    rules = Rules.create(CONFIGS["k8"], mesh)
    got, text = mapped(made, "k8", "k8", mesh, jax.device_put(index, rules.sharding("batch", None)))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert ("all-gather" in text) is (heads is None)


def test_a_hand_off_on_a_mesh_is_the_one_without() -> None:
    """Two KV heads of the source are stored four times, eight of the target divided; some of it read natively."""
    tokens = np.random.default_rng(3).integers(0, 256, (2, 64)).astype(np.int32)
    length, idle = np.asarray([40, 23], np.int32), np.zeros(2, bool)
    made, repair, found = mapper("k2", "k8", None), Repair(tail=3, head=2, layers=1), []
    for mesh in (None, make_mesh(1, 8)):
        source, target = (tiny.place(name, mesh) for name in ("k2", "k8"))
        with target.model.rules.context():
            begin = lambda lm: loop.start(lm.model, Plain(), SamplerProgram(), (), tokens, length, idle)  # noqa: E731
            read = begin(source)
            for i in range(2):
                read = loop.prefill(source.model, Plain(), 32, source.params, (), read, np.int32(i))
            placed = place(made, source.model.rules, target.model.rules)
            state = hand_over(target.model, repair, 32, target.params, placed, read.cache, begin(target), 40)
        assert state.cache.filled.tolist() == [39, 22]
        found.append([np.asarray(x) for x in (*state.cache.k, *state.cache.v)])
    for a, b in zip(*found, strict=True):
        for row, end in enumerate((39, 22)):
            np.testing.assert_allclose(a[row, :, :end], b[row, :, :end], atol=2e-4)


def test_what_does_not_lie_together_is_refused(caplog, tmp_path) -> None:
    made, mesh = mapper("k8", "k8", SWAPPED), make_mesh(1, 8)
    plain, meshed = (Rules.create(CONFIGS["k8"], m) for m in (None, mesh))
    assert place(made, plain, plain) is made
    geometry = made.source, made.target
    parties = [artifact.Party(g, None, g, "", x) for g, x in zip("ab", geometry, strict=True)]
    with pytest.raises(artifact.ArtifactError, match="laid out for a mesh"):
        own = place(mapper("k8", "k8", IDENTITY), meshed, meshed)
        artifact.save(tmp_path / "map", own, artifact.Manifest(*parties, "ridge", {}, {}, {}))
    with pytest.raises(MeshError, match="source was loaded on no mesh and the target on mesh .*'model': 8"):
        place(made, plain, meshed)
    with caplog.at_level(logging.WARNING, logger="kvjax"):
        place(made, meshed, meshed)
    assert "target layers [0, 1] read source heads that other devices store" in caplog.text
    model = build(CONFIGS["k8"], mesh)
    with model.rules.context(), pytest.raises(ValueError, match="placing.place moves it"):
        index, pos = jnp.int32(0), jnp.zeros((BATCH, ROWS), jnp.int32)
        map_rows(made, cache("k8", meshed), index, pos, rules=meshed, choice=Choice("cpu"))
