"""Plots of a judgement: the k sweep and the conditions beside each other. Needs matplotlib (extra `train`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def draw(series: dict[str, Any], directory: Path) -> list[Path]:
    """Write sweep.png and conditions.png into `directory`; returns their paths.

    Raises:
      ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    sweep, results = series["sweep"], series["results"]
    figure = Figure(figsize=(7.5, 2.6), layout="constrained")
    columns = (("nats", "nats a suffix token"), ("top1", "same likeliest token"), ("map_ms", "mapping, ms"))
    for axis, (name, label) in zip(figure.subplots(1, 3), columns):
        axis.plot([row["k"] for row in sweep], [row[name] for row in sweep], marker="o", color="#225588")
        axis.set_xlabel("source layers k")
        axis.set_title(label, fontsize=9)
    paths = [_write(FigureCanvasAgg(figure), directory / "sweep.png")]

    names = [name for name in results if name != "random map"]
    figure = Figure(figsize=(7.5, 0.35 * len(names) + 1), layout="constrained")
    axis = figure.subplots()
    means = [float(np.mean(results[name].nats)) for name in names]
    axis.barh(
        names, means, color=["#225588" if n in ("native", "source alone") else "#99aabb" for n in names]
    )
    axis.axvline(means[0], color="#225588", linewidth=0.8)
    axis.set_xlim(left=0.9 * min(means))
    axis.invert_yaxis()
    axis.set_xlabel("nats a suffix token (lower is better)")
    paths.append(_write(FigureCanvasAgg(figure), directory / "conditions.png"))
    return paths


def _write(canvas: Any, path: Path) -> Path:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as f:
        canvas.print_png(f)
    part.replace(path)
    return path
