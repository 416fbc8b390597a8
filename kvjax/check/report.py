"""What a check found: tables, bars, one JSON object, and the same for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Bar:
    """One demand: what was measured, what was asked, and whether it is met."""

    name: str
    value: float
    bound: float
    ok: bool

    @classmethod
    def at_most(cls, name: str, value: float, bound: float) -> Bar:
        return cls(name, value, bound, value <= bound)

    @classmethod
    def at_least(cls, name: str, value: float, bound: float) -> Bar:
        return cls(name, value, bound, value >= bound)


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """One model. about: what ran; tables: rows by table name."""

    model: str
    about: dict[str, Any]
    tables: dict[str, list[Row]]
    bars: tuple[Bar, ...]

    @property
    def ok(self) -> bool:
        return all(bar.ok for bar in self.bars)


@dataclasses.dataclass(frozen=True)
class Report:
    """All models of one call."""

    models: tuple[ModelReport, ...]

    @property
    def ok(self) -> bool:
        return all(model.ok for model in self.models)

    @property
    def total(self) -> dict[str, Any]:
        sums = ("prompts", "answers", "tokens", "seconds")
        whole: dict[str, Any] = {name: round(sum(m.about[name] for m in self.models), 1) for name in sums}
        across = [row for m in self.models for row in m.tables["programs"]]
        for name in ("mismatches", "explained", "unexplained"):
            whole[name] = sum(row[name] for row in across)
        return {"models": len(self.models), **whole}

    def json(self) -> dict[str, Any]:
        """The object `kvjax check --json` prints; bars carry the model's name when there are several."""
        several = len(self.models) > 1
        bars = [
            dataclasses.asdict(bar) | {"name": f"{m.model}: {bar.name}" if several else bar.name}
            for m in self.models
            for bar in m.bars
        ]
        models = [{"model": m.model, **m.about, "ok": m.ok, "tables": m.tables} for m in self.models]
        return {"command": "check", "ok": self.ok, "total": self.total, "models": models, "bars": bars}

    def text(self) -> str:
        """Tables for a terminal."""
        parts = []
        for m in self.models:
            head = (
                f"{m.model}: {m.about['prompts']} prompts, {m.about['tokens']} tokens, {m.about['dtype']}, "
            )
            parts.append(
                head + f"batch {m.about['batch']}, size {m.about['size']}, {m.about['seconds']:.0f} s"
            )
            for name, rows in m.tables.items():
                if rows:
                    parts.append(f"\n{TITLES[name]}\n{table(rows)}")
            parts.append(
                "\n" + table([dataclasses.asdict(b) | {"ok": "yes" if b.ok else "NO"} for b in m.bars]) + "\n"
            )
        if len(self.models) > 1:
            parts.append("all: " + ", ".join(f"{value:g} {name}" for name, value in self.total.items()))
        parts.append("every bar is met" if self.ok else "NOT every bar is met")
        return "\n".join(parts)


TITLES = {
    "distribution": "(a) emitted tokens against the model's own distribution",
    "identity": "(b) inside one program: drafts against the plain baseline of the same width",
    "differences": "(b) rows that differ",
    "programs": "(c) plain decoding of width 1 against the program of each width",
    "mismatches": "(c) first divergent positions",
}


def table(rows: Sequence[Row]) -> str:
    """Columns of the first row's keys, numbers to the right."""
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    left = [all(isinstance(row[name], str) for row in rows) for name in names]
    lines = []
    for line in cells:
        padded = [c.ljust(w) if side else c.rjust(w) for c, w, side in zip(line, widths, left)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
