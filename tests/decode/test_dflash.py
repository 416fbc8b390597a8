"""DFlash in the decoding loop: it changes no token, whatever it drafts, and costs exactly what its drafts imply."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import serve
from kvjax.attention import MaskSpec
from kvjax.cache import CacheFull
from kvjax.compilation import CompileCounter
from kvjax.config import ConfigError
from kvjax.decode import loop
from kvjax.decode.dflash import DFlash
from kvjax.decode.loop import Decoded
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.sources import Junk
from tests.check.test_planted import noise_of_the_block, noise_of_the_position_before
from tests.decode import dflash_golden as golden
from tests.decode import tinylm
from tests.decode.reference import filtered_probabilities, p_value

C = "dflash-c"  # trained: it accepts 3 to 8 of 8
B, S, CHUNK, NEW, W = 4, 96, 16, 24, 8
KEY = jax.random.key(5)
MIXED = {
    "temperature": [0.0, 0.7, 0.0, 1.0],
    "top_p": [1.0, 0.9, 1.0, 1.0],
    "top_k": [0, 0, 0, 8],
    "seed": [1, 2, 3, 4],
}
PROGRAM = SamplerProgram(greedy=False, edges=True, logprobs=True)


@functools.cache
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """[B, S] tokens and [B] lengths: one token, fewer than a block, and more than a chunk; garbage behind them."""
    texts = [[26], golden.prompts(C)[5].ids[:5], golden.prompts(C)[0].ids, golden.prompts(C)[3].ids]
    tokens = np.random.default_rng(0).integers(0, 48, (B, S)).astype(np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text)] = text
    return tokens, np.array([len(t) for t in texts], np.int32)


def sampling(stop_ids=((-1, -1),) * B, max_new=NEW, **changes) -> Sampling:
    return Sampling.create(B, max_new=max_new, stop_ids=np.asarray(stop_ids), **(MIXED | changes))


@functools.partial(jax.jit, static_argnums=(0, 1))
def compiled(model, source, params, draft_params, tokens, length, how):
    return loop.generate(
        model, params, tokens, length, KEY, sampling=how, source=source, draft_params=draft_params, program=PROGRAM,
        chunk=CHUNK,
    )  # fmt: skip


def run(source, draft_params=(), how: Sampling | None = None, tokens=None, length=None) -> Decoded:
    if tokens is None:
        tokens, length = prompts()
    lm = golden.target(C)
    how = sampling() if how is None else how
    out = jax.tree.map(np.asarray, compiled(lm.model, source, lm.params, draft_params, tokens, length, how))
    assert out.done.all()
    return out


def drafts(width: int = W) -> tuple[DFlash, golden.DrafterParams]:
    return DFlash(golden.drafter(C).model, width), golden.bound(C)


@functools.cache
def baseline(width: int = W) -> Decoded:
    return run(Junk(width=width, vocab=48))


@functools.cache
def drafted(width: int = W) -> Decoded:
    return run(*drafts(width))


def answers(out: Decoded) -> list[list[int]]:
    return [out.tokens[b, p:n].tolist() for b, (p, n) in enumerate(zip(out.prompt, out.length))]


def assert_same(a: Decoded, b: Decoded) -> None:
    """Tokens, and the bits of their log-probabilities."""
    assert answers(a) == answers(b)
    for b_, (p, n) in enumerate(zip(a.prompt, a.length)):
        x, y = (o.logprobs[b_, p:n].view(np.uint32) for o in (a, b))
        np.testing.assert_array_equal(x, y)


# --- what is drafted changes nothing but the cost ---------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4, W])
def test_drafts_change_no_bit(width: int) -> None:
    """Greedy and sampled rows of a ragged batch, whole blocks and prefixes of them."""
    assert_same(baseline(width), drafted(width))
    assert [len(a) for a in answers(drafted(width))] == [NEW] * B
    assert drafted(width).accepted.sum() > baseline(width).accepted.sum() + B  # and drafting did something


def test_untrained_and_broken_drafters_change_no_bit() -> None:
    source, params = drafts()
    random = source.drafter.init(3)
    assert_same(baseline(), run(source, params._replace(own=random)))
    names = source.drafter.names
    for name in ("fc", "layers.1.attn.qkv_proj"):
        broken = tuple(jnp.full_like(x, jnp.nan) if n == name else x for n, x in zip(names, params.own))
        assert_same(baseline(), run(source, params._replace(own=broken)))


@dataclasses.dataclass(frozen=True)
class Forced(DFlash):
    """The drafter runs, but what it says is replaced by a table of tokens by position."""

    def init(self, params, batch, size):
        return super().init(params[0], batch, size)

    def propose(self, params, state, view):
        draft, state = super().propose(params[0], state, view)
        at = view.pos[:, None] + jnp.arange(self.width)
        known = jnp.take_along_axis(params[1], jnp.minimum(at, S - 1), axis=1)
        # 0 * scores: the drafter's work is not optimised away
        return draft._replace(tokens=known + (0 * draft.score).astype(jnp.int32)), state

    def absorb(self, params, state, commit):
        return super().absorb(params[0], state, commit)


def test_gold_drafts_are_accepted_whole() -> None:
    source, params = drafts()
    out = run(Forced(source.drafter, W), (params, baseline().tokens))
    assert_same(baseline(), out)
    assert out.rounds.tolist() == [NEW // W] * B and out.accepted.tolist() == [NEW // W * (W - 1)] * B


def test_a_row_costs_the_same_in_any_company() -> None:
    """Alone in another slot, beside idle rows full of something else: same tokens, rounds and accepted drafts."""
    tokens, length = prompts()
    for row in (0, 3):
        place = (row + 1) % B
        others = np.random.default_rng(9).integers(0, 48, (B, S)).astype(np.int32)
        others[place] = tokens[row]
        alone = np.where(np.arange(B) == place, length[row], 1).astype(np.int32)
        how = jax.tree.map(lambda x: np.ascontiguousarray(x[np.full(B, row)]), sampling())  # noqa: B023
        how = dataclasses.replace(how, max_new=np.where(np.arange(B) == place, NEW, 0).astype(np.int32))
        out = run(*drafts(), how=how, tokens=others, length=alone)
        assert answers(out)[place] == answers(drafted())[row]
        assert out.rounds[place] == drafted().rounds[row] and out.accepted[place] == drafted().accepted[row]


@pytest.mark.parametrize("place", [0, 3, 9])
def test_stop_ids_inside_an_accepted_block(place: int) -> None:
    stops = np.full((B, 2), -1)
    for row in (2, 3):
        stops[row, 1] = answers(baseline())[row][place]
    out = run(*drafts(), how=sampling(stop_ids=stops))
    for b, whole in enumerate(answers(baseline())):
        ends = [i for i, t in enumerate(whole) if t in stops[b]]
        assert answers(out)[b] == (whole[: ends[0] + 1] if ends else whole)
    if place:  # row 2 is greedy and well drafted: its stop lies among drafts
        ends = [i for i, t in enumerate(answers(baseline())[2]) if t in stops[2]]
        assert out.rounds[2] < ends[0] + 1


def test_each_row_has_its_own_length() -> None:
    for limits in ([0, 1, 2, 3], [5, 4, 0, 24]):
        out = run(*drafts(), how=sampling(max_new=limits))
        assert answers(out) == [a[:n] for a, n in zip(answers(baseline()), limits)]


# --- who sees what ----------------------------------------------------------------------------------------------------


def test_verification_is_causal() -> None:
    """Row j of the target's verification knows nothing of drafts behind it: not one bit of its logits."""
    lm = golden.target(C)
    tokens, length = prompts()

    @jax.jit
    def logits(params, block):
        pos = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), block.shape)
        return lm.model.forward(params, block, pos, lm.model.cache(B, S), MaskSpec(), taps=(1, 2)).logits

    block = tokens[:, :W].copy()
    one = np.asarray(logits(lm.params, block))
    for j in range(W - 1):
        other = block.copy()
        other[:, j + 1 :] ^= 1
        two = np.asarray(logits(lm.params, other))
        np.testing.assert_array_equal(one[:, : j + 1].view(np.uint32), two[:, : j + 1].view(np.uint32))
        assert (one[:, j + 1] != two[:, j + 1]).any()


