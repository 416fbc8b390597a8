"""The tokenizer: specials once, chat templates rendered as their authors expect, GGUF equal to transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvjax.checkpoints import gguf
from kvjax.tokenizer import Tokenizer, TokenizerError

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CHAT = [{"role": "user", "content": "ab"}]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def directory(
    path: Path, *, merges: list[tuple[str, str]] | None = None, bos: bool = False, **settings: Any
) -> Path:
    merges = merges if merges is not None else [("a", "b"), ("ab", "c")]
    names = ["<s>", "</s>", *LETTERS, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    base = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(base | settings))
    return path


def make(path: Path, **kwargs: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(directory(path, **kwargs))
    assert tokenizer is not None
    return tokenizer


def test_text_goes_round(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    for text in ("abc ab\n", "Grüße, 日本 😀\x00", " two  spaces ", "a" * 50):
        assert (
            tokenizer.decode(tokenizer.encode(text)) == text
        )  # nothing cut, although the file says 4 tokens
    assert tokenizer.encode("") == []
    assert tokenizer.eos == (1,) and tokenizer.vocab == 260


@pytest.mark.parametrize(
    ("bos", "settings", "first"),
    [
        (False, {}, []),
        (True, {}, [0]),
        (True, {"add_bos_token": False}, [0]),
        (False, {"add_bos_token": True}, []),
    ],
)
def test_specials_are_added_as_the_files_say(
    tmp_path: Path, bos: bool, settings: dict, first: list[int]
) -> None:
    tokenizer = make(tmp_path, bos=bos, **settings)
    inner = [tokenizer._backend.token_to_id("ab")]
    assert tokenizer.encode("ab") == first + inner
    assert tokenizer.encode_chat(CHAT).count(0) == 1  # the template's own, never a second


def test_special_texts_are_single_ids_and_skipped_on_request(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    ids = tokenizer.encode("ab</s>")
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "ab" and tokenizer.decode(ids, skip_special=False) == "ab</s>"
    assert tokenizer.decode([*ids, 5000]) == "ab"  # an id beyond the tokenizer means nothing


def test_the_thinking_switch_must_exist(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain")
    with pytest.raises(
        TokenizerError, match="thinking=False: the chat template has no enable_thinking switch"
    ):
        plain.encode_chat(CHAT, thinking=False)
    template = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}"
    switched = make(tmp_path / "switched", chat_template=template)
    assert switched.render(CHAT) == switched.render(CHAT, thinking=True) == "<s><user>ab<assistant>"
    assert switched.render(CHAT, thinking=False) == "<s><user>ab<assistant><no>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {{- m.content }}\n{% endfor %}", "ab\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "ab"}]'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "ab"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if add_generation_prompt %}g{% endif %}{{ eos_token }}{{ tools is defined }}", "g</s>False"),
        ("{{ 'ü<' | tojson }}", '"ü<"'),
    ],
)
def test_what_templates_may_use(tmp_path: Path, template: str, expected: str) -> None:
    assert make(tmp_path, chat_template=template).render(CHAT) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{% if %}", "chat template, line 1"),
        ("{{ messages[0].content + 1 }}", "refuses the messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
    ],
)
def test_what_templates_refuse(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        make(tmp_path, chat_template=template).render(CHAT)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "x"}]])
def test_messages_have_roles(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(TokenizerError, match="messages"):
        make(tmp_path).encode_chat(messages)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert make(tmp_path, chat_template=named).render(CHAT) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert make(tmp_path, chat_template=named).render(CHAT) == "file"
    without = make(tmp_path / "none", chat_template=None)
    assert not without.has_chat_template and without.template_hash is None
    with pytest.raises(TokenizerError, match="has no chat template"):
        without.encode_chat(CHAT)


def test_hash_is_of_what_decides_ids(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    assert first.hash == make(tmp_path / "b", chat_template="other").hash
    assert first.template_hash != make(tmp_path / "b", chat_template="other").template_hash
    assert first.hash != make(tmp_path / "c", merges=[("a", "b"), ("ab", "d")]).hash
    assert first.hash != make(tmp_path / "d", bos=True).hash


def test_saved_and_read_again(tmp_path: Path) -> None:
    first = make(tmp_path / "a", bos=True)
    (tmp_path / "b").mkdir()
    first.save(tmp_path / "b")
    second = Tokenizer.from_directory(tmp_path / "b")
    assert second is not None
    assert (second.hash, second.template_hash, second.eos) == (first.hash, first.template_hash, first.eos)
    assert second.encode_chat(CHAT) == first.encode_chat(CHAT)


def test_tokens_only_the_config_knows_are_added(tmp_path: Path) -> None:
    added = {"260": {"content": "<think>", "special": False}}
    tokenizer = make(tmp_path, added_tokens_decoder=added)
    assert tokenizer.encode("<think>") == [260] and tokenizer.vocab == 261
    with pytest.raises(TokenizerError, match="'<think>' is 300 there, 260 in tokenizer.json"):
        make(tmp_path, added_tokens_decoder={"300": {"content": "<think>"}})


def test_faults_name_the_file(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None
    with pytest.raises(TokenizerError, match="eos_token '<end>' is not in the vocabulary"):
        make(tmp_path, eos_token="<end>")
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match="tokenizer_config.json: cannot be read as JSON"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json: cannot be read"):
        Tokenizer.from_directory(tmp_path)


def metadata(pre: str = "qwen2", **changes: Any) -> dict[str, Any]:
    tokens = ["<s>", "</s>", "<think>", "naïve word", *LETTERS, "ab", "Ġab", "[PAD0]"]
    types = [3, 3, 4, 3, *[1] * 256, 1, 1, 5]
    base = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": ["a b", "Ġ ab"],
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in (base | changes).items() if v is not None}


def test_gguf_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(metadata(eot_token_id=2), "m.gguf")
    assert tokenizer is not None
    names = metadata()["tokenizer.ggml.tokens"]
    assert [names[i] for i in tokenizer.encode("<s>ab ab<think>")] == ["<s>", "ab", "Ġab", "<think>"]
    assert tokenizer.decode(tokenizer.encode("<s>ab<think>")) == "ab<think>"
    assert tokenizer.decode(tokenizer.encode("naïve word")) == "naïve word"
    assert names.index("naïve word") not in tokenizer.encode("naïve word")  # mislabelled as control
    assert tokenizer.eos == (1, 2) and tokenizer.vocab == len(names) - 1
    assert Tokenizer.from_gguf({}, "m.gguf") is None


@pytest.mark.parametrize(
    ("pre", "flag", "first"),
    [("qwen2", None, []), ("qwen2", True, [0]), ("llama-bpe", None, [0]), ("llama-bpe", False, [])],
)
def test_gguf_bos(pre: str, flag: bool | None, first: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata(pre, add_bos_token=flag), "m.gguf")
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [*first, 260]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's  12345 x", ["it", "'s", " ", " 12345", " x"]),
        ("smollm", "it's  12345 x", ["it", "'s", "  ", "1", "2", "3", "4", "5", " x"]),
        ("qwen2", "IT'S  12345 x", ["IT", "'S", " ", " ", "1", "2", "3", "4", "5", " x"]),
        ("llama-bpe", "IT'S  12345 x", ["IT", "'S", " ", " ", "123", "45", " x"]),
        ("qwen2", "a\r\n\n b!?\n", ["a", "\r\n\n", " b", "!?\n"]),
    ],
)
def test_gguf_pieces(pre: str, text: str, pieces: list[str]) -> None:
    """How text is cut before merging, written out by hand for each style."""
    tokenizer = Tokenizer.from_gguf(metadata(pre), "m.gguf")
    assert tokenizer is not None
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in cut] == pieces


def test_qwen_text_is_normalised_and_llama_looks_pieces_up_whole() -> None:
    qwen, llama = (Tokenizer.from_gguf(metadata(p), "m.gguf") for p in ("qwen2", "llama-bpe"))
    assert qwen is not None and llama is not None
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    assert llama.encode("e\u0301") != llama.encode("\u00e9")
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        tokenizer = Tokenizer.from_gguf(metadata(pre, merges=["Ġ ab"], add_bos_token=False), "m.gguf")
        assert tokenizer is not None
        assert (len(tokenizer.encode("ab")) == 1) is whole  # the vocabulary has "ab", no merge makes it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not supported .*Hugging Face directory"),
        ({"pre": "tekken"}, r"tokenizer.ggml.pre 'tekken' is not supported \(known: .*llama-bpe.*smollm"),
        ({"pre": None}, "tokenizer.ggml.pre None is not supported"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges: 'a b c' is not made of tokens"),
        ({"merges": ["q q"]}, "tokenizer.ggml.merges: 'q q' is not made of tokens"),
        ({"merges": None}, "tokenizer.ggml.merges: missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens: missing or not a list of strings"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type does not fit"),
        ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id 9999 is not a token"),
    ],
)
def test_gguf_faults(changes: dict, message: str) -> None:
    with pytest.raises(TokenizerError, match=f"m.gguf: {message}"):
        Tokenizer.from_gguf(metadata(**changes), "m.gguf")


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from kvjax.tokenizer import Tokenizer; t = Tokenizer.from_directory(sys.argv[1]);"
        "t.encode_chat([{'role': 'user', 'content': 'x'}]); t.hash;"
        "print([m for m in ('torch', 'transformers', 'jax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory(tmp_path))], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_smollm2_chat(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_gguf(gguf.File(smollm2).metadata, str(smollm2))
    assert tokenizer is not None
    ids = tokenizer.encode_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 12"}]
    )
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids, skip_special=False) == expected
    assert ids[0] == 1 and ids.count(2) == 2 and tokenizer.eos == (2,) and tokenizer.vocab == 49152


POOLS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", " \t\n\r", " ", "'\"!?.,;:-_()[]{}<>|/\\@#$%^&*+=~`",
    "äöüßéñçøåčžğ", "日本語中文字漢字かなカナ", "한국어", "русский", "العربية", "हिन्दी",
    "😀👍🏽👨‍👩‍👧", "\u200b\u00a0\u2003\u3000",
    "①²½Ⅳ٣", "e\u0301a\u0308o\u0302",
)  # fmt: skip
WORDS = (
    "the", "def", "return", "import", " you're", "I'LL", "they've", "12345", "  ", "\n\n", "\r\n", "    ",
    "http://a.b/c?d=1", "<|im_", "|>", "你好", "naïve", "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<tool_call>",
)  # fmt: skip


def texts(count: int) -> Iterator[str]:
    """Words, runs of one script and any assigned or unassigned characters, mixed."""
    rng = random.Random(0)
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(24)):
            kind = rng.random()
            if kind < 0.3:
                parts.append(rng.choice(WORDS))
            elif kind < 0.9:
                pool = rng.choice(POOLS)
                parts.append("".join(rng.choice(pool) for _ in range(rng.randrange(1, 6))))
            else:
                low, high = rng.choice([(1, 0x2000), (0x2000, 0xD800), (0xE000, 0x20000)])
                parts.append(chr(rng.randrange(low, high)))
        yield "".join(parts)


@pytest.mark.parity
@pytest.mark.parametrize("model", ["smollm2", "qwen_coder"])
def test_gguf_equals_transformers(request: pytest.FixtureRequest, model: str) -> None:
    """Token-equal on 10,000 texts.

    From a GGUF, transformers builds the published tokenizers less one stage each, which is put back in it
    here: SmolLM2 splits digits one by one before anything else, and Qwen2 (as in its own class
    `Qwen2Tokenizer`) brings text to NFC first. Where that stage changes nothing, its result is compared as
    it comes.
    """
    from transformers import AutoTokenizer

    path: Path = request.getfixturevalue(model)
    ours = Tokenizer.from_gguf(gguf.File(path).metadata, str(path))
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    assert ours is not None
    inputs = list(texts(10_000))

    def plain(text: str) -> bool:
        if model == "smollm2":
            return not any(c.isnumeric() for c in text)
        return unicodedata.is_normalized("NFC", text)

    untouched = [t for t in inputs if plain(t)]
    assert len(untouched) > 1000
    assert [t for t in untouched if ours.encode(t) != theirs.encode(t)] == []
    if model == "smollm2":
        digits = pre_tokenizers.Digits(individual_digits=True)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        theirs.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    assert [t for t in inputs if ours.encode(t) != theirs.encode(t)] == []
    sample = inputs[:1000]
    known = [[i for i in theirs.encode(t) if i < ours.vocab] for t in sample]
    for skip in (True, False):
        expected = [theirs.decode(ids, skip_special_tokens=skip) for ids in known]
        assert [ours.decode(ids, skip_special=skip) for ids in known] == expected
    chat = [{"role": "user", "content": "Hi 12"}, {"role": "assistant", "content": "Yes"}, *CHAT]
    text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ours.render(chat) == text and ours.encode_chat(chat) == theirs.encode(
        text, add_special_tokens=False
    )


@pytest.mark.parity
@pytest.mark.parametrize(
    "settings", [{}, {"bos": True}, {"add_bos_token": True}, {"bos": True, "add_bos_token": False}]
)
def test_directory_equals_transformers(tmp_path: Path, settings: dict) -> None:
    from transformers import AutoTokenizer

    ours = make(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **settings)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts(500):
        assert ours.encode(text) == theirs.encode(text, truncation=False), text
    assert ours.render(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
