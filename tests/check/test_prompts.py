"""Built-in prompts: enough of them, all different; random ids where they run out."""

from __future__ import annotations

import pytest

import kvjax
from kvjax.check.prompts import PromptError, built_in, parse, prompts


def test_built_in_prompts_are_many_and_varied():
    entries = built_in()
    texts = {entry.get("text", entry.get("chat")) for entry in entries}
    assert len(texts) == len(entries) >= 24
    assert len({entry["kind"] for entry in entries}) >= 8


@pytest.mark.parametrize(
    "text, named",
    [
        ("[[prompt]]\nkind = 'x'\n", "prompt 0"),
        ("[[prompt]]\nkind = 'x'\ntext = 'a'\nchat = 'b'\n", "prompt 0"),
        ("[[prompt]]\nkind = 'x'\ntext = 'a'\ntemperature = 1\n", "temperature"),
        ("prompts = []\n", "prompts"),
        ("[[prompt", "here.toml"),
    ],
)
def test_a_wrong_file_is_refused(text, named):
    with pytest.raises(PromptError, match=named):
        parse(text, "here.toml")


@pytest.mark.parametrize("name", ["llama-bias", "qwen2-window"])
def test_prompts_of_a_model(golden_dirs, name):
    (path,) = [p for p in golden_dirs if p.name == name]
    lm = kvjax.load(path)
    found = prompts(lm, 40, 100)
    assert len(set(found)) == 40 and all(1 <= len(p) <= 100 for p in found)
    assert max(max(p) for p in found) < lm.tokenizer.vocab
    assert found[:10] == prompts(lm, 10, 100)
    assert len({len(p) for p in found}) > 10
