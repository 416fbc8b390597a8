"""`kvjax train`: one configuration file to a finished directory: checkpoints, metrics, model, card."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from pathlib import Path
from typing import Any

from train.config import TrainConfig, TrainError, read

TASKS = {"pretrain": "train.pretrain:Pretrain", "mapper": "train.mapper:MapperTask"}
"""Task name -> class, built with (config, data directory). See `train.loop.Task`."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What `run` left: `model` is the exported best checkpoint, None while the run is not finished."""

    name: str
    out: Path
    step: int
    steps: int
    best: int
    metrics: dict[str, float]
    model: Path | None

    def as_dict(self) -> dict[str, Any]:
        fields = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}
        return {**fields, "done": self.model is not None}


def task_of(config: TrainConfig, data: Path) -> Any:
    """The configured task.

    Raises:
      TrainError: an unknown task.
    """
    if config.task not in TASKS:
        raise TrainError(f"task {config.task!r} is not one of {', '.join(TASKS)}")
    module, _, name = TASKS[config.task].partition(":")
    return getattr(importlib.import_module(module), name)(config, data)


def run(path: str | Path, *, data: str | Path, out: str | Path, minutes: float | None = None) -> Outcome:
    """Train what the TOML file `path` describes, or go on with it, and export the best checkpoint when it is done.

    Args:
      data: what the task reads; for pretraining a corpus directory with its tokenizers.
      out: the run's directory; resumed where it holds a run of the same configuration.
      minutes: pause after about this long; the next call goes on.

    Raises:
      TrainError: see `train.loop.fit`.
    """
    from train.loop import fit

    config, out = read(path), Path(out)
    task = task_of(config, Path(data))
    trained = fit(task, config, out, minutes=minutes)
    model = None
    if trained.done:
        model = out / "model"
        shutil.rmtree(model, ignore_errors=True)  # of an earlier call; written anew from the same checkpoint
        task.export(trained.params, model, config.name)
    return Outcome(config.name, out, trained.step, config.steps, trained.best, trained.metrics, model)
