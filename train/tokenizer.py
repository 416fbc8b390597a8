"""Tokenizers of the kvjax-mini models: byte-level BPE, trained on the corpus, the same bytes every time.

Every encoded text begins with `<|endoftext|>`, which also separates documents and ends a text. Encoding then
decoding is the identity: nothing is normalized, and all 256 bytes are tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from kvjax.documents import Documents
from kvjax.report import Report
from kvjax.resources import config_path
from train.corpus import HOW_TO_PIN, MANIFEST, compare, read_manifest, replace_file
from train.corpus import build as build_corpus
from train.packages import SPLITS

END, PAD, MASK, IM_START, IM_END = SPECIAL = (
    "<|endoftext|>",
    "<|pad|>",
    "<|mask|>",
    "<|im_start|>",
    "<|im_end|>",
)
MAX_LENGTH = 2048  # tokens
_BATCH = 256  # documents encoded at once

# Words take one leading mark or space; digits stand alone; line ends close what stands before them, so that the
# rest of the white space, the indentation, is a piece of its own.
_QWEN_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """`vocab` ids, special ones included; `pattern` None is GPT-2's split; `half` (0 or 1) of the documents."""

    vocab: int
    pattern: str | None
    half: int


SPECS = {"mini": Spec(4096, _QWEN_LIKE, 0), "mini-x": Spec(3072, None, 1)}


class VocabularyError(ValueError):
    """A tokenizer that did not become what its specification or the manifest says."""


def sample(documents: Documents, half: int) -> Iterator[str]:
    """The texts whose names' SHA-256 is even (`half` 0) or odd (1), in order."""
    for i, name in enumerate(documents.names):
        if hashlib.sha256(name.encode()).digest()[-1] % 2 == half:
            yield documents[i]


def train(texts: Iterable[str], spec: Spec) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `spec.vocab` ids, special tokens first.

    Raises:
      VocabularyError: the texts have too few pairs to merge.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(spec.pattern), behavior="isolated")] if spec.pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if (found := backend.get_vocab_size()) != spec.vocab:
        raise VocabularyError(f"the texts give {found} tokens, {spec.vocab} are wanted; give more text")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, SPECIAL.index(END))]
    )
    return backend


def save(backend: tokenizers.Tokenizer, directory: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, for kvjax and for transformers."""
    directory = Path(directory)
    added = {
        str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
        for i, t in enumerate(SPECIAL)
    }
    settings: dict[str, Any] = {
        "added_tokens_decoder": added,
        "bos_token": END,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "extra_special_tokens": [IM_START, IM_END],
        "mask_token": MASK,
        "model_max_length": MAX_LENGTH,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    replace_file(directory / "tokenizer.json", backend.to_str(pretty=True).encode() + b"\n")
    replace_file(directory / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())


def count(backend: tokenizers.Tokenizer, documents: Documents) -> int:
    """Tokens of a split, the `<|endoftext|>` before each document included."""
    total = 0
    for start in tqdm(range(0, len(documents), _BATCH), documents.path.name, disable=None):
        texts = [documents[i] for i in range(start, min(start + _BATCH, len(documents)))]
        total += sum(len(e.ids) for e in backend.encode_batch_fast(texts))
    return total


def digest(backend: tokenizers.Tokenizer) -> str:
    """SHA-256 over everything that decides the ids, as `kvjax.tokenizer.Tokenizer.hash`."""
    canonical = json.dumps(json.loads(backend.to_str()), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def build(
    corpus: str | Path,
    out: str | Path | None = None,
    *,
    names: Sequence[str] = tuple(SPECS),
    manifest: Path | None = None,
    pin: bool = False,
) -> Report:
    """Train the named tokenizers on `corpus` into `out`/<name> (default `corpus`/tokenizers).

    They are compared with the manifest, two bars a tokenizer; a missed one, and none is written. With `pin` the
    manifest records what came out instead.

    Raises:
      VocabularyError: an unknown name, or one the manifest has not.
      DocumentsError: the corpus is missing or damaged.
    """
    if unknown := set(names) - set(SPECS):
        raise VocabularyError(f"unknown tokenizer {min(unknown)!r} (known: {', '.join(SPECS)})")
    target = manifest or Path(str(config_path(MANIFEST)))
    content = read_manifest(target)
    pinned = content.setdefault("tokenizers", {})
    if not pin and (missing := [name for name in names if name not in pinned]):
        raise VocabularyError(f"{target}: has no tokenizer {', '.join(missing)}; {HOW_TO_PIN}")
    splits = {split: Documents(Path(corpus) / split) for split in SPLITS}
    report = Report("tokenizers", {"tokenizers library": tokenizers.__version__})
    made = {name: train(sample(splits["train"], SPECS[name].half), SPECS[name]) for name in names}
    for name, backend in made.items():
        tokens = {split: count(backend, documents) for split, documents in splits.items()}
        for split, number in tokens.items():
            size = splits[split].bytes
            report.row("tokens", tokenizer=name, split=split, tokens=number, bytes_per_token=size / number)
        facts: dict[str, Any] = {"vocab": SPECS[name].vocab, "sha256": digest(backend)}
        if pin:
            pinned[name] = {**facts, "tokens": tokens}
        else:
            compare(report, f"{name} tokenizer", facts, pinned[name])
            compare(report, f"{name} token counts", tokens, pinned[name].get("tokens", {}))
    if report.ok:
        for name, backend in made.items():
            save(backend, (Path(out) if out else Path(corpus) / "tokenizers") / name)
    if pin:
        replace_file(target, (json.dumps(content, indent=1) + "\n").encode())
    return report


def rebuild(
    directory: str | Path, *, manifest: Path | None = None, pin: bool = False, **options: Any
) -> Report:
    """The corpus and all tokenizers in `directory`; when a bar is missed, `directory` stays as it was.

    Args:
      options: further ones of `train.corpus.build`.

    Returns: both reports in one. Where the corpus differs from the manifest, no tokenizer is trained.

    Raises:
      CorpusError, VocabularyError: see `train.corpus.build` and `build`.
    """
    directory = Path(directory).expanduser()
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)  # before the work, lest it be in vain
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".", suffix=".part") as place:
            found = build_corpus(place, manifest=manifest, pin=pin, **options)
            report = Report("kvjax corpus", found.facts, found.tables, found.bars)
            if report.ok:
                found = build(place, manifest=manifest, pin=pin)
                report.facts |= found.facts
                report.tables |= found.tables  # of the two only one has rows that differ
                report.bars += found.bars
            if report.ok:
                for path in sorted(p for p in Path(place).rglob("*") if p.is_file()):
                    target = directory / path.relative_to(place)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
            return report
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # there is something in it
                directory.rmdir()
