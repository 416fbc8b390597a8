"""Pretraining on a small synthetic corpus: what it computes, and that a killed run goes on exactly where it was."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import build
from train import config, loop
from train import tokenizer as vocabulary
from train.config import TrainConfig, TrainError
from train.corpus import Document, write
from train.pretrain import Pretrain
from train.step import create as create_state
from train.step import make_step, optimizer, schedule

ROOT = Path(__file__).parents[2]
VOCAB = 288
QWEN3 = dict(
    model_type="qwen3", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=48, rms_norm_eps=1e-6, rope_theta=1e4,
    tie_word_embeddings=True, max_position_embeddings=128,
)  # fmt: skip
LLAMA = {**QWEN3, "model_type": "llama", "tie_word_embeddings": False}
WORDS = (
    "alpha beta gamma delta return value for in if else print 12 345 = + ( ) : \n \n\n    self . , def".split(
        " "
    )
)


def text(random: random.Random, words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def small_corpus(folder: Path) -> Path:
    """Three splits of random words, and a tokenizer of VOCAB tokens."""
    random_ = random.Random(7)
    for split, count in (("train", 90), ("selection", 25), ("confirmation", 5)):
        texts = [text(random_, random_.randint(3, 200)) for _ in range(count)]
        write(folder / split, [Document(f"p/{i:03}.py", t, "code") for i, t in enumerate(texts)])
    pattern = vocabulary.SPECS["mini"].pattern
    made = vocabulary.train([text(random_, 3000)], vocabulary.Spec(VOCAB, pattern, 0))
    vocabulary.save(made, folder / "tokenizers" / "small")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def run_config(
    model: dict[str, Any] = QWEN3, phases: Any = ((30, 4, 32), (10, 2, 64)), *, run: Any = (), optim: Any = ()
) -> TrainConfig:
    """Phases are (steps, batch, length[, accumulate])."""
    names = ("steps", "batch", "length", "accumulate")
    return config.from_dict(
        {
            "name": "small",
            "task": "pretrain",
            "pretrain": {"tokenizer": "tokenizers/small", "model": model, "held_out": 600},
            "optimizer": {"rate": 5e-3, "warmup": 5, **dict(optim)},
            "phases": [dict(zip(names, phase)) for phase in phases],
            "run": {"every": 10, **dict(run)},
        },
        "test",
    )


class Watched(Pretrain):
    """Adds a checksum of each batch to the metrics of its step."""

    def loss(self, params, batch, key):
        value, weight, more = super().loss(params, batch, key)
        flat = batch["tokens"].reshape(-1).astype(jnp.uint32)
        odd = jnp.uint32(2) * jnp.arange(flat.size, dtype=jnp.uint32) + jnp.uint32(2654435761)
        total = (flat * odd * (odd >> 3)).sum() >> jnp.uint32(10)  # 22 bits, exact in float32
        return value, weight, more | {"batch": total.astype(jnp.float32) * weight}


def journal(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / loop.METRICS).read_text().splitlines()]


def exact(directory: Path) -> list[tuple[float, ...]]:
    """What must not depend on interruptions."""
    keys = ("step", "loss", "grad_norm", "rate", "batch", "tokens")
    return [tuple(entry[k] for k in keys) for entry in journal(directory)]


# --- kill -9 --------------------------------------------------------------------------------------------------------

LONG = run_config(phases=((150, 4, 32), (20, 2, 64)), run={"every": 25})


def child(corpus: str, *directories: str) -> None:
    """What the subprocess does: one run in each directory."""
    kvjax.compile_cache(Path(directories[0]).with_name("programs"))
    for directory in directories:
        loop.fit(Watched(LONG, Path(corpus)), LONG, directory)


def start(corpus: Path, *directories: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from tests.train.test_pretrain import child; child(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(corpus), *map(str, directories)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def test_a_killed_run_resumes_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL at a random moment after the first checkpoint. Losses, gradient norms and batches of the resumed run
    are those of a run in another directory that nothing interrupted, to the last bit."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    moment = random.randint(30, 165)  # lines of the journal
    process = start(corpus, killed)
    path, deadline = killed / loop.METRICS, time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < moment:
        assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = path.read_bytes().count(b"\n")
    assert moment <= before < LONG.steps
    saved = [int(p.name) for p in (killed / loop.CHECKPOINTS).iterdir() if p.name.isdigit()]
    assert saved and max(saved) <= before
    process = start(corpus, killed, whole)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said.decode()
    assert [entry[0] for entry in exact(whole)] == list(range(1, LONG.steps + 1))
    assert exact(killed) == exact(whole), f"killed after {before} steps"
    scores = [[e.get("bits_per_byte") for e in journal(d)] for d in (killed, whole)]
    assert scores[0] == scores[1]
    assert len({entry[4] for entry in exact(whole)}) == LONG.steps  # no batch comes twice


# --- what it computes -----------------------------------------------------------------------------------------------


def reference_loss(task: Pretrain, params: Any, tokens: np.ndarray) -> float:
    """Mean nats of the next token from the serving model's logits, in float64."""
    model = build(task.config)
    pos = np.broadcast_to(np.arange(tokens.shape[1] - 1, dtype=np.int32), (len(tokens), tokens.shape[1] - 1))
    logits = jax.jit(lambda p, i, q: model.forward(p, i, q).logits)(params, tokens[:, :-1], pos)
    z = np.asarray(logits, np.float64)
    z -= z.max(-1, keepdims=True)
    picked = np.take_along_axis(z, tokens[:, 1:, None], -1)[..., 0]
    return float((np.log(np.exp(z).sum(-1)) - picked).mean())


