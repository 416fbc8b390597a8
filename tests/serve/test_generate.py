"""`serve.generate` and `serve.stream`: one answer per prompt, however it is asked for and handed over."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
import serve
from kvjax.compilation import CompileCounter
from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Plain
from kvjax.sharding import make_mesh
from tests.decode import tinylm

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = ["the cat and the", "Hello wörld, you", "a", "for you and for you and for"]
# One shape and one program for the whole file: four rows, greedy and sampled ones.
SHAPE = {"size": 96, "chunk": 16, "logprobs": True}
MIXED = SHAPE | {"max_new_tokens": 40, "temperature": [0.0, 1.0, 0.8, 1.3], "seed": [1, 2, 3, 4]}
NGRAM = kvjax.Ngram(width=4)
SOURCES = pytest.mark.parametrize("draft", [None, NGRAM], ids=["plain", "ngram"])


@pytest.fixture(scope="module")
def lm() -> kvjax.LM:
    return kvjax.load(GOLDEN / "qwen3-tied", progress=False)


@pytest.fixture(scope="module")
def first(lm) -> dict:
    """The first calls, and what they compiled."""
    calls = {}
    for draft in (None, NGRAM):
        with CompileCounter() as counter:
            calls[draft] = serve.generate(lm, PROMPTS, draft=draft, **MIXED), counter
    return calls


@pytest.fixture(scope="module")
def base(first) -> serve.Result:
    return first[None][0]


def streamed(lm, prompts, every: int, **options) -> list[serve.Generation]:
    """The generations of a stream, after checking that its events add up to them."""
    tokens, text, done = [[] for _ in prompts], ["" for _ in prompts], [None] * len(prompts)
    rounds = [0] * len(prompts)
    for event in serve.stream(lm, prompts, every=every, **options):
        assert done[event.index] is None  # nothing after the last event
        assert event.tokens or event.finish_reason
        tokens[event.index] += event.tokens
        text[event.index] += event.text
        rounds[event.index] += bool(event.tokens)
        assert (event.generation is None) == (event.finish_reason is None)
        if event.generation is not None:
            assert event.finish_reason == event.generation.finish_reason
            done[event.index] = event.generation
    assert [tuple(t) for t in tokens] == [g.tokens for g in done]
    assert text == [g.text for g in done]
    if every == 1:
        assert rounds == [g.rounds for g in done]
    return done


# --- what it costs ------------------------------------------------------------------------------------------------


@SOURCES
def test_three_programs_then_none(lm, first, draft) -> None:
    """Start, prefill and rounds; nothing eager. Other prompts, parameters, seeds and streams reuse them."""
    result, counter = first[draft]
    assert result.compiles + result.cache_hits == counter.programs == 3
    with CompileCounter() as again:
        result = serve.generate(lm, PROMPTS, draft=draft, **MIXED)
        other = MIXED | {
            "seed": 9,
            "temperature": [1.0, 0.0, 2.0, 0.1],
            "max_new_tokens": [1, 2, 3, 0],
            "stop": "x",
        }
        serve.generate(lm, [[5] * 33, [6], [7, 8], "the"], draft=draft, **other)
        list(serve.stream(lm, PROMPTS[:3], draft=draft, every=3, **MIXED | {"temperature": 1.0, "seed": 5}))
    assert again.programs == result.compiles == result.cache_hits == 0


def test_results_say_what_happened(lm, base) -> None:
    assert base.program == {
        "batch": 4, "size": 96, "width": 1, "chunk": 16, "dtype": "float32", "source": "Stateless", "mesh": None,
    }  # fmt: skip
    assert set(base.timings) == {"prepare", "prefill", "decode", "total"}
    assert base.timings["total"] == pytest.approx(sum(v for k, v in base.timings.items() if k != "total"))
    assert len(base) == 4 and list(base) == list(base.generations) and base[2] is base.generations[2]
    for prompt, g in zip(PROMPTS, base):
        assert g.prompt_tokens == len(lm.tokenizer.encode(prompt))
        assert g.text == lm.tokenizer.decode(g.tokens)
        assert len(g.logprobs) == len(g.tokens) <= 40 and max(g.logprobs) <= 0
        assert g.finish_reason == ("stop" if g.tokens[-1] in lm.config.eos else "length")
        assert (g.rounds, g.accepted) == (len(g.tokens), 0)
    with pytest.raises(ValueError, match="4 answers"):
        _ = base.text


# --- one answer ---------------------------------------------------------------------------------------------------


@SOURCES
@pytest.mark.parametrize("every", [1, 3, 8])
def test_a_stream_is_the_whole_in_pieces(lm, first, draft, every) -> None:
    assert streamed(lm, PROMPTS, every, draft=draft, **MIXED) == list(first[draft][0])


def test_drafts_were_accepted_and_each_round_counts_once(first) -> None:
    result = first[NGRAM][0]
    assert sum(g.accepted for g in result) > 20
    for g in result:
        # A round gives its accepted drafts and one more token, except the last, which may be cut at a draft.
        assert len(g.tokens) - g.accepted <= g.rounds <= len(g.tokens) - g.accepted + 1


def test_the_function_underneath_gives_the_same(lm, base) -> None:
    """`loop.generate` inside a user's own jit."""
    rows = [lm.tokenizer.encode(p) for p in PROMPTS]
    tokens = np.zeros((4, 96), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    how = Sampling.create(
        4, temperature=MIXED["temperature"], seed=MIXED["seed"], max_new=40, stop_ids=sorted(lm.config.eos)
    )
    program = SamplerProgram.of(how, limit=lm.tokenizer.vocab, logprobs=True)

    @jax.jit
    def mine(params, tokens, length):
        out = loop.generate(
            lm.model, params, tokens, length, jax.random.wrap_key_data(np.zeros(2, np.uint32)), sampling=how,
            source=Plain(), program=program, chunk=16,
        )  # fmt: skip
        return out.tokens, out.length, out.logprobs

    out, length, logprobs = map(
        np.asarray, mine(lm.params, tokens, np.array([len(r) for r in rows], np.int32))
    )
    for b, g in enumerate(base):
        assert tuple(out[b, len(rows[b]) : length[b]]) == g.tokens
        np.testing.assert_allclose(logprobs[b, len(rows[b]) : length[b]], g.logprobs, atol=1e-5)


@SOURCES
def test_a_batch_in_another_order_and_with_idle_rows(lm, first, draft) -> None:
    base = list(first[draft][0])
    order = [2, 0, 3]  # three prompts: the fourth row is idle
    options = {k: [v[i] for i in order] if isinstance(v, list) else v for k, v in MIXED.items()}
    assert list(serve.generate(lm, [PROMPTS[i] for i in order], draft=draft, **options)) == [
        base[i] for i in order
    ]


def test_parameters_are_per_prompt(lm, base) -> None:
    """Each row as if all rows had its parameters."""
    options = {
        "max_new_tokens": [3, 40, 0, 17], "temperature": [0.0, 0.5, 1.0, 1.0], "min_p": [0.0, 0.0, 0.0, 0.3],
        "seed": [1, 2, 3, 4], "stop": [[], ["a", "e"], "the", []], "logprobs": [True, False, True, False],
    }  # fmt: skip
    options["stop"][2] = ["the"]
    together = serve.generate(lm, PROMPTS, **SHAPE | options)
    for b in range(4):
        mine = {name: value[b] for name, value in options.items()}
        # One sampled row keeps the program the same for a greedy row.
        mine |= {"temperature": [mine["temperature"] if i == b else 1.0 for i in range(4)], "logprobs": True}
        alone = serve.generate(lm, PROMPTS, **SHAPE | mine)[b]
        if not options["logprobs"][b]:
            alone = dataclasses.replace(alone, logprobs=None)
        assert together[b] == alone
    assert [len(g.tokens) for g in together][0::2] == [3, 0]
    assert together[2].text == "" and together[2].finish_reason == "length"


def test_ids_and_chats_are_prompts_too(lm) -> None:
    chats = [[{"role": "user", "content": p}] for p in PROMPTS]
    answers = {}
    for thinking in (None, True, False):
        ids = [lm.tokenizer.encode_chat(c, thinking=thinking) for c in chats]
        by_chat = serve.generate(lm, chats, thinking=thinking, **MIXED | {"max_new_tokens": 8})
        assert by_chat.generations == serve.generate(lm, ids, **MIXED | {"max_new_tokens": 8}).generations
        answers[thinking] = [g.prompt_tokens for g in by_chat]
    assert answers[None] == answers[True] != answers[False]


# --- where it ends ------------------------------------------------------------------------------------------------


def spanning(lm, tokens) -> list[tuple[str, int]]:
    """Stop strings made of the end of one token and the beginning of the next, and the tokens that complete them."""
    found = []
    for n in range(2, len(tokens)):
        before, text = lm.tokenizer.decode(tokens[: n - 1]), lm.tokenizer.decode(tokens[:n])
        string = before[-1:] + text[len(before) :][:1]
        if text.startswith(before) and len(string) == 2 and "\ufffd" not in string:
            earliest = next(m for m in range(n + 1) if string in lm.tokenizer.decode(tokens[:m]))
            found.append((string, earliest))
    return found


@SOURCES
def test_stop_strings_end_a_text_wherever_tokens_end(lm, first, draft) -> None:
    """In the middle of a block and of tokens too; the same in a stream of any rhythm, counters included."""
    base, stops, ends = first[draft][0], [], []
    for g in base:
        string, n = (spanning(lm, g.tokens) or [("never", len(g.tokens))])[-1]
        stops.append([string, "occurs never"])
        ends.append(n)
    stopping = [s[0] != "never" for s in stops]
    assert sum(stopping) >= 3 and max(ends) > 9  # beyond the first look at the text
    result = serve.generate(lm, PROMPTS, draft=draft, stop=stops, **MIXED)
    for whole, g, stop, n, stops_here in zip(base, result, stops, ends, stopping):
        assert g.tokens == whole.tokens[:n] and g.logprobs == whole.logprobs[:n]
        if stops_here:
            assert g.finish_reason == "stop"
            text = lm.tokenizer.decode(g.tokens)
            assert g.text == text[: text.index(stop[0])]
        # Of what is kept, not of what the device did by the time the text was looked at.
        assert g.rounds + g.accepted - len(g.tokens) in ((0, 1) if draft else (0,))
    for every in (1, 3, 8):
        assert streamed(lm, PROMPTS, every, draft=draft, stop=stops, **MIXED) == list(result)


def test_stop_ids_replace_the_models_own(lm, base) -> None:
    ids = [base[1].tokens[4], base[3].tokens[6]]
    result = serve.generate(lm, PROMPTS, stop_ids=ids, **MIXED)
    for whole, g in zip(base, result):
        ends = [i for i, t in enumerate(whole.tokens) if t in ids]
        if ends:
            assert g.tokens == whole.tokens[: ends[0] + 1] and g.finish_reason == "stop"
        else:
            assert g.tokens[: len(whole.tokens)] == whole.tokens
    assert result[1].finish_reason == result[3].finish_reason == "stop"


def test_end_of_text_ids_are_kept_as_tokens_and_dropped_from_the_text(lm) -> None:
    """A model that ends: its end-of-text id scores half as much again as a token it would have come to."""
    cold = MIXED | {"temperature": [0.0, 1e-3, 1e-3, 1e-3]}
    tokens = serve.generate(lm, ["Hello"] * 4, **cold)[0].tokens
    goal, end = next(t for t in tokens if t != tokens[0]), lm.config.eos[0]
    params = dict(zip(lm.model.names, lm.params))
    embed = np.asarray(params["embed"]).copy()
    embed[end] = 1.5 * embed[goal]
    ending = dataclasses.replace(lm, params=tuple({**params, "embed": embed}.values()))
    for g in serve.generate(ending, ["Hello"] * 4, **cold):
        assert g.tokens[-1] == end and end not in g.tokens[:-1] and len(g.tokens) > 1
        assert (g.finish_reason, g.text) == ("stop", lm.tokenizer.decode(g.tokens[:-1]))


# --- between events -----------------------------------------------------------------------------------------------


def test_a_stream_leaves_its_consumer_alone() -> None:
    """The model's mesh is set only during calls; what the consumer compiles is not counted; a stream may be
    dropped, and two may be read in turn."""
    plain = tinylm.language_model(num_layers=1)
    model = kvjax.build(plain.config, mesh=make_mesh(1, 2))
    params = tuple(jax.device_put(np.asarray(x), s.sharding) for x, s in zip(plain.params, model.abstract()))
    lm = dataclasses.replace(plain, model=model, params=params)
    options = {"size": 32, "chunk": 8, "max_new_tokens": 6}
    before = jax.sharding.get_mesh()
    one, two = (serve.stream(lm, [[3, 1, 4]], **options) for _ in range(2))
    tokens = []
    for a, b in zip(one, two):
        assert jax.sharding.get_mesh() == before
        assert a == b
        tokens += a.tokens
    assert len(tokens) == 6
    dropped = serve.stream(lm, [[3, 1, 4]], **options)
    next(dropped)
    assert jax.sharding.get_mesh() == before
    del dropped
    result = serve.generate(lm, [[3, 1, 4]], **options)
    assert list(result[0].tokens) == tokens and result.program["mesh"] == {"data": 1, "model": 2}
