"""Serving: `generate` for whole answers, `stream` for tokens as they come, `handoff` from another model's cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serve.generate import Event, Generation, Result, generate, stream

if TYPE_CHECKING:
    from serve.exact import stream_exact
    from serve.handoff import Transfer, handoff

__all__ = ["Event", "Generation", "Result", "Transfer", "generate", "handoff", "stream", "stream_exact"]
_LATER = {"Transfer": "serve.handoff", "handoff": "serve.handoff", "stream_exact": "serve.exact"}


def __getattr__(name: str) -> Any:
    """Hand-off is imported on first use: plain generation starts sooner without it."""
    if name not in _LATER:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
