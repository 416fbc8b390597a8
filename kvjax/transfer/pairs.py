"""From two models and texts to a stored map: what `kvjax fit` does."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from kvjax.lm import LM
from kvjax.report import Report
from kvjax.transfer import artifact, calibrate, select, weighted
from kvjax.transfer.fit import METHODS as fit_methods
from kvjax.transfer.fit import FitConfig, fit, fit_hidden, held_out, held_out_hidden
from kvjax.transfer.moments import CalibrationError
from kvjax.typing import Texts

log = logging.getLogger("kvjax")
SELECTIONS = ("explained", "matching")
METHODS = (*fit_methods, "weighted")


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """How a map is fitted. k: source layers per target layer; layers: how they are chosen, "explained" (most variance
    explained alone) or "matching" (same relative depth and its neighbours). method: of
    `kvjax.transfer.fit.FitConfig`, as are ridge and local, or "weighted" (`kvjax.transfer.weighted`). joint: keys and
    values explain both. length, sequences, every, batch: of the calibration text (`kvjax.transfer.calibrate.collect`;
    "weighted" takes every token). held: texts of the held-out figures. hidden: also fit the hidden state that enters
    this target layer, from the source layers of its rows."""

    k: int = 4
    layers: str = "explained"
    ridge: float = 1e-3
    method: str = "ridge"
    local: bool = False
    joint: bool = True
    length: int = 512
    sequences: int = 200
    every: int = 1
    batch: int = 4
    held: int = 16
    dtype: str = "float32"
    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.layers not in SELECTIONS:
            raise ValueError(f"layers {self.layers!r} is not one of {', '.join(SELECTIONS)}")
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is not one of {', '.join(METHODS)}")


def fit_pair(
    source: LM, target: LM, texts: Texts, held: Texts, out: str | Path, options: FitOptions = FitOptions(), *,
    data: str = "", keep: Path | None = None, progress: bool | None = None,
) -> Report:  # fmt: skip
    """Fit a map on `texts`, score it on `held` (other documents), and store it in `out`.

    Args:
      data: what the texts are, in words, for the manifest. keep: see `calibrate.collect`.

    Returns: a report; table "explained" has R^2 of keys and values on held-out text per target layer.

    Raises:
      CalibrationError, ArtifactError: texts, models or directory that cannot be used.
    """
    if Path(out).exists():
        raise artifact.ArtifactError(f"{out}: exists; nothing is overwritten")
    began = time.perf_counter()
    how: dict[str, Any] = {
        "length": options.length, "batch": options.batch, "every": options.every, "joint": options.joint,
        "hidden": options.hidden, "progress": progress,
    }  # fmt: skip
    stats = calibrate.collect(source, target, texts, sequences=options.sequences, keep=keep, **how)
    read = time.perf_counter() - began
    layers = select.choose(options.layers, stats, options.k, ridge=options.ridge)
    began = time.perf_counter()
    if options.method == "weighted":
        mapper = weighted.fit_pair(
            source, target, texts, stats, layers, FitConfig(options.ridge, local=options.local),
            length=options.length, batch=options.batch, sequences=options.sequences, progress=progress,
        )  # fmt: skip
    else:
        mapper = fit(stats, layers, FitConfig(options.ridge, options.method, options.local))
    if options.hidden is not None:
        part = fit_hidden(stats, layers[options.hidden], ridge=options.ridge)
        mapper = dataclasses.replace(mapper, hidden=part)
    solved = time.perf_counter() - began
    try:
        other = calibrate.collect(source, target, held, sequences=options.held, **how)
    except CalibrationError as error:
        raise CalibrationError(f"held-out texts: {error}") from None
    explained = held_out(mapper, other)
    key, value = (float(x) for x in explained.mean(0))
    calibration = {
        "data": data, "rows": stats.rows, "skipped": stats.skipped, "longest": options.length,
        "sequences": options.sequences, "every": options.every,
    }  # fmt: skip
    metrics = {"held_out_texts": options.held, "r2_key": key, "r2_value": value}
    if mapper.hidden is not None:
        metrics["r2_hidden"] = held_out_hidden(mapper.hidden, other)
    chosen = {k: getattr(options, k) for k in ("k", "layers", "ridge", "local", "joint", "hidden")}
    manifest = artifact.Manifest(
        artifact.Party.of(source), artifact.Party.of(target), options.method, chosen, calibration, metrics
    )
    artifact.save(out, mapper, manifest, dtype=options.dtype)
    report = Report(f"map from {source.id} to {target.id}", {"out": str(out), **calibration, **chosen})
    report.facts |= {"weights": mapper.size, "read_s": read, "solve_s": solved, **metrics}
    for layer, (r2, picked) in enumerate(zip(explained, layers, strict=True)):
        report.row(
            "explained", layer=layer, source=" ".join(map(str, picked)), key=float(r2[0]), value=float(r2[1])
        )
    return report
