"""The decoder against the logits and greedy tokens transformers computed for the golden checkpoints.

Everything runs from the committed files; neither torch nor transformers' model code is needed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax import cache as kv_cache
from kvjax.config import ModelConfig, RopeConfig
from kvjax.models import build
from kvjax.sharding import make_mesh

GOLDEN = Path(__file__).parents[1] / "golden"
DIRECTORIES = sorted(p.parent for p in GOLDEN.glob("*/config.json"))
BOUND = 1e-4  # largest absolute difference of a float32 logit; logits have standard deviation 2
KNOWN = 320  # ids the golden tokenizers know

each = pytest.mark.parametrize("path", DIRECTORIES, ids=lambda p: p.name)


def _forward(model, params, ids: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of one call without a cache."""
    pos = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    with model.rules.context():
        args = [x if model.rules.mesh is None else jax.device_put(x, model.rules.sharding("batch", None))
                for x in (ids, pos)]  # fmt: skip
        return np.asarray(jax.jit(lambda p, i, q: model.forward(p, i, q).logits)(params, *args))


def _difference(path: Path, logits: np.ndarray) -> float:
    return float(np.abs(logits - load_file(path / "expected.safetensors")["logits"]).max())


@each
def test_logits(path):
    lm = kvjax.load(path, dtype="float32")
    logits = _forward(lm.model, lm.params, load_file(path / "expected.safetensors")["input_ids"])
    assert logits.dtype == np.float32
    assert _difference(path, logits) <= BOUND


@each
def test_logits_and_greedy_tokens_through_the_cache(path):
    """Prefill in chunks of 12, then one token at a time: the same logits, and the reference's tokens.

    The second row starts 5 tokens later than the first, so the rows of a chunk lie at different positions.
    """
    lm, expected = kvjax.load(path, dtype="float32"), load_file(path / "expected.safetensors")
    model, ids, size, chunk = lm.model, expected["input_ids"], 64, 12
    batch, length = ids.shape

    @jax.jit
    def step(params, cache, ids, count):
        pos = cache.filled[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
        out = model.forward(params, ids, pos, cache)
        return out.logits, kv_cache.commit(cache, out.rows, count, rules=model.rules)

    cache = jax.jit(lambda: model.cache(batch, size))()
    logits, done, delay = np.zeros_like(expected["logits"]), np.zeros(batch, int), np.array([0, 5])
    while (done < length).any():
        block = np.zeros((batch, chunk), np.int32)
        count = np.minimum(chunk - delay, length - done).astype(np.int32)
        for b, n in enumerate(count):
            block[b, :n] = ids[b, done[b] : done[b] + n]
        out, cache = step(lm.params, cache, block, count)
        for b, n in enumerate(count):
            logits[b, done[b] : done[b] + n] = out[b, :n]
        done, delay = done + count, np.zeros(batch, int)
    assert (np.asarray(cache.filled) == length).all()
    assert _difference(path, logits) <= BOUND

    token, tokens = logits[:, -1, :KNOWN].argmax(-1), []
    for _ in range(expected["tokens"].shape[1]):
        tokens.append(token)
        out, cache = step(lm.params, cache, token[:, None].astype(np.int32), np.ones(batch, np.int32))
        token = np.asarray(out)[:, 0, :KNOWN].argmax(-1)
    np.testing.assert_array_equal(np.stack(tokens, 1), expected["tokens"])


# K = 8, 3, 2 and 1 KV heads, and heads that do not divide; groups 1 to 7.
MESHED = [
    "llama3-sharded",
    "llama32-tied",
    "qwen3-tied",
    "qwen2-untied",
    "qwen3-yarn",
    "llama-bias",
    "qwen2-window",
]


@pytest.mark.parametrize("mesh", [(2, 2), (1, 8)], ids=lambda m: f"{m[0]}x{m[1]}")
@pytest.mark.parametrize("name", MESHED)
def test_logits_on_a_mesh(name, mesh):
    lm = kvjax.load(GOLDEN / name, mesh=make_mesh(*mesh), dtype="float32")
    logits = _forward(lm.model, lm.params, load_file(GOLDEN / name / "expected.safetensors")["input_ids"])
    assert _difference(GOLDEN / name, logits) <= BOUND


def _variants(config: ModelConfig) -> dict[str, ModelConfig]:
    """The same parameters read with one thing wrong."""
    change = {"epsilon": {"eps": 1e-2}}
    if any(config.windows):
        change["window dropped"] = {"windows": (None,) * config.num_layers}
        change["window one wider"] = {"windows": tuple(w and w + 1 for w in config.windows)}
    if config.rope.kind != "default":
        change["rope scaling dropped"] = {"rope": RopeConfig(theta=config.rope.theta)}
    if config.rope.attention_factor != 1.0:
        change["attention factor dropped"] = {"rope": dataclasses.replace(config.rope, attention_factor=1.0)}
    change["rope theta"] = {"rope": dataclasses.replace(config.rope, theta=config.rope.theta * 2)}
    return {name: dataclasses.replace(config, **fields) for name, fields in change.items()}


@pytest.mark.parametrize("name", ["llama31-rope", "llama-linear-old", "qwen3-yarn", "qwen2-window"])
def test_the_bound_catches_a_wrong_configuration(name):
    """Each variant the golden models exist for moves logits by far more than the bound."""
    lm, ids = (
        kvjax.load(GOLDEN / name, dtype="float32"),
        load_file(GOLDEN / name / "expected.safetensors")["input_ids"],
    )
    for what, config in _variants(lm.config).items():
        wrong = _difference(GOLDEN / name, _forward(build(config), lm.params, ids))
        assert wrong > 100 * BOUND, f"{what}: {wrong}"


def test_the_golden_models_cover_what_they_should():
    configs = [ModelConfig.from_hf(json.loads((p / "config.json").read_text())) for p in DIRECTORIES]
    assert {c.groups for c in configs} == set(range(1, 9))
    assert {c.num_kv_heads for c in configs} >= {1, 2, 3, 4, 8}
    assert {c.head_dim for c in configs} == {32, 64, 80, 96, 128}
    assert {c.rope.kind for c in configs} == {"default", "linear", "llama3", "yarn"}
    assert {(c.model_type, c.tie) for c in configs} == {
        (t, b) for t in ("llama", "qwen2", "qwen3") for b in (True, False)
    }
    assert {(c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) for c in configs} == {
        (False, False, False, False), (True, True, True, False), (True, False, False, False),
        (False, False, False, True), (True, True, False, True),
    }  # fmt: skip
    assert {c.dtype for c in configs} == {"bfloat16", "float16", "float32"}
    assert sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()) < 18e6
