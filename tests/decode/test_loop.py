"""The decoding loop: one width, one program, one answer, whatever is drafted and whoever else is in the batch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compilation import CompileCounter
from kvjax.decode import loop
from kvjax.decode.loop import Decoded
from kvjax.decode.model import DraftModel
from kvjax.decode.ngram import Ngram
from kvjax.decode.sampler import SamplerProgram, Sampling, noise
from kvjax.decode.sources import Junk, Oracle, Plain
from tests.decode import tinylm
from tests.decode.reference import filtered_probabilities, p_value

WIDTHS = (2, 4, 8, 16)
B, S, CHUNK, NEW = 4, 96, 16, 24
LENGTH = np.array([1, 7, 18, 40], np.int32)  # no chunk, half a chunk, two, three
LIMIT = 40  # of 48 ids
KEY = jax.random.key(5)
# Greedy and sampled rows of every kind in one program.
MIXED = {"temperature": [0.0, 1.0, 0.7, 1.2], "top_k": [0, 0, 8, 0], "top_p": [1.0, 1.0, 1.0, 0.9],
         "min_p": [0.0, 0.0, 0.0, 0.02], "seed": [1, 2, 3, 4]}  # fmt: skip
PROGRAM = SamplerProgram(greedy=False, edges=True, limit=LIMIT, logprobs=True)


@functools.cache
def target():
    return tinylm.language_model(seed=0)


@functools.cache
def prompts() -> np.ndarray:
    """[B, S]: prompts, and garbage behind them that nothing may look at."""
    return np.random.default_rng(2).integers(0, LIMIT, (B, S)).astype(np.int32)


@functools.cache
def junk_table() -> np.ndarray:
    return np.random.default_rng(3).integers(0, LIMIT, (B, S)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="chunk")
def compiled(model, source, program, params, draft_params, tokens, length, sampling, chunk=CHUNK):
    return loop.generate(
        model, params, tokens, length, KEY, sampling=sampling, source=source, draft_params=draft_params,
        program=program, chunk=chunk,
    )  # fmt: skip


def sampling(stop_ids=((-1, -1),) * B, max_new=NEW, **changes) -> Sampling:
    return Sampling.create(B, max_new=max_new, stop_ids=np.asarray(stop_ids), **(MIXED | changes))


def run(
    source, draft_params=(), *, tokens=None, length=LENGTH, how: Sampling | None = None, lm=None
) -> Decoded:
    lm = lm or target()
    tokens = prompts() if tokens is None else tokens
    how = sampling() if how is None else how
    out = compiled(lm.model, source, PROGRAM, lm.params, draft_params, tokens, length, how)
    assert bool(np.asarray(out.done).all())
    return jax.tree.map(np.asarray, out)


@functools.cache
def baseline(width: int) -> Decoded:
    """The plain answer of a width: its program with drafts that know nothing."""
    return run(Oracle(width=width), junk_table())


def answers(out: Decoded) -> list[list[int]]:
    return [out.tokens[b, p:n].tolist() for b, (p, n) in enumerate(zip(out.prompt, out.length))]


def scores(out: Decoded) -> list[np.ndarray]:
    return [out.logprobs[b, p:n] for b, (p, n) in enumerate(zip(out.prompt, out.length))]


def assert_same(a: Decoded, b: Decoded) -> None:
    """Tokens, lengths and the bits of the log-probabilities."""
    assert answers(a) == answers(b)
    for x, y in zip(scores(a), scores(b)):
        np.testing.assert_array_equal(x, y)


class Cost(NamedTuple):
    rounds: list[int]
    accepted: list[int]


def cost_of(out: Decoded, table: np.ndarray, width: int) -> Cost:
    """Rounds and accepted drafts that drafting `table` (by position) must take to give `out`'s answers."""
    rounds, accepted = [], []
    for b, (at, end) in enumerate(zip(out.prompt.tolist(), out.length.tolist())):
        n = hits = 0
        while at < end:
            same = table[b, at : at + width - 1] == out.tokens[b, at : at + width - 1]
            run = int(np.cumprod(same).sum())
            emitted = min(run + 1, end - at)
            n, hits, at = n + 1, hits + min(run, emitted), at + emitted
        rounds.append(n)
        accepted.append(hits)
    return Cost(rounds, accepted)


