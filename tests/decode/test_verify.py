"""The accept rule: against a plain loop, and against the enumerated distribution on a small vocabulary.

The statistical check takes the judge of a round (noise, sampling, verification) as an argument. The product's
passes; planted mistakes of the kinds such code suffers from must not.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.decode.sampler import SamplerProgram, Sampling, filtered, noise, sample
from kvjax.decode.verify import accepted_prefix, verify
from tests.decode.reference import filtered_probabilities, p_value

# --- the rule, as a loop ---------------------------------------------------------------------------------------


def plainly(draft, target, stops, room, done) -> tuple[int, int, bool]:
    """Count, accepted, done of one row, token by token."""
    count = accepted = 0
    while not done:
        token = target[count]
        drafted = count + 1 < len(draft) and draft[count + 1] == token
        count, accepted = count + 1, accepted + drafted
        done = token in stops or count == room
        if not drafted:
            break
    return count, accepted, done


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_verify_is_the_plain_loop(data) -> None:
    width, batch = data.draw(st.sampled_from([1, 2, 5])), 4
    token = st.integers(0, 3)
    block = st.lists(st.lists(token, min_size=width, max_size=width), min_size=batch, max_size=batch)
    draft, target = np.array(data.draw(block), np.int32), np.array(data.draw(block), np.int32)
    follow = data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch))
    for b, n in enumerate(follow):  # random blocks hardly ever agree for long
        draft[b, 1 : 1 + n] = target[b, : len(draft[b, 1 : 1 + n])]
    stop = np.array(data.draw(st.lists(st.sampled_from([(-1, -1), (2, -1), (0, 3)]), min_size=4, max_size=4)))
    room = np.array(data.draw(st.lists(st.integers(1, 8), min_size=4, max_size=4)), np.int32)
    done = np.array(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    got = jax.jit(verify)(draft, target, stop_ids=stop.astype(np.int32), room=room, done=done)
    want = [
        plainly(draft[b].tolist(), target[b].tolist(), set(stop[b]) - {-1}, room[b], done[b])
        for b in range(4)
    ]
    assert list(zip(*(np.asarray(x).tolist() for x in got))) == want


# --- the distribution ------------------------------------------------------------------------------------------

V, W, NEW, DRAWS = 5, 4, 3, 20_000
PROMPT = (3, 1)
TABLE = (1.3 * np.random.default_rng(7).standard_normal((2, V, V, V))).astype(np.float32)
"""Logits of a target: TABLE[position % 2, token before last, last token]."""
DRAFTER = (TABLE + 0.8 * np.random.default_rng(8).standard_normal(TABLE.shape)).astype(np.float32)

SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 4, "top_p": 0.85, "min_p": 0.05},
)
PROGRAM = SamplerProgram(greedy=False, edges=True)
KEY = jax.random.key(11)


def enumerated(setting: dict) -> np.ndarray:
    """The probability of every answer, [V] * NEW, in float64."""
    joint = np.zeros((V,) * NEW)
    for answer in itertools.product(range(V), repeat=NEW):
        text, p = list(PROMPT), 1.0
        for token in answer:
            p *= filtered_probabilities(TABLE[len(text) % 2, text[-2], text[-1]], **setting)[token]
            text.append(token)
        joint[answer] = p
    assert abs(joint.sum() - 1) < 1e-12
    return joint


def exact(logits, draft, pos, sampling, memory):
    """The product: the target's own token on every row, and how many of them are emitted."""
    return sample(logits, pos + 1, sampling, PROGRAM, KEY), memory


