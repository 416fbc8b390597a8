"""What `kvjax judge-transfer` is told: one pair of models, the maps between them, and what is demanded of these."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvjax import settings
from kvjax.transfer.select import HOW


class StudyError(ValueError):
    """A pair file or a control that makes the judgement worthless; the message says which."""


@dataclasses.dataclass(frozen=True)
class TextsTable:
    """Splits of the corpus for fitting, choosing and reporting; how texts are cut (`kvjax.transfer.scoring.Cut`);
    documents judged on each split, and how many at once."""

    calibration: str = "train"
    choosing: str = "selection"
    reporting: str = "confirmation"
    prefix: int = 256
    suffix: int = 128
    tail: int = 1
    documents: int = 64
    batch: int = 4


KINDS = ("both", "own kind", "head-local")
"""Keys and values explain both; each its own kind; each target head reads one source head, keys and values of it."""


@dataclasses.dataclass(frozen=True)
class FitTable:
    """Closed-form maps that are compared: k source layers each, in each of `kinds` (`KINDS`). The rest as in
    `kvjax.transfer.pairs.FitOptions`."""

    k: tuple[int, ...]
    kinds: tuple[str, ...] = ("both",)
    sequences: int = 200
    length: int = 512
    every: int = 1
    batch: int = 4
    ridge: float = 1e-3
    method: str = "ridge"
    layers: str = "explained"


@dataclasses.dataclass(frozen=True)
class RolloutTable:
    """Tokens of continuation over which divergence is measured, teacher-forced on the native one and free-running; and
    of text that is handed over instead of a cache."""

    steps: int = 32


@dataclasses.dataclass(frozen=True)
class ChoiceTable:
    """Items of the 4-way choice, each a prefix and a suffix of so many tokens. items 0 leaves it out."""

    items: int = 1000
    prefix: int = 224
    suffix: int = 32
    tail: int = 1


@dataclasses.dataclass(frozen=True)
class RepairTable:
    """Every number of last tokens with every number of first layers, recomputed by the target. Empty leaves it out."""

    tails: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SpeedTable:
    """Prompt lengths at which the time to first token is measured, and how many last tokens the target then reads
    itself. Empty leaves it out."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    tail: int = 32
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class TrainedMap:
    """Directories (below `--maps`) of a trained map and of its control: a map from the target to itself, trained with
    the same data, loss and steps. What the control gains was learned about the text, not read from the source."""

    map: str
    control: str


@dataclasses.dataclass(frozen=True)
class Bars:
    """The least that is demanded of one map; None demands nothing. The field names are those of the tables' columns.

    forced_kl_cut: share of the closed form's KL over teacher-forced steps that is gone.
    """

    recovery: float | None = None
    gap_closed: float | None = None
    top1: float | None = None
    top1_gap_closed: float | None = None
    forced_kl_cut: float | None = None
    quality: float | None = None


CLOSED = "closed form"


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """One pair. trained, bars: by the name of a map; the best closed form is called "closed form"."""

    source: str
    target: str
    texts: TextsTable
    fit: FitTable
    rollout: RolloutTable = RolloutTable()
    choice: ChoiceTable = ChoiceTable()
    repair: RepairTable = RepairTable()
    speed: SpeedTable = SpeedTable()
    trained: dict[str, TrainedMap] = dataclasses.field(default_factory=dict)
    bars: dict[str, Bars] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, bars in self.bars.items():
            if name not in (CLOSED, *self.trained):
                raise StudyError(f"bars.{name}: there is no such map; there are {CLOSED!r} and those trained")
            if bars.quality is not None and not self.choice.items:
                raise StudyError(f"bars.{name}.quality: choice.items is 0, so no quality is measured")
        for kind in self.fit.kinds:
            if kind not in KINDS:
                raise StudyError(f"fit.kinds: {kind!r} is not one of {', '.join(KINDS)}")
        if self.fit.layers not in HOW:
            raise StudyError(f"fit.layers: {self.fit.layers!r} is not one of {', '.join(HOW)}")
        if self.rollout.steps < 1:
            raise StudyError(f"rollout.steps must be at least 1, got {self.rollout.steps}")


def read(path: str | Path) -> PairConfig:
    """
    Raises:
      StudyError: the file or a key cannot be used, by name.
    """
    return settings.parse(PairConfig, settings.table(path, StudyError), str(path), StudyError)
