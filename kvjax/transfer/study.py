"""`kvjax judge-transfer`: one pair, its maps, their controls, chosen on one split of texts and reported on another."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

import kvjax
from kvjax import documents
from kvjax.lm import LM
from kvjax.report import Report
from kvjax.stats import bootstrap
from kvjax.transfer import artifact, calibrate, conditions, judge, latency, select, verdict, windows
from kvjax.transfer.conditions import Condition
from kvjax.transfer.fit import FitConfig, fit, held_out
from kvjax.transfer.mapper import Mapper, map_content
from kvjax.transfer.moments import Statistics
from kvjax.transfer.pairfile import CLOSED, PairConfig, StudyError, read
from kvjax.transfer.repair import Repair
from kvjax.transfer.scoring import Cut

log = logging.getLogger("kvjax")
ENOUGH = 0.99  # top-1 agreement that a repair is asked to reach


@dataclasses.dataclass
class Study:
    """Everything that is judged, and where it goes. corpus: directory of the splits; maps: of the trained maps. Models
    are judged in float32 on every device, so that what differs from native is the cache and not the rounding."""

    config: PairConfig
    corpus: Path
    maps: Path
    report: Report
    _encoded: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def source(self) -> LM:
        return kvjax.load(self.config.source, dtype="float32")

    @functools.cached_property
    def target(self) -> LM:
        return kvjax.load(self.config.target, dtype="float32")

    @property
    def cut(self) -> Cut:
        texts = self.config.texts
        return Cut(texts.prefix, texts.suffix, texts.tail)

    def statistics(self, split: str, sequences: int, keep: Path | None = None) -> Statistics:
        table = self.config.fit
        return calibrate.collect(
            self.source, self.target, documents.read(self.corpus / split), length=table.length, batch=table.batch,
            sequences=sequences, every=table.every, keep=keep,
        )  # fmt: skip

    def encoded(self, split: str) -> list[np.ndarray]:
        if split not in self._encoded:
            self._encoded[split] = windows.encoded(documents.read(self.corpus / split), self.target)
        return self._encoded[split]

    def judged(
        self, split: str, asked: Mapping[str, Condition], *, steps: int = 0, tail: int | None = None
    ) -> dict[str, judge.Answers]:
        texts = self.config.texts
        cut = dataclasses.replace(self.cut, tail=self.cut.tail if tail is None else tail)
        rows = windows.beginnings(self.encoded(split), cut.length, texts.documents)
        rows = rows[: len(rows) - len(rows) % texts.batch]
        self.report.facts[f"texts ({split})"] = len(rows)
        log.info("judging %d conditions on %d texts of %s", len(asked), len(rows), split)
        return judge.judge(
            self.source, self.target, asked, judge.Texts(rows, cut), batch=texts.batch, steps=steps
        )

    def trained(self) -> tuple[dict[str, Mapper], dict[str, Mapper]]:
        """The trained maps, and the maps from the target to itself that control them, by the trained maps' names."""
        loaded: tuple[dict[str, Mapper], dict[str, Mapper]] = {}, {}
        for name, entry in self.config.trained.items():
            for found, directory, reader in (
                (loaded[0], entry.map, self.source),
                (loaded[1], entry.control, self.target),
            ):
                found[name], manifest = artifact.load(self.maps / directory)
                artifact.check(manifest, reader, self.target)
        return loaded


def run(path: str | Path, *, corpus: str | Path, maps: str | Path = ".", keep: Path | None = None) -> Report:
    """Fit, choose on `texts.choosing`, report on `texts.reporting`.

    Raises:
      StudyError, CalibrationError, ArtifactError: a file, text, model or map that cannot be used.
    """
    began = time.perf_counter()
    config = read(path)
    report = Report(f"transfer from {config.source} to {config.target}")
    study = Study(config, Path(corpus), Path(maps), report)
    calibrate.same_tokens(study.source, study.target)
    trained, selves = study.trained()
    stats = study.statistics(config.texts.calibration, config.fit.sequences, keep)
    report.facts |= {"calibration_rows": stats.rows, "calibration_s": time.perf_counter() - began}
    maps_of, best = _chosen(study, stats, trained)
    if config.repair.tails:
        _repairs(study, maps_of[best])

    asked = {name: conditions.mapped(mapper, study.cut) for name, mapper in maps_of.items()}
    asked |= {
        verdict.control_of(name): conditions.mapped(m, study.cut, own=True) for name, m in selves.items()
    }
    asked |= {
        verdict.mismatch_of(name): conditions.mapped(m, study.cut, shift=1) for name, m in maps_of.items()
    }
    beside = conditions.controls(study.source, study.target, maps_of[CLOSED], study.cut, config.rollout.steps)
    for name, control in beside.items():
        if name in asked:
            raise StudyError(f"{path}: trained.{name}: a control has this name")
        if isinstance(control, str):
            report.row("left out", condition=name, reason=control)
        else:
            asked[name] = control
    results = study.judged(config.texts.reporting, asked, steps=config.rollout.steps)
    verdict.answers_table(report, results)
    verdict.training_table(report, results, trained)
    quality = _choice(study, maps_of) if config.choice.items else {}
    if config.speed.lengths:
        _speed(study, maps_of[best])
    verdict.sanity(report, results, maps_of)
    verdict.demands(report, config.bars, results, quality)
    report.facts["total_s"] = time.perf_counter() - began
    return report