def cost(out: Decoded) -> Cost:
    return Cost(out.rounds.tolist(), out.accepted.tolist())


# --- what is drafted changes nothing but the cost -----------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_known_drafts(width: int) -> None:
    """Right, partly right and wrong drafts in one program: one answer, at exactly the cost they imply."""
    base = baseline(width)
    assert [len(a) for a in answers(base)] == [NEW] * B
    assert cost(base) == cost_of(base, junk_table(), width)
    full = run(Oracle(width=width), base.tokens)
    assert_same(base, full)
    # W tokens a round, the last round may be short: the best a width can do.
    assert cost(full) == Cost(
        [-(-NEW // width)] * B, [sum(min(width - 1, NEW - i) for i in range(0, NEW, width))] * B
    )
    spoiled = base.tokens.copy()
    spoiled[:, ::5] ^= 1
    partly = run(Oracle(width=width), spoiled)
    assert_same(base, partly)
    assert cost(partly) == cost_of(base, spoiled, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_ngram_drafts(width: int) -> None:
    looping = prompts().copy()
    looping[3, :40] = np.tile(looping[3, :5], 8)  # something to find
    plain = baseline(width) if width != 4 else run(Oracle(width=4), junk_table(), tokens=looping)
    found = run(Ngram(width=width), tokens=looping if width == 4 else None)
    assert_same(plain, found)
    assert found.rounds.sum() <= plain.rounds.sum() + B


@pytest.mark.parametrize("width", WIDTHS)
def test_model_drafts(width: int) -> None:
    """The target as its own draft model is always right (but for a near-tie between two programs); another model
    is right now and then; the answer is the same."""
    base, source = baseline(width), DraftModel(target().model, width)
    own = run(source, target().params)
    assert_same(base, own)
    best = cost_of(base, base.tokens, width)
    assert sum(own.accepted) >= 0.95 * sum(best.accepted) and sum(own.rounds) <= sum(best.rounds) + 2
    other = run(source, tinylm.weights(target().model, seed=1))
    assert_same(base, other)
    assert other.accepted.sum() < own.accepted.sum()


def test_the_junk_source() -> None:
    """The baseline users name, in a program of its own: still the same bits."""
    assert_same(baseline(4), run(Junk(width=4, vocab=LIMIT)))


def test_a_draft_model_of_another_shape() -> None:
    small = tinylm.language_model(seed=4, num_layers=1, hidden=16, num_heads=2, num_kv_heads=1)
    assert_same(baseline(4), run(DraftModel(small.model, 4), small.params))


# --- what the answer is -------------------------------------------------------------------------------------------


def reference_step(logits: np.ndarray, how: Sampling, b: int, pos: int) -> np.ndarray:
    """Scores whose argmax is the token, from logits [V] of an independent forward."""
    z = logits[:LIMIT].astype(np.float64)
    if how.temperature[b] == 0:
        return z
    p = filtered_probabilities(
        z, temperature=float(how.temperature[b]), top_k=int(how.top_k[b]), top_p=float(how.top_p[b]),
        min_p=float(how.min_p[b]),
    )  # fmt: skip
    g = noise(KEY, jnp.asarray(how.seed[b : b + 1]), jnp.asarray([[pos]]), tinylm.TINY.vocab)
    with np.errstate(divide="ignore"):
        return np.log(p) + np.asarray(g)[0, 0, :LIMIT]


@pytest.mark.parametrize("width", [1, 4, 16])
def test_tokens_and_logprobs_are_those_of_one_forward(width: int) -> None:
    """Every token is the one an uncached forward of the text before it gives, and so is its log-probability."""
    out, how = run(Plain()) if width == 1 else baseline(width), sampling()
    logits = tinylm.one_shot(target(), out.tokens)
    close = 0
    for b in range(B):
        z = logits[b].astype(np.float64)
        logp = (
            z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
        )
        for at in range(out.prompt[b], out.length[b]):
            token = out.tokens[b, at]
            assert abs(out.logprobs[b, at] - logp[at - 1, token]) < 1e-4
            step = reference_step(logits[b, at - 1], how, b, at)
            best = np.sort(step)[-2:]
            if best[1] - best[0] < 1e-3:
                close += 1  # two programs may differ here
            else:
                assert token == step.argmax(), (b, at)
    assert close <= 3


def test_ids_the_tokenizer_lacks_are_never_chosen() -> None:
    out = baseline(4)
    logits = tinylm.one_shot(target(), out.tokens)
    tempted = 0
    for b in range(B):
        chosen = np.array(answers(out)[b])
        assert chosen.max() < LIMIT
        tempted += (logits[b, out.prompt[b] - 1 : out.length[b] - 1].argmax(-1) >= LIMIT).sum()
    assert tempted >= 3  # an unlimited greedy row would have chosen them


# --- who else is in the batch changes nothing ---------------------------------------------------------------------


def rows(how: Sampling, order) -> Sampling:
    return jax.tree.map(lambda x: x[order], how)


def test_permuted_rows_give_permuted_answers() -> None:
    base, order = baseline(4), np.array([2, 0, 3, 1])
    out = run(
        Oracle(width=4),
        junk_table()[order],
        tokens=prompts()[order],
        length=LENGTH[order],
        how=rows(sampling(), order),
    )
    for new, old in enumerate(order):
        assert answers(out)[new] == answers(base)[old]
        np.testing.assert_array_equal(scores(out)[new], scores(base)[old])


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("row", range(B))
def test_a_row_alone_is_the_row_in_the_batch(row: int, width: int) -> None:
    """Alone: the same program, its other rows idle and full of something else."""
    base, other = baseline(width), np.random.default_rng(9 + row).integers(0, LIMIT, (B, S)).astype(np.int32)
    place = (row + 1) % B
    other[place], length = prompts()[row], np.ones(B, np.int32)
    length[place] = LENGTH[row]
    max_new = np.where(np.arange(B) == place, NEW, 0)
    how = rows(sampling(), np.full(B, row))
    how = dataclasses.replace(how, max_new=max_new.astype(np.int32))
    out = run(Oracle(width=width), junk_table(), tokens=other, length=length, how=how)
    assert answers(out)[place] == answers(base)[row]
    np.testing.assert_array_equal(scores(out)[place], scores(base)[row])
    assert [len(a) for a in answers(out)] == max_new.tolist() and out.rounds[max_new == 0].sum() == 0


def test_greedy_rows_do_not_notice_sampled_ones() -> None:
    base = baseline(4)
    out = run(Oracle(width=4), junk_table(), how=sampling(temperature=[0.0, 0.0, 0.0, 0.0]))
    assert answers(out)[0] == answers(base)[0]
    assert answers(out)[1] != answers(base)[1]


def test_the_seed_decides() -> None:
    base = baseline(4)
    other = run(Oracle(width=4), junk_table(), how=sampling(seed=[7, 8, 3, 9]))
    same = [a == b for a, b in zip(answers(base), answers(other))]
    assert same == [True, False, True, False]  # row 0 is greedy, row 2 kept its seed


# --- where a row ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["junk", "right"])
def test_stop_ids_end_a_row_where_they_first_occur(drafts: str) -> None:
    """In the middle of an accepted block too; the id itself is emitted; other rows go on."""
    base = baseline(4)
    table = junk_table() if drafts == "junk" else base.tokens
    for place in (0, 1, 6, 10):
        stops = np.full((B, 2), -1)
        stops[1] = [LIMIT + 1, answers(base)[1][place]]
        stops[2, 1] = answers(base)[2][place]
        out = run(Oracle(width=4), table, how=sampling(stop_ids=stops))
        for b, whole in enumerate(answers(base)):
            ends = [i for i, t in enumerate(whole) if t in stops[b]]
            assert answers(out)[b] == (whole[: ends[0] + 1] if ends else whole)
        assert cost(out) == cost_of(out, table, 4)


def test_each_row_has_its_own_length() -> None:
    base = baseline(4)
    for table in (junk_table(), base.tokens):
        for limits in ([0, 1, 2, 3], [5, 4, 0, 24]):
            out = run(Oracle(width=4), table, how=sampling(max_new=limits))
            assert answers(out) == [a[:n] for a, n in zip(answers(base), limits)]
            assert cost(out) == cost_of(out, table, 4)


# --- the three programs under the loop ----------------------------------------------------------------------------


class Steps:
    """The loop as a server runs it: start, prefill chunk by chunk, then some rounds at a time."""

    source, program = Oracle(width=4), PROGRAM

    def __init__(self, table: np.ndarray, how: Sampling) -> None:
        self.lm, self.table, self.how = target(), table, how
        self.key = np.asarray(jax.random.key_data(KEY))
        self.state = loop.start(
            self.lm.model, self.source, self.program, table, prompts(), LENGTH, np.zeros(B, bool)
        )
        for i in range(3):
            self.state = loop.prefill(
                self.lm.model, self.source, CHUNK, self.lm.params, table, self.state, np.int32(i)
            )

    def rounds(self, limit: int, cut=(-1,) * B) -> None:
        self.state = loop.rounds(
            self.lm.model, self.source, self.program, self.lm.params, self.table, self.state, self.how, self.key,
            np.int32(limit), np.array(cut, np.int32),
        )  # fmt: skip

    def held(self) -> list[list[np.ndarray]]:
        """Copies of everything that is valid, row by row: cache slots, tokens, log-probabilities."""
        s, out = self.state, []
        for b in range(B):
            n, filled = int(s.length[b]), int(s.cache.filled[b])
            slots = [np.array(x[b, :, :filled]) for x in (*s.cache.k, *s.cache.v)]
            out.append([*slots, np.array(s.tokens[b, :n]), np.array(s.logprobs[b, s.prompt[b] : n])])
        return out

    def answers(self) -> list[list[int]]:
        return answers(jax.tree.map(np.asarray, loop.decoded(self.state)))


@pytest.mark.parametrize("limits", [(1,), (2, 3), (100,)], ids=str)
def test_rounds_in_any_portions_are_the_whole(limits) -> None:
    """However many rounds are run at a time; done rows keep every bit while the others go on."""
    base = baseline(4)
    steps = Steps(base.tokens, sampling(max_new=[2, NEW, 9, 0]))
    assert np.asarray(steps.state.cache.filled).tolist() == (LENGTH - 1).tolist()
    frozen: dict[int, list[np.ndarray]] = {}
    for i in range(50):
        if bool(np.asarray(steps.state.done).all()):
            break
        steps.rounds(limits[i % len(limits)])
        assert (np.asarray(steps.state.cache.filled) == np.asarray(steps.state.length) - 1).all()
        held = steps.held()
        for b, was in frozen.items():
            assert len(was) == len(held[b])
            for x, y in zip(was, held[b]):
                np.testing.assert_array_equal(x, y)
        frozen = {b: held[b] for b in range(B) if bool(steps.state.done[b])}
    assert steps.answers() == [a[:n] for a, n in zip(answers(base), [2, NEW, 9, 0])]


def test_a_cut_ends_a_row_and_rolls_its_cache_back() -> None:
    base = baseline(4)
    steps = Steps(junk_table(), sampling())
    steps.rounds(6)
    before = steps.held()
    grown = [len(a) for a in steps.answers()]
    cut = [-1, int(LENGTH[1]) + 2, -1, int(LENGTH[3]) + 1]
    steps.rounds(100, cut)
    assert [len(a) for a in steps.answers()] == [NEW, 2, NEW, 1]
    assert min(grown) >= 3  # both cuts took something back
    assert steps.answers() == [a[:n] for a, n in zip(answers(base), [NEW, 2, NEW, 1])]
    filled = np.asarray(steps.state.cache.filled)
    assert filled[1] == LENGTH[1] + 1 and filled[3] == LENGTH[3]
    for b in (1, 3):
        for x, y in zip(steps.held()[b][:4], before[b]):
            np.testing.assert_array_equal(x, y[:, : filled[b]])


def test_a_second_batch_compiles_nothing() -> None:
    """Other prompts, seeds, parameters and stop ids of the same shapes: no program, no eager operation."""
    Steps(junk_table(), sampling()).rounds(1)
    with CompileCounter() as counter:
        steps = Steps(
            prompts(),
            sampling(seed=[9, 8, 7, 6], temperature=[1.0, 0.0, 0.5, 2.0], top_k=3, stop_ids=[[3, 5]] * B),
        )
        steps.rounds(2)
        steps.rounds(5, [4, -1, -1, 41])
    assert (counter.compiles, counter.hits) == (0, 0)


def test_generate_travels_through_export() -> None:
    """Exported, sent as bytes where the package for that is installed, and called: the same answers."""
    lm, base = target(), baseline(4)

    def flat(params, table, tokens, length, temperature, key):
        how = dataclasses.replace(sampling(), temperature=temperature)
        out = loop.generate(
            lm.model, params, tokens, length, jax.random.wrap_key_data(key), sampling=how, source=Oracle(width=4),
            draft_params=table, program=PROGRAM, chunk=CHUNK,
        )  # fmt: skip
        return out.tokens, out.length

    arguments = (
        lm.params, junk_table(), prompts(), LENGTH, sampling().temperature, np.asarray(jax.random.key_data(KEY)),
    )  # fmt: skip
    exported = jax.export.export(jax.jit(flat))(*arguments)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize())
    tokens, length = exported.call(*arguments)
    got = base._replace(tokens=np.asarray(tokens), length=np.asarray(length))
    assert answers(got) == answers(base)


def test_sampled_answers_have_the_models_distribution() -> None:
    """The whole loop, 16,384 seeds at once with drafts of all kinds: two tokens against all 64 pairs."""
    lm = tinylm.language_model(
        seed=6, vocab=8, num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8
    )
    n, prompt, how = 16_384, [3, 1, 4], {"temperature": 0.8, "top_p": 0.9}
    tokens = np.tile(np.array([*prompt, 0, 0, 0, 0, 0], np.int32), (n, 1))
    drafts = np.random.default_rng(0).integers(0, 8, (n, 8)).astype(np.int32)
    seeds = Sampling.create(n, seed=np.arange(n), max_new=2, **how)
    program, source = SamplerProgram(greedy=False, edges=True), Oracle(width=3)
    out = compiled(
        lm.model, source, program, lm.params, drafts, tokens, np.full(n, 3, np.int32), seeds, chunk=4
    )
    counts = np.zeros((8, 8))
    np.add.at(counts, tuple(np.asarray(out.tokens)[:, 3:5].T), 1)
    logits = tinylm.one_shot(lm, np.array([[*prompt, t] for t in range(8)]))
    first = filtered_probabilities(logits[0, 2], **how)
    joint = first[:, None] * np.stack([filtered_probabilities(logits[t, 3], **how) for t in range(8)])
    assert p_value(counts, joint) > 1e-4
    assert p_value(counts, joint.T) < 1e-6  # the test can tell
    assert 0.1 < np.asarray(out.accepted).mean() < 1.9
