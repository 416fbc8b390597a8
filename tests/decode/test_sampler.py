"""The sampler: filters against float64, noise by seed and position alone, parameters that are refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.decode.sampler import SamplerProgram, Sampling, filtered, log_probability, noise, sample
from tests.decode.reference import filtered_probabilities

B, W, V = 4, 2, 64
FULL = SamplerProgram(greedy=False, edges=True)
KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnames="program")
def probabilities(logits, sampling, program=FULL):
    return jax.nn.softmax(filtered(logits, sampling, program), axis=-1)


@functools.partial(jax.jit, static_argnames="program")
def draw(logits, pos, sampling, program=FULL):
    return sample(logits, pos, sampling, program, KEY)


def some_logits(seed: int, ties: bool = False) -> np.ndarray:
    z = 2 * np.random.default_rng(seed).standard_normal((B, W, V))
    return (np.round(2 * z) / 2 if ties else z).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.3, 1.0, 2.5]),
            st.sampled_from([0, 1, 2, 7, V, 100]),
            st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
            st.sampled_from([0.0, 0.03, 0.4, 1.0]),
        ),
        min_size=B,
        max_size=B,
    ),
)
def test_filters(seed, ties, rows) -> None:
    logits = some_logits(seed, ties)
    names = ("temperature", "top_k", "top_p", "min_p")
    each = dict(zip(names, map(list, zip(*rows))))
    got = np.asarray(probabilities(logits, Sampling.create(B, **each)), np.float64)
    for b, row in enumerate(rows):
        for w in range(W):
            want = filtered_probabilities(logits[b, w], **dict(zip(names, row)))
            # An id whose place relative to an edge float32 cannot tell may fall either way.
            near = filtered_probabilities(
                logits[b, w], **(dict(zip(names, row)) | {"top_p": min(1.0, row[2] + 1e-6)})
            )
            close = [np.allclose(got[b, w], x, atol=2e-6) for x in (want, near)]
            assert any(close), (row, got[b, w], want)


def test_both_zeros_are_one_value() -> None:
    """At the edge of top-k and of top-p, 0.0 and -0.0 are tied."""
    logits = np.full((B, W, V), -3, np.float32)
    logits[..., :4] = [1.0, 0.0, -0.0, -1.0]
    kept = (
        probabilities(logits, Sampling.create(B, temperature=1.0, top_k=[2, 2, 0, 0], top_p=[1, 1, 0.4, 0.4]))
        > 0
    )
    assert (np.asarray(kept) == (np.arange(V) < 3)).all()


def test_a_program_without_sort_has_the_same_rest() -> None:
    logits = some_logits(1)
    sampling = Sampling.create(B, temperature=[0.5, 1.0, 2.0, 1.0], min_p=[0.0, 0.1, 0.3, 0.0])
    with_sort, without = (
        probabilities(logits, sampling, program=SamplerProgram(False, s)) for s in (True, False)
    )
    np.testing.assert_array_equal(with_sort, without)


def test_noise_depends_on_seed_and_position_alone() -> None:
    make = jax.jit(lambda seed, pos: noise(KEY, seed, pos, V))
    seeds, pos = np.array([5, 6, 7, 5], np.uint32), np.array([[10, 11], [10, 11], [3, 4], [9, 10]], np.int32)
    g = np.asarray(make(seeds, pos))
    np.testing.assert_array_equal(g[0, 0], g[3, 1])  # same seed, same position, another row and place
    keyed = {}
    for b in range(B):
        for w in range(W):
            keyed.setdefault((seeds[b], pos[b, w]), g[b, w])
    distinct = np.stack(list(keyed.values()))
    assert len(np.unique(distinct[:, 0])) == len(keyed) == 7
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(make(seeds[order], pos[order]), g[order])
    assert np.isfinite(g).all()


def test_seeds_and_positions_are_independent_draws() -> None:
    """Neighbouring seeds and positions: no correlation beyond chance (5 sigma of 20,000 pairs)."""
    n = 20_000
    make = jax.jit(lambda seed, pos: noise(KEY, seed, pos, 1)[..., 0])
    g = np.asarray(make(np.arange(n, dtype=np.uint32), np.tile(np.array([[4, 5]], np.int32), (n, 1))))
    for a, b in ((g[:, 0], g[:, 1]), (g[1:, 0], g[:-1, 0]), (g[1:, 0], g[:-1, 1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5
    # Gumbel: mean is Euler's constant, variance pi^2 / 6.
    assert abs(g.mean() - 0.577216) < 5 * (np.pi / 6**0.5) / (2 * n) ** 0.5
    assert abs(g.var() - np.pi**2 / 6) < 0.06


def test_greedy_rows_in_a_sampled_program_are_argmax() -> None:
    logits, pos = some_logits(2, ties=True), np.zeros((B, W), np.int32)
    mixed = draw(logits, pos, Sampling.create(B, temperature=[0, 1, 0, 2], seed=[1, 2, 3, 4], top_k=5))
    greedy = draw(logits, pos, Sampling.create(B), program=SamplerProgram())
    np.testing.assert_array_equal(greedy, logits.argmax(-1))  # ties: the first
    np.testing.assert_array_equal(np.asarray(mixed)[[0, 2]], np.asarray(greedy)[[0, 2]])
    assert (np.asarray(mixed)[[1, 3]] != np.asarray(greedy)[[1, 3]]).any()


def test_ids_beyond_the_limit_are_never_drawn() -> None:
    """Even where they hold nearly all of the probability, and when top-k would keep nothing else."""
    logits = some_logits(3)
    logits[..., 20:] += 50
    pos = np.arange(B * W, dtype=np.int32).reshape(B, W)
    for greedy, sort in ((True, False), (False, True)):
        sampling = Sampling.create(
            B, temperature=0.0 if greedy else [0.2, 0.7, 1.0, 2.0], top_k=3 if sort else 0
        )
        limited = SamplerProgram(greedy, sort, limit=20)
        assert (np.asarray(draw(logits, pos, sampling, program=limited)) < 20).all()
        free = SamplerProgram(greedy, sort)
        assert (np.asarray(draw(logits, pos, sampling, program=free)) >= 20).all()


def test_log_probabilities_are_raw() -> None:
    logits, tokens = 3 * some_logits(4), np.array([[0, 31], [5, 6], [7, 7], [2, 9]], np.int32)
    z = logits.astype(np.float64)
    want = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
    want = np.take_along_axis(want, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(jax.jit(log_probability)(logits, tokens), want, atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "program"),
    [
        ({}, SamplerProgram(True, False)),
        ({"top_k": 5, "top_p": 0.5}, SamplerProgram(True, False)),  # greedy rows use no filter
        ({"temperature": 1.0}, SamplerProgram(False, False)),
        ({"temperature": 1.0, "min_p": 0.5}, SamplerProgram(False, False)),
        ({"temperature": [0, 1], "top_k": [5, 0]}, SamplerProgram(False, False)),
        ({"temperature": [0, 1], "top_k": [0, 5]}, SamplerProgram(False, True)),
        ({"temperature": 1.0, "top_p": [1.0, 0.9]}, SamplerProgram(False, True)),
    ],
)
def test_the_smallest_program_is_chosen(parameters, program) -> None:
    assert SamplerProgram.of(Sampling.create(2, **parameters)) == program


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": -0.1}, r"temperature must lie in \[0, 100\], got -0.1"),
        ({"temperature": float("nan")}, r"temperature must lie in \[0, 100\], got nan"),
        ({"temperature": [0.5, float("inf")]}, r"temperature must lie in"),
        ({"temperature": "hot"}, r"temperature must be a number, got 'hot'"),
        ({"temperature": None}, r"temperature must be a number, got None"),
        ({"temperature": True}, r"temperature must be a number, got True"),
        ({"top_k": -1}, r"top_k must lie in \[0, "),
        ({"top_k": 2.5}, r"top_k must be an integer, got 2.5"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \[0, 1\], got 1.5"),
        ({"top_p": [0.5, 0.0]}, r"top_p must lie in \(0, 1\]"),
        ({"min_p": 1.01}, r"min_p must lie in \[0, 1\]"),
        ({"seed": -1}, r"seed must lie in \[0, "),
        ({"seed": 2**32}, r"seed must lie in \[0, "),
        ({"max_new": -1}, r"max_new_tokens must lie in \[0, "),
        (
            {"max_new": [1, 2, 3]},
            r"max_new_tokens must be one value or one per prompt \(2\), got shape \(3,\)",
        ),
        ({"seed": [[1, 2]]}, r"seed must be one value or one per prompt"),
    ],
)
def test_parameters_out_of_range_are_named(parameters, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling.create(2, **parameters)


def test_parameters_come_in_any_numeric_form() -> None:
    made = Sampling.create(
        2,
        temperature=jnp.ones(2),
        top_k=np.int64(3),
        top_p=1,
        min_p=(0.0, 0.5),
        seed=[2**32 - 1, 0],
        stop_ids=[4, 5],
    )
    assert made.seed.tolist() == [2**32 - 1, 0] and made.seed.dtype == np.uint32
    assert made.temperature.dtype == made.top_p.dtype == made.min_p.dtype == np.float32
    assert made.top_k.tolist() == [3, 3] and made.stop_ids.tolist() == [[4, 5], [4, 5]]
