"""The loop on a model small enough to be checked by hand: resuming, pausing, refusing, and stopping on trouble."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import types
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.sharding import LOGICAL, Rules
from train import config, data, loop
from train.config import Phase, TrainConfig, TrainError
from train.loop import Guard, Journal, fit

VOCAB, BAD = 16, 15
# Orbax leaves coroutines behind where a read fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
]
PLAIN = Rules(None, 1, tuple((name, None) for name in LOGICAL))


class Bigram:
    """Next-token cross-entropy from a table of logits; not finite on batches that hold the token BAD."""

    metric = "nats"
    coordinates = None

    def __init__(self, rules: Rules = PLAIN, bad_at: int | None = None) -> None:
        self.rules, self.bad_at = rules, bad_at
        rng = np.random.default_rng(0)
        self.texts = ["".join(map(chr, rng.integers(0, BAD, rng.integers(1, 40)))) for _ in range(70)]
        self.evaluated: list[float] = []

    def init(self) -> tuple[Any, Any]:
        return {"table": jnp.zeros((VOCAB, VOCAB)), "bias": jnp.zeros(VOCAB)}, {"table": True, "bias": False}

    def data(self, phase: Phase, index: int) -> grain.IterDataset:
        blocks = data.blocks(
            self.texts, lambda t: [ord(c) for c in t], length=phase.length, batch=phase.batch, seed=index
        )
        bad = self.bad_at
        if bad is None:
            return blocks
        return grain.MapDataset.range(10**6).map(
            lambda i: {"tokens": np.full((phase.batch, phase.length + 1), BAD if i == bad else i % 7, np.int32)}
        ).to_iter_dataset(grain.ReadOptions(num_threads=0))  # fmt: skip

    def loss(
        self, params: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        inputs, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        scores = jax.nn.log_softmax(params["table"][inputs] + params["bias"])
        nats = -jnp.take_along_axis(scores, labels[..., None], -1).sum()
        nats = jnp.where((inputs == BAD).any(), jnp.nan, nats)
        weight = jnp.float32(labels.size)
        more = {"first": inputs[0, 0] * weight, "drawn": jax.random.uniform(key) * weight}
        return nats, weight, more

    def evaluate(self, params: Any) -> dict[str, float]:
        score = float(jnp.abs(params["table"]).mean())
        self.evaluated.append(score)
        return {"nats": -score}

    def facts(self) -> dict[str, Any]:
        return {"texts": len(self.texts)}


def run_config(phases: Any = ((8, 4, 6), (7, 2, 9)), *, run: Any = (), **optim: Any) -> TrainConfig:
    names = ("steps", "batch", "length", "accumulate")
    return config.from_dict(
        {
            "name": "bigram",
            "task": "count",
            "optimizer": {"rate": 0.05, "warmup": 2, **optim},
            "phases": [dict(zip(names, phase)) for phase in phases],
            "run": {"every": 4, **dict(run)},
        },
        "test",
    )


def lines(directory: Path) -> list[dict[str, Any]]:
    """The journal without the clock."""
    entries = [json.loads(line) for line in (directory / loop.METRICS).read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def steps(directory: Path) -> list[int]:
    return sorted(int(p.name) for p in (directory / loop.CHECKPOINTS).iterdir() if p.name.isdigit())


def same_params(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any]:
    """Journal and parameters of a run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    done = fit(Bigram(), run_config(), directory)
    assert done.done and done.step == 15
    assert steps(directory) == [12, 15]  # the best is the last
    return lines(directory), done.params


class Worsening(Bigram):
    """Every score is worse than the one before."""

    def evaluate(self, params: Any) -> dict[str, float]:
        return {"nats": -super().evaluate(params)["nats"]}


def test_the_best_is_of_the_last_phase(tmp_path: Path) -> None:
    """A model that has not seen the last phase (its length, say) is not the result, however it scores."""
    paused = fit(Worsening(), run_config(), tmp_path, stop_at=8)
    assert not paused.done and paused.best == 8 and paused.metrics
    for _ in range(2):  # a finished run answers the same again
        done = fit(Worsening(), run_config(), tmp_path)
        assert done.done and done.best == 12
        journal = {e["step"]: e["nats"] for e in lines(tmp_path) if "nats" in e}
        assert journal[4] < journal[8] < journal[12] == done.metrics["nats"] < journal[15]


# --- one run --------------------------------------------------------------------------------------------------------


