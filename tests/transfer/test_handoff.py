"""Hand-off between tiny models: what must be exact is, and repair replaces what it says."""

from __future__ import annotations

import dataclasses
import random
import string
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import serve
from kvjax.lm import LM
from kvjax.transfer import artifact, calibrate, fit, select
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.hidden import HiddenMap
from kvjax.transfer.repair import Repair
from serve.handoff import Transfer, handoff

GOLDEN = Path(__file__).parents[1] / "golden"
_RNG = random.Random(0)
TEXTS = [
    "".join(_RNG.choices(string.printable, k=300)) for _ in range(24)
]  # many tokens: moments of full rank
PROMPTS = [TEXTS[3][:150], TEXTS[5][:41], "a"]


@pytest.fixture(scope="module")
def lm() -> LM:
    return kvjax.load(GOLDEN / "qwen3-tied")


@pytest.fixture(scope="module")
def identity(lm: LM):
    """A map from the model to itself, fitted: the matching layer explains everything."""
    stats = calibrate.collect(lm, lm, TEXTS, length=64, batch=4, sequences=24, joint=False)
    layers = select.matching(lm.config.num_layers, lm.config.num_layers)
    return stats, fit.fit(stats, layers, fit.FitConfig(ridge=1e-7))


def logprobs(result) -> np.ndarray:
    return np.concatenate([g.logprobs for g in result])


def test_the_identity_pair_is_native(lm: LM, identity) -> None:
    stats, mapper = identity
    assert fit.held_out(mapper, stats).min() > 0.99999
    options = dict(max_new_tokens=12, logprobs=True, size=256)
    native = serve.generate(lm, PROMPTS, **options)
    for repair in (
        Repair(),
        Repair(tail=8),
        Repair(head=4),
        Repair(layers=1),
        Repair(tail=5, head=2, layers=1),
    ):
        mapped = handoff(lm, mapper, lm, PROMPTS, repair=repair, **options)
        assert [g.tokens for g in mapped] == [g.tokens for g in native], repair
        np.testing.assert_allclose(logprobs(mapped), logprobs(native), atol=1e-3)
        assert set(mapped.timings) == {"prepare", "read", "map", "decode", "total"}


def test_repairing_everything_is_native_whatever_the_map(lm: LM, identity) -> None:
    """With a map of zeros: all layers, or a tail of the whole prompt, leave nothing of it."""
    _, mapper = identity
    zero = dataclasses.replace(
        mapper, maps=tuple(dataclasses.replace(m, key=m.key * 0, value=m.value * 0) for m in mapper.maps)
    )
    options = dict(max_new_tokens=8, logprobs=True, size=256)
    native = serve.generate(lm, PROMPTS, **options)
    spoiled = handoff(lm, zero, lm, PROMPTS, **options)
    assert np.abs(logprobs(spoiled)[:8] - logprobs(native)[:8]).max() > 1e-2
    assert spoiled[2].tokens == native[2].tokens  # one token: nothing to map
    for repair in (Repair(layers=lm.config.num_layers), Repair(tail=160)):
        mapped = handoff(lm, zero, lm, PROMPTS, repair=repair, **options)
        assert [g.tokens for g in mapped] == [g.tokens for g in native], repair
        np.testing.assert_allclose(logprobs(mapped), logprobs(native), atol=1e-4)


def test_each_repair_makes_its_rows_native(lm: LM, identity) -> None:
    """Head and first layers of a spoiled map equal native rows; the others stay spoiled."""
    from kvjax.decode import loop
    from kvjax.decode.sampler import SamplerProgram
    from kvjax.decode.sources import Plain
    from kvjax.transfer.repair import hand_over

    _, mapper = identity
    zero = dataclasses.replace(
        mapper, maps=tuple(dataclasses.replace(m, value=m.value * 0) for m in mapper.maps)
    )
    ids = lm.tokenizer.encode(PROMPTS[0])
    tokens = np.zeros((1, 256), np.int32)
    tokens[0, : len(ids)] = ids
    length, idle = np.asarray([len(ids)], np.int32), np.zeros(1, bool)

    def begin():
        return loop.start(lm.model, Plain(), SamplerProgram(), (), tokens, length, idle)

    native = begin()
    for i in range(4):
        native = loop.prefill(lm.model, Plain(), 64, lm.params, (), native, np.int32(i))
    repair = Repair(tail=3, head=5, layers=1)
    made = hand_over(lm.model, repair, 64, lm.params, zero, native.cache, begin(), len(ids))
    assert int(made.cache.filled[0]) == int(native.cache.filled[0]) == len(ids) - 1
    near = lambda a, b: bool(jnp.abs(a - b).max() < 1e-4)  # noqa: E731
    end = len(ids) - 3
    for layer in range(lm.config.num_layers):
        a, b = made.cache.v[layer], native.cache.v[layer]
        assert near(a[:, :, :5], b[:, :, :5])
        assert near(a[:, :, 5:end], b[:, :, 5:end]) is (layer < repair.layers)


