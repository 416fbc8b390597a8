"""What a judgement's results say: tables, ratios with their intervals, and bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvjax.report import Report
from kvjax.stats import bootstrap
from kvjax.transfer.judge import Answers, covered
from kvjax.transfer.pairfile import CLOSED, Bars

SLACK = 0.01  # nats by which a cache that must not work has to be worse
RATIOS = (
    ("recovery", "nats", "no context"),
    ("gap_closed", "nats", "source alone"),
    ("top1_gap_closed", "top1", "source alone"),
)
"""Name, figure, and the condition from which the way to native is measured."""


def control_of(name: str) -> str:
    """The condition of a trained map's self-map control."""
    return f"self-map control, {name}"


def mismatch_of(name: str) -> str:
    """The condition in which a map is given another text's cache."""
    return f"another text's cache, {name}"


def answers_table(report: Report, results: Mapping[str, Answers]) -> None:
    """A row a condition: what it says of the suffix, and how it goes on."""
    columns = {k: {name: getattr(a, k) for name, a in results.items()} for k in ("nats", "top1")}
    for name, answers in results.items():
        row: dict[str, Any] = {"condition": name}
        for column in ("nats", "kl", "top1"):
            row |= interval(column, *mean(getattr(answers, column)))
        for label, column, start in RATIOS:
            row |= interval(label, *covered(columns[column], name, start))
        report.row("conditions", **row)
    for name, answers in results.items():
        row = {"condition": name}
        for column in ("forced_kl", "free_kl"):
            row |= interval(column, *mean(getattr(answers, column)))
        for column in ("forced_top1", "free_same"):
            row[column] = float(np.mean(getattr(answers, column)))
        report.row("continuations and attention", **row, **cosine(answers))


def cosine(answers: Answers) -> dict[str, Any]:
    """Two cells: mean over layers, and the worst layer."""
    if answers.cosine is None:
        return {"cosine": "", "worst_layer": ""}
    layers = answers.cosine.mean(0)
    return {"cosine": float(layers.mean()), "worst_layer": float(layers.min())}


def mean(values: np.ndarray) -> tuple[float, float, float]:
    return bootstrap({"x": values}, lambda m: m["x"])


def interval(name: str, value: float, low: float, high: float) -> dict[str, Any]:
    """Two cells of a table, each empty where it is undefined."""
    known = np.isfinite((low, high)).all()
    return {
        name: value if np.isfinite(value) else "",
        f"{name} 95 %": f"{low:.3f} .. {high:.3f}" if known else "",
    }


def training_table(report: Report, results: Mapping[str, Answers], trained: Iterable[str]) -> None:
    """What training gained over the closed form, and how much of it the self-map control gains too."""
    for name in trained:
        row: dict[str, Any] = {"map": name}
        for kind in ("forced_kl", "free_kl"):
            row |= interval(f"{kind}_cut", *_cut(results, name, kind))
        columns = {k: results[k].nats for k in ("native", "no context")}
        columns |= {"map": results[name].nats, "control": results[control_of(name)].nats}
        row |= interval("control_gain", *bootstrap(columns, lambda m: m["native"] - m["control"]))
        row |= interval("recovery_less_tuning", *bootstrap(columns, _less_tuning))
        report.row("training", **row)


def _less_tuning(mean: Mapping[str, Any]) -> float:
    """Recovery without what the control gains over native: tuning to the kind of text, which is no reading."""
    tuning = max(mean["native"] - mean["control"], 0.0)
    return (mean["no context"] - mean["map"] - tuning) / (mean["no context"] - mean["native"])


def _cut(results: Mapping[str, Answers], name: str, kind: str) -> tuple[float, float, float]:
    return covered({k: getattr(a, kind) for k, a in results.items()}, name, CLOSED)


def sanity(report: Report, results: Mapping[str, Answers], maps: Iterable[str]) -> None:
    """A cache that must not work has to be clearly worse, and the native one put back must be native."""
    again = float(results["native, re-injected"].kl.mean())
    report.bar("native cache re-injected: mean KL", again, "<=", 1e-4)
    for name in maps:
        for bad in ("no context", mismatch_of(name)):
            columns = {"bad": results[bad].nats, "map": results[name].nats}
            _, low, _ = bootstrap(columns, lambda m: m["bad"] - m["map"])
            report.bar(f"{bad}: nats above {name} (low end of 95 %)", low, ">=", SLACK)


def demands(
    report: Report, bars_of: Mapping[str, Bars], results: Mapping[str, Answers], quality: Mapping[str, float]
) -> None:
    """The bars of the pair file, on points."""
    for name, bars in bars_of.items():
        columns = {k: {c: getattr(a, k) for c, a in results.items()} for k in ("nats", "top1")}
        points = {label: covered(columns[k], name, start)[0] for label, k, start in RATIOS}
        points |= {"top1": float(results[name].top1.mean()), "quality": quality.get(name, float("nan"))}
        points["forced_kl_cut"] = _cut(results, name, "forced_kl")[0]
        for field, bound in dataclasses.asdict(bars).items():
            if bound is not None:
                report.bar(f"{name}: {field}", points[field], ">=", bound)
