"""The one training loop: resume, step, log, evaluate, save, stop on trouble. What is trained is a `Task`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from tqdm import tqdm

from kvjax.sharding import Rules
from train import step as stepping
from train.checkpoint import Checkpoints, write_json
from train.config import Phase, TrainConfig, TrainError, differences
from train.data import Batches

log = logging.getLogger("kvjax")
CONFIG, METRICS, CHECKPOINTS, FAILED = "config.json", "metrics.jsonl", "checkpoints", "failed"


class Task(Protocol):
    """What a run trains."""

    rules: Rules
    metric: str  # of `evaluate`: the one whose lowest value is best

    @property
    def coordinates(self) -> stepping.Coordinates | None:
        """Those the optimizer works in, if they are not the parameters' own."""

    def init(self) -> tuple[Any, Any]:
        """(float32 parameters to train, the same tree of bool: which get weight decay)."""

    def loss(
        self, params: Any, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See `train.step.Loss`."""

    def data(self, phase: Phase, index: int) -> Any:
        """The grain dataset of phase number `index`: dictionaries of arrays [B, ...]."""

    def evaluate(self, params: Any) -> dict[str, float]:
        """Figures on the selection split; lower is better for `metric`."""

    def facts(self) -> dict[str, Any]:
        """What identifies the data and whatever else a resumed run must find unchanged."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished (or paused) run after `step` steps; `params` and `metrics` are those of the best checkpoint
    of the last phase, taken at `best`."""

    params: Any
    step: int
    best: int
    done: bool
    metrics: dict[str, float]


def fit(
    task: Task, config: TrainConfig, directory: str | Path, *, stop_at: int | None = None, minutes: float | None = None
) -> Trained:  # fmt: skip
    """Train, or go on training, in `directory`.

    The batches and the arithmetic of a resumed run are those of an uninterrupted one: on a CPU its losses are the
    same bits.

    Args:
      stop_at, minutes: pause (with a checkpoint) at this step, or after about this time.

    Raises:
      TrainError: a batch does not divide over the mesh, the directory belongs to another configuration (the keys
        are named), its checkpoints cannot be read or written, a loss or gradient is not finite (batch and state are
        saved under `failed/`), or the loss climbs above its start.
    """
    for phase in config.phases:  # before the directory is this configuration's
        _divides(phase, task.rules)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _same_run(directory / CONFIG, {**config.flat(), **{f"task.{k}": v for k, v in task.facts().items()}})
    with task.rules.context():
        return _fit(task, config, directory, stop_at, minutes)


def _fit(
    task: Task, config: TrainConfig, directory: Path, stop_at: int | None, minutes: float | None
) -> Trained:
    run, total = config.run, config.steps
    end = total if stop_at is None else min(stop_at, total)
    params, decayed = task.init()
    transform = stepping.optimizer(config.optimizer, total, decayed)
    if task.coordinates is not None:
        transform = stepping.within(task.coordinates, transform)
    rate = stepping.schedule(config.optimizer, total)
    state = stepping.create(params, transform, run.seed)
    del params
    at, position, scores = 0, None, {}
    checkpoints = Checkpoints(directory / CHECKPOINTS, keep=run.keep, best=task.metric)
    found = checkpoints.load(jax.tree.map(_abstract, state))
    if found is not None:
        at, state, position = found
        scores = checkpoints.scores(at)
        log.info("resuming %s at step %d of %d", config.name, at, total)
    journal = Journal(directory / METRICS, at)
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    bar = tqdm(total=total, initial=at, unit="step", desc=config.name, disable=not sys.stderr.isatty())
    try:
        while at < end and time.monotonic() < deadline:
            index, inside = config.phase_at(at)
            phase = config.phases[index]
            guard = Guard(run.diverged, journal.losses[at - inside :])  # phases need not share a loss
            last = min(end, at + phase.steps - inside)
            step = stepping.make_step(task.loss, transform, rate, phase.accumulate)
            batches = Batches(task.data(phase, index), position if inside else None)
            following = next(batches)
            late = False
            while at < last and not late:
                batch, position = following, batches.position()
                began = time.perf_counter()
                state, metrics = step(state, _lay_out(batch, phase, task.rules))
                following = next(batches)  # while the device works
                metrics = {name: float(value) for name, value in metrics.items()}
                seconds = time.perf_counter() - began
                if not metrics.pop("healthy"):
                    raise _failed(directory, at, batch, state, metrics)
                at += 1
                tokens = phase.batch * phase.length
                bar.update()
                bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {tokens / seconds:,.0f} tokens/s")
                entry = {"step": at, **metrics, "tokens": tokens, "seconds": round(seconds, 4)}
                late = time.monotonic() >= deadline
                if at % run.every == 0 or at == last or late:
                    scores = task.evaluate(state.params)
                    entry |= scores
                    # Before the last phase a model is not what was asked for (its context, say), however it scores.
                    checkpoints.save(at, state, position, scores if index + 1 == len(config.phases) else None)
                    told = {"loss": metrics["loss"], **scores}
                    log.info(
                        "step %d of %d: %s", at, total, ", ".join(f"{k} {v:.4f}" for k, v in told.items())
                    )
                journal.write(entry)
                guard.see(at, metrics["loss"])
    finally:
        bar.close()
        journal.close()
    checkpoints.wait()
    best = checkpoints.best(after=total - config.phases[-1].steps)
    if best is not None and best != at:
        params, scores = (
            checkpoints.read(best, jax.tree.map(_abstract, state)).params,
            checkpoints.scores(best),
        )
        log.info("the best checkpoint is that of step %d", best)
    else:
        best, params = at, state.params
    checkpoints.close()
    return Trained(params, at, best, at == total, scores)


class Journal:
    """`metrics.jsonl`: one line a step. Lines beyond the step a run is resumed at are dropped.

    Raises:
      TrainError: it cannot be written.
    """

    def __init__(self, path: Path, at: int) -> None:
        self.losses: list[float] = []
        self._path = path
        kept = []
        if path.exists():
            for line in path.read_text("utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                    step, loss = int(entry["step"]), float(entry["loss"])
                except (ValueError, TypeError, KeyError):  # it was being written when the run was killed
                    break
                if step <= at:
                    kept.append(line)
                    self.losses.append(loss)
            part = path.with_name(f".{path.name}.part")
            part.write_text("".join(line + "\n" for line in kept), "utf-8")
            part.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainError(f"{self._path}: {error}; the last checkpoint is intact") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has said so
            self._file.close()


class Guard:
    """Notices a run that diverges: its smoothed loss climbs above `limit` times that of the first steps
    of its phase."""

    WINDOW = 20

    def __init__(self, limit: float, losses: list[float]) -> None:
        self._limit = limit
        self._first = losses[: self.WINDOW]
        self._recent = losses[-self.WINDOW :]

    def see(self, step: int, loss: float) -> None:
        """
        Raises:
          TrainError: the run has diverged.
        """
        if len(self._first) < self.WINDOW:
            self._first.append(loss)
        self._recent = [*self._recent, loss][-self.WINDOW :]
        if len(self._recent) < self.WINDOW:
            return
        recent, first = float(np.mean(self._recent)), float(np.mean(self._first))
        if recent > self._limit * first:
            raise TrainError(
                f"diverged: mean loss of steps {step - self.WINDOW + 1} to {step} is {recent:.3f}, against"
                f" {first:.3f} at the start; lower optimizer.rate or lengthen optimizer.warmup"
            )


def _same_run(path: Path, config: dict[str, Any]) -> None:
    if not path.exists():
        write_json(path, config)
        return
    try:
        old = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TrainError(f"{path}: not JSON: {error}") from None
    if not isinstance(old, dict):
        raise TrainError(f"{path}: not a table of the run's configuration")
    changed = differences(old, json.loads(json.dumps(config)))
    if changed:
        raise TrainError(
            f"{path.parent} holds a run with another configuration ({'; '.join(changed)}); resume it with the"
            " configuration it began with, or choose another directory"
        )


def _divides(phase: Phase, rules: Rules) -> None:
    if (phase.batch // phase.accumulate) % rules.data:
        raise TrainError(
            f"a batch of {phase.batch} in {phase.accumulate} part(s) does not divide over a data axis of {rules.data}"
        )


def _lay_out(batch: Any, phase: Phase, rules: Rules) -> Any:
    """Host arrays [B, ...] onto the device(s), in `accumulate` parts [A, B/A, ...] where there are several."""
    parts = phase.accumulate

    def put(x: np.ndarray) -> jax.Array:
        lead: tuple[str | None, ...] = ("batch",)
        if parts > 1:
            x, lead = x.reshape(parts, -1, *x.shape[1:]), (None, "batch")
        return jax.device_put(x, rules.sharding(*lead, *(None,) * (x.ndim - len(lead))))

    return jax.tree.map(put, batch)


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _failed(directory: Path, at: int, batch: Any, state: Any, metrics: dict[str, float]) -> TrainError:
    """Keep what made step `at` + 1 not finite: the state it began with, its batch and its metrics."""
    place = directory / FAILED
    told = "the state before it, its batch and its metrics are in"
    try:
        shutil.rmtree(place, ignore_errors=True)  # what an earlier attempt left
        failed = Checkpoints(place, keep=1, best="")
        failed.save(at, state, "", {})
        failed.close()
        np.savez(place / "batch.npz", **batch)
        write_json(place / "metrics.json", {"step": at + 1, **{k: repr(v) for k, v in metrics.items()}})
    except (OSError, TrainError) as error:
        told = f"its state could not be saved ({error}) in"
    what = "the loss" if not math.isfinite(metrics["loss"]) else "a gradient"
    return TrainError(
        f"step {at + 1}: {what} is not finite ({metrics}); {told} {place}; lower optimizer.rate, or look at the batch"
    )
