"""Which implementation of an operation runs where: an ordered list of backends, and reasons as sentences."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of `operation`: the function of that name in kvjax.kernels.<operation>.<module>. The module is
    imported only for its platform (None: any), since Pallas alone costs half a second of a start."""

    operation: str
    name: str
    module: str
    platform: str | None = None

    def is_supported(self, *args: Any, platform: str, device_kind: str = "", **options: Any) -> str | None:
        """None, or a sentence saying why this call (arrays or their shapes) cannot be served on this device."""
        if self.platform not in (None, platform):
            return f"the {self.name.upper()} kernel runs on no other platform, and the device is a {platform}"
        return self._load().is_supported(*args, platform=platform, device_kind=device_kind, **options)

    def run(self, *args: Any, **options: Any) -> Any:
        return getattr(self._load(), self.operation)(*args, **options)

    def _load(self) -> ModuleType:
        return importlib.import_module(f"kvjax.kernels.{self.operation}.{self.module}")


def backends(operation: str) -> tuple[Backend, ...]:
    """In the order in which they are tried: the kernels, then plain XLA, which takes everything."""
    kernels = (Backend(operation, name, name, name) for name in ("tpu", "gpu"))
    return (*kernels, Backend(operation, "xla", "ref"))


def choose(
    what: str,
    known: Sequence[Backend],
    *args: Any,
    platform: str,
    device_kind: str = "",
    name: str | None = None,
    **options: Any,
) -> Backend:
    """The first of `known` that supports this call, or the one that is named; `what` is for the message.

    Raises:
      ValueError: the named backend is unknown or does not support this call, with its reason.
    """
    named = [b for b in known if name in (None, b.name)]
    if not named:
        raise ValueError(f"unknown {what} backend {name!r}; known: {', '.join(b.name for b in known)}")
    for backend in named:
        reason = backend.is_supported(*args, platform=platform, device_kind=device_kind, **options)
        if reason is None:
            return backend
    raise ValueError(f"{what} backend {name!r} cannot be used: {reason}")
