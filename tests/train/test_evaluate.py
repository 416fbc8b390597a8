"""Every token once, behind the context that is promised, at the price a forward of its own gives it."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import ModelConfig
from kvjax.documents import Documents
from kvjax.lm import LM
from kvjax.models import build
from kvjax.tokenizer import Tokenizer
from train import evaluate
from train import tokenizer as made
from train.corpus import Document, write
from train.evaluate import EvaluateError, Scores, encode, score, windows

CODE = Path(made.__file__).read_text("utf-8")
VOCAB, CONTEXT = 300, 16
# lengths around every edge: of a padded size, of the context, of the step between windows
LENGTHS = (1, 2, 3, 8, 9, 16, 17, 18, 24, 25, 26, 33, 41, 70)


@pytest.fixture(scope="module")
def lm() -> LM:
    config = ModelConfig.from_hf(
        dict(model_type="qwen3", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=8, intermediate_size=24, rms_norm_eps=1e-6, rope_theta=1e4,
             tie_word_embeddings=True, max_position_embeddings=64)
    )  # fmt: skip
    model = build(config)
    # far from uniform, so that a token behind the wrong context has another price
    return LM(model, tuple(3 * p for p in model.init(1)), None, config, "tiny")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save(made.train([CODE], made.Spec(VOCAB, made.SPECS["mini"].pattern, 0)), directory)
    found = Tokenizer.from_directory(directory)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def encoded() -> evaluate.Encoded:
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS)
    return evaluate.Encoded(ids, np.array([max(1, n - 1) for n in LENGTHS]))


def test_windows_score_every_row_once_behind_what_is_promised():
    for context in (8, 16, 2048):
        for rows in [*range(3 * context), 5 * context + 1] if context < 99 else (1, 2048, 2049, 3072, 9999):
            before = {}
            for window in windows(rows, context):
                assert 0 < window.end - window.start <= context
                for row in range(window.first, window.end):
                    assert row not in before
                    before[row] = row + 1 - window.start  # inputs a token is predicted from
            assert sorted(before) == list(range(rows))
            assert all(seen >= min(row + 1, context // 2) for row, seen in before.items())
            # the whole document before it, up to a full context
            assert all(before[row] == row + 1 for row in range(min(rows, context)))


def test_the_promise_of_the_issue():
    """At 2,048 tokens, 1,024 or the whole document."""
    assert [(w.start, w.first, w.end) for w in windows(3100, 2048)] == [
        (0, 0, 2048), (1024, 2048, 3072), (2048, 3072, 3100)
    ]  # fmt: skip


def test_equals_one_forward_a_token(lm: LM, encoded: evaluate.Encoded):
    half = CONTEXT // 2

    @jax.jit
    def last(ids, length):
        """-log P of ids[length] after ids[:length]."""
        pos = jnp.arange(CONTEXT)[None]
        logits = lm.model.forward(lm.params, ids[None, :CONTEXT], pos).logits[0]
        return -jax.nn.log_softmax(logits)[length - 1, ids[length]]

    expected = []
    for ids in encoded.ids:
        nats = 0.0
        for at in range(1, len(ids)):
            start = 0 if at <= CONTEXT else half * math.ceil((at - CONTEXT) / half)
            seen = ids[start : at + 1]
            assert len(seen) - 1 >= min(at, half)
            nats += float(last(np.pad(seen, (0, CONTEXT + 1 - len(seen))), len(seen) - 1))
        expected.append(nats)
    got = score(lm, encoded, context=CONTEXT)
    np.testing.assert_allclose(got.bits * math.log(2), expected, rtol=2e-5, atol=1e-5)
    assert got.bits[0] == 0 and (got.bits[1:] > 0).all()
    assert got.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / encoded.bytes.sum(), rel=1e-5)


def test_few_programs_are_compiled(lm: LM, encoded: evaluate.Encoded):
    evaluate._losses.clear_cache()
    score(lm, encoded, context=CONTEXT)
    assert evaluate._losses._cache_size() <= 4


def test_a_split_is_read_whole(tmp_path: Path, tokenizer: Tokenizer):
    texts = [CODE[:999], "é \U0001f40d <|endoftext|> x\n", "\n"]
    write(tmp_path / "split", [Document(f"p/{i}.py", t, "code") for i, t in enumerate(texts)])
    documents = Documents(tmp_path / "split")
    found = encode(documents, tokenizer)
    assert found.bytes.tolist() == [len(t.encode()) for t in texts] and found.bytes.sum() == documents.bytes
    assert all(ids[0] == 0 and ids.dtype == np.int32 for ids in found.ids)
    assert 0 in found.ids[1][1:], "a special token that stands in a text is scored like any other"
    scores = found.scores([1.0, 2.0, 3.0])
    assert scores.bits_per_byte == pytest.approx(6 / math.log(2) / documents.bytes)


class Broken:
    """A tokenizer that loses what `decode` should give, or adds what `encode` should not."""

    def __init__(self, tokenizer: Tokenizer, lost: str = "", end: bool = False, bos: int = 0) -> None:
        self.tokenizer, self.lost, self.end, self.bos = tokenizer, lost, end, bos

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text) + [0] * self.end
        return [self.bos, *ids[1:]] if text else ids

    def decode(self, ids, *, skip_special: bool) -> str:
        return self.tokenizer.decode(ids, skip_special=skip_special).replace(self.lost or "\0", "")


def test_a_tokenizer_that_loses_bytes_is_refused(tokenizer: Tokenizer):
    for broken, told in (
        (Broken(tokenizer, lost="q"), "document 1: decoding"),
        (Broken(tokenizer, end=True), r"puts \[0, 0\] around"),
        (Broken(tokenizer, bos=7), "document 0: begins with id 7"),
    ):
        with pytest.raises(EvaluateError, match=told):
            encode(["abc\n", "q\n"], broken)  # type: ignore[arg-type]

    class Short(list):
        bytes = 99

    with pytest.raises(EvaluateError, match="4 bytes of the split's 99"):
        encode(Short(["abc\n"]), tokenizer)


def test_what_cannot_be_scored_is_named(lm: LM, encoded: evaluate.Encoded):
    for context in (0, 18, 128):
        with pytest.raises(EvaluateError, match=f"context {context} .* 64"):
            score(lm, encoded, context=context)
    with pytest.raises(EvaluateError, match="tiny: .*vocabulary of 300"):
        score(lm, evaluate.Encoded((np.array([0, 300], np.int32),), np.ones(1, np.int64)), context=CONTEXT)
    broken = LM(lm.model, tuple(p * np.nan for p in lm.params), None, lm.config, "broken")
    with pytest.raises(EvaluateError, match="broken: the loss of document 1 is not finite"):
        score(broken, encoded, context=CONTEXT)


def test_intervals_cover_and_pairing_tells():
    rng = np.random.default_rng(0)
    sizes = rng.integers(500, 20_000, 200)
    bits = sizes * rng.normal(2.0, 0.4, 200)
    a, b = Scores(bits, sizes), Scores(bits * rng.normal(1.02, 0.01, 200), sizes)
    low, high = a.interval()
    assert low < a.bits_per_byte < high and a.interval() == (low, high)
    # the delta method's interval, which many documents come close to
    residual = bits - a.bits_per_byte * sizes
    error = 1.96 * math.sqrt((residual**2).sum()) / sizes.sum()
    assert (high - low) / 2 == pytest.approx(error, rel=0.1)
    value, less, more = b.minus(a)
    assert value == pytest.approx(b.bits_per_byte - a.bits_per_byte)
    assert 0 < less < value < more and more - less < (high - low) / 5, "the same documents are drawn for both"
    assert a.minus(a) == (0, 0, 0)
    with pytest.raises(EvaluateError, match="same documents"):
        a.minus(Scores(bits, sizes + 1))
    with pytest.raises(EvaluateError, match="same documents"):
        Scores(bits, sizes[1:])
