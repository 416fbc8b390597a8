"""What may be shown when: stop strings and half characters, for texts that arrive in any pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.tokenizer import Tokenizer
from serve.text import HALF, TextRow

TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[1] / "golden" / "qwen3-tied")
# Letters the tokenizer merges, characters of two, three and four bytes, and line ends.
ALPHABET = "the in\nandé漢🙂"


def feed(tokens: list[int], ends: list[int], stop: tuple[str, ...]) -> tuple[list[str], str, int | None]:
    """Hand a growing list of tokens over as `serve` does; pieces shown, final text, tokens kept at a stop."""
    row, pieces = TextRow(TOKENIZER, stop), []
    for end in [*ends, len(tokens)]:
        kept = row.find_stop(tokens[:end])
        final = end == len(tokens) or kept is not None
        pieces.append(
            row.extend(tokens[: end if kept is None else kept], final=final, stopped=kept is not None)
        )
        if final:
            return pieces, row.text, kept
    raise AssertionError("the last piece is final")


def whole(tokens: list[int], stop: tuple[str, ...]) -> tuple[str, int | None]:
    """The text, and where it stops: at the first token that completes any stop string."""
    for n in range(len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:n])
        found = [text.find(s) for s in stop if s in text]
        if found:
            return text[: min(found)], n
    return text, None


def portions(draw, n: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(1, n), max_size=6))) if n else []


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_stopped_text(data) -> None:
    text = data.draw(st.text(ALPHABET, max_size=30))
    tokens = TOKENIZER.encode(text)
    inside = st.tuples(st.integers(0, 29), st.integers(1, 4)).map(lambda p: text[p[0] : p[0] + p[1]])
    stop = tuple(
        s for s in data.draw(st.lists(st.one_of(inside, st.text(ALPHABET, max_size=4)), max_size=3)) if s
    )
    pieces, final, kept = feed(tokens, portions(data.draw, len(tokens)), stop)
    assert (final, kept) == whole(tokens, stop)
    assert "".join(pieces) == final
    assert not any(s in final for s in stop)
    # Kept tokens end with the character that completes the stop string, so half of one is never shown.
    assert HALF not in "".join(pieces)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 319), max_size=25), data=st.data())
def test_any_tokens_add_up(tokens, data) -> None:
    """Bytes that are no UTF-8 and special tokens included: nothing shown is ever taken back."""
    pieces, final, _ = feed(tokens, portions(data.draw, len(tokens)), ())
    assert "".join(pieces) == final == TOKENIZER.decode(tokens)


def test_text_is_held_back_and_released() -> None:
    tokens = TOKENIZER.encode("a🙂b<")
    assert len(tokens) == 7  # the face is four tokens
    assert feed(tokens, [1, 2, 3, 4, 5, 6], ()) == (["a", "", "", "", "🙂", "b", "<"], "a🙂b<", None)
    row = TextRow(TOKENIZER, ("</end>",))
    ids = TOKENIZER.encode("x</en")
    assert row.find_stop(ids) is None
    assert row.extend(ids, final=False) == "x"  # the rest may become the stop string
    more = ids + TOKENIZER.encode("tity")
    assert row.find_stop(more) is None
    assert row.extend(more, final=False) == "</entity"  # it did not
    assert row.extend(more + TOKENIZER.encode("</e"), final=True) == "</e"  # no more is coming


def test_a_half_character_at_the_end_is_shown_as_what_it_is() -> None:
    tokens = TOKENIZER.encode("é")[:1]
    assert feed(tokens, [], ()) == ([HALF], HALF, None)


def test_without_a_tokenizer_there_is_no_text() -> None:
    row = TextRow(None, ())
    assert row.find_stop([1, 2]) is None and row.extend([1, 2], final=True) == "" and row.text == ""


@pytest.mark.parametrize("order", [("nd", "and"), ("and", "nd")])
def test_of_two_stop_strings_that_end_together_the_longer_counts(order) -> None:
    assert feed(TOKENIZER.encode("the and"), [], order)[1] == "the "