def _chosen(study: Study, stats: Statistics, trained: Mapping[str, Mapper]) -> tuple[dict[str, Mapper], str]:
    """(the best closed form and the trained maps, the name of the best of them), by nats on the choosing split."""
    table, split = study.config.fit, study.config.texts.choosing
    held = study.statistics(split, 16)
    made = {}
    for kind in table.kinds:
        seen, truth = (s.own_kind() if kind == "own kind" else s for s in (stats, held))
        how = FitConfig(table.ridge, table.method, kind == "head-local")
        for k in table.k:
            layers = select.choose(table.layers, seen, k, ridge=table.ridge)
            made[f"k = {k}, {kind}"] = (k, kind, fit(seen, layers, how), truth)
    named = {**{name: mapper for name, (_, _, mapper, _) in made.items()}, **trained}
    results = study.judged(split, {name: conditions.mapped(m, study.cut) for name, m in named.items()})
    for name, (k, kind, mapper, truth) in made.items():
        answers, explained = results[name], held_out(mapper, truth).mean(0)
        study.report.row(
            "sweep", k=k, kind=kind, nats=float(answers.nats.mean()), kl=float(answers.kl.mean()),
            top1=float(answers.top1.mean()), **verdict.cosine(answers), r2_key=float(explained[0]),
            r2_value=float(explained[1]), map_ms=1e3 * _mapping(study, mapper), weights=mapper.size,
        )  # fmt: skip
    nats = {name: float(results[name].nats.mean()) for name in named}
    closed = min(made, key=nats.__getitem__)
    nats[CLOSED], found = nats[closed], {CLOSED: named[closed], **trained}
    best = min(found, key=nats.__getitem__)
    study.report.facts |= {"closed form chosen on the choosing split": closed, "best map there": best}
    return found, best


def _mapping(study: Study, mapper: Mapper, repeats: int = 5) -> float:
    """Seconds to map one prefix, source features given (median)."""
    cut, g = study.cut, mapper.source
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


def _repairs(study: Study, mapper: Mapper) -> None:
    """Quality against cost of every repair on the choosing split; the smallest cost that is enough, on the reporting
    one."""
    config, cut = study.config, dataclasses.replace(study.cut, tail=1)
    asked = [Repair(tail, layers=m) for tail in config.repair.tails for m in config.repair.layers]
    price = {r: latency.flops_share(study.target.config, mapper, r, cut.prefix) for r in asked}

    def judged(split: str, repairs: list[Repair]) -> dict[Repair, judge.Answers]:
        named = {str(r): conditions.repaired(study.target, mapper, cut, r) for r in repairs}
        results = study.judged(split, named, tail=1)
        for r in repairs:
            row = {"split": split, "tail": r.tail, "layers": r.layers, "cost": price[r]}
            for column in ("top1", "kl"):
                row |= verdict.interval(column, *verdict.mean(getattr(results[str(r)], column)))
            study.report.row("repair", **row)
        return {r: results[str(r)] for r in repairs}

    top1 = {r: float(a.top1.mean()) for r, a in judged(config.texts.choosing, asked).items()}
    enough = [r for r in asked if top1[r] >= ENOUGH]
    chosen = min(enough, key=price.__getitem__) if enough else max(asked, key=top1.__getitem__)
    found = judged(config.texts.reporting, [chosen])[chosen]
    how = "the cheapest that reaches" if enough else "the best, but it does not reach"
    study.report.facts["repair"] = (
        f"tail {chosen.tail}, layers {chosen.layers}: {how} {ENOUGH:.0%} top-1 on the choosing split, at"
        f" {price[chosen]:.3f} of a prefill's flops; {found.top1.mean():.4f} on the reporting split"
    )


def _choice(study: Study, maps: Mapping[str, Mapper]) -> dict[str, float]:
    """Normalised quality by map: (this - no context) / (native - no context) of the share of right choices."""
    table, target = study.config.choice, study.target
    cut = Cut(table.prefix, table.suffix, table.tail)
    encoded = study.encoded(study.config.texts.reporting)
    tokens, origin = windows.spread(encoded, conditions.lead_of(target), cut.length, table.items)
    asked = {"no context": conditions.no_context(target)}
    asked |= {name: conditions.mapped(m, cut) for name, m in maps.items()}
    asked |= {verdict.mismatch_of(name): conditions.mapped(m, cut, shift=1) for name, m in maps.items()}
    log.info("choosing among continuations: %d items", len(tokens))
    right = judge.choice(study.source, target, asked, tokens, cut, batch=study.config.texts.batch)
    # Items of one document are not independent: documents are drawn, with all their items.
    _, of = np.unique(origin, return_inverse=True)
    sums = {name: np.bincount(of, weights=values) for name, values in right.items()}
    items, found = np.bincount(of).astype(float), {}
    for name in right:
        row = {"condition": name}
        row |= verdict.interval("right", *bootstrap({"x": sums[name], "n": items}, lambda m: m["x"] / m["n"]))
        quality = judge.covered(sums, name, "no context")
        found[name] = quality[0]
        study.report.row("choice", **row, **verdict.interval("quality", *quality))
    native, nothing = float(right["native"].mean()), float(right["no context"].mean())
    study.report.facts["choice"] = f"{len(tokens)} items of {len(items)} documents"
    study.report.bar("choice is valid: native", native, ">=", 0.6)
    study.report.bar("choice is valid: |no context - chance|", abs(nothing - 0.25), "<=", 0.05)
    return found


def _speed(study: Study, mapper: Mapper) -> None:
    table = study.config.speed
    log.info("time to first token at %s tokens", ", ".join(map(str, table.lengths)))
    rows = latency.by_length(
        study.source, study.target, mapper, Repair(table.tail), table.lengths, table.repeats
    )
    for row in rows:
        study.report.row("time to first token", **row)
    for kind in ("warm", "cold"):
        found = latency.break_even(rows, kind)
        study.report.facts[f"break-even, {kind}"] = latency.told(found, rows)
