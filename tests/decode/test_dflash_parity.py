"""DFlash against reference implementations, round by round through the cached loop; and that mistakes would show.

dflash-a to -c are outputs of the published one, the others of tests/golden/make_dflash.py, which is held to the
published ones here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.attention import MaskSpec
from kvjax.cache import commit
from kvjax.decode import loop
from kvjax.decode.dflash import DFlash
from kvjax.decode.sampler import SamplerProgram, Sampling
from kvjax.decode.state import View
from kvjax.models.drafter import DrafterConfig, DrafterModel, build_drafter
from tests.decode import dflash_golden as golden

S, CHUNK, ATOL = 128, 16, 1e-4
KEY = np.zeros(2, np.uint32)
GREEDY = SamplerProgram()


class Seen(NamedTuple):
    """One round looked at from outside: what the drafter computes, and the target of the block it drafts."""

    hidden: jax.Array
    logits: jax.Array
    block: jax.Array
    verify: jax.Array
    taps: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def look(model, source, params, draft_params, state) -> Seen:
    pos = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, pos[:, None], axis=1)[:, 0]
    hidden = source.drafter.block(draft_params, anchor, pos, state.draft)
    view = View(anchor, pos, state.tokens, state.cache, None, GREEDY, None)
    block = source.propose(draft_params, state.draft, view)[0].tokens
    rows = pos[:, None] + jnp.arange(source.width)
    out = model.forward(params, block, rows, state.cache, MaskSpec(), taps=source.taps)
    return Seen(hidden, source.drafter.logits(draft_params, hidden), block, out.logits, out.taps)


@functools.partial(jax.jit, static_argnums=(0, 1))
def features(model, taps, params, tokens):
    """[B, T, len(taps) * D] of whole texts."""
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return model.forward(params, tokens, pos, taps=taps, logits=False).taps


@pytest.mark.parametrize("name", golden.NAMES)
def test_round_by_round(name: str) -> None:
    """One ragged batch of all prompts, each row beside its own reference: features, hidden states, logits, drafts,
    verification and tokens committed, every round; then the answers."""
    lm, params, prompts = golden.target(name), golden.bound(name), golden.prompts(name)
    model = golden.drafter(name).model
    source = DFlash(model, model.drafter.block)
    tokens = np.zeros((len(prompts), S), np.int32)
    for b, prompt in enumerate(prompts):
        tokens[b, : len(prompt.begun)] = prompt.begun
    length = np.array([len(p.begun) for p in prompts], np.int32)
    read = np.asarray(features(lm.model, source.taps, lm.params, tokens))
    sampling = Sampling.create(len(prompts), max_new=[len(p.output) - 1 for p in prompts])
    state = loop.start(lm.model, source, GREEDY, params, tokens, length, length < 0)
    for i in range(-(-int(length.max() - 1) // CHUNK)):
        state = loop.prefill(lm.model, source, CHUNK, lm.params, params, state, np.int32(i))

    compared = 0
    for j in range(max(len(p.emitted) for p in prompts)):
        seen = jax.tree.map(np.asarray, look(lm.model, source, lm.params, params, state))
        before = np.asarray(state.length)
        np.testing.assert_array_equal(state.draft.filled, state.cache.filled)
        state = loop.rounds(
            lm.model, source, GREEDY, lm.params, params, state, sampling, KEY, np.int32(1),
            np.full(len(prompts), -1, np.int32),
        )  # fmt: skip
        committed = np.asarray(state.length) - before
        for b, prompt in enumerate(prompts):
            assert committed[b] == (prompt.emitted[j] if j < len(prompt.emitted) else 0), (b, j)
            if j < len(prompt.rounds):
                want, at = prompt.rounds[j], (b, j)
                assert want.start == before[b] - 1, at
                if j == 0:
                    np.testing.assert_allclose(read[b, : want.start], want.taps, atol=ATOL, err_msg=str(at))
                np.testing.assert_allclose(seen.hidden[b, 1:], want.hidden[1:], atol=ATOL, err_msg=str(at))
                np.testing.assert_allclose(seen.logits[b, 1:], want.logits[1:], atol=ATOL, err_msg=str(at))
                np.testing.assert_array_equal(seen.block[b], want.block, err_msg=str(at))
                np.testing.assert_allclose(seen.verify[b], want.verify, atol=ATOL, err_msg=str(at))
                if j + 1 < len(prompt.rounds):
                    new = prompt.rounds[j + 1].taps
                    np.testing.assert_allclose(seen.taps[b, : len(new)], new, atol=ATOL, err_msg=str(at))
                compared += 1
    assert compared == sum(len(p.rounds) for p in prompts) >= 4 * len(prompts)
    for b, prompt in enumerate(prompts):
        first = len(prompt.ids)
        assert np.asarray(state.tokens)[b, first : first + len(prompt.output)].tolist() == prompt.output
    assert max(max(p.committed) for p in prompts) > 1  # something was accepted


# --- mistakes would show ----------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def draft(model: DrafterModel, params, taps, anchor):
    """(hidden [B, D], logits, tokens) of one block behind features [n, T*D]."""
    pos = jnp.arange(len(taps), dtype=jnp.int32)[None]
    count = jnp.array([len(taps)])
    cache = commit(
        model.cache(1, S), model.context(params, taps[None], pos), count, rules=model.rules, at=jnp.int32(0)
    )
    hidden = model.block(params, anchor[None], count, cache)
    return hidden[0], model.logits(params, hidden)[0], model.choose(params, hidden)[0][0]


def last_round(name: str) -> tuple[np.ndarray, golden.Round]:
    """All features before the last recorded round of the longest prompt, and that round."""
    prompt = max(golden.prompts(name), key=lambda p: len(p.ids))
    return np.concatenate([r.taps for r in prompt.rounds]), prompt.rounds[-1]


def changed(name: str, **changes) -> DrafterConfig:
    return dataclasses.replace(golden.drafter(name).model.drafter, **changes)


def windows(name: str, by: int) -> DrafterConfig:
    model = golden.drafter(name).model.config
    moved = tuple(None if w is None else w + by for w in model.windows)
    return changed(name, model=dataclasses.replace(model, windows=moved))


def error(name: str, config: DrafterConfig | None = None, **params) -> float:
    """How far the drafter of that configuration is from the reference, in its hidden states."""
    taps, want = last_round(name)
    model = golden.drafter(name).model if config is None else build_drafter(config, golden.target(name).model)
    hidden, _, _ = draft(model, golden.bound(name)._replace(**params), taps, np.int32(want.block[0]))
    return float(np.abs(np.asarray(hidden)[1:] - want.hidden[1:]).max())


@pytest.mark.parametrize("name", ["dflash-sliding", "dflash-both-ways", "dflash-own-head", "dflash-causal"])
def test_windows_and_directions(name: str) -> None:
    """Each one row off, or looking the other way, is far outside the tolerance."""
    right = golden.drafter(name).model.drafter
    assert error(name) < ATOL
    turned = tuple(not c for c in right.causal)
    assert error(name, changed(name, causal=turned)) > 100 * ATOL
    for by in (-1, 1):
        if any(right.model.windows):
            assert error(name, windows(name, by)) > 100 * ATOL, by


def test_sliding_layers_are_causal_unless_the_file_says_otherwise() -> None:
    assert golden.drafter("dflash-sliding").model.drafter.causal == (True, False, True)
    assert golden.drafter("dflash-both-ways").model.drafter.causal == (False, False, False)
    assert golden.drafter("dflash-causal").model.drafter.causal == (True, True)
    assert golden.drafter("dflash-own-head").model.drafter.causal == (False, True)


@pytest.mark.parametrize("name", golden.NAMES)
def test_taps_one_off(name: str) -> None:
    """Features of the next or the previous layer are not the reference's; a drafter fed with them is far off."""
    lm, right = golden.target(name), golden.drafter(name).model.drafter.taps
    prompt = max(golden.prompts(name), key=lambda p: len(p.ids))
    text = np.array([prompt.ids], np.int32)
    want = prompt.rounds[0]
    shift = 1 if max(right) + 1 < lm.config.num_layers else -1
    off = tuple(max(tap + shift, 0) for tap in right)
    params, model, anchor = golden.bound(name), golden.drafter(name).model, np.int32(want.block[0])
    for taps, fits in ((right, True), (off, False)):
        found = np.asarray(features(lm.model, taps, lm.params, text))[0]
        assert (np.abs(found - want.taps).max() < ATOL) == fits
        hidden = np.asarray(draft(model, params, found, anchor)[0])
        assert (np.abs(hidden[1:] - want.hidden[1:]).max() < (ATOL if fits else 100 * ATOL)) == fits


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_row_is_about_its_own_position(name: str) -> None:
    """Row j drafts token j of the block. Taken for the next position, logits and most drafts would be others."""
    taps, want = last_round(name)
    _, logits, tokens = map(
        np.asarray,
        draft(golden.drafter(name).model, golden.bound(name), taps, np.int32(want.block[0])),
    )
    assert tokens[1:].tolist() == want.block[1:].tolist()
    assert np.abs(logits[1:] - want.logits[1:]).max() < ATOL
    assert np.abs(logits[:-1] - want.logits[1:]).max() > 100 * ATOL
    rounds = [r for p in golden.prompts(name) for r in p.rounds]
    assert any(r.block[1:-1].tolist() != r.block[2:].tolist() for r in rounds)  # the tokens can tell too