@pytest.mark.parametrize("model", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_the_loss_is_the_serving_models(corpus: Path, model: dict[str, Any]) -> None:
    task = Pretrain(run_config(model), corpus)
    params, _ = task.init()
    scaled = tuple(8 * p if p.ndim > 1 else p for p in params)  # logits that are not all alike
    tokens = task.blocks[:4]
    value, weight, _ = jax.jit(task.loss)(scaled, {"tokens": tokens}, jax.random.key(0))
    assert float(weight) == tokens[:, 1:].size
    want = reference_loss(task, scaled, tokens)
    assert abs(want - math.log(VOCAB)) > 0.1
    np.testing.assert_allclose(float(value) / float(weight), want, rtol=2e-6)


def test_a_run_learns_and_can_be_used(corpus: Path, tmp_path: Path) -> None:
    """Loss falls well below that of a uniform guess; the score is the reference's; the model is an LM."""
    settings = run_config(phases=((60, 8, 32),), run={"every": 60})
    task = Pretrain(settings, corpus)
    done = loop.fit(task, settings, tmp_path / "run")
    assert done.done and done.step == 60
    lines = journal(tmp_path / "run")
    assert abs(lines[0]["loss"] - math.log(VOCAB)) < 0.1 and lines[-1]["loss"] < 0.65 * math.log(VOCAB)
    assert len(task.blocks) > 8 and len(task.blocks) % 8  # the last part is not full
    nats = reference_loss(task, done.params, task.blocks)
    np.testing.assert_allclose(done.metrics["selection_loss"], nats, rtol=1e-5)
    bits = nats / math.log(2) / task.bytes_per_token
    np.testing.assert_allclose(done.metrics["bits_per_byte"], bits, rtol=1e-5)
    assert lines[-1]["bits_per_byte"] == done.metrics["bits_per_byte"]
    again = loop.fit(task, settings, tmp_path / "run")  # a finished run is read, not trained
    assert again.step == 60 and again.metrics == done.metrics
    for a, b in zip(again.params, done.params, strict=True):
        np.testing.assert_array_equal(a, b)


def test_initial_weights(corpus: Path) -> None:
    task = Pretrain(run_config(LLAMA), corpus)
    params, decayed = task.init()
    for name, x, mark in zip(task.master.names, params, decayed, strict=True):
        leaf = name.rsplit(".", 1)[-1]
        assert x.dtype == jnp.float32 and mark == (x.ndim > 1), name
        if x.ndim > 1:
            want = 0.02 * (2**-0.5 if leaf in ("o_proj", "down_proj") else 1)
            assert abs(float(x.std()) - want) < 0.1 * want, name
        else:
            assert (np.asarray(x) == 1).all(), name


# --- ways to compute the same ---------------------------------------------------------------------------------------


def losses(task: Pretrain, settings: TrainConfig, steps: int) -> tuple[np.ndarray, Any]:
    """Losses of the first steps as `fit` takes them (without its files), and the state after them."""
    phase = settings.phases[0]
    params, decayed = task.init()
    transform = optimizer(settings.optimizer, settings.steps, decayed)
    step = make_step(task.loss, transform, schedule(settings.optimizer, settings.steps), phase.accumulate)
    found = []
    with task.rules.context():
        state = create_state(params, transform, 0)
        for _, batch in zip(range(steps), iter(task.data(phase, 0))):
            state, metrics = step(state, loop._lay_out(batch, phase, task.rules))
            found.append(float(metrics["loss"]))
    return np.array(found), state


@pytest.fixture(scope="module")
def plain(corpus: Path) -> np.ndarray:
    settings = run_config(phases=((6, 4, 32),))
    return losses(Pretrain(settings, corpus), settings, 6)[0]


@pytest.mark.parametrize(("parts", "remat"), [(2, False), (4, True)])
def test_parts_and_recomputation_change_nothing(
    corpus: Path, plain: np.ndarray, parts: int, remat: bool
) -> None:
    settings = run_config(phases=((6, 4, 32, parts),), run={"remat": remat})
    got, _ = losses(Pretrain(settings, corpus), settings, 6)
    np.testing.assert_allclose(got, plain, atol=1e-6)


def test_bfloat16_computes_near_float32_on_float32_masters(corpus: Path, plain: np.ndarray) -> None:
    settings = run_config(phases=((6, 4, 32),), run={"compute": "bfloat16"})
    task = Pretrain(settings, corpus)
    got, state = losses(task, settings, 6)
    assert {x.dtype for x in state.params} == {jnp.dtype(jnp.float32)}
    moments = {x.dtype for x in jax.tree.leaves(state.optimizer) if x.ndim}
    assert moments == {jnp.dtype(jnp.float32)}
    assert 1e-6 < np.abs(got - plain).max() < 0.03
    program = jax.make_jaxpr(task.loss)(state.params, {"tokens": task.blocks[:2]}, None)
    products = dots(program.jaxpr)
    assert products and {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype(jnp.bfloat16)}
    # Small updates are not lost, as they would be in bfloat16 weights.
    exact = [np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32) == x).mean() for x in state.params]
    assert max(exact) < 0.5


