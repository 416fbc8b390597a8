"""Serving: `serve.generate` for whole answers, `serve.stream` for tokens as they are committed."""

from serve.generate import Event, Generation, Result, generate, stream

__all__ = ["Event", "Generation", "Result", "generate", "stream"]