def test_the_journal_tells_every_step(whole: tuple[list[dict[str, Any]], Any]) -> None:
    entries, _ = whole
    assert [e["step"] for e in entries] == list(range(1, 16))
    assert entries[0]["loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert all(e["loss"] < a["loss"] + 0.5 for a, e in zip(entries, entries[1:]))
    assert [e["tokens"] for e in entries] == [24] * 8 + [18] * 7
    assert [e["step"] for e in entries if "nats" in e] == [4, 8, 12, 15]  # every 4, and the ends of phases
    assert len({e["drawn"] for e in entries}) == 15  # each step has its own key


def test_the_batches_are_those_of_the_phases(whole: tuple[list[dict[str, Any]], Any]) -> None:
    task, settings = Bigram(), run_config()
    want = []
    for index, phase in enumerate(settings.phases):
        batches = iter(task.data(phase, index))
        want += [float(next(batches)["tokens"][0, 0]) for _ in range(phase.steps)]
    assert [e["first"] for e in whole[0]] == want


@pytest.mark.parametrize("at", [1, 7, 8, 9])
def test_pausing_changes_nothing(whole: tuple[list[dict[str, Any]], Any], tmp_path: Path, at: int) -> None:
    """Also one step before the boundary of the phases, on it and one after, and after the first step."""
    paused = fit(Bigram(), run_config(), tmp_path, stop_at=at)
    assert (paused.step, paused.done) == (at, False) and steps(tmp_path)[-1] == at
    done = fit(Bigram(), run_config(), tmp_path)
    assert done.done and same_params(done.params, whole[1])
    scored = [
        {k: v for k, v in e.items() if k != "nats" or e["step"] in (4, 8, 12, 15)} for e in lines(tmp_path)
    ]
    assert scored == whole[0]


def test_work_beyond_the_last_checkpoint_is_done_again(
    whole: tuple[list[dict[str, Any]], Any], tmp_path: Path
) -> None:
    """What a kill leaves: a checkpoint of step 4, a journal up to step 6 and a half-written line."""
    fit(Bigram(), run_config(), tmp_path, stop_at=4)
    path = tmp_path / loop.METRICS
    text = path.read_text() + "".join(json.dumps(e | {"loss": 99.0}) + "\n" for e in whole[0][4:6])
    path.write_text(text + json.dumps(whole[0][6])[:17])
    done = fit(Bigram(), run_config(), tmp_path)
    assert lines(tmp_path) == whole[0] and same_params(done.params, whole[1])


def test_a_run_without_its_newest_checkpoint_goes_on_from_the_older(
    whole: tuple[list[dict[str, Any]], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Bigram(), run_config(), tmp_path, stop_at=12)
    newest = tmp_path / loop.CHECKPOINTS / "12"
    biggest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-9])
    done = fit(Bigram(), run_config(), tmp_path)
    assert "checkpoint 12" in caplog.text and "using checkpoint 8" in caplog.text
    assert lines(tmp_path) == whole[0] and same_params(done.params, whole[1])
    assert steps(tmp_path) == [12, 15]