def test_a_map_is_refused_for_other_models(lm: LM, identity, tmp_path: Path) -> None:
    stats, mapper = identity
    other = kvjax.load(GOLDEN / "qwen3-untied")
    manifest = artifact.Manifest(
        artifact.Party.of(lm), artifact.Party.of(lm), "ridge", {}, {"rows": stats.rows, "longest": 64}, {}
    )
    artifact.save(tmp_path / "map", mapper, manifest)
    loaded = Transfer.load(str(tmp_path / "map"), lm, lm)
    for a, b in zip(loaded.mapper.maps, mapper.maps, strict=True):
        np.testing.assert_array_equal(a.key, b.key)
    assert loaded.mapper.layers == mapper.layers and loaded.manifest.longest == 64
    with pytest.raises(artifact.ArtifactError, match="target .*weights: not those of"):
        Transfer.load(str(tmp_path / "map"), lm, other)
    pair = dataclasses.replace(manifest, target=artifact.Party.of(other))
    artifact.check(pair, lm, other)
    with pytest.raises(artifact.ArtifactError, match="source and target are swapped"):
        artifact.check(pair, other, lm)
    # A map that was checked when it was loaded is checked again with the models it is used with.
    with pytest.raises(artifact.ArtifactError, match="target .*weights: not those of"):
        handoff(lm, loaded, other, PROMPTS, max_new_tokens=1)
    with pytest.raises(artifact.ArtifactError, match="nothing is overwritten"):
        artifact.save(tmp_path / "map", mapper, manifest)
    weights = tmp_path / "map" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(artifact.ArtifactError, match="weights.safetensors: damaged"):
        artifact.load(tmp_path / "map")


def test_a_bare_map_the_wrong_way_round_is_told(lm: LM, identity) -> None:
    _, mapper = identity
    other = kvjax.load(GOLDEN / "qwen3-untied")
    there = dataclasses.replace(mapper, target=Geometry.of(other.config))
    with pytest.raises(ValueError, match="goes the other way: .*qwen3-untied and .*qwen3-tied are swapped"):
        handoff(other, there, lm, PROMPTS)
    with pytest.raises(ValueError, match="the map goes from .* the models are"):
        handoff(other, mapper, lm, PROMPTS)
    with pytest.raises(ValueError, match="repair.group = 1: the map has no hidden state"):
        handoff(lm, mapper, lm, PROMPTS, repair=Repair(group=1))


