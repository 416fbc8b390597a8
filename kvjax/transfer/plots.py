"""Plots of a judgement, from its tables. Needs matplotlib (extra `train`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.report import Report

DARK, LIGHT = "#225588", "#99aabb"
Table = list[dict[str, Any]]


def draw(report: Report, directory: Path) -> list[Path]:
    """Write a PNG for each table that is there: sweep, conditions, repair and speed; returns their paths.

    Raises:
      ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, table, plot in _PLOTS:
        if table in report.tables:
            figure = Figure(layout="constrained")
            plot(figure, report.tables[table])
            paths.append(_write(FigureCanvasAgg(figure), directory / f"{name}.png"))
    return paths


def _sweep(figure: Any, rows: Table) -> None:
    figure.set_size_inches(9, 2.6)
    columns = (
        ("nats", "nats a suffix token"), ("top1", "same likeliest token"), ("cosine", "attention-output cosine"),
        ("map_ms", "mapping, ms"),
    )  # fmt: skip
    for axis, (name, label) in zip(figure.subplots(1, len(columns)), columns, strict=True):
        for i, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
            own = [row for row in rows if row["kind"] == kind]
            axis.plot(
                [row["k"] for row in own], [row[name] for row in own], marker="o", color=f"C{i}", label=kind
            )
        axis.set_xlabel("source layers k")
        axis.set_title(label, fontsize=9)
    axis.legend(fontsize=7)


def _conditions(figure: Any, rows: Table) -> None:
    shown = [row for row in rows if row["condition"] != "random map"]
    figure.set_size_inches(7.5, 0.35 * len(shown) + 1)
    axis = figure.subplots()
    nats = [row["nats"] for row in shown]
    fixed = ("native", "source alone")
    colours = [DARK if row["condition"] in fixed else LIGHT for row in shown]
    axis.barh([row["condition"] for row in shown], nats, color=colours)
    axis.axvline(nats[0], color=DARK, linewidth=0.8)
    axis.set_xlim(left=0.9 * min(nats))
    axis.invert_yaxis()
    axis.set_xlabel("nats a suffix token (lower is better)")


def _repair(figure: Any, rows: Table) -> None:
    figure.set_size_inches(5, 3.2)
    axis = figure.subplots()
    rows = [row for row in rows if row["split"] == rows[0]["split"]]
    for i, layers in enumerate(sorted({row["layers"] for row in rows})):
        own = sorted((row for row in rows if row["layers"] == layers), key=lambda row: row["cost"])
        costs, top1 = [row["cost"] for row in own], [row["top1"] for row in own]
        axis.plot(costs, top1, marker="o", color=f"C{i}", label=f"first {layers} layers")
    axis.set_xlabel("flops, as a share of the target's prefill")
    axis.set_ylabel("same likeliest token")
    axis.legend(fontsize=8)


def _speed(figure: Any, rows: Table) -> None:
    figure.set_size_inches(5, 3.2)
    axis = figure.subplots()
    for i, kind in enumerate(("native", "warm", "cold")):
        times = [row[f"{kind} ms"] for row in rows]
        axis.plot([row["tokens"] for row in rows], times, marker="o", color=f"C{i}", label=kind)
    axis.set_xlabel("prompt tokens")
    axis.set_ylabel("time to first token, ms")
    axis.legend(fontsize=8)


_PLOTS: tuple[tuple[str, str, Callable[[Any, Table], None]], ...] = (
    ("sweep", "sweep", _sweep), ("conditions", "conditions", _conditions), ("repair", "repair", _repair),
    ("speed", "time to first token", _speed),
)  # fmt: skip


def _write(canvas: Any, path: Path) -> Path:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as f:
        canvas.print_png(f)
    part.replace(path)
    return path
