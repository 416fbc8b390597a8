"""Tables and bars: what every judging command prints, for people or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

RELATIONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure that is demanded: `value` must be `relation` ("<=", ">=" or "==") `bound`."""

    name: str
    value: float
    relation: str
    bound: float

    @property
    def ok(self) -> bool:
        if math.isnan(self.value):
            return False
        return bool(RELATIONS[self.relation](self.value, self.bound))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "bound": f"{self.relation} {self.bound:g}",
            "ok": self.ok,
        }


@dataclasses.dataclass
class Report:
    """tables: name -> rows (dictionaries with the same keys); facts: the conditions they were measured in."""

    title: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    bars: list[Bar] = dataclasses.field(default_factory=list)

    def row(self, table: str, **values: Any) -> None:
        self.tables.setdefault(table, []).append(values)

    def bar(self, name: str, value: float, relation: str, bound: float) -> None:
        self.bars.append(Bar(name, float(value), relation, float(bound)))

    @property
    def ok(self) -> bool:
        return all(bar.ok for bar in self.bars)

    @property
    def exit_code(self) -> int:
        """1 when a bar is not met."""
        return 0 if self.ok else 1

    def as_dict(self) -> dict[str, Any]:
        bars = [bar.as_dict() for bar in self.bars]
        return {"title": self.title, "facts": self.facts, "tables": self.tables, "bars": bars, "ok": self.ok}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, default=float)

    def as_text(self) -> str:
        lines = [self.title, *(f"  {k}: {v}" for k, v in self.facts.items())]
        for name, rows in self.tables.items():
            lines += ["", name, *_columns(rows)]
        if self.bars:
            dicts = (bar.as_dict() for bar in self.bars)
            lines += ["", "bars", *_columns([{"": "ok" if d.pop("ok") else "MISSED", **d} for d in dicts])]
        return "\n".join(lines)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(h, "")) for h in heads] for row in rows]
    widths = [max(len(h), *(len(c[i]) for c in cells)) for i, h in enumerate(heads)]
    numeric = [all(not isinstance(row.get(h, 0), str) for row in rows) for h in heads]

    def line(values: Sequence[str]) -> str:
        parts = (v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, numeric))
        return ("  " + "  ".join(parts)).rstrip()

    return [line(heads), *(line(c) for c in cells)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