def test_heads_are_not_mixed_up() -> None:
    """Own head and target's, embedding and untied head, rows of a head and the tokens they stand for."""
    name = "dflash-own-head"
    taps, want = last_round(name)
    model, right = golden.drafter(name).model, golden.bound(name)
    anchor = np.int32(want.block[0])
    assert right.ids is not None and right.ids.tolist() == [0, 1, 3, 4, 7, 9, 11]
    _, logits, tokens = draft(model, right, taps, anchor)
    assert (
        tokens[1:].tolist() == want.block[1:].tolist() and np.abs(logits[1:] - want.logits[1:]).max() < ATOL
    )
    lm = golden.target(name)
    theirs = dict(zip(lm.model.names, lm.params))["lm_head"]
    for wrong in (right._replace(head=theirs, ids=None), right._replace(ids=jnp.arange(7, dtype=jnp.int32))):
        blocks = [
            np.asarray(draft(model, wrong, np.concatenate([r.taps for r in p.rounds]), p.rounds[-1].block[0])[2])
            for p in golden.prompts(name)
        ]  # fmt: skip
        wants = [p.rounds[-1].block for p in golden.prompts(name)]
        assert any(a[1:].tolist() != b[1:].tolist() for a, b in zip(blocks, wants))
    # dflash-b has an untied head; its embedding in that place is far off.
    taps, want = last_round("dflash-b")
    params, anchor = golden.bound("dflash-b"), np.int32(want.block[0])
    model = golden.drafter("dflash-b").model
    assert np.abs(np.asarray(draft(model, params, taps, anchor)[1])[1:] - want.logits[1:]).max() < ATOL
    tied = draft(model, params._replace(head=params.embed), taps, anchor)[1]
    assert np.abs(np.asarray(tied)[1:] - want.logits[1:]).max() > 100 * ATOL


