"""Tokenizers of the mini family: exact sizes, identity on any text, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvjax.documents import Documents, DocumentsError
from kvjax.tokenizer import Tokenizer
from train import tokenizer as made
from train.corpus import Document, write
from train.packages import SPLITS

SMALL = {name: made.Spec(420, spec.pattern, spec.half) for name, spec in made.SPECS.items()}
CODE = Path(made.__file__).read_text("utf-8")


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return made.train([CODE], SMALL[request.param])


@pytest.fixture(scope="module")
def saved(small: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save(small, directory)
    return directory


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(made, "SPECS", SMALL)
    lines = CODE.splitlines()
    for split in SPLITS:
        texts = ["\n".join(lines[i : i + 40]) for i in range(0, len(lines), 20)]
        write(tmp_path / split, [Document(f"p/{i:02}.py", text, "code") for i, text in enumerate(texts)])
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path


def test_special_tokens_come_first(small: tokenizers.Tokenizer):
    assert [small.id_to_token(i) for i in range(5)] == list(made.SPECIAL)
    assert small.get_vocab_size() == 420
    assert small.encode("x").ids[0] == 0
    assert small.encode("a<|mask|>b", add_special_tokens=False).ids[1] == 2


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="def f():\n\treturn 1  \r\n\n    x , y don't .\u200b\u00a0é e\u0301 \U0001f40d\x00")
@example(text="a <|endoftext|> b<|im_start|>\n")
def test_decoding_undoes_encoding(small: tokenizers.Tokenizer, text: str):
    ids = small.encode(text).ids
    assert small.decode(ids[1:], skip_special_tokens=False) == text
    if "<|" not in text:
        assert small.decode(ids) == text


def test_training_is_deterministic(small: tokenizers.Tokenizer, tmp_path: Path, saved: Path):
    qwen = any("Split" in json.dumps(p) for p in json.loads(small.to_str())["pre_tokenizer"]["pretokenizers"])
    made.save(made.train([CODE], SMALL["mini" if qwen else "mini-x"]), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes()


def test_too_little_text_is_refused():
    with pytest.raises(made.VocabularyError, match="420 are wanted; give more text"):
        made.train(["x = 1"], SMALL["mini"])


def test_mini_takes_digits_alone_and_indentation_whole():
    backend = made.train([CODE], SMALL["mini"])
    pieces = backend.encode("if x12:\n        return\n", add_special_tokens=False).tokens
    assert "1" in pieces and "2" in pieces
    assert "Ġ" * 7 in pieces  # the eighth space goes with the word


def test_kvjax_loads_it(small: tokenizers.Tokenizer, saved: Path):
    loaded = Tokenizer.from_directory(saved)
    assert loaded is not None
    assert loaded.encode("x = 1\n") == small.encode("x = 1\n").ids
    assert (loaded.eos, loaded.vocab) == ((0,), 420)
    assert loaded.hash == made.digest(small)


def test_transformers_loads_it(small: tokenizers.Tokenizer, saved: Path):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(saved), local_files_only=True)
    text = "def f(a , b) :\n    return 'x' . y\n"
    assert loaded(text)["input_ids"] == small.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    ids = (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id, loaded.mask_token_id)
    assert ids == (0, 0, 1, 2)
    assert (len(loaded), loaded.model_max_length) == (420, 2048)
    assert loaded.convert_tokens_to_ids([made.IM_START, made.IM_END]) == [3, 4]


def test_the_two_halves_share_nothing(corpus: Path):
    documents = Documents(corpus / "train")
    halves = [list(made.sample(documents, half)) for half in (0, 1)]
    assert halves[0] and halves[1]
    assert sorted(halves[0] + halves[1]) == sorted(documents)


def test_a_build_is_compared_with_the_manifest(corpus: Path):
    manifest = corpus / "manifest.json"
    with pytest.raises(made.VocabularyError, match="has no tokenizer mini, mini-x; run `kvjax corpus"):
        made.build(corpus, manifest=manifest)
    pinned = made.build(corpus, manifest=manifest, pin=True)
    recorded = json.loads(manifest.read_text())["tokenizers"]
    assert recorded["mini"]["tokens"]["train"] == pinned.tables["tokens"][0]["tokens"] > 0
    report = made.build(corpus, manifest=manifest)
    assert report.tables == pinned.tables
    assert [(bar.value, bar.ok) for bar in report.bars] == 4 * [(0, True)] and not pinned.bars


def test_what_differs_is_named_and_no_tokenizer_written(corpus: Path):
    manifest = corpus / "manifest.json"
    made.build(corpus, manifest=manifest, pin=True)
    write(corpus / "selection", [Document("p/a.py", "x = 1", "code")])
    report = made.build(corpus, corpus / "elsewhere", manifest=manifest)
    assert [bar.value for bar in report.bars] == [0, 1, 0, 1] and report.exit_code == 1
    assert [(row["of"], row["figure"]) for row in report.tables["differs"]] == [
        ("mini token counts", "selection"), ("mini-x token counts", "selection")
    ]  # fmt: skip
    assert not (corpus / "elsewhere").exists()


def test_tokens_are_counted_with_one_end_a_document(corpus: Path, small: tokenizers.Tokenizer):
    documents = Documents(corpus / "train")
    ids = sum(len(small.encode(text, add_special_tokens=False).ids) for text in documents)
    assert made.count(small, documents) == ids + len(documents)


def test_unknown_names_and_missing_corpora(corpus: Path):
    with pytest.raises(made.VocabularyError, match="unknown tokenizer 'maxi'"):
        made.build(corpus, names=["maxi"], manifest=corpus / "manifest.json")
    (corpus / "manifest.json").write_text('{"tokenizers": {"mini": {}, "mini-x": {}}}')
    with pytest.raises(DocumentsError, match="not a corpus split"):
        made.build(corpus / "nowhere", manifest=corpus / "manifest.json")
