"""The ledger against what XLA compiled, against the models' own leaves, and against published sizes."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvjax import cost, models
from kvjax.config import ModelConfig, RopeConfig
from kvjax.cost import Layout
from kvjax.plan import layout_of
from kvjax.sharding import make_mesh

CONFIGS = Path(__file__).parents[1] / "configs" / "models"


def config_of(name: str, **changes: object) -> ModelConfig:
    config = ModelConfig.from_hf(tomllib.loads((CONFIGS / f"{name}.toml").read_text()))
    if "num_layers" in changes:
        changes["windows"] = ()
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "rows", "size", "head"),
    [(1, 1, 256, True), (2, 16, 1024, True), (1, 8, 8192, True), (1, 64, 512, False), (1, 256, 2048, False)],
)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen2.5-0.5b", "smollm2-135m"])
def test_flops_are_those_of_the_compiled_step(name: str, batch: int, rows: int, size: int, head: bool):
    """Within 5 % of XLA's own count for an unrolled build without kernels; real widths, few layers."""
    config = config_of(name, num_layers=3 if name != "qwen3-8b" else 2)
    model = models.build(config, None, "float32", attention="xla")

    def step(params, ids, pos, cache):
        out = model.forward(params, ids, pos, cache, logits=head)
        return out.logits, out.cache

    ids = jax.ShapeDtypeStruct((batch, rows), jnp.int32)
    cache = jax.eval_shape(lambda: model.cache(batch, size))
    compiled = jax.jit(step).lower(model.abstract(), ids, ids, cache).compile()
    counted = compiled.cost_analysis()["flops"]
    ours = cost.step_cost(config, batch=batch, rows=rows, context=size - rows, head=head, dtype_bytes=4)
    assert ours.flops == pytest.approx(counted, rel=0.05)
    assert ours.flops < counted, "the ledger leaves out norms and softmax"
    argument_bytes = compiled.memory_analysis().argument_size_in_bytes
    if head:  # of what it is given, it leaves unread the embedding table, unless that is the head
        table = 0 if config.tie else config.vocab * config.hidden * 4
        assert ours.bytes + table == pytest.approx(argument_bytes, rel=0.01)


@pytest.mark.parametrize("shape", [None, (1, 2), (2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (8, 8), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("variant", ["plain", "biased", "tied"])
def test_memory_is_that_of_the_leaves(shape, heads, variant):
    """Weights and cache per device, KV heads repeated or attention replicated included."""
    extra = {
        "plain": {"model_type": "qwen3", "qk_norm": True},
        "biased": {"model_type": "llama", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        "tied": {"model_type": "qwen2", "qkv_bias": True, "tie": True},
    }[variant]
    config = ModelConfig(
        vocab=64, hidden=48, num_layers=3, num_heads=heads[0], num_kv_heads=heads[1], head_dim=16, intermediate=80,
        rope=RopeConfig(), eps=1e-6, max_positions=512, **extra,
    )  # fmt: skip
    mesh = None if shape is None else make_mesh(*shape)
    model = models.build(config, mesh, "bfloat16", attention="xla")
    layout = layout_of(model.rules)

    def here(leaf) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    found = cost.memory(config, batch=4, size=96, dtype_bytes=2, layout=layout)
    assert found.weights == sum(here(leaf) for leaf in model.abstract())
    with model.rules.context():
        cache = jax.eval_shape(lambda: model.cache(4, 96))
    assert found.cache == sum(here(leaf) for leaf in (*cache.k, *cache.v))
    assert found.total == found.weights + found.cache + 4 * 96 * 4 // layout.data


@pytest.mark.parametrize(
    ("name", "millions"),
    [("qwen3-0.6b", 596), ("qwen3-4b", 4022), ("qwen3-8b", 8191), ("qwen3-32b", 32762), ("qwen2.5-0.5b", 494),
     ("qwen2.5-3b", 3086), ("llama-3.1-8b", 8030), ("llama-3.1-70b", 70554), ("smollm2-135m", 134.5),
     ("llama-3.1-minitron-4b", 4510)],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name: str, millions: float):
    assert sum(cost.parameters(config_of(name)).values()) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_eight_devices_do_one_devices_work():
    """Where everything divides, the devices of a mesh share products, weights and cache exactly."""
    config = config_of("qwen3-8b")
    step = {"rows": 16, "context": 4096}
    one = cost.step_cost(config, batch=2, **step)
    for layout in (Layout(1, 8), Layout(2, 4)):
        each = cost.step_cost(config, batch=2, layout=layout, **step)
        assert each.flops * 8 == one.flops
        assert each.kv_read * 8 == one.kv_read and each.kv_write * 8 == one.kv_write
        norms = one.parts["norms"].weight_bytes
        for name in ("projections", "mlp", "head"):
            assert each.parts[name].weight_bytes * layout.model == one.parts[name].weight_bytes
        assert each.parts["norms"].weight_bytes == norms
        assert each.reduced == 36 * 2 * (2 // layout.data) * 16 * 4096 * 2
    assert one.reduced == 0


def test_a_window_bounds_what_is_read():
    config = config_of("qwen3-0.6b")
    full = cost.step_cost(config, batch=1, rows=4, context=10_000)
    half = dataclasses.replace(config, windows=(None, 512) * 14)
    windowed = cost.step_cost(half, batch=1, rows=4, context=10_000)
    assert windowed.kv_read / full.kv_read == pytest.approx((10_000 + 515) / 20_000)
    assert windowed.kv_write == full.kv_write
    short = {"batch": 1, "rows": 4, "context": 300}
    assert cost.step_cost(half, **short) == cost.step_cost(config, **short)


def test_roofline_is_the_slower_of_the_two():
    step = cost.step_cost(config_of("qwen3-8b"), batch=1, rows=1, context=1024)
    assert step.seconds(1e30, 1e9) == step.bytes / 1e9
    assert step.seconds(1e9, 1e30) == step.flops / 1e9
    assert step.bytes == step.weight_bytes + step.kv_read + step.kv_write
    # Decoding one token reads every weight but the embedding table, of which it takes one row.
    assert step.weight_bytes == (8_190_735_360 - 151_936 * 4096 + 4096) * 2


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="batch 3 does not divide over a data axis of 2"):
        cost.step_cost(config_of("qwen3-0.6b"), batch=3, rows=1, context=8, layout=Layout(data=2))