def test_a_prompt_longer_than_the_calibration_is_told_once(lm: LM, identity, caplog) -> None:
    stats, mapper = identity
    party = artifact.Party.of(lm)
    longest = len(lm.tokenizer.encode(PROMPTS[1]))
    manifest = artifact.Manifest(party, party, "ridge", {}, {"rows": stats.rows, "longest": longest}, {})
    transfer = Transfer(mapper, manifest)
    options = dict(max_new_tokens=2, size=256)
    with caplog.at_level("WARNING", "kvjax"):
        assert handoff(lm, transfer, lm, PROMPTS[1:], **options).warnings == ()
        assert not caplog.records
        said = handoff(lm, transfer, lm, [PROMPTS[0]] * 2, **options).warnings
    count = len(lm.tokenizer.encode(PROMPTS[0]))
    assert said == (
        f"a prompt of {count} tokens: the map was fitted on texts of at most {longest}, and is unproved beyond",
    )
    assert [record.getMessage() for record in caplog.records] == list(said)
    assert serve.generate(lm, PROMPTS[:1], max_new_tokens=1).warnings == ()


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("once", [1, 2])
def test_interleaved_with_reading_the_state_is_the_same(
    lm: LM, identity, monkeypatch, chunk: int, once: int
) -> None:
    """Bit for bit the state that mapping the finished source cache gives, whatever is mapped at once."""
    from kvjax.decode import loop
    from kvjax.decode.sampler import SamplerProgram
    from kvjax.decode.sources import Plain
    from kvjax.transfer.repair import hand_over
    from serve import handoff as module

    _, mapper = identity
    monkeypatch.setattr(module, "span", lambda model, chunk, size: once * chunk)
    repair = Repair(tail=3, head=5, layers=1)
    run = module._Handoff(lm, mapper, lm, PROMPTS, repair, size=256, chunk=chunk, max_new_tokens=4)
    made = run._read()
    batch = run.batch
    begin = lambda: loop.start(  # noqa: E731
        lm.model, Plain(), SamplerProgram(), (), batch.tokens, batch.length, batch.idle
    )
    read = begin()
    longest = int(batch.length.max())
    for i in range(-(-longest // chunk)):
        read = loop.prefill(lm.model, Plain(), chunk, lm.params, (), read, np.int32(i))
    whole = hand_over(lm.model, repair, once * chunk, lm.params, mapper, read.cache, begin(), longest)
    np.testing.assert_array_equal(made.cache.filled, whole.cache.filled)
    for a, b in zip((*made.cache.k, *made.cache.v), (*whole.cache.k, *whole.cache.v), strict=True):
        for row, end in enumerate(np.asarray(made.cache.filled)):
            np.testing.assert_array_equal(a[row, :, :end], b[row, :, :end])


@pytest.mark.parametrize(("local", "shape"), [(False, (2, 2)), (True, (2, 2)), (False, (1, 4))], ids=str)
def test_on_a_mesh_it_is_the_same_hand_off(lm: LM, identity, local: bool, shape: tuple[int, int]) -> None:
    """Heads and prompts over devices; on the last mesh each of the two heads is stored twice. With a group too."""
    stats, mapper = identity
    spread = kvjax.load(GOLDEN / "qwen3-tied", mesh=kvjax.make_mesh(*shape))
    if local:
        layers = select.matching(lm.config.num_layers, lm.config.num_layers)
        mapper = fit.fit(stats, layers, fit.FitConfig(ridge=1e-7, local=True))
    k, h, width = lm.config.num_kv_heads, lm.config.head_dim, lm.config.hidden
    weight = np.random.default_rng(0).normal(size=(width, 2, k, h)).astype(np.float32) / 8
    state = HiddenMap(jnp.asarray(weight), jnp.zeros((2, k, h)), jnp.zeros(width), 1, (1,))
    mapper = dataclasses.replace(mapper, hidden=state)
    options = dict(max_new_tokens=4, logprobs=True, size=256, chunk=64)
    for repair in (Repair(tail=5, head=2, layers=1), Repair(tail=5, group=1)):
        one, many = (handoff(x, mapper, x, [*PROMPTS, "b"], repair=repair, **options) for x in (lm, spread))
        assert [g.tokens for g in one] == [g.tokens for g in many]
        np.testing.assert_allclose(logprobs(one), logprobs(many), atol=1e-4)
        assert tuple(many.program["mesh"].values()) == shape
    with pytest.raises(ValueError, match="load both on one mesh"):
        handoff(lm, mapper, spread, PROMPTS, size=512)


def test_moments_are_taken_up_where_they_were_left(lm: LM, tmp_path: Path) -> None:
    keep = tmp_path / "moments.npz"
    options = dict(length=64, batch=4, joint=True)
    first = calibrate.collect(lm, lm, TEXTS, sequences=8, keep=keep, **options)
    both = calibrate.collect(lm, lm, TEXTS, sequences=16, keep=keep, **options)
    whole = calibrate.collect(lm, lm, TEXTS, sequences=16, **options)
    assert first.rows == 8 * 64 and both.rows == 16 * 64
    np.testing.assert_array_equal(both.xy, whole.xy)
    with pytest.raises(calibrate.CalibrationError, match="made with other every"):
        calibrate.collect(lm, lm, TEXTS, sequences=16, keep=keep, every=2, **options)
    keep.write_bytes(b"PK\\x03\\x04 garbage")
    with pytest.raises(calibrate.CalibrationError, match="not stored moments"):
        calibrate.collect(lm, lm, TEXTS, sequences=16, keep=keep, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_exact_hand_off_is_native_token_for_token(lm: LM, identity, temperature: float) -> None:
    """With a good map, a spoiled one and one of zeros: the same answer, by the native programs of the same width."""
    from serve.exact import Confirmed, Exact, Provisional, Retracted

    _, good = identity
    options = dict(max_new_tokens=14, size=256, chunk=64, temperature=temperature, seed=[1, 2, 3])
    native = serve.generate(lm, PROMPTS, draft=kvjax.Junk(width=4, vocab=lm.config.vocab), **options)
    retractions = []
    for scale in (1.0, 0.5, 0.0):
        mapper = dataclasses.replace(
            good, maps=tuple(dataclasses.replace(m, value=m.value * scale) for m in good.maps)
        )
        run = Exact(lm, mapper, lm, PROMPTS, Repair(), 2, 4, **options)
        text = [[] for _ in PROMPTS]
        start = [len(lm.tokenizer.encode(p)) for p in PROMPTS]
        final = [[] for _ in PROMPTS]
        for event in run.run():
            if isinstance(event, Provisional):
                assert event.pos == start[event.index] + len(text[event.index])
                text[event.index] += event.tokens
            elif isinstance(event, Retracted):
                del text[event.index][event.start - start[event.index] :]
            elif isinstance(event, Confirmed):
                final[event.index] += event.tokens
                known = event.upto - start[event.index]
                assert text[event.index][:known] == final[event.index][: len(text[event.index])]
                text[event.index][: len(final[event.index])] = final[event.index]
        result = run.result()
        assert [g.tokens for g in result] == [g.tokens for g in native]
        assert [tuple(t) for t in text] == [g.tokens for g in native]
        retractions.append(sum(result.course.retracted))
        assert result.course.first_provisional_s < result.course.first_confirmed_s <= result.course.last_s
    assert retractions[0] == 0 < retractions[2]
