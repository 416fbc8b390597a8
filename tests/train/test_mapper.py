"""Functional training of a map on tiny models: it starts at the map, gets better, and folds exactly."""

from __future__ import annotations

import dataclasses
import json
import random
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import serve
from kvjax.documents import Documents
from kvjax.transfer import artifact, calibrate, select
from kvjax.transfer.fit import FitConfig
from kvjax.transfer.fit import fit as closed_form
from kvjax.transfer.pairs import FitOptions, fit_pair
from kvjax.transfer.scoring import Cut, first, native, rollout
from train.config import TrainError, from_dict
from train.corpus import Document, write
from train.loop import fit
from train.mapper import MapperTask
from train.run import run

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A corpus whose selection split is part of the training texts (optimization is tested here, not
    generalization), and a map of a model to itself with too strong a ridge, so that there is something to learn."""
    root = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    texts = ["".join(rng.choices(string.printable, k=220)) for _ in range(24)]
    for split, count in (("train", 24), ("selection", 6)):
        write(root / split, [Document(f"p/{i}", t, "code") for i, t in enumerate(texts[:count])])
    lm = kvjax.load(GOLDEN / "qwen3-tied")
    options = FitOptions(k=1, layers="matching", joint=False, ridge=0.3, length=48, sequences=16, held=4)
    report = fit_pair(lm, lm, Documents(root / "train"), Documents(root / "selection"), root / "map", options)
    assert 0.2 < report.facts["r2_value"] < 0.99
    return root


def config(part: str, loss: str | list[str] = "suffix", phases=((40, 48),), rate: float = 4e-3, **more):
    model = str(GOLDEN / "qwen3-tied")
    table = {
        "source": model,
        "target": model,
        "start": "map",
        "part": part,
        "loss": loss,
        "prefix": 32,
        "held_out": 4,
    }
    return from_dict(
        {
            "name": "tiny", "task": "mapper", "mapper": {**table, **more},
            "optimizer": {"rate": rate, "warmup": 2, "weight_decay": 0.0},
            "phases": [{"steps": n, "batch": 4, "length": length} for n, length in phases],
            "run": {"every": 20, "diverged": 10.0},
        },
        "tiny.toml",
    )  # fmt: skip


@pytest.mark.parametrize("part", ["affine", "residual"])
def test_training_lowers_the_divergence_and_folds_into_a_map(data: Path, tmp_path: Path, part: str) -> None:
    settings = config(part, rank=4)
    task = MapperTask(settings, data)
    start, _ = task.init()
    folded = task.mapper(start, task.start)
    for a, b in zip(folded.maps, task.start.maps, strict=True):
        np.testing.assert_array_equal(a.key, b.key)
    before = task.evaluate(start)
    trained = fit(task, settings, tmp_path / "run")
    assert trained.metrics["divergence"] < 0.95 * before["divergence"]
    task.export(trained.params, tmp_path / "out", "tiny")
    mapper, manifest = artifact.load(tmp_path / "out")
    assert manifest.method == "ridge+suffix" and manifest.options["part"] == part
    told = manifest.metrics
    assert told["divergence"] == pytest.approx(trained.metrics["divergence"], rel=1e-5)
    assert (
        told["start"]["divergence"] == pytest.approx(before["divergence"], rel=1e-5) and "r2_key" not in told
    )
    again = MapperTask(settings, data)
    again.start = mapper
    zero = again.init()[0]
    np.testing.assert_allclose(again.evaluate(zero)["divergence"], trained.metrics["divergence"], rtol=1e-4)


@pytest.mark.parametrize("loss", ["attention", "rollout", "free"])
def test_a_perfect_map_has_no_divergence(data: Path, loss: str) -> None:
    """It attends as natively, and follows the native continuation, which is the target's own greedy one."""
    task = MapperTask(config("affine", loss), data)
    lm, cut = task.target, Cut(32, 16)
    stats = calibrate.collect(
        lm, lm, Documents(data / "train"), length=48, batch=4, sequences=24, joint=False
    )
    exact = closed_form(stats, select.matching(2, 2), FitConfig(ridge=1e-7))
    good = tuple({k: getattr(m, k) for k in ("key", "value", "key_bias", "value_bias")} for m in exact.maps)
    moved = [
        dataclasses.replace(a, key_mean=b.key_mean, value_mean=b.value_mean)
        for a, b in zip(task.start.maps, exact.maps, strict=True)
    ]
    start = dataclasses.replace(task.start, maps=tuple(moved))
    tokens = jnp.asarray(task.held)
    divergence, error = task._divergence((lm.params, lm.params, start), good, tokens, loss)
    assert divergence.shape == error.shape == (len(task.held),)
    assert float(divergence.max()) < 1e-3 and float(error.max()) < 1e-3
    bad, _ = task.init()
    divergence, _ = task._divergence(task._frozen, bad, tokens, loss)
    assert float(divergence.mean()) > 1e-2
    _, rows = native(task.model, lm.params, tokens, cut)
    rows = first(rows, cut.given)
    said, _ = rollout(task.model, lm.params, rows, tokens, cut, cut.suffix, lm.tokenizer.vocab)
    greedy = serve.generate(
        lm, [t[: cut.prefix].tolist() for t in task.held], max_new_tokens=cut.suffix, stop_ids=[]
    )
    assert [tuple(row) for row in np.asarray(said).tolist()] == [g.tokens for g in greedy]


