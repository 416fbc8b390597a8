"""What cannot be served is refused before anything runs, with a message that names it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import kvjax
import serve
from kvjax.cache import CacheFull
from kvjax.compilation import CompileCounter
from kvjax.sharding import make_mesh
from kvjax.tokenizer import Tokenizer, TokenizerError
from tests.decode import tinylm

GOLDEN = Path(__file__).parents[1] / "golden"
TWO = ["the", "and"]
CHAT = [[{"role": "user", "content": "the"}]]


@pytest.fixture(scope="module")
def lm() -> kvjax.LM:
    """336 ids, 320 of them known to the tokenizer; 512 positions."""
    return kvjax.load(GOLDEN / "qwen3-tied", progress=False)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts given"),
        ("", {}, "prompt 0 is empty: it has no tokens"),
        (["the", ""], {}, "prompt 1 is empty"),
        ([[3, 4], []], {}, "prompt 1 is empty"),
        ([[3, 336]], {}, r"prompt 0: token id 336 is outside the vocabulary \(0..335\)"),
        ([[3], [-1]], {}, r"prompt 1: token id -1 is outside the vocabulary"),
        (TWO, {"temperature": -1.0}, "temperature must lie in"),
        (TWO, {"temperature": float("nan")}, "temperature must lie in .* got nan"),
        (TWO, {"temperature": "warm"}, "temperature must be a number, got 'warm'"),
        (TWO, {"temperature": [0.0, float("nan")]}, "temperature must lie in"),
        (TWO, {"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        (TWO, {"top_p": 1.01}, "top_p must lie in"),
        (TWO, {"top_k": -2}, "top_k must lie in"),
        (TWO, {"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        (TWO, {"min_p": -0.1}, "min_p must lie in"),
        (TWO, {"seed": -1}, "seed must lie in"),
        (TWO, {"max_new_tokens": -1}, "max_new_tokens must lie in"),
        (TWO, {"temperature": [1.0, 1.0, 1.0]}, "temperature: 3 values for 2 prompts"),
        (TWO, {"max_new_tokens": [4]}, "max_new_tokens: 1 values for 2 prompts"),
        (TWO, {"seed": np.arange(3)}, "seed: 3 values for 2 prompts"),
        (TWO, {"logprobs": [True]}, "logprobs: 1 values for 2 prompts"),
        (TWO, {"stop": ""}, "stop: '' is not a non-empty string"),
        (TWO, {"stop": ["x", ""]}, "stop: '' is not a non-empty string"),
        (TWO, {"stop": ["x", 3]}, "stop: 3 is not a non-empty string"),
        (TWO, {"stop": [["x"], [""]]}, "stop: '' is not a non-empty string"),
        (TWO, {"stop": [["x"], ["y"], []]}, "stop: 3 lists of stop strings for 2 prompts"),
        (TWO, {"stop_ids": [336]}, r"stop_ids: 336 is not a token id \(0..335\)"),
        (TWO, {"stop_ids": ["x"]}, "stop_ids: 'x' is not a token id"),
        (TWO, {"chunk": 0}, "chunk must be at least 1 token, got 0"),
        (TWO, {"width": 4}, "width 4 needs a draft source: plain decoding has width 1"),
        (TWO, {"draft": kvjax.Ngram(width=4), "width": 8}, "width 8 contradicts the draft source's own width, 4"),
        (TWO, {"draft": "ngram"}, "draft: 'ngram' is neither a draft source nor a loaded model"),
        (TWO, {"thinking": True}, "thinking applies to chat messages"),
        ([[3, 4]], {"thinking": False}, "thinking applies to chat messages"),
    ],
)  # fmt: skip
def test_refused(lm, prompts, options, message) -> None:
    with CompileCounter() as counter:
        with pytest.raises(ValueError, match=message):
            serve.generate(lm, prompts, **options)
        with pytest.raises(ValueError, match=message):
            serve.stream(lm, prompts, **options)  # at the call, not at the first event
    assert counter.programs == 0


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (70, {"size": 64, "max_new_tokens": 1}, "prompt 1 has 70 tokens; .* needs 72 cache slots, but size is 64"),
        (40, {"size": 64, "max_new_tokens": 24}, "max_new_tokens 24 and width 1 it needs 65 cache slots"),
        (
            40,
            {"size": 64, "max_new_tokens": 20, "draft": kvjax.Ngram(width=5)},
            "max_new_tokens 20 and width 5 it needs 65 cache slots, but size is 64",
        ),
        (500, {"max_new_tokens": 13}, "exceeds the 512 positions .*qwen3-tied was made for"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(lm, length, options, message) -> None:
    prompts = [[5], [7] * length]
    with pytest.raises(CacheFull, match=message):
        serve.generate(lm, prompts, chunk=16, **options)


def test_an_unknown_option_is_named(lm) -> None:
    with pytest.raises(TypeError, match="temprature"):
        serve.generate(lm, TWO, temprature=1.0)


def test_stream_needs_a_positive_interval(lm) -> None:
    with pytest.raises(ValueError, match="every must be at least 1 round, got 0"):
        serve.stream(lm, TWO, every=0)


def test_draft_models_must_fit(lm) -> None:
    tiny = tinylm.language_model()
    with pytest.raises(
        ValueError, match=r"draft model tiny-0 has a vocabulary of 48, .*qwen3-tied one of 336"
    ):
        serve.generate(lm, TWO, draft=tiny)
    other = Tokenizer.from_directory(GOLDEN / "llama1-old")  # puts a start token before every text
    with pytest.raises(ValueError, match="have different tokenizers"):
        serve.generate(lm, TWO, draft=dataclasses.replace(lm, tokenizer=other))
    with pytest.raises(ValueError, match="a draft model needs width >= 2, got 1"):
        serve.generate(lm, TWO, draft=lm, width=1)
    elsewhere = kvjax.build(lm.config, mesh=make_mesh(1, 2))
    with pytest.raises(ValueError, match="different meshes"):
        serve.generate(lm, TWO, draft=dataclasses.replace(lm, model=elsewhere))


def test_texts_need_a_tokenizer() -> None:
    bare = tinylm.language_model()
    with pytest.raises(ValueError, match="prompt 0 is text, but tiny-0 was loaded without a tokenizer"):
        serve.generate(bare, "the")
    with pytest.raises(ValueError, match="prompt 0 is text"):
        serve.generate(bare, CHAT)
    with pytest.raises(ValueError, match="stop: tiny-0 was loaded without a tokenizer"):
        serve.generate(bare, [[1, 2]], stop="x")


def test_chat_templates_without_a_switch_refuse_it(lm) -> None:
    llama = kvjax.load(GOLDEN / "llama32-tied", progress=False)
    with pytest.raises(TokenizerError, match="has no enable_thinking switch"):
        serve.generate(llama, CHAT, thinking=False)
    with pytest.raises(ValueError, match=r"messages\[1\]: expected an object with a role"):
        serve.generate(lm, [[{"role": "user", "content": "a"}, {"content": "b"}]])
