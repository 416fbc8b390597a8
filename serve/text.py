"""From committed tokens to text that may be shown: stop strings and half characters are held back."""

from __future__ import annotations

import dataclasses

from kvjax.tokenizer import Tokenizer

HALF = "�"


@dataclasses.dataclass
class TextRow:
    """The text of one row's answer as it grows."""

    tokenizer: Tokenizer | None
    stop: tuple[str, ...]
    shown: int = 0  # characters already handed out
    checked: int = 0  # tokens already searched for stop strings
    text: str = ""

    def find_stop(self, tokens: list[int]) -> int | None:
        """The number of tokens with which the first stop string is complete; None if there is none."""
        if not self.stop or self.tokenizer is None:
            return None
        for n in range(self.checked + 1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[:n])
            hits = [at for s in self.stop if (at := text.find(s)) >= 0]
            if hits:
                self.text = text[: min(hits)]
                return n
        self.checked = len(tokens)
        return None

    def extend(self, tokens: list[int], *, final: bool, stopped: bool = False) -> str:
        """New text that can no longer change. With `final` all of it; `stopped`: `find_stop` set the text."""
        if self.tokenizer is None:
            return ""
        if not stopped:
            self.text = self.tokenizer.decode(tokens)
        end = len(self.text)
        if not final:
            while end and self.text[end - 1] == HALF:
                end -= 1
            # The longest tail that begins a stop string might yet become one.
            hold = max(
                (k for s in self.stop for k in range(1, len(s)) if self.text[:end].endswith(s[:k])), default=0
            )
            end -= hold
        new = self.text[self.shown : max(end, self.shown)]
        self.shown = max(end, self.shown)
        return new