def same_noise_for_two_positions(logits, draft, pos, sampling, memory):
    """Planted: the key of a position is used for the next one as well."""
    return sample(logits, (pos + 1) // 2 * 2, sampling, PROGRAM, KEY), memory


def same_noise_for_a_block(logits, draft, pos, sampling, memory):
    """Planted: the key is folded with the anchor's position, so all rows of a round share their noise."""
    return sample(logits, jnp.broadcast_to(pos[:, :1], pos.shape), sampling, PROGRAM, KEY), memory


def residual_kept(logits, draft, pos, sampling, memory):
    """Planted: the draft a round rejected stays struck out for the first draw of the next round."""
    row = jnp.arange(W) == 0
    struck = row[None, :, None] & (jnp.arange(V) == memory[:, None])[:, None, :]
    target = sample(jnp.where(struck, -1e9, logits), pos + 1, sampling, PROGRAM, KEY)
    n = accepted_prefix(draft, target)
    last = jnp.take_along_axis(draft, jnp.minimum(n + 1, W - 1)[:, None], axis=1)[:, 0]
    return target, jnp.where(n < W - 1, last, -1)


def residual_forgotten(logits, draft, pos, sampling, memory):
    """Planted: the correction is drawn afresh, with the mass of the draft that has just been rejected."""
    target = sample(logits, pos + 1, sampling, PROGRAM, KEY)
    again = sample(logits, pos + 1001, sampling, PROGRAM, KEY)
    n = accepted_prefix(draft, target)
    corrected = (jnp.arange(W) == n[:, None]) & (n < W - 1)[:, None]
    return jnp.where(corrected, again, target), memory


def junk_drafts(tokens, length, sampling):
    return jnp.broadcast_to((length[:, None] + jnp.arange(1, W)) * 2 % V, (len(length), W - 1))


def _chain(tokens, length, choose):
    """W-1 drafts, each chosen from DRAFTER's logits given what stands before it."""
    before, last = (jnp.take_along_axis(tokens, length[:, None] - n, axis=1)[:, 0] for n in (2, 1))
    drafts = []
    for j in range(W - 1):
        at = length + j
        before, last = last, choose(jnp.asarray(DRAFTER)[at % 2, before, last], at, j)
        drafts.append(last)
    return jnp.stack(drafts, axis=1)


def argmax_drafts(tokens, length, sampling):
    return _chain(tokens, length, lambda z, at, j: jnp.argmax(z, -1).astype(jnp.int32))


def _sampled(tokens, length, sampling, key):
    gumbel = noise(key, sampling.seed, length[:, None] + jnp.arange(W - 1), V)
    warm = sampling.temperature[:, None]
    return _chain(tokens, length, lambda z, at, j: jnp.argmax(z / warm + gumbel[:, j], -1).astype(jnp.int32))


def shared_noise_drafts(tokens, length, sampling):
    """A sampled drafter that draws with the target's own noise, as `DraftModel` does."""
    return _sampled(tokens, length, sampling, KEY)


def own_noise_drafts(tokens, length, sampling):
    return _sampled(tokens, length, sampling, jax.random.key(99))


DRAFTERS = (junk_drafts, argmax_drafts, shared_noise_drafts, own_noise_drafts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def answers(judge, drafter, sampling: Sampling):
    """NEW tokens for every row of `sampling`, by rounds: [B, NEW], and the drafts accepted on the way."""
    batch = len(sampling.seed)
    tokens = jnp.zeros((batch, len(PROMPT) + NEW + W), jnp.int32).at[:, : len(PROMPT)].set(jnp.array(PROMPT))
    length = jnp.full(batch, len(PROMPT), jnp.int32)
    table, put = (
        jnp.asarray(TABLE),
        jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,))),
    )

    def one_round(carry, _):
        tokens, length, done, accepted, memory = carry
        anchor, before = (jnp.take_along_axis(tokens, length[:, None] - n, axis=1) for n in (1, 2))
        draft = jnp.concatenate([anchor, drafter(tokens, length, sampling)], axis=1)
        pos = length[:, None] - 1 + jnp.arange(W)
        logits = table[(pos + 1) % 2, jnp.concatenate([before, draft[:, :-1]], axis=1), draft]
        target, memory = judge(logits, draft, pos, sampling, memory)
        room = len(PROMPT) + NEW - length
        verdict = verify(draft, target, stop_ids=sampling.stop_ids, room=room, done=done)
        tokens = put(tokens, target, length)
        return (tokens, length + verdict.count, verdict.done, accepted + verdict.accepted, memory), None

    none = jnp.full(batch, -1, jnp.int32)
    carry = (tokens, length, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32), none)
    (tokens, length, done, accepted, _), _ = jax.lax.scan(one_round, carry, length=NEW)
    return tokens[:, len(PROMPT) : len(PROMPT) + NEW], accepted, done.all()


@functools.cache
def drawn(judge, drafter) -> tuple[np.ndarray, float]:
    """Answers [len(SETTINGS), DRAWS, NEW], and the share of accepted tokens."""
    each = {
        name: [s.get(name, off) for s in SETTINGS for _ in range(DRAWS)]
        for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    batch = DRAWS * len(SETTINGS)
    sampling = Sampling.create(batch, seed=np.arange(batch), max_new=NEW, **each)
    tokens, accepted, done = answers(judge, drafter, sampling)
    assert bool(done)
    return np.asarray(tokens).reshape(len(SETTINGS), DRAWS, NEW), float(np.mean(accepted)) / NEW


def check(judge, drafter) -> np.ndarray:
    """p of the joint distribution of NEW tokens, for each of SETTINGS."""
    found = []
    for setting, rows in zip(SETTINGS, drawn(judge, drafter)[0]):
        counts = np.zeros((V,) * NEW)
        np.add.at(counts, tuple(rows.T), 1)
        found.append(p_value(counts, enumerated(setting)))
    return np.array(found)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.__name__)
def test_answers_have_the_targets_distribution(drafter) -> None:
    p = check(exact, drafter)
    assert p.min() > 1e-4, dict(zip(map(str, SETTINGS), p))
    # Neither nothing nor everything was accepted: blocks of every length occurred.
    assert 0.05 < drawn(exact, drafter)[1] < 0.95


def test_drafts_change_no_draw() -> None:
    """Not only the distribution: each seed's own tokens are the same whatever was drafted."""
    tokens = [drawn(exact, d)[0] for d in DRAFTERS]
    for other in tokens[1:]:
        np.testing.assert_array_equal(tokens[0], other)


@pytest.mark.parametrize(
    "judge",
    [same_noise_for_two_positions, same_noise_for_a_block, residual_kept, residual_forgotten],
    ids=lambda j: j.__name__,
)
def test_planted_mistakes_are_caught(judge) -> None:
    p = check(judge, argmax_drafts)
    assert p.min() < 1e-6, dict(zip(map(str, SETTINGS), p))


def test_the_check_notices_a_filter_that_is_off() -> None:
    """Planted in the sampler: a top-p that keeps one id less fails exactly where top-p is used."""

    def narrower(logits, draft, pos, sampling, memory):
        z = filtered(logits, sampling, PROGRAM)
        worst = jnp.where(z > -jnp.inf, z, jnp.inf).min(-1, keepdims=True)
        fewer = jnp.where((z == worst) & ((z > -jnp.inf).sum(-1, keepdims=True) > 1), -jnp.inf, z)
        z = jnp.where((sampling.top_p < 1)[:, None, None], fewer, z)
        return jnp.argmax(z + noise(KEY, sampling.seed, pos + 1, V), axis=-1).astype(jnp.int32), memory

    p = check(narrower, junk_drafts)
    assert all((p_i < 1e-6) == ("top_p" in s) for p_i, s in zip(p, SETTINGS)), p