@pytest.mark.parametrize("loss", ["suffix", "attention"])
def test_gradients_reach_the_map_and_nothing_else(data: Path, loss: str) -> None:
    task = MapperTask(config("affine", loss), data)
    params, decayed = task.init()
    assert not any(jax.tree.leaves(decayed))
    batch = {loss: jnp.asarray(task.held)}
    gradients = jax.grad(lambda p: task.loss(p, batch, jax.random.key(0))[0])(params)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients))
    assert jax.tree.structure(gradients) == jax.tree.structure(params)


def test_attention_then_rollouts_in_one_run(data: Path, tmp_path: Path) -> None:
    """Each phase descends on its own loss; checkpoints are scored by the last one."""
    settings = config("affine", ["attention", "rollout"], phases=((40, 48), (20, 40)))
    task = MapperTask(settings, data)
    start, _ = task.init()
    score = jax.jit(task._divergence, static_argnames="loss")
    attention = lambda p: float(score(task._frozen, p, jnp.asarray(task.held), loss="attention")[0].mean())  # noqa: E731
    trained = fit(task, settings, tmp_path / "run")
    assert attention(trained.params) < 0.9 * attention(start)
    assert trained.metrics["divergence"] < 0.95 * task.evaluate(start)["divergence"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {entry["tokens"] for entry in steps[:40]} == {4 * 48} and {e["tokens"] for e in steps[40:]} == {
        4 * 40
    }
    task.export(trained.params, tmp_path / "out", "tiny")
    assert artifact.load(tmp_path / "out")[1].method == "ridge+attention+rollout"


def test_the_command_writes_an_artefact(data: Path, tmp_path: Path) -> None:
    model = GOLDEN / "qwen3-tied"
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'''name = "tiny"
task = "mapper"
[mapper]
source = "{model}"
target = "{model}"
start = "map"
prefix = 32
held_out = 4
[optimizer]
rate = 1e-3
weight_decay = 0.0
[[phases]]
steps = 2
batch = 2
length = 48
'''
    )
    outcome = run(path, data=data, out=tmp_path / "run")
    assert outcome.model is not None and artifact.load(outcome.model)[1].options["name"] == "tiny"


def test_options_that_cannot_be_are_named(data: Path) -> None:
    for change, message in (
        ({"part": "all"}, "part 'all'"),
        ({"loss": "mse"}, "loss 'mse'"),
        ({"loss": ["suffix", "free"]}, "2 losses for 1 phases"),
        ({"prefix": 48}, "leaves no suffix"),
        ({"start": "nowhere"}, "nowhere: not a stored map"),
    ):
        with pytest.raises((TrainError, artifact.ArtifactError), match=message):
            MapperTask(config(**{"part": "affine", **change}), data)
