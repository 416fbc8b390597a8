"""`kvjax judge-transfer`: one pair, its maps, their controls, chosen on one split of texts and reported on another."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import documents, settings
from kvjax.lm import LM
from kvjax.report import Report
from kvjax.stats import bootstrap
from kvjax.transfer import artifact, calibrate, judge, select
from kvjax.transfer.fit import FitConfig, fit, held_out
from kvjax.transfer.mapper import Mapper, map_content
from kvjax.transfer.moments import Statistics
from kvjax.transfer.scoring import Cut
from kvjax.transfer.windows import beginnings, spread

log = logging.getLogger("kvjax")


@dataclasses.dataclass(frozen=True)
class TextsConfig:
    """Splits of the corpus for fitting, choosing and reporting; how texts are cut; documents judged on each split."""

    calibration: str = "train"
    choosing: str = "selection"
    reporting: str = "confirmation"
    prefix: int = 256
    suffix: int = 128
    tail: int = 1
    documents: int = 64


@dataclasses.dataclass(frozen=True)
class FitTable:
    """Closed-form maps that are compared: k source layers each. The rest as in `kvjax.transfer.pairs.FitOptions`."""

    k: tuple[int, ...]
    sequences: int = 200
    length: int = 512
    every: int = 1
    batch: int = 4
    ridge: float = 1e-3
    method: str = "ridge"
    local: bool = False
    joint: bool = True
    layers: str = "explained"


@dataclasses.dataclass(frozen=True)
class RolloutTable:
    """Tokens of continuation over which divergence is measured, teacher-forced on text and free-running."""

    steps: int = 32


@dataclasses.dataclass(frozen=True)
class ChoiceTable:
    """Items of the 4-way choice, each a prefix and a suffix of so many tokens. items 0 leaves it out."""

    items: int = 1000
    prefix: int = 224
    suffix: int = 32


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """One pair. trained: name -> directory (below `--maps`) of a map that is judged beside the closed form. selves: the
    same of maps from the target to itself, trained with the same data, loss and steps: what they gain was learned about
    the text, not read from the source."""

    source: str
    target: str
    texts: TextsConfig
    fit: FitTable
    rollout: RolloutTable = RolloutTable()
    choice: ChoiceTable = ChoiceTable()
    trained: dict[str, str] = dataclasses.field(default_factory=dict)
    selves: dict[str, str] = dataclasses.field(default_factory=dict)


class StudyError(ValueError):
    """A pair file or a control that makes the judgement worthless; the message says which."""


@dataclasses.dataclass
class Study:
    """Everything that is judged, and where it goes. corpus: directory of the splits; maps: of the trained maps."""

    config: PairConfig
    corpus: Path
    maps: Path
    report: Report
    progress: Callable[[str], Any]

    @functools.cached_property
    def source(self) -> LM:
        return kvjax.load(self.config.source)

    @functools.cached_property
    def target(self) -> LM:
        return kvjax.load(self.config.target)

    def cut(self) -> Cut:
        texts = self.config.texts
        return Cut(texts.prefix, texts.suffix, texts.tail)

    def statistics(self, split: str, sequences: int, keep: Path | None = None) -> Statistics:
        table = self.config.fit
        return calibrate.collect(
            self.source, self.target, documents.read(self.corpus / split), length=table.length, batch=table.batch,
            sequences=sequences, every=table.every, joint=table.joint, keep=keep,
        )  # fmt: skip

    def texts(self, split: str) -> judge.Texts:
        cut, texts = self.cut(), documents.read(self.corpus / split)
        rows = beginnings(texts, self.target, cut.length, self.config.texts.documents)
        rows = rows[: len(rows) - len(rows) % 4]
        self.report.facts[f"texts ({split})"] = len(rows)
        return judge.Texts(rows, cut)

    def judged(
        self, split: str, conditions: Mapping[str, judge.Condition], steps: int = 0
    ) -> dict[str, judge.Answers]:
        return judge.judge(
            self.source,
            self.target,
            conditions,
            self.texts(split),
            batch=4,
            steps=steps,
            progress=self.progress,
        )


def read(path: str | Path) -> PairConfig:
    """
    Raises:
      StudyError: the file or a key cannot be used, by name.
    """
    return settings.parse(PairConfig, settings.table(path, StudyError), str(path), StudyError)


def run(
    path: str | Path, *, corpus: str | Path, maps: str | Path = ".", keep: Path | None = None,
    progress: Callable[[str], Any] = lambda name: None,
) -> tuple[Report, dict[str, Any]]:  # fmt: skip
    """Fit, choose on `texts.choosing`, report on `texts.reporting`.

    Returns: the report and the arrays behind its plots (`kvjax.transfer.plots`).

    Raises:
      StudyError, CalibrationError, ArtifactError: a file, text, model or map that cannot be used.
    """
    began = time.perf_counter()
    config = read(path)
    report = Report(f"transfer from {config.source} to {config.target}")
    study = Study(config, Path(corpus), Path(maps), report, progress)
    calibrate.same_tokens(study.source, study.target)
    stats = study.statistics(config.texts.calibration, config.fit.sequences, keep)
    report.facts |= {"calibration_rows": stats.rows, "calibration_s": time.perf_counter() - began}
    found = _sweep(study, stats)
    best = min(found, key=lambda k: found[k][1])
    report.facts["k chosen on the choosing split"] = best
    maps_of: dict[str, tuple[LM, Mapper]] = {"closed form": (study.source, found[best][0])}
    for reader, named in ((study.source, config.trained), (study.target, config.selves)):
        for name, directory in named.items():
            mapper, manifest = artifact.load(study.maps / directory)
            artifact.check(manifest, reader, study.target)
            maps_of[name] = reader, mapper
    conditions = {name: judge.mapped(*pair, study.cut()) for name, pair in maps_of.items()}
    for name, control in judge.controls(study.source, study.target, found[best][0], study.cut()).items():
        if isinstance(control, str):
            report.row("left out", condition=name, reason=control)
        else:
            conditions[name] = control
    results = study.judged(config.texts.reporting, conditions, config.rollout.steps)
    cosines = judge.similarity(study.target, conditions, study.texts(config.texts.reporting))
    _conditions(report, results, cosines)
    if config.choice.items:
        _choice(study, maps_of)
    _sanity(report, results)
    report.facts["total_s"] = time.perf_counter() - began
    return report, {"sweep": report.tables.get("k", []), "results": results}


def _sweep(study: Study, stats: Statistics) -> dict[int, tuple[Mapper, float]]:
    """Every k on the choosing split: k -> (map, mean nats of the suffix)."""
    table, config = study.config.fit, study.config
    held = study.statistics(config.texts.choosing, 16)
    made, conditions = {}, {}
    for k in table.k:
        if table.layers == "matching":
            layers = select.matching(stats.source.layers, stats.target.layers, k)
        else:
            layers = select.by_explained_variance(stats, k, ridge=table.ridge)
        made[k] = fit(stats, layers, FitConfig(table.ridge, table.method, table.local))
        conditions[f"k = {k}"] = judge.mapped(study.source, made[k], study.cut())
    results = study.judged(config.texts.choosing, conditions)
    cosines = judge.similarity(study.target, conditions, study.texts(config.texts.choosing))
    found = {}
    for k, mapper in made.items():
        answers, explained = results[f"k = {k}"], held_out(mapper, held).mean(0)
        found[k] = (mapper, float(answers.nats.mean()))
        study.report.row(
            "k", k=k, nats=float(answers.nats.mean()), kl=float(answers.kl.mean()), top1=float(answers.top1.mean()),
            cosine=cosines[f"k = {k}"][0], worst_layer=cosines[f"k = {k}"][1],
            r2_key=float(explained[0]), r2_value=float(explained[1]), map_ms=1e3 * _mapping(study, mapper),
            weights=mapper.size,
        )  # fmt: skip
    return found


def _mapping(study: Study, mapper: Mapper, repeats: int = 5) -> float:
    """Seconds to map one prefix, source features given (median)."""
    cut, g = study.cut(), mapper.source
    features = jax.numpy.zeros((1, cut.prefix, g.layers, 2, g.kv_heads, g.head_dim))
    pos = jax.numpy.arange(cut.prefix, dtype=jax.numpy.int32)[None]
    apply = jax.jit(map_content)
    jax.block_until_ready(apply(mapper, features, pos))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(apply(mapper, features, pos))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _conditions(
    report: Report, results: Mapping[str, judge.Answers], cosines: Mapping[str, tuple[float, float]]
) -> None:
    for name, answers in results.items():
        row: dict[str, Any] = {"condition": name}
        for column in ("nats", "kl", "top1"):
            row |= _interval(column, *bootstrap({"x": getattr(answers, column)}, lambda m: m["x"]))
        if name in cosines:
            row |= {"cosine": cosines[name][0], "worst layer": cosines[name][1]}
        if answers.free is not None and answers.same is not None and np.isfinite(answers.free).all():
            row |= {"free kl": float(np.mean(answers.free)), "free same": float(np.mean(answers.same))}
        for column, ratio in (("recovery", judge.recovery), ("gap closed", judge.gap_closed)):
            row |= _interval(column, *ratio(results, name))
        report.row("conditions", **row)


def _interval(name: str, value: float, low: float, high: float) -> dict[str, Any]:
    """Two cells of a table; empty where the figure is undefined."""
    if not np.isfinite((value, low, high)).all():
        return {name: "", f"{name} 95 %": ""}
    return {name: value, f"{name} 95 %": f"{low:.3f} .. {high:.3f}"}


def _choice(study: Study, maps: Mapping[str, tuple[LM, Mapper]]) -> None:
    table = study.config.choice
    cut = Cut(table.prefix, table.suffix, study.config.texts.tail)
    texts = documents.read(study.corpus / study.config.texts.reporting)
    tokens, _ = spread(texts, study.target, cut.length, table.items)
    short = {"no context": judge.Condition((), lambda _, tokens: None)}
    short |= {name: judge.mapped(*pair, cut) for name, pair in maps.items()}
    # Four candidates stand side by side in a batch, so another text is four rows away.
    short["another text's cache"] = judge.mapped(*maps["closed form"], cut, shift=4)
    right = judge.choice(study.source, study.target, short, tokens, cut)
    for name, values in right.items():
        row = {"condition": name, **_interval("right", *bootstrap({"x": values}, lambda m: m["x"]))}
        study.report.row("choice", **row, **_interval("quality", *judge.quality(right, name)))
    native, nothing = float(right["native"].mean()), float(right["no context"].mean())
    study.report.bar("choice is valid: native", native, ">=", 0.6)
    study.report.bar("choice is valid: |no context - chance|", abs(nothing - 0.25), "<=", 0.05)


def _sanity(report: Report, results: Mapping[str, judge.Answers]) -> None:
    """A cache that must not work has to be clearly worse, and the native one put back must be native."""
    again = float(results["native, re-injected"].kl.mean())
    report.bar("native cache re-injected: mean KL", again, "<=", 1e-4)
    for name in ("no context", "another text's cache"):
        columns = {"bad": results[name].nats, "map": results["closed form"].nats}
        _, low, _ = bootstrap(columns, lambda m: m["bad"] - m["map"])
        report.bar(f"{name}: nats above the closed form (low end of 95 %)", low, ">=", 0.0)
