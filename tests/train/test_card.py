"""A model card says what was measured and nothing else, and refuses figures of another model."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvjax
from kvjax.config import ModelConfig
from kvjax.lm import LM
from kvjax.models import build
from kvjax.tokenizer import Tokenizer
from train import card
from train import tokenizer as made
from train.card import CardError, write_card
from train.card_page import plot
from train.corpus import Document, write
from train.evaluate import Confirmation, Measured

CODE = Path(made.__file__).read_text("utf-8")
HARDWARE = "3 cores of a test machine"
CONTEXT = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for split, text in (("train", CODE), ("confirmation", Path(__file__).read_text("utf-8"))):
        pieces = [text[i : i + 900] for i in range(0, 3600, 900)]
        write(folder / split, [Document(f"p/{i}.py", piece, "code") for i, piece in enumerate(pieces)])
    made.save(made.train([CODE], made.Spec(300, made.SPECS["mini"].pattern, 0)), folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def exported(corpus: Path) -> Path:
    tokenizer = Tokenizer.from_directory(corpus / "tokenizer")
    config = ModelConfig.from_hf(
        dict(model_type="llama", vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=8, intermediate_size=24, rms_norm_eps=1e-6, rope_theta=1e4,
             tie_word_embeddings=True, max_position_embeddings=128, eos_token_id=0)
    )  # fmt: skip
    model = build(config)
    return kvjax.save_hf(
        LM(model, model.init(0), tokenizer, config, "tiny"), corpus / "model", dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def lm(exported: Path) -> LM:
    return kvjax.load(exported, dtype="float32")


@pytest.fixture(scope="module")
def measured(corpus: Path, lm: LM) -> Measured:
    return Confirmation(corpus).measure(lm, context=CONTEXT)


@pytest.fixture(scope="module")
def manifest(corpus: Path, lm: LM, measured: Measured) -> Path:
    assert lm.tokenizer is not None
    wheels = [{"name": f"w{i}", "licence": "MIT" if i else "BSD"} for i in range(5)]
    split = {"documents": 4, "bytes": int(measured.model.bytes.sum()), "sha256": "5" * 64}
    names = ("train", "selection", "confirmation")
    entry = {"vocab": 300, "sha256": lm.tokenizer.hash, "tokens": dict.fromkeys(names, 12345)}
    facts = {
        "recipe": "4" * 64, "stdlib": {"version": "3.11.7", "files": 600, "sha256": "6" * 64},
        "packages": dict.fromkeys(names, wheels), "splits": dict.fromkeys(names, split),
        "tokenizers": {"other": entry | {"sha256": "7" * 64}, "tiny-tok": entry},
    }  # fmt: skip
    path = corpus / "manifest.json"
    path.write_text(json.dumps(facts))
    return path


def history(steps: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    loss = 2 + 6 * np.exp(-np.arange(steps) / steps * 5) + rng.normal(0, 0.2, steps)
    entries: list[dict[str, Any]] = [
        {"step": i + 1, "loss": float(x), "rate": 0.003 * min(1, i / 20), "tokens": 64, "seconds": 36.0}
        for i, x in enumerate(loss)
    ]
    for entry in entries[49::50]:
        entry |= {"selection_loss": entry["loss"] + 0.1, "bits_per_byte": 1.5}
    return entries


@pytest.fixture
def run(tmp_path: Path, lm: LM) -> Path:
    assert lm.tokenizer is not None
    config = {
        "name": "tiny", "task.tokenizer": lm.tokenizer.hash, "run.compute": "float32", "options.model.vocab_size": 300,
        "options.model.hidden_size": 16, "options.model.num_hidden_layers": 2, "optimizer.rate": 0.00321,
        "optimizer.warmup": 21, "optimizer.schedule": "wsd", "optimizer.decay": 0.25, "optimizer.floor": 0.05,
        "optimizer.b1": 0.9, "optimizer.b2": 0.98, "optimizer.weight_decay": 0.1, "optimizer.clip": 1.5,
        "phases.0.steps": 150, "phases.0.batch": 2, "phases.0.length": 32, "phases.1.steps": 100,
        "phases.1.batch": 1, "phases.1.length": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in history(200)))
    return tmp_path


@pytest.fixture
def directory(tmp_path: Path, exported: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {k.replace("__", "."): v for k, v in values.items()})
    )


def test_every_figure_comes_from_what_was_given(directory, lm, run, measured, manifest):
    figures = write_card(directory, lm, run, measured, hardware=HARDWARE, step=150, manifest=manifest)
    assert figures == json.loads((directory / "card.json").read_text())
    page = (directory / "README.md").read_text()
    assert "{" not in re.sub(r"```.*?```", "", page, flags=re.DOTALL), "a place in the template was left open"
    assert page.startswith("---\nlicense: apache-2.0\nlanguage:\n- code\nlibrary_name: kvjax\n")
    table = {row["code"]: row for row in figures["confirmation"]["table"]}
    assert table["tiny"]["bits_per_byte"] == measured.model.bits_per_byte
    assert table["tiny"]["low"] < table["tiny"]["bits_per_byte"] < table["tiny"]["high"]
    assert table["xz -9e, each document"]["bits_per_byte"] == measured.of("xz -9e").bits_per_byte
    whole = table["xz -9e, the split in one piece"]
    assert whole["bits_per_byte"] == measured.compressed["xz -9e"].whole / measured.model.bytes.sum()
    parameters = sum(int(p.size) for p in lm.params)
    for told in (
        f"{parameters:,} parameters", "# tiny\n", "`" + "4" * 64, "`" + "5" * 64, lm.tokenizer.hash, "MIT (4), BSD (1)",
        "200 of 250 planned steps", "after step 150, 9,600 tokens in", "2.00 hours", HARDWARE, "0.00321", "21 steps",
        "| 1 | 150 | 2 | 32 | 9,600 |", "| 2 | 100 | 1 | 128 | 12,800 |", f"{history(200)[149]['selection_loss']:.3f}",
        f"| tiny | {measured.model.bits_per_byte:.4f} |", "43% of its training tokens", "from 5 packages",
        f"| xz -9e, the split in one piece | {whole['bits_per_byte']:.4f} |", "at norm 1.5",
    ):  # fmt: skip
        assert told in page, told
    assert len(figures["weights"]["model.safetensors"]) == 64


def test_another_run_makes_another_card(directory, lm, run, measured, manifest):
    first = write_card(directory, lm, run, measured, hardware=HARDWARE, manifest=manifest)
    assert first["training"]["step"] == 200 and first["training"]["tokens"] == 12_800
    change(run / "config.json", optimizer__schedule="cosine", name="other")
    lines = (run / "metrics.jsonl").read_text().splitlines()[:100]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    second = write_card(directory, lm, run, measured, hardware="another", manifest=manifest)
    page = (directory / "README.md").read_text()
    assert "# other\n" in page and "a cosine" in page and "100 of 250" in page and "1.00 hours" in page
    assert second["training"]["step"] == 100 and HARDWARE not in page


def test_samples_are_64_tokens_and_repeat(lm, monkeypatch: pytest.MonkeyPatch):
    told = []
    generate = card.serve.generate

    def listening(*args, **options):
        result = generate(*args, **options)
        told.extend(result)
        return result

    monkeypatch.setattr(card.serve, "generate", listening)
    found = card.samples(lm)
    assert found == card.samples(lm)
    assert [len(answer.tokens) for answer in told] == [64] * 2 * 2 * len(card.PROMPTS)
    assert [s["prompt"] for s in found] == list(card.PROMPTS)
    assert all(s["greedy"] != s["sampled"] for s in found)
    greedy = generate(lm, card.PROMPTS[1], max_new_tokens=64, stop_ids=())[0].tokens
    assert lm.tokenizer.decode(greedy, skip_special=False) == found[1]["greedy"]


def test_a_sample_cannot_leave_its_fence():
    from train.card_page import _sample

    text = _sample({"prompt": "a", "greedy": "```\n# not a heading\n````"})
    assert "`````text\n```\n# not a heading\n````\n`````" in text


def test_the_curve_is_small_and_shows_all():
    from PIL import Image

    phases = [{"steps": 11_000, "batch": 8, "length": 256}, {"steps": 500, "batch": 2, "length": 2048}]
    entries = history(11_500)
    data = plot(entries, phases)
    assert len(data) < 60_000 and plot(entries, phases) == data
    image = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    for colour in ((0xC6, 0xD8, 0xEA), (0x1F, 0x5F, 0x9E), (0xD1, 0x49, 0x5B), (0x7A, 0x9E, 0x3F)):
        assert (abs(image - colour).sum(-1) < 30).sum() > 20, f"nothing drawn in {colour}"
    plain = [{k: v for k, v in e.items() if k != "selection_loss"} for e in entries]
    assert plot(plain, phases) != data and plot(entries, phases[:1]) != data
    assert plot(entries[:1], phases)


def test_what_does_not_belong_together_is_refused(directory, lm, run, measured, manifest, corpus):
    def card_of(**options):
        return write_card(
            directory, lm, run, **({"measured": measured, "manifest": manifest} | options), hardware=""
        )

    config, metrics = run / "config.json", run / "metrics.jsonl"
    good, lines = config.read_text(), metrics.read_text()
    for changed, told in (
        ({"task.tokenizer": "8" * 64}, "task.tokenizer is 8888"),
        (
            {"options.model.hidden_size": 32},
            "config.json: options.model.hidden_size is 32, and of this model 16",
        ),
    ):
        config.write_text(json.dumps(json.loads(good) | changed))
        with pytest.raises(CardError, match=told):
            card_of()
    config.write_text(good)
    with pytest.raises(CardError, match=r"metrics.jsonl: has no step 201; its last is 200"):
        card_of(step=201)
    metrics.write_text(lines + '{"step": 201}\n')
    with pytest.raises(CardError, match="metrics.jsonl: a line lacks"):
        card_of()
    metrics.write_text(lines + '{"step": 2')
    with pytest.raises(CardError, match="metrics.jsonl: cannot be read"):
        card_of()
    metrics.write_text(lines)
    facts = json.loads(manifest.read_text())
    other = run / "manifest.json"
    for path, value, told in (
        (("splits", "confirmation", "bytes"), 5, "splits.confirmation.bytes is 5"),
        (("tokenizers", "tiny-tok", "sha256"), "9", "no tokenizer has the model's SHA-256"),
    ):
        changed = json.loads(json.dumps(facts))
        changed[path[0]][path[1]][path[2]] = value
        other.write_text(json.dumps(changed))
        with pytest.raises(CardError, match=told):
            card_of(manifest=other)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CardError, match="holds no .*safetensors"):
        card_of()
    assert not (directory / "README.md").exists()


def test_the_command(directory, run, corpus, manifest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "config_path", lambda name: manifest)
    monkeypatch.setattr(card, "Confirmation", lambda path: Small(path))

    class Small(Confirmation):
        def measure(self, lm, *, context=CONTEXT):
            return super().measure(lm, context=context)

    options = [f"--model={directory}", f"--run={run}", f"--corpus={corpus}", f"--hardware={HARDWARE}"]
    result = CliRunner().invoke(card.main, options)
    assert result.exit_code == 0, result.output
    assert HARDWARE in (directory / "README.md").read_text()
    result = CliRunner().invoke(card.main, [*options, "--step=999"])
    assert result.exit_code == 1 and "has no step 999" in result.output