def test_a_limit_keeps_ids_out() -> None:
    """The mask's embedding may sit where the tokenizer knows no id: such ids are never drafted."""
    name = "dflash-b"
    taps, want = last_round(name)
    model, params = golden.drafter(name).model, golden.bound(name)
    free = want.logits[1:].argmax(-1)
    limit = int(free.max())
    hidden = jnp.asarray(want.hidden[None])
    got, score = jax.jit(lambda p, h: model.choose(p, h, limit))(params, hidden)
    assert got[0, 1:].tolist() == want.logits[1:, :limit].argmax(-1).tolist() != free.tolist()
    p = np.exp(want.logits[1:, :limit].astype(np.float64))
    np.testing.assert_allclose(score[0, 1:], (p / p.sum(-1, keepdims=True)).max(-1), atol=1e-4)


# --- the second reference -------------------------------------------------------------------------------------------


@functools.cache
def script():
    spec = importlib.util.spec_from_file_location("make_dflash", golden.ROOT / "make_dflash.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", golden.PUBLIC)
def test_the_script_agrees_with_the_published_reference(name: str) -> None:
    """What computed the other golden files gives the published outputs, where those exist."""
    target = script().Target(golden.ROOT / name / "target")
    drafter = script().Drafter(golden.ROOT / name / "drafter", target)
    for prompt in golden.prompts(name):
        for j, want in enumerate(prompt.rounds):
            taps = np.concatenate([r.taps for r in prompt.rounds[: j + 1]])
            hidden, logits, ids = drafter.draft(taps, int(want.block[0]))
            np.testing.assert_allclose(hidden[1:], want.hidden[1:], atol=2e-5)
            np.testing.assert_allclose(logits[1:], want.logits[1:], atol=2e-5)
            assert ids[1:].tolist() == want.block[1:].tolist()
            text = [*prompt.ids, *prompt.output][: want.start] + want.block.tolist()
            verify, features = target.read(text, drafter.taps)
            np.testing.assert_allclose(verify[want.start :], want.verify, atol=2e-5)
            np.testing.assert_allclose(features[: want.start], taps, atol=2e-5)


@pytest.mark.parametrize("name", sorted(set(golden.NAMES) - set(golden.PUBLIC)))
def test_golden_drafters_are_what_the_script_writes(name: str, tmp_path) -> None:
    script().build(name, tmp_path / name)
    for part in ("target/model", "drafter/model", "rounds"):
        fresh, kept = (load_file(root / name / f"{part}.safetensors") for root in (tmp_path, golden.ROOT))
        assert fresh.keys() == kept.keys()
        for tensor, value in kept.items():
            np.testing.assert_allclose(fresh[tensor], value, atol=1e-5 * (part == "rounds"), err_msg=tensor)
    for file in ("expected.json", "drafter/config.json", "target/config.json"):
        assert (tmp_path / name / file).read_text() == (golden.ROOT / name / file).read_text()