def test_time_runs_out_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every moment the clock may pass the deadline: what was done is saved."""
    for late in range(1, 6):
        now = iter([0.0] * late + [61.0] * 1000)
        clock = types.SimpleNamespace(monotonic=lambda now=now: next(now), perf_counter=time.perf_counter)
        monkeypatch.setattr(loop, "time", clock)
        directory = tmp_path / str(late)
        paused = fit(Bigram(), run_config(), directory, minutes=1)
        assert paused.step < 15 and not paused.done
        assert (steps(directory) or [0])[-1] == paused.step
        assert len(lines(directory)) == paused.step


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    settings = run_config(((4, 2, 6),))
    first = fit(Bigram(), settings, tmp_path)
    text = (tmp_path / loop.METRICS).read_text()
    again = fit(Bigram(), settings, tmp_path)
    assert again.done and same_params(again.params, first.params) and again.metrics == first.metrics
    assert (tmp_path / loop.METRICS).read_text() == text


def test_parts_are_one_batch(whole: tuple[list[dict[str, Any]], Any], tmp_path: Path) -> None:
    fit(Bigram(), run_config(((8, 4, 6, 2), (7, 2, 9))), tmp_path)
    for a, b in zip(lines(tmp_path), whole[0], strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-6 and a["tokens"] == b["tokens"]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_another_configuration_is_refused_by_key(tmp_path: Path) -> None:
    fit(Bigram(), run_config(), tmp_path, stop_at=2)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(TrainError, match=r"optimizer.rate: 0.05 then, 0.1 now; run.seed: 0 then, 3 now"):
        fit(Bigram(), run_config(run={"seed": 3}, rate=0.1), tmp_path)
    with pytest.raises(TrainError, match=r"phases.1.steps: 7 then, 8 now"):
        fit(Bigram(), run_config(((8, 4, 6), (8, 2, 9))), tmp_path)
    other = Bigram()
    other.texts = other.texts[:-1]
    with pytest.raises(TrainError, match=r"task.texts: 70 then, 69 now.*or choose another directory"):
        fit(other, run_config(), tmp_path)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert fit(Bigram(), run_config(run={"every": 3, "keep": 1}), tmp_path).done  # these may change


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "not a table of the run's")])
def test_a_configuration_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / loop.CONFIG).write_text(text)
    with pytest.raises(TrainError, match=message):
        fit(Bigram(), run_config(), tmp_path)


def test_a_batch_that_does_not_divide_the_mesh_is_refused_first(tmp_path: Path) -> None:
    """Before the directory belongs to this configuration, so that the next attempt is not refused."""
    rules = dataclasses.replace(PLAIN)
    rules = type("Split", (Rules,), {"data": property(lambda self: 4)})(
        *dataclasses.astuple(rules)[:2], PLAIN.axes
    )
    with pytest.raises(TrainError, match="a batch of 2 in 1 part.* does not divide over a data axis of 4"):
        fit(Bigram(rules), run_config(), tmp_path / "run")
    with pytest.raises(TrainError, match="a batch of 8 in 4 part.* does not divide"):
        fit(Bigram(rules), run_config(((1, 8, 6, 4),)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- trouble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_kept(tmp_path: Path, parts: int) -> None:
    """The directory holds the batch, and the state bit for bit as it was before the step."""
    task, settings = Bigram(bad_at=6), run_config(((8, 4, 6, parts),))
    with pytest.raises(
        TrainError, match=rf"step 7: the loss is not finite .* are in {tmp_path}/failed; lower"
    ):
        fit(task, settings, tmp_path)
    failed = tmp_path / loop.FAILED
    batch = np.load(failed / "batch.npz")["tokens"]
    assert batch.shape == (4, 7) and (batch == BAD).all()
    assert json.loads((failed / "metrics.json").read_text())["step"] == 7
    clean = Bigram(bad_at=10**5)
    before = fit(clean, settings, tmp_path / "clean", stop_at=6)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(clean, settings))
    kept = loop.Checkpoints(failed, keep=1, best="")
    step, state, _ = kept.load(shapes)  # type: ignore[misc]
    kept.close()
    saved = loop.Checkpoints(tmp_path / "clean" / loop.CHECKPOINTS, keep=2, best="nats")
    clean_state = saved.read(6, shapes)
    saved.close()
    assert step == 6 and int(state.step) == 6 and not bool(state.healthy)
    assert same_params(state.params, before.params)
    assert same_params(state.optimizer, clean_state.optimizer)
    assert [e["step"] for e in lines(tmp_path)] == list(range(1, 7))
    assert steps(tmp_path) == [4]
    with pytest.raises(
        TrainError, match=rf"step 7: .* its metrics are in {tmp_path}/failed"
    ):  # over the old ones
        fit(task, settings, tmp_path)


def state_of(task: Bigram, settings: TrainConfig) -> Any:
    params, decayed = task.init()
    return loop.stepping.create(params, loop.stepping.optimizer(settings.optimizer, 1, decayed), 0)


def test_a_rate_that_diverges_stops_the_run(tmp_path: Path) -> None:
    settings = run_config(((200, 4, 6),), rate=150.0, warmup=60, run={"every": 50})
    with pytest.raises(
        TrainError, match=r"diverged: mean loss of steps \d+ to \d+ is .* lower optimizer.rate"
    ):
        fit(Bigram(), settings, tmp_path)
    assert 20 <= len(lines(tmp_path)) < 100


def test_guard() -> None:
    """It compares means of windows, remembers the start over a resume, and needs a full window."""
    guard = Guard(1.5, [])
    for i in range(Guard.WINDOW - 1):
        guard.see(i, 100.0 if i > 10 else 1.0)  # too few to tell
    resumed = Guard(1.5, [2.0] * 20 + [1.0] * 200)
    for i in range(19):
        resumed.see(i, 2.95)
    with pytest.raises(TrainError, match="mean loss of steps 1 to 20 is 3.05., against 2.000"):
        resumed.see(20, 5.0)
    steady = Guard(1.5, [2.0] * 20)
    for i in range(100):
        steady.see(i, 2.99)


def test_journal_keeps_what_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "loss": float(i)} for i in range(1, 8)]
    text = "".join(json.dumps(r) + "\n" for r in rows)
    for tail in ("", '{"step": 8, "lo', '{"step": 8}\n', "\x00\x00", "3\n"):
        path.write_text(text + tail)
        journal = Journal(path, 5)
        assert journal.losses == [1.0, 2.0, 3.0, 4.0, 5.0]
        journal.write({"step": 6, "loss": 0.5})
        journal.close()
        assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 0.5]
    path.write_bytes(text.encode() + b'{"step": 8, "\xff\xfe')
    assert Journal(path, 9).losses == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert Journal(path, 0).losses == [] and path.read_text() == ""


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    journal = Journal(tmp_path / "metrics.jsonl", 0)
    journal.close()
    journal._file = full.open("a")
    with pytest.raises(TrainError, match="metrics.jsonl: .*No space left.*the last checkpoint is intact"):
        journal.write({"step": 1})
    journal.close()


def test_progress_is_logged_at_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvjax"):
        fit(Bigram(), run_config(((4, 2, 6),)), tmp_path, stop_at=2)
        fit(Bigram(), run_config(((4, 2, 6),)), tmp_path)
    assert "step 2 of 4: loss " in caplog.text and "resuming bigram at step 2 of 4" in caplog.text
