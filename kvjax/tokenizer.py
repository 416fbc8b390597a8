"""Text to ids and back, from a Hugging Face directory or from GGUF metadata.

Built on the `tokenizers` library. `transformers` is imported only for a directory without `tokenizer.json`
(its import alone takes longer than loading a small model); torch never is.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

Message = Mapping[str, Any]


class TokenizerError(ValueError):
    """A tokenizer or a request to it that cannot be used; the message names the file or the argument."""


class Tokenizer:
    """One model's tokenizer. `eos` are the ids that end a text as far as the tokenizer itself knows."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str,
        special: Mapping[str, str],
        eos: Sequence[int] = (),
        chat_template: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`special` maps names such as `bos_token` to texts; `settings` is kept for `save`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._source, self._special = backend, source, dict(special)
        self._template, self._settings = chat_template, dict(settings or {})
        self.eos = tuple(sorted(set(eos)))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face directory; None when it holds no tokenizer files.

        `tokenizer.json` decides which special tokens surround a text, as in transformers 5: `add_bos_token`
        beside it is not looked at.

        Raises:
          TokenizerError: damaged or contradicting files; the message names the file.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        settings = _json(directory / "tokenizer_config.json")
        if path.exists():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise TokenizerError(f"{path}: cannot be read: {str(error)[:200]}") from None
        elif any((directory / name).exists() for name in ("tokenizer.model", "vocab.json")):
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
        else:
            return None
        special = {k: t for k in _NAMES if (t := _text(settings.get(k))) is not None}
        _add_missing(backend, settings, directory)
        eos = []
        if "eos_token" in special:
            index = backend.token_to_id(special["eos_token"])
            if index is None:
                raise TokenizerError(f"{path}: eos_token {special['eos_token']!r} is not in the vocabulary")
            eos.append(index)
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if (directory / "chat_template.jinja").exists():
            template = (directory / "chat_template.jinja").read_text("utf-8")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"{directory / 'tokenizer_config.json'}: chat_template is not a text")
        return cls(
            backend,
            source=str(directory),
            special=special,
            eos=eos,
            chat_template=template,
            settings=settings,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
        """The byte-level BPE tokenizer a GGUF file describes; None when it describes none.

        Ids the file marks as unused (padding of the vocabulary) are left out.

        Raises:
          TokenizerError: another kind of tokenizer, an unknown pre-tokenizer or damaged metadata.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind in (None, "no_vocab", "none"):
            return None
        if kind != "gpt2":
            raise TokenizerError(
                f"{source}: tokenizer.ggml.model {kind!r} is not supported (known: gpt2, byte-level BPE); "
                "take the model from its Hugging Face directory"
            )
        pre = metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in _PRE:
            raise TokenizerError(
                f"{source}: tokenizer.ggml.pre {pre!r} is not supported (known: {', '.join(sorted(_PRE))})"
            )
        tokens, merges, types = (
            _strings(metadata, "tokens", source),
            _strings(metadata, "merges", source),
            metadata.get("tokenizer.ggml.token_type"),
        )
        if not isinstance(types, list) or len(types) != len(tokens):
            raise TokenizerError(f"{source}: tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
        style = _PRE[pre]
        backend = _byte_level(tokens, merges, types, style, source)

        def token(name: str) -> str | None:
            index = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if index is None:
                return None
            if type(index) is not int or not 0 <= index < len(tokens):
                raise TokenizerError(f"{source}: tokenizer.ggml.{name}_token_id {index!r} is not a token")
            return tokens[index]

        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        special = {k: t for k, v in names.items() if (t := token(v)) is not None}
        add = metadata.get("tokenizer.ggml.add_bos_token", style == _LLAMA3)
        end = metadata.get("tokenizer.ggml.add_eos_token", False)
        bos, last = special.get("bos_token") if add else None, special.get("eos_token") if end else None
        if bos or last:
            backend.post_processor = _surround(backend, bos, last)
        ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            source=source,
            special=special,
            eos=[i for i in ends if type(i) is int],
            chat_template=template if isinstance(template, str) else None,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens this model puts around a text."""
        return self._backend.encode(text, add_special_tokens=True).ids

    def encode_chat(self, messages: Sequence[Message], *, thinking: bool | None = None) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins.

        The template writes all special tokens itself, so none are added. `thinking` None leaves the
        template's own default.

        Raises:
          TokenizerError: no template, `thinking` given to a template without such a switch, or messages
            the template refuses.
        """
        return self._backend.encode(self.render(messages, thinking=thinking), add_special_tokens=False).ids

    def render(self, messages: Sequence[Message], *, thinking: bool | None = None) -> str:
        """The text `encode_chat` encodes."""
        import jinja2

        if self._template is None:
            raise TokenizerError(f"{self._source}: has no chat template; pass a plain text prompt")
        if isinstance(messages, (str, Mapping)) or not messages:
            raise TokenizerError("messages: expected a non-empty list of {'role': ..., 'content': ...}")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise TokenizerError(f"messages[{i}]: expected an object with a role")
        values: dict[str, Any] = dict(self._special)
        if thinking is not None:
            if "enable_thinking" not in self._switches:
                raise TokenizerError(
                    f"{self._source}: thinking={thinking}: the chat template has no enable_thinking switch"
                )
            values["enable_thinking"] = thinking
        try:
            return self._compiled.render(messages=list(messages), add_generation_prompt=True, **values)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            raise TokenizerError(f"{self._source}: the chat template refuses the messages: {error}") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Ids the tokenizer does not know give nothing."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @functools.cached_property
    def vocab(self) -> int:
        """Largest id + 1. The model's vocabulary may be larger; those ids mean nothing."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON of everything that decides the ids."""
        canonical = json.dumps(json.loads(self._backend.to_str()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @functools.cached_property
    def template_hash(self) -> str | None:
        """SHA-256 of the chat template, None without one."""
        return hashlib.sha256(self._template.encode()).hexdigest() if self._template is not None else None

    @functools.cached_property
    def _environment(self) -> Any:
        return _environment()

    @functools.cached_property
    def _compiled(self) -> Any:
        return _guard(self._source, self._environment.from_string, self._template)

    @functools.cached_property
    def _switches(self) -> set[str]:
        import jinja2.meta

        tree = _guard(self._source, self._environment.parse, self._template)
        return jinja2.meta.find_undeclared_variables(tree)

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template for transformers."""
        directory = Path(directory)
        self._backend.save(str(directory / "tokenizer.json"))
        elsewhere = ("chat_template", "added_tokens_decoder")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{k: v for k, v in self._settings.items() if k not in elsewhere},
            **self._special,
        }
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text + "\n", "utf-8")
        if self._template is not None:
            (directory / "chat_template.jinja").write_text(self._template, "utf-8")


_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # token types of GGUF

# How a vocabulary's merges were learned: pieces of text that no token crosses. The patterns are those of the
# models' published tokenizer.json files. None stands for the split built into ByteLevel (GPT-2's).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2, _SMOLLM = "gpt-2", "smollm"
_PRE = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def _byte_level(
    tokens: list[str], merges: list[str], types: list[int], style: str, source: str
) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise TokenizerError(f"{source}: tokenizer.ggml.merges: {merge!r} is not made of tokens")
        pairs.append((left, right))
    try:
        # Llama 3 looks a piece up whole before merging.
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=style == _LLAMA3)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{source}: tokenizer.ggml.merges: {error}") from None
    backend = tokenizers.Tokenizer(model)
    split = style not in (_GPT2, _SMOLLM)
    first: list[Any] = [pre_tokenizers.Split(Regex(style), behavior="isolated")] if split else []
    if style == _SMOLLM:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    backend.decoder = decoders.ByteLevel()
    if style == _QWEN2:
        backend.normalizer = normalizers.NFC()
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _USER or (kind == _CONTROL and set(token) <= alphabet)
    ]
    backend.add_special_tokens([t for t in added if t.special])
    backend.add_tokens([t for t in added if not t.special])
    return backend


def _strings(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TokenizerError(f"{source}: tokenizer.ggml.{key}: missing or not a list of strings")
    return value


def _surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> Any:
    parts = [p for p in (bos, "$A", eos) if p]
    special = [(t, backend.token_to_id(t)) for t in (bos, eos) if t]
    return processors.TemplateProcessing(single=" ".join(parts), special_tokens=special)


def _add_missing(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: Path) -> None:
    """Tokens only `tokenizer_config.json` knows, which transformers adds on loading."""
    where = f"{directory / 'tokenizer_config.json'}: added_tokens_decoder"
    table = settings.get("added_tokens_decoder") or {}
    if not isinstance(table, Mapping) or not all(
        k.isdecimal() and isinstance(v, Mapping) for k, v in table.items()
    ):
        raise TokenizerError(f"{where}: expected an object from ids to tokens")
    for index, token in sorted((int(k), v) for k, v in table.items()):
        text = token.get("content")
        if not isinstance(text, str):
            raise TokenizerError(f"{where}: token {index} has no content")
        if backend.token_to_id(text) is None:
            names = ("lstrip", "rstrip", "single_word", "normalized", "special")
            backend.add_tokens([AddedToken(text, **{k: bool(token.get(k)) for k in names})])
        if (found := backend.token_to_id(text)) != index:
            raise TokenizerError(f"{where}: {text!r} is {index} there, {found} in tokenizer.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return value


def _text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _guard(source: str, function: Any, template: str | None) -> Any:
    import jinja2

    try:
        return function(template)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"{source}: chat template, line {error.lineno}: {error.message}") from None


def _environment() -> Any:
    """What templates may use, as model authors expect it; sandboxed: a template is someone else's code."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, indent=indent, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
