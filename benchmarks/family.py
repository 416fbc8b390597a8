"""The shipped models on the confirmation split: bits per byte beside a 5-gram and compressors; logits of transformers.

    python benchmarks/family.py --corpus DIR [--models DIR_or_name ...] [--json]

`--corpus` is what `kvjax corpus` wrote. Every figure has a 95 % interval from drawing documents with replacement;
models are compared on the same draws. Needs the `train` and `parity` extras; without torch the agreement with
transformers stays unproved, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.lm import LM
from kvjax.report import Report
from kvjax.resources import packaged_models
from kvjax.stats import LEVEL
from train.compress import XZ
from train.evaluate import Confirmation, Scores

PREFIX = 512  # tokens whose logits are compared with transformers'
STRICT = 1e-6  # "below" is demanded, and float32 losses are not sure of more
LARGER, SMALLER = "mini-m", "mini-s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--models", nargs="+", help="directories or names; default: those in the package")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    packaged = packaged_models()
    directories = [packaged.get(name, Path(name)).resolve() for name in args.models or packaged]
    models = {directory.name: directory for directory in directories}
    if not models:
        parser.error("no models are installed with kvjax; give directories with --models")
    for directory in directories:
        if not (directory / "config.json").is_file():
            parser.error(f"--models {directory}: holds no config.json")
        if models[directory.name] != directory:
            parser.error(f"--models {directory}: has the name of {models[directory.name]}")

    kvjax.compile_cache()
    confirmation = Confirmation(args.corpus)
    documents = confirmation.documents
    facts = {"split": "confirmation", "documents": len(documents), "bytes": documents.bytes,
             "interval": f"{LEVEL:.0%}, documents drawn with replacement"}  # fmt: skip
    report = Report("bits per byte of the family", facts)
    own: dict[str, Scores] = {}
    ngrams: dict[str, tuple[Scores, list[str]]] = {}
    for name, directory in models.items():
        lm = kvjax.load(directory, dtype="float32")
        measured = confirmation.measure(lm)
        own[name], ngram, xz = measured.model, measured.ngram, measured.of(XZ)
        row(report, name, own[name])
        assert lm.tokenizer is not None
        ngrams.setdefault(lm.tokenizer.hash, (ngram, []))[1].append(name)
        for what, other in (("5-gram", ngram), (XZ, xz)):
            difference(report, f"{name} - {what}", own[name], other)
            ratio = own[name].bits_per_byte / other.bits_per_byte
            report.bar(f"{name}: bits per byte / those of {what}", ratio, "<=", 1 - STRICT)
        agreement(report, name, lm, directory, confirmation)
    for ngram, names in ngrams.values():
        row(report, f"5-gram over the tokens of {', '.join(names)}", ngram)
    for codec, found in confirmation.compressed.items():
        row(report, codec, Scores(found.each, next(iter(own.values())).bytes))
        one = {"code": f"{codec}, in one piece", "bits per byte": found.whole / documents.bytes}
        report.row("bits per byte", **one, low="", high="")
    if {LARGER, SMALLER} <= own.keys():
        high = difference(report, f"{LARGER} - {SMALLER}", own[LARGER], own[SMALLER])
        report.bar(f"{LARGER} - {SMALLER}: upper end of the interval", high, "<=", -STRICT)
    else:
        report.facts[f"{LARGER} - {SMALLER}"] = "not compared: both must be among the models"
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


def row(report: Report, code: str, scores: Scores) -> None:
    low, high = scores.interval()
    values = {"bits per byte": scores.bits_per_byte, "low": low, "high": high}
    report.row("bits per byte", code=code, **values)


def difference(report: Report, what: str, one: Scores, other: Scores) -> float:
    """A row of the differences; returns the interval's upper end."""
    value, low, high = one.minus(other)
    report.row("differences", what=what, **{"bits per byte": value}, low=low, high=high)
    return high


def agreement(report: Report, name: str, lm: LM, directory: Path, confirmation: Confirmation) -> None:
    """The largest difference between transformers' float32 logits and kvjax's on a prefix of the split."""
    if not importlib.util.find_spec("torch"):
        report.facts["transformers"] = "not compared, so unproved: torch is not installed (extra `parity`)"
        report.bar(f"{name}: logits compared with transformers'", 0, "==", 1)
        return
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report.facts["transformers"] = f"{transformers.__version__}, torch {torch.__version__}"
    assert lm.tokenizer is not None
    tokens = (t for text in confirmation.documents for t in lm.tokenizer.encode(text))
    ids = np.asarray([list(itertools.islice(tokens, PREFIX))], np.int32)
    peer = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = peer(torch.tensor(ids, dtype=torch.long)).logits[0].numpy()
    pos = jnp.arange(ids.shape[1])[None]
    ours = jax.jit(lambda params: lm.model.forward(params, ids, pos).logits[0])(lm.params)
    worst = np.abs(np.asarray(ours) - theirs).max()
    report.bar(f"{name}: largest difference from transformers' logits", worst, "<=", 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
