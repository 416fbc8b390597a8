"""TOML tables as frozen dataclasses: every key known, every type right, or an error that says where."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import dacite

T = TypeVar("T")


def table(path: str | Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The contents of a TOML file.

    Raises:
      error: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as fault:
        raise error(f"{path}: {fault.strerror or fault}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise error(f"{path}: not TOML: {fault}") from None


def parse(kind: type[T], data: Any, where: str, error: type[ValueError] = ValueError) -> T:
    """`data` as the dataclass `kind`; `where` names file and table in errors.

    Raises:
      error: unknown, missing or mistyped keys, or what the dataclass itself refuses.
    """
    if not isinstance(data, dict):
        raise error(f"{where}: must be a table, got {data!r}")
    hooks: dict[type[Any], Any] = {float: _number, int: _no_bool}
    try:
        return dacite.from_dict(kind, data, dacite.Config(strict=True, cast=[tuple], type_hooks=hooks))
    except dacite.UnexpectedDataError as fault:
        known = ", ".join(f.name for f in dataclasses.fields(kind))  # type: ignore[arg-type]
        raise error(f"{where}: unknown {', '.join(sorted(fault.keys))}; known: {known}") from None
    except (
        dacite.DaciteError,
        ValueError,
        TypeError,
    ) as fault:  # also of the fields' own checks, or of a cast
        raise error(f"{where}: {fault}") from None


def _number(value: Any) -> Any:
    """TOML's 1 will do for 1.0, its "1" and true will not."""
    value = _no_bool(value)
    return float(value) if isinstance(value, int) else value


def _no_bool(value: Any) -> Any:
    """To Python, but not here, true is a number."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} stands where a number should")
    return value
