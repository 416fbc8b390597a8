"""What a check of several models found: one report each (`kvjax.report`), and the sums."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.report import Report as ModelReport

Row = dict[str, Any]

TITLES = {
    "distribution": "(a) emitted tokens against the model's own distribution",
    "identity": "(b) inside one program: drafts against the plain baseline of the same width",
    "differences": "(b) rows that differ",
    "programs": "(c) plain decoding of width 1 against the program of each width",
    "mismatches": "(c) first divergent positions",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """All models of one call."""

    models: tuple[ModelReport, ...]

    @property
    def ok(self) -> bool:
        return all(model.ok for model in self.models)

    @property
    def total(self) -> dict[str, Any]:
        """Sums over the models."""
        names = ("prompts", "answers", "tokens", "seconds")
        sums: dict[str, Any] = {name: round(sum(m.facts[name] for m in self.models), 1) for name in names}
        across = [row for m in self.models for row in m.tables["programs"]]
        for name in ("mismatches", "explained", "unexplained"):
            sums[name] = sum(row[name] for row in across)
        return {"models": len(self.models), **sums}

    def json(self) -> dict[str, Any]:
        """The object `kvjax check --json` prints; bars carry the model's name when there are several."""
        several = len(self.models) > 1
        bars = [
            bar.as_dict() | {"name": f"{m.title}: {bar.name}" if several else bar.name}
            for m in self.models
            for bar in m.bars
        ]
        models = [{"model": m.title, **m.facts, "ok": m.ok, "tables": m.tables} for m in self.models]
        return {"command": "check", "ok": self.ok, "total": self.total, "models": models, "bars": bars}

    def text(self) -> str:
        """Tables for a terminal."""
        shown = [
            dataclasses.replace(m, tables={TITLES[name]: rows for name, rows in m.tables.items() if rows})
            for m in self.models
        ]
        parts = [m.as_text() + "\n" for m in shown]
        if len(self.models) > 1:
            parts.append("all: " + ", ".join(f"{value:g} {name}" for name, value in self.total.items()))
        parts.append("every bar is met" if self.ok else "NOT every bar is met")
        return "\n".join(parts)
