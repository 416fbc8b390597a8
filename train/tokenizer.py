"""Tokenizers of the kvjax-mini models: byte-level BPE, trained on the corpus, the same bytes every time.

Every encoded text begins with `<|endoftext|>`, which also separates documents and ends a text. Encoding then
decoding is the identity: nothing is normalized, and all 256 bytes are tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from kvjax.report import Report
from kvjax.resources import config_path
from train.corpus import MANIFEST, SPLITS, CorpusError, Documents, replace_file

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

    With `pin` the manifest records what came out, otherwise it is compared with what the manifest records.

    Raises:
      VocabularyError: an unknown name, or a tokenizer or a token count that is not the pinned one.
      CorpusError: the corpus is missing or damaged.
    """
    if unknown := set(names) - set(SPECS):
        raise VocabularyError(f"unknown tokenizer {min(unknown)!r} (known: {', '.join(SPECS)})")
    target = manifest or Path(str(config_path(MANIFEST)))
    pinned = json.loads(target.read_text("utf-8"))
    splits = {split: Documents(Path(corpus) / split) for split in SPLITS}
    report = Report("tokenizers", {"tokenizers library": tokenizers.__version__})
    for name in names:
        backend = train(sample(splits["train"], SPECS[name].half), SPECS[name])
        tokens = {split: count(backend, documents) for split, documents in splits.items()}
        made = {"vocab": SPECS[name].vocab, "sha256": digest(backend), "tokens": tokens}
        recorded = pinned.setdefault("tokenizers", {}).get(name)
        if pin:
            pinned["tokenizers"][name] = made
        elif made != recorded:
            raise VocabularyError(f"{name}: is not the pinned tokenizer: {made}, pinned {recorded}")
        save(backend, (Path(out) if out else Path(corpus) / "tokenizers") / name)
        for split, number in tokens.items():
            size = splits[split].bytes
            report.row("tokens", tokenizer=name, split=split, tokens=number, bytes_per_token=size / number)
    if pin:
        replace_file(target, (json.dumps(pinned, indent=1) + "\n").encode())
    return report


@click.group()
def main() -> None:
    """The tokenizers of the kvjax-mini models."""


@main.command("build")
@click.option("--corpus", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Default: CORPUS/tokenizers.")
@click.option("--pin", is_flag=True, help="Record the result in the manifest instead of comparing it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("names", nargs=-1)
def _build(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train the tokenizers NAMES (all of them by default) on a corpus."""
    try:
        report = build(names=names or tuple(SPECS), **options)
    except (VocabularyError, CorpusError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(report.as_json() if as_json else report.as_text())


if __name__ == "__main__":
    main()
