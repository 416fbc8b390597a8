"""Tiny random models whose heads meet a mesh in every way there is, and the referee of claim (c)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax import LM, build
from kvjax.config import ModelConfig, RopeConfig
from kvjax.decode.sampler import noise
from kvjax.models import regroup

SIZE, CHUNK, WIDTH = 128, 32, 4
TIE_BOUND = 5e-4  # float32: two tokens closer than this may trade places between programs


def _config(**change) -> ModelConfig:
    base = dict(
        model_type="llama", vocab=256, hidden=64, num_layers=1, head_dim=16, intermediate=96,
        rope=RopeConfig(), eps=1e-6, max_positions=4096,
    )  # fmt: skip
    return ModelConfig(**(base | change))


CONFIGS = {
    # K divides by every model axis here
    "k8": _config(model_type="qwen3", num_layers=2, num_heads=16, num_kv_heads=8, qk_norm=True),
    # neither 2 nor 8 divides 3 heads, nor 3 them: attention is replicated
    "k3": _config(model_type="qwen2", num_heads=9, num_kv_heads=3, qkv_bias=True, tie=True),
    # split in two; on 4 and 8 devices every KV head is stored two and four times
    "k2": _config(num_heads=16, num_kv_heads=2, qkv_bias=True, o_bias=True, mlp_bias=True),
    # split in two, replicated on 8: the query heads do not divide
    "k2-n6": _config(num_heads=6, num_kv_heads=2, tie=True, windows=(20,)),
}


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
    """Leaves by path, laid out for K KV heads; large enough that every part moves the logits."""
    config = CONFIGS[name]
    rng, leaves = np.random.default_rng(sorted(CONFIGS).index(name)), {}
    model = build(config)
    for path, shape in zip(model.names, model.shapes):
        leaf = path.rsplit(".", 1)[-1]
        x = rng.standard_normal(shape.shape).astype(np.float32)
        if leaf.endswith("norm"):
            x = 1 + 0.2 * x
        elif leaf in ("embed", "lm_head"):
            x *= 0.35
        elif leaf.endswith("bias"):
            x *= 0.3
        else:  # the contracted axes: all but the outputs'
            outputs = {"qkv_proj": 2, "gate_up_proj": 2}.get(leaf, 1)
            x *= 1.5 / np.sqrt(np.prod(shape.shape[outputs:]))
        leaves[path] = x
    return leaves


def place(name: str, mesh: Mesh | None, leaves: dict[str, np.ndarray] | None = None) -> LM:
    """The model on a mesh, as a bundle without a tokenizer."""
    model = build(CONFIGS[name], mesh)
    leaves = weights(name) if leaves is None else leaves
    params = []
    for path, shape in zip(model.names, model.abstract()):
        x = regroup(path, leaves[path], model.config, model.rules.kv_heads)
        assert x.shape == shape.shape, path
        params.append(jax.device_put(x, shape.sharding))
    return LM(model, tuple(params), None, model.config, name)


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of one `serve.generate` call, by row."""

    prompts: tuple[tuple[int, ...], ...]
    max_new: tuple[int, ...]
    temperature: tuple[float, ...]
    seed: tuple[int, ...]

    def take(self, order) -> Request:
        return Request(*(tuple(field[i] for i in order) for field in dataclasses.astuple(self)))

    def options(self) -> dict:
        return dict(
            max_new_tokens=list(self.max_new), temperature=list(self.temperature), seed=list(self.seed),
            size=SIZE, chunk=CHUNK, logprobs=True,
        )  # fmt: skip


def request() -> Request:
    """Four ragged rows (one token to more than two chunks), greedy and sampled."""
    rng = np.random.default_rng(7)
    prompts = [tuple(int(t) for t in rng.integers(0, 256, n)) for n in (1, 37, 70, 11)]
    return Request(tuple(prompts), (24, 40, 17, 30), (0.0, 0.9, 0.0, 1.2), (5, 5, 0, 6))


def table(asked: Request, answers=None, *, every: int = 0) -> np.ndarray:
    """What an oracle reads, [B, SIZE]: the answers, each `every`-th one wrong; junk when none are given."""
    rng = np.random.default_rng(11)
    out = rng.integers(0, 256, (len(asked.prompts), SIZE)).astype(np.int32)
    for b, answer in enumerate(answers or ()):
        first = len(asked.prompts[b])
        tokens = np.array(answer, np.int32)
        if every:
            tokens[::every] ^= 1
        out[b, first : first + len(tokens)] = tokens
    return out


class Referee:
    """Scores of an answer by one teacher-forced pass without a mesh and without a cache."""

    def __init__(self, name: str) -> None:
        self.lm = place(name, None)
        self.scores = jax.jit(self._scores)

    def _scores(self, params, tokens, temperature, seed):
        pos = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), tokens.shape)
        with jax.default_matmul_precision("highest"):
            logits = self.lm.model.forward(params, tokens, pos).logits
        warm = (temperature > 0)[:, None, None]
        drawn = noise(jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)), seed, pos + 1, logits.shape[-1])
        return jnp.where(warm, logits / jnp.where(warm, temperature[:, None, None], 1) + drawn, logits)

    def gaps(self, asked: Request, answers, other) -> list[float | None]:
        """Per row: how far apart the two tokens at the first difference are; None where there is none."""
        tokens = table(asked, answers)
        for b, prompt in enumerate(asked.prompts):
            tokens[b, : len(prompt)] = prompt
        temperature, seed = np.float32(asked.temperature), np.uint32(asked.seed)
        z = np.asarray(self.scores(self.lm.params, tokens, temperature, seed))
        found: list[float | None] = []
        for b, (mine, theirs) in enumerate(zip(answers, other, strict=True)):
            at = next((i for i, (s, t) in enumerate(zip(mine, theirs)) if s != t), None)
            if at is None:
                assert len(mine) == len(theirs)
                found.append(None)
                continue
            row = z[b, len(asked.prompts[b]) + at - 1]
            found.append(float(abs(row[mine[at]] - row[theirs[at]])))
        return found

    def surprise(self, asked: Request, answers) -> float:
        """The most by which a chosen token scores below the best one."""
        tokens = table(asked, answers)
        for b, prompt in enumerate(asked.prompts):
            tokens[b, : len(prompt)] = prompt
        temperature, seed = np.float32(asked.temperature), np.uint32(asked.seed)
        z = np.asarray(self.scores(self.lm.params, tokens, temperature, seed))
        worst = 0.0
        for b, answer in enumerate(answers):
            first = len(asked.prompts[b]) - 1
            rows = z[b, first : first + len(answer)]
            worst = max(worst, float((rows.max(-1) - rows[np.arange(len(answer)), list(answer)]).max()))
        return worst
