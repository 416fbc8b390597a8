"""Caches leave and come back; transformers goes on from one."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import KVCache
from kvjax.transfer import interop

GOLDEN = Path(__file__).parents[1] / "golden"


def cache_of(filled: list[int], size: int = 9) -> KVCache:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(len(filled), 2, size, 4)), jnp.float32) for _ in range(6)]
    return KVCache(tuple(arrays[:3]), tuple(arrays[3:]), jnp.asarray(filled, jnp.int32))


def test_a_cache_comes_back_from_disk(tmp_path: Path):
    cache = cache_of([5, 5])
    interop.save(cache, tmp_path / "c", model="m", tokens=[1, 2])
    again, about = interop.load(tmp_path / "c", size=16)
    assert about["model"] == "m" and about["shape"] == [2, 2, 5, 4]
    assert again.size == 16 and again.filled.tolist() == [5, 5]
    for a, b in zip((*again.k, *again.v), (*cache.k, *cache.v), strict=True):
        np.testing.assert_array_equal(a[:, :, :5], b[:, :, :5])
        assert not a[:, :, 5:].any()


def test_what_cannot_be_taken_over_is_named(tmp_path: Path):
    with pytest.raises(interop.InteropError, match=r"rows hold \[3, 5\] tokens"):
        interop.to_pairs(cache_of([3, 5]))
    interop.save(cache_of([5]), tmp_path / "c")
    with pytest.raises(interop.InteropError, match="exists"):
        interop.save(cache_of([5]), tmp_path / "c")
    with pytest.raises(interop.InteropError, match="5 tokens do not fit 4 slots"):
        interop.load(tmp_path / "c", size=4)
    file = tmp_path / "c" / "layer-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(interop.InteropError, match="not a stored cache: SafetensorError"):
        interop.load(tmp_path / "c", size=8)
    file.unlink()
    with pytest.raises(interop.InteropError, match="not a stored cache: FileNotFoundError"):
        interop.load(tmp_path / "c", size=8)
    pairs = interop.to_pairs(cache_of([5]))
    pairs[1] = (pairs[1][0][:, :1], pairs[1][1])
    with pytest.raises(interop.InteropError, match="layer 1: key has shape"):
        interop.from_pairs(pairs, size=8)
    pairs = [(k * np.nan, v) for k, v in interop.to_pairs(cache_of([5]))]
    with pytest.raises(interop.InteropError, match="layer 0: key is not finite"):
        interop.from_pairs(pairs, size=8)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["qwen3-tied", "llama31-rope"])
def test_transformers_goes_on_from_our_cache_and_we_from_its(name: str):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    lm = kvjax.load(GOLDEN / name)
    peer = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, lm.config.vocab, (1, 24)).astype(np.int32)
    pos = jnp.arange(24, dtype=jnp.int32)[None]
    ours = lm.model.forward(lm.params, jnp.asarray(ids), pos)
    cache = interop.from_pairs(
        [(np.asarray(k)[:, :, :20], np.asarray(v)[:, :, :20]) for k, v in ours.rows], size=32
    )
    with torch.no_grad():
        theirs = peer(
            torch.from_numpy(ids[:, 20:]).long(), past_key_values=interop.to_dynamic_cache(cache),
            position_ids=torch.arange(20, 24)[None],
        ).logits.numpy()  # fmt: skip
        made = peer(torch.from_numpy(ids[:, :20]).long(), use_cache=True).past_key_values
    np.testing.assert_allclose(theirs, np.asarray(ours.logits)[:, 20:], atol=1e-4)
    back = interop.from_dynamic_cache(made, size=32)
    out = lm.model.forward(lm.params, jnp.asarray(ids[:, 20:]), pos[:, 20:], back)
    np.testing.assert_allclose(out.logits, np.asarray(ours.logits)[:, 20:], atol=1e-4)
