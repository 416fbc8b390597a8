"""TOML tables as frozen dataclasses: every key known, every type right, or an error that says where."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
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
    _known(kind, data, where, error)
    hooks: dict[type[Any], Any] = {float: _number, int: _no_bool}
    try:
        return dacite.from_dict(kind, data, dacite.Config(strict=True, cast=[tuple], type_hooks=hooks))
    except (
        dacite.DaciteError,
        ValueError,
        TypeError,
    ) as fault:  # also of the fields' own checks, or of a cast
        raise error(f"{where}: {fault}") from None


def _known(kind: Any, data: Any, where: str, error: type[ValueError]) -> None:
    """Refuse unknown keys here, table by table, so that the message can say which table has which keys."""
    if not isinstance(data, dict):
        raise error(f"{where}: must be a table, got {data!r}")
    fields = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(data) - fields)
    if unknown:
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        raise error(f"{where}: unknown {', '.join(unknown)}; known: {names}")
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner) and name in data:
            _known(inner, data[name], f"{where}: {name}", error)


def _number(value: Any) -> Any:
    """TOML's 1 will do for 1.0, its "1" and true will not."""
    value = _no_bool(value)
    return float(value) if isinstance(value, int) else value


def _no_bool(value: Any) -> Any:
    """To Python, but not here, true is a number."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} stands where a number should")
    return value
