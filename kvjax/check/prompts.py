"""What a check runs on: the built-in prompts first, then random ids."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np

from kvjax.lm import LM
from kvjax.resources import config_path

FILE = "prompts/check.toml"


class PromptError(ValueError):
    """The file of built-in prompts is missing or has an entry that is not understood."""


def built_in() -> list[dict[str, str]]:
    """The entries of `configs/prompts/check.toml`: a kind, and a text or a chat message.

    Raises:
      PromptError: naming the file and entry.
    """
    return parse(config_path(FILE).read_text("utf-8"), f"configs/{FILE}")


def parse(text: str, source: str) -> list[dict[str, str]]:
    """Entries of a prompt file.

    Raises:
      PromptError: not TOML, an unknown key, or an entry without exactly one of `text` and `chat`.
    """
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PromptError(f"{source}: {error}") from None
    if unknown := sorted(data.keys() - {"prompt"}):
        raise PromptError(f"{source}: unknown key {unknown[0]!r}")
    entries = data.get("prompt", [])
    for i, entry in enumerate(entries):
        if unknown := sorted(entry.keys() - {"kind", "text", "chat"}):
            raise PromptError(f"{source}: prompt {i}: unknown key {unknown[0]!r}")
        if not isinstance(entry.get("kind"), str) or ("text" in entry) == ("chat" in entry):
            raise PromptError(f"{source}: prompt {i} needs a kind, and either text or chat")
    return entries


def prompts(lm: LM, count: int, longest: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """`count` distinct prompts of 1 to `longest` ids: built-in ones, cut to size, then random ids."""
    found: dict[tuple[int, ...], None] = {}
    if lm.tokenizer is not None:
        for entry in built_in():
            ids = lm.tokenizer.encode(entry["text"]) if "text" in entry else _chat(lm, entry["chat"])
            found.setdefault(tuple(ids[:longest]))
    found.pop((), None)
    kept = list(found)[:count]
    rng = np.random.default_rng(seed)
    while len(kept) < count:
        drawn = tuple(int(t) for t in rng.integers(0, known(lm), int(rng.integers(1, longest + 1))))
        if drawn not in found:
            found[drawn] = None
            kept.append(drawn)
    return kept


def known(lm: LM) -> int:
    """Ids below this one may be chosen: the tokenizer's, as in `serve.generate`."""
    return lm.config.vocab if lm.tokenizer is None else min(lm.config.vocab, lm.tokenizer.vocab)


def _chat(lm: LM, message: str) -> list[int]:
    assert lm.tokenizer is not None
    if lm.tokenizer.has_chat_template:
        return lm.tokenizer.encode_chat([{"role": "user", "content": message}])
    return lm.tokenizer.encode(f"User: {message}\nAssistant:")