def test_the_drafter_reads_committed_rows_only() -> None:
    """Rejected rows lie in its cache beyond `filled`; replaced by anything finite they change no bit of a block."""
    source, params = drafts()
    model = source.drafter
    rng = np.random.default_rng(1)
    shape = model.cache(1, 1).k[0].shape
    rows = [rng.standard_normal((B, shape[1], S, shape[3])).astype(np.float32) for _ in range(6)]
    filled = np.array([0, 1, 7, 40], np.int32)
    block = jax.jit(lambda p, c: model.block(p, jnp.arange(B), c.filled, c))
    cache = model.cache(B, S)
    one = block(params, dataclasses.replace(cache, k=tuple(rows[:3]), v=tuple(rows[3:]), filled=filled))
    seen = np.arange(S)[None, None, :, None] < filled[:, None, None, None]
    other = [np.where(seen, r, 1e3 * rng.standard_normal(r.shape)).astype(np.float32) for r in rows]
    two = block(params, dataclasses.replace(cache, k=tuple(other[:3]), v=tuple(other[3:]), filled=filled))
    np.testing.assert_array_equal(one, two)


def test_a_feature_that_is_not_finite_spoils_its_own_row_only() -> None:
    """Else every later draft would read it, and through 0 x NaN even rows that do not see it."""
    source, params = drafts()
    taps = np.random.default_rng(2).standard_normal((2, 5, 3 * 48)).astype(np.float32)
    pos = np.broadcast_to(np.arange(5, dtype=np.int32), (2, 5))
    context = jax.jit(source.drafter.context)
    good = context(params, taps, pos)
    for bad in (np.nan, np.inf, -np.inf):
        spoiled = taps.copy()
        spoiled[1, 3, 7] = bad
        for (k, v), (k2, v2) in zip(good, context(params, spoiled, pos)):
            for x, y in ((k, k2), (v, v2)):
                assert np.isfinite(y).all()
                differ = (np.asarray(x) != np.asarray(y)).any((1, 3))
                assert np.argwhere(differ).tolist() == [[1, 3]]


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_three_programs_then_none_and_both_caches_in_place() -> None:
    lm, drafter = golden.target(C), golden.drafter(C)
    first = serve.generate(lm, [p.ids for p in golden.prompts(C)[:3]], draft=drafter, max_new_tokens=16)
    assert first.compiles + first.cache_hits == 3
    assert first.program["source"] == "DFlash" and first.program["width"] == 8
    assert sum(g.accepted for g in first) > 30
    with CompileCounter() as again:
        other = serve.generate(lm, [[3] * 50, [4], [5, 6]], draft=drafter, max_new_tokens=[1, 30, 7])
        streamed = list(serve.stream(lm, [[3] * 50, [4], [5, 6]], draft=drafter, max_new_tokens=[1, 30, 7]))
    assert again.programs == 0
    told = [[t for e in streamed if e.index == i for t in e.tokens] for i in range(3)]
    assert told == [list(g.tokens) for g in other]

    source, params = drafts()
    program, key, size = SamplerProgram(), np.zeros(2, np.uint32), 512
    state = loop.start(
        lm.model,
        source,
        program,
        params,
        np.zeros((2, size), np.int32),
        np.full(2, 5, np.int32),
        np.zeros(2, bool),
    )
    how, cut = Sampling.create(2, max_new=4), np.full(2, -1, np.int32)
    held = sum(x.nbytes for c in (state.cache, state.draft) for x in (*c.k, *c.v))
    for lowered in (
        loop.prefill.lower(lm.model, source, 16, lm.params, params, state, np.int32(0)),
        loop.rounds.lower(lm.model, source, program, lm.params, params, state, how, key, np.int32(1), cut),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= held
        assert memory.temp_size_in_bytes < held / 2


# --- what is refused --------------------------------------------------------------------------------------------------


def test_widths_that_make_no_sense_are_refused() -> None:
    lm, drafter = golden.target(C), golden.drafter(C)
    for width in (0, 1, 9):
        with pytest.raises(ValueError, match=f"width {width}: this drafter's blocks have 8 rows"):
            serve.generate(lm, [[1, 2]], draft=drafter, width=width)


def test_a_block_must_fit_the_cache() -> None:
    lm, drafter = golden.target(C), golden.drafter(C)
    with pytest.raises(
        CacheFull, match="max_new_tokens 20 and width 8 it needs 33 cache slots, but size is 32"
    ):
        serve.generate(lm, [[1] * 5], draft=drafter, max_new_tokens=20, size=32, chunk=16)
    fits = serve.generate(lm, [[1] * 4], draft=drafter, max_new_tokens=20, size=32, chunk=16)
    assert len(fits[0].tokens) == 20


def test_another_targets_drafter_is_refused() -> None:
    drafter = golden.drafter(C)
    with pytest.raises(ConfigError, match="hidden_size: the drafter was made for 48, the target has 32"):
        serve.generate(golden.target("dflash-a"), [[1, 2]], draft=drafter)
    shallow = tinylm.language_model(num_layers=3, hidden=48)
    beyond = r"num_target_layers: .* made for 6, the target has 3; target_layer_ids: \[3\] are not layers .* \(0..2\)"
    with pytest.raises(ConfigError, match=beyond):
        serve.generate(shallow, [[1, 2]], draft=drafter)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_on_a_mesh(shape: tuple[int, int]) -> None:
    """Rows over `data`, heads (with four devices each KV head twice) and vocabulary over `model`: the same answers
    at the same cost, for this model is never near a tie."""
    mesh = kvjax.make_mesh(*shape)
    lm = kvjax.load(golden.ROOT / C / "target", mesh=mesh)
    drafter = kvjax.load_drafter(golden.ROOT / C / "drafter", lm)
    ids = [p.ids for p in golden.prompts(C)[:4]]
    options = {"max_new_tokens": 24, "size": 256}
    found = serve.generate(lm, ids, draft=drafter, **options)
    plain = serve.generate(golden.target(C), ids, draft=golden.drafter(C), **options)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert [g.rounds for g in found] == [g.rounds for g in plain]
    with pytest.raises(ValueError, match="loaded on different meshes"):
        serve.generate(lm, ids, draft=golden.drafter(C))
    saved = dict(zip(drafter.model.names, drafter.params))
    assert saved["layers.0.attn.qkv_proj"].sharding.spec[0] == "model"


# --- the law of what is emitted ---------------------------------------------------------------------------------------


# An even length: the two tokens then share their noise under the first planted bug.
K, PROMPT, MANY = 8, [9, 21, 11, 5], 4000


@functools.cache
def law() -> tuple[np.ndarray, np.ndarray]:
    """dflash-a's own law of two tokens behind PROMPT under top-k, [V, V] float64, and where it is not zero."""
    lm = golden.target("dflash-a")
    logits = tinylm.one_shot(lm, np.array([[*PROMPT, t] for t in range(24)]))
    first = filtered_probabilities(logits[0, 3], temperature=1.0, top_k=K)
    joint = first[:, None] * np.stack(
        [filtered_probabilities(logits[t, 4], temperature=1.0, top_k=K) for t in range(24)]
    )
    return joint, np.argwhere(joint > 0)


def pairs(seeds: int) -> tuple[np.ndarray, float]:
    """Counts [V, V] of two sampled tokens, one answer a seed, and the share of them that were drafts."""
    lm, source = golden.target("dflash-a"), DFlash(golden.drafter("dflash-a").model, W)
    tokens = np.zeros((MANY, 16), np.int32)
    tokens[:, :4] = PROMPT

    @jax.jit
    def answer(params, draft_params, how):
        return loop.generate(
            lm.model, params, tokens, np.full(MANY, 4, np.int32), KEY, sampling=how, source=source,
            draft_params=draft_params, program=SamplerProgram(greedy=False, edges=True), chunk=4,
        )  # fmt: skip

    counts, accepted = np.zeros((24, 24)), 0
    for first in range(0, seeds, MANY):
        how = Sampling.create(MANY, temperature=1.0, top_k=K, seed=np.arange(first, first + MANY), max_new=2)
        out = answer(lm.params, golden.bound("dflash-a"), how)
        np.add.at(counts, tuple(np.asarray(out.tokens)[:, 4:6].T), 1)
        accepted += int(np.asarray(out.accepted).sum())
    return counts, accepted / (2 * seeds)


def test_sampled_answers_have_the_models_distribution() -> None:
    """64 cells of two tokens, 20,000 seeds, against the law by enumeration."""
    joint, cells = law()
    assert len(cells) == K * K
    counts, accepted = pairs(20_000)
    assert p_value(counts, joint) > 1e-3
    assert 0.02 < accepted < 0.9  # blocks ended in every way


@pytest.mark.parametrize("wrong", [noise_of_the_position_before, noise_of_the_block])
def test_planted_bugs_are_found(wrong, monkeypatch) -> None:
    monkeypatch.setattr(loop, "sample", wrong)
    assert p_value(pairs(MANY)[0], law()[0]) < 1e-6
