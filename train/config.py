"""What a training run is told: frozen dataclasses read from TOML. An unknown or missing key is an error.

A file names its task and holds one table for each of `OptimizerConfig`, `RunConfig` and the task's own options,
and one `[[phases]]` table per `Phase`. `configs/mini/mini-s.toml` is an example.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, TypeVar

from kvjax import settings

T = TypeVar("T")
SCHEDULES = ("cosine", "wsd")
COMPUTE = ("float32", "bfloat16")


class TrainError(ValueError):
    """A run that cannot start or go on; the message names the file, field or step and says what to do."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and decay.

    rate: highest learning rate. warmup: steps of linear warm-up. schedule: "cosine" (from the end of the warm-up to
    the end of the run) or "wsd" (constant, then linear decay over the last `decay` share of the run). floor: share
    of `rate` at the end. clip: bound of the gradients' global norm.
    """

    rate: float
    warmup: int = 100
    schedule: str = "cosine"
    decay: float = 0.2
    floor: float = 0.05
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise TrainError(f"optimizer.schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        for name in ("rate", "clip", "eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TrainError(f"optimizer.{name} must be positive, got {value}")
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise TrainError(f"optimizer.{name} must lie in [0, 1], got {getattr(self, name)}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise TrainError(f"optimizer.{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.warmup < 0 or not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise TrainError("optimizer.warmup and optimizer.weight_decay must not be negative")


@dataclasses.dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps on batches of `batch` sequences of `length` tokens, taken in `accumulate` parts."""

    steps: int
    batch: int
    length: int
    accumulate: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise TrainError(f"phases.{field.name} must be at least 1, got {getattr(self, field.name)}")
        if self.batch % self.accumulate:
            raise TrainError(
                f"phases.batch = {self.batch} does not divide into phases.accumulate = {self.accumulate} parts"
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a run is carried out.

    compute: dtype of forward and backward; parameters and moments stay float32. remat: recompute each layer in the
    backward pass instead of keeping its activations. every: steps between checkpoints, each scored on the selection
    split. keep: newest checkpoints kept beside the best. mesh: [data, model]. diverged: abort when the smoothed loss
    is above this multiple of its value in the first steps of its phase.
    """

    seed: int = 0
    compute: str = "float32"
    remat: bool = False
    every: int = 500
    keep: int = 2
    mesh: tuple[int, int] = (1, 1)
    diverged: float = 1.5

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE:
            raise TrainError(f"run.compute {self.compute!r} is not one of {', '.join(COMPUTE)}")
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise TrainError(f"run.{name} must be at least 1, got {getattr(self, name)}")
        if min(self.mesh) < 1:
            raise TrainError(f"run.mesh must be two sizes of at least 1, got {list(self.mesh)}")
        if not self.diverged > 1:
            raise TrainError(f"run.diverged must be above 1, got {self.diverged}")
        if not 0 <= self.seed < 2**31:
            raise TrainError(f"run.seed must lie in [0, 2^31), got {self.seed}")


FREE = ("run.every", "run.keep")
"""Keys that may differ when a run is resumed: they change nothing that is computed from one step to the next."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. `options` is the table named after the task, for the task to parse (`parse`)."""

    name: str
    task: str
    optimizer: OptimizerConfig
    phases: tuple[Phase, ...]
    run: RunConfig
    options: dict[str, Any]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[int, int]:
        """(phase, steps done in it) of 0-based `step`."""
        for i, phase in enumerate(self.phases):
            if step < phase.steps:
                return i, step
            step -= phase.steps
        return len(self.phases), 0

    def flat(self) -> dict[str, Any]:
        """Dotted key -> value, as stored beside a run and compared when it is resumed."""
        return _flatten(dataclasses.asdict(self))


def parse(kind: type[T], data: Any, where: str) -> T:
    """See `kvjax.settings.parse`; raises TrainError."""
    return settings.parse(kind, data, where, TrainError)


def read(path: str | Path) -> TrainConfig:
    """The run described by the TOML file `path`.

    Raises:
      TrainError: not TOML, or a key that is unknown, missing or out of range.
    """
    return from_dict(settings.table(path, TrainError), str(path))


def from_dict(data: dict[str, Any], where: str) -> TrainConfig:
    """See `read`."""
    for key, kind in (("name", str), ("task", str), ("optimizer", dict), ("phases", list)):
        if not isinstance(data.get(key), kind):
            raise TrainError(f"{where}: {key} is missing or not a {kind.__name__}")
    task = data["task"]
    if not re.fullmatch(r"\w[\w.-]*", data["name"]):
        raise TrainError(f"{where}: name {data['name']!r} is not made of letters, digits, '_', '-' and '.'")
    if not isinstance(data.get(task, {}), dict):
        raise TrainError(f"{where}: {task} is not a table")
    unknown = set(data) - {"name", "task", "optimizer", "phases", "run", task}
    if unknown:
        raise TrainError(
            f"{where}: unknown {', '.join(sorted(unknown))}; known: name, task, optimizer, phases, run, {task}"
        )
    if not data["phases"]:
        raise TrainError(f"{where}: phases is empty")
    return TrainConfig(
        data["name"],
        task,
        parse(OptimizerConfig, data["optimizer"], f"{where}: optimizer"),
        tuple(parse(Phase, phase, f"{where}: phases[{i}]") for i, phase in enumerate(data["phases"])),
        parse(RunConfig, data.get("run", {}), f"{where}: run"),
        data.get(task, {}),
    )


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The keys that forbid resuming, each with both values; `FREE` ones may differ."""
    found = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key, "absent"), new.get(key, "absent")
        if a != b and key not in FREE:
            found.append(f"{key}: {a!r} then, {b!r} now")
    return found


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        parts = ((str(k), v) for k, v in value.items())
    elif isinstance(value, list | tuple):
        parts = ((str(i), v) for i, v in enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, part in parts:
        flat |= _flatten(part, f"{prefix}.{key}" if prefix else key)
    return flat
