"""Bugs planted in the decoding loop, each of which a check must find."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import attention
from kvjax.cache import commit
from kvjax.check.distribution import NEW, ROWS, distribution
from kvjax.check.drafters import DRAFTERS
from kvjax.check.host import Setting
from kvjax.check.identity import identity
from kvjax.check.programs import Programs, Request
from kvjax.check.prompts import prompts
from kvjax.decode import loop
from kvjax.decode.sampler import sample
from kvjax.decode.verify import accepted_prefix, verify

WIDTH = 4
attend_chain = attention._attend_chain


def noise_of_the_position_before(logits, pos, sampling, program, key):
    """Every second token is drawn with the noise of the one before it."""
    return sample(logits, pos - pos % 2, sampling, program, key)


def noise_of_the_block(logits, pos, sampling, program, key):
    """All rows of a round draw with the same noise."""
    return sample(logits, jnp.broadcast_to(pos[:, :1], pos.shape), sampling, program, key)


def keep_one_more(draft, target, *, stop_ids, room, done):
    """What was computed behind the rejected draft is emitted after the correction."""
    right = verify(draft, target, stop_ids=stop_ids, room=room, done=done)
    more = (accepted_prefix(draft, target) < draft.shape[1] - 1) & ~right.done & (right.count > 0)
    return right._replace(count=right.count + more, done=right.done | (more & (room - right.count <= 1)))


def count_rejected_rows(cache, rows, count, *, rules, path=None, at=None):
    """The cache is declared valid up to the rejected draft."""
    if at is None:
        count = jnp.where((count > 0) & (count < WIDTH), count + 1, count)
    return commit(cache, rows, count, rules=rules, path=path, at=at)


def keep_rejected_rows(q, k, v, slab_k, slab_v, pos, at, **options):
    """A round does not overwrite what the round before left at its anchor: a rejected draft's key and value."""
    out, *slabs = attend_chain(q, k, v, slab_k, slab_v, pos, at, **options)
    if at is not None or q.shape[1] == 1:
        return out, *slabs
    stale = jnp.arange(slab_k.shape[2])[:, None] == pos[:, 0][:, None, None, None]
    return out, *(jnp.where(stale, old, new) for old, new in zip((slab_k, slab_v), slabs))


@pytest.fixture
def plant(monkeypatch):
    """Put a wrong function in the loop's place; compiled programs are forgotten before and after."""

    def put(module, name, wrong):
        monkeypatch.setattr(module, name, wrong)
        jax.clear_caches()

    yield put
    jax.clear_caches()


@pytest.fixture(scope="module")
def lm(golden_dirs):
    (path,) = [p for p in golden_dirs if p.name == "llama2-f16"]
    return kvjax.load(path)


def of_distribution(lm):
    _, bars = distribution(Programs(lm, ROWS, 64, 64, NEW), 384, 1e-3)
    return {bar.name: bar for bar in bars}["distribution: smallest p-value times number of tests"]


def of_identity(lm):
    work = [[Request(i, ids, Setting()) for i, ids in enumerate(prompts(lm, 8, 60))]]
    table, *_ = identity(Programs(lm, 8, 128, 64, 12), work, (WIDTH,), DRAFTERS[:2], True)
    return {name: sum(row[name] for row in table) for name in ("tokens differ", "bits differ", "cache off")}


@pytest.mark.parametrize(
    "name, wrong",
    [("sample", noise_of_the_position_before), ("sample", noise_of_the_block), ("verify", keep_one_more)],
)
def test_distribution_finds(lm, plant, name, wrong):
    plant(loop, name, wrong)
    bar = of_distribution(lm)
    assert not bar.ok and bar.value < 1e-6


@pytest.mark.parametrize(
    "module, name, wrong, where",
    [
        (loop, "verify", keep_one_more, "tokens differ"),
        (loop, "commit", count_rejected_rows, "cache off"),
        (attention, "_attend_chain", keep_rejected_rows, "bits differ"),
    ],
)
def test_identity_finds(lm, plant, module, name, wrong, where):
    plant(module, name, wrong)
    assert of_identity(lm)[where] > 0


def test_nothing_is_found_in_the_right_loop(lm):
    assert not any(of_identity(lm).values())  # the rest of a right model is in test_check.py