def dots(jaxpr: Any) -> list[Any]:
    """All products of a program but those of attention's weights, which stay as they are made."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation)
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += dots(inner)
    return found


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_trained_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="has 288 tokens, pretrain.model.vocab_size is 300"):
        Pretrain(run_config({**QWEN3, "vocab_size": 300}), corpus)
    with pytest.raises(TrainError, match="a phase of length 129 is longer than max_position_embeddings"):
        Pretrain(run_config(phases=((1, 1, 129),)), corpus)
    with pytest.raises(
        TrainError, match=r"transformers refuses it: .* \(40\) is not a multiple .* heads \(6\)"
    ):
        Pretrain(run_config({**LLAMA, "hidden_size": 40, "num_attention_heads": 6}), corpus)
    with pytest.raises(TrainError, match="no tokenizer.json"):
        Pretrain(dataclasses.replace(run_config(), options={"model": QWEN3, "tokenizer": "none"}), corpus)
    with pytest.raises(TrainError, match="pretrain: unknown tokeniser"):
        Pretrain(dataclasses.replace(run_config(), options={"tokeniser": "none"}), corpus)


def test_a_changed_corpus_or_tokenizer_is_another_run(tmp_path: Path) -> None:
    """The data a resumed run would read are not those it began with: refused, and the split named."""
    folder = small_corpus(tmp_path / "corpus")
    settings = run_config(phases=((2, 2, 16),))
    loop.fit(Pretrain(settings, folder), settings, tmp_path / "run", stop_at=1)
    with (folder / "train.bin").open("r+b") as file:
        file.write(b"A")
    with pytest.raises(
        TrainError, match=r"another configuration \(task.train: '[0-9a-f]{64}' then, '[0-9a-f]{64}'"
    ):
        loop.fit(Pretrain(settings, folder), settings, tmp_path / "run")


def test_text_that_is_not_utf8_stops_the_run_by_name(tmp_path: Path) -> None:
    folder = small_corpus(tmp_path / "corpus")
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(b"\xff" * len(data))
    settings = run_config(phases=((2, 2, 16),))
    task = Pretrain(settings, folder)
    with pytest.raises(ValueError, match=r"train.bin: document \d+ \(p/\d+.py\) is not UTF-8"):
        loop.fit(task, settings, tmp_path / "run")
