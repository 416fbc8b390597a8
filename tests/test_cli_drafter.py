"""`kvjax generate --drafter` and `kvjax check --drafter` with a drafter directory, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import kvjax
import serve
from kvjax.cli import main
from kvjax.compilation import compile_cache
from kvjax.decode.sources import Junk
from kvjax.lm import Drafter
from kvjax.models.drafter import DrafterConfig, build_drafter

GOLDEN = Path(__file__).parent / "golden"
MODEL = str(GOLDEN / "qwen3-tied")


@pytest.fixture(scope="module")
def lm() -> kvjax.LM:
    return kvjax.load(MODEL)


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory) -> str:
    """A random drafter for MODEL, with blocks of 4."""
    config = DrafterConfig(lm.config, taps=(0, 1), block=4, mask_id=335, target_layers=2)
    model = build_drafter(config, lm.model)
    out = tmp_path_factory.mktemp("drafters") / "random-b4"
    return str(kvjax.save_drafter(Drafter(model, model.init(1), None, "random"), out))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["--quiet", *arguments])


@pytest.fixture(scope="module", autouse=True)
def kept_programs(tmp_path_factory, restored_cache_options_after_module):
    """A compile cache that is already set up, which the commands respect: each of them loads anew."""
    compile_cache(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize(("flags", "width"), [(["--drafter"], 4), (["--width", "3", "--draft"], 3)])
def test_generate(lm, path, flags, width) -> None:
    result = run("generate", MODEL, "in the", "--no-chat", "-n", "12", "--json", *flags, path)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["program"]["source"], report["program"]["width"]) == ("DFlash", width)
    plain = serve.generate(lm, "in the", draft=Junk(width=width, vocab=320), max_new_tokens=12)
    assert report["tokens"] == list(plain[0].tokens)


def test_stop_strings_end_a_text_inside_a_block(lm, path) -> None:
    """A ragged batch, drafted by a random drafter: the texts of plain decoding, cut there."""
    drafter, prompts = kvjax.load_drafter(path, lm), ["in the", "the order of the"]
    plain = serve.generate(lm, prompts, draft=Junk(width=4, vocab=320), max_new_tokens=16)
    stop = [[g.text[5:7]] for g in plain]
    found = serve.generate(lm, prompts, draft=drafter, max_new_tokens=16, stop=stop)
    again = serve.generate(lm, prompts, draft=Junk(width=4, vocab=320), max_new_tokens=16, stop=stop)
    assert [(g.text, g.tokens, g.finish_reason) for g in found] == [
        (g.text, g.tokens, g.finish_reason) for g in again
    ]
    for got, whole, (s,) in zip(found, plain, stop):
        assert got.text == whole.text[: whole.text.index(s)] and got.finish_reason == "stop"


def test_check(path) -> None:
    """Its rows are in the table of claim (b) at the widths its blocks have, and nothing differs."""
    options = ["--prompts", "2", "--tokens", "6", "--samples", "16", "--widths", "4,5", "--json"]
    result = run("check", MODEL, "--drafter", path, *options)
    assert result.exit_code == 0, result.stdout + result.stderr
    (model,) = json.loads(result.stdout)["models"]
    rows = [row for row in model["tables"]["identity"] if row["drafts"].startswith(path)]
    assert {(row["drafts"], row["width"]) for row in rows} == {(path, 4), (f"{path}, alone", 4)}
    assert sum(row["rows"] for row in rows) >= 4
    assert not any(row["tokens differ"] or row["bits differ"] or row["cache off"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", MODEL, "x", "--drafter", "{path}", "--width", "5"], "width 5: this drafter's blocks have 4 rows"),
        (["generate", MODEL, "x", "--drafter", "{path}", "--width", "1"], "width 1: this drafter's blocks have 4 rows"),
        (["generate", MODEL, "x", "--drafter", str(GOLDEN / "dflash-a" / "drafter")], "hidden_size: the drafter was"),
        (["generate", str(GOLDEN / "llama31-rope"), "x", "--drafter", "{path}"], "config.json: "),
        (["generate", "{path}", "x"], "dflash_config"),
        (["check", MODEL, "--drafter", "./nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(path, arguments, message) -> None:
    result = run(*(a.format(path=path) for a in arguments))
    assert result.exit_code == 2 and message in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
