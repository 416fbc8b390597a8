"""`kvjax judge-transfer` from end to end, on a tiny model as both source and target."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvjax.cli import main
from kvjax.transfer import study
from train.corpus import Document, write

GOLDEN = Path(__file__).parents[1] / "golden"


def pair_file(path: Path, **change: str) -> Path:
    model = GOLDEN / "qwen3-tied"
    lines = {
        "head": f'source = "{model}"\ntarget = "{model}"',
        "texts": "[texts]\nprefix = 24\nsuffix = 8\ndocuments = 4",
        "fit": '[fit]\nk = [1, 2]\nsequences = 16\nlength = 40\nridge = 1e-6',
        "rollout": "[rollout]\nsteps = 3",
        "choice": "[choice]\nitems = 8\nprefix = 16\nsuffix = 6",
    }  # fmt: skip
    path.write_text("\n".join({**lines, **change}.values()))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for split, count in (("train", 20), ("selection", 18), ("confirmation", 8)):
        texts = ["".join(rng.choices(string.printable, k=160)) for _ in range(count)]
        write(root / split, [Document(f"p/{i}", t, "code") for i, t in enumerate(texts)])
    return root


def test_a_pair_is_judged_with_all_its_controls(corpus: Path, tmp_path: Path) -> None:
    path = pair_file(tmp_path / "pair.toml")
    plots = tmp_path / "plots"
    done = CliRunner().invoke(
        main, ["judge-transfer", str(path), "--corpus", str(corpus), "--plots", str(plots), "--json"]
    )
    report = json.loads(done.stdout)
    assert [row["k"] for row in report["tables"]["k"]] == [1, 2]
    rows = {row["condition"]: row for row in report["tables"]["conditions"]}
    assert {"native", "source alone", "closed form", "no context", "zero cache", "random map"} <= set(rows)
    assert rows["closed form"]["kl"] < 1e-2 < rows["no context"]["kl"]
    assert rows["native, re-injected"]["cosine"] > 0.9999
    choice = {row["condition"]: row for row in report["tables"]["choice"]}
    assert choice["native"]["right"] == choice["closed form"]["right"]
    bars = {bar["name"]: bar["ok"] for bar in report["bars"]}
    assert bars["native cache re-injected: mean KL"]
    assert "choice is valid: native" in bars and done.exit_code == (0 if all(bars.values()) else 1)
    assert {p.name for p in plots.iterdir()} == {"sweep.png", "conditions.png"}


def test_a_pair_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(study.StudyError, match="absent.toml: No such file"):
        study.read(tmp_path / "absent.toml")
    for change, message in (
        ({"fit": "[fit]\nk = [1]\nkay = 2"}, "unknown kay; known: k, sequences"),
        ({"head": 'source = "a"'}, 'missing value for field "target"'),
        ({"texts": "[texts]\nprefix = true"}, "true stands where a number should"),
    ):
        with pytest.raises(study.StudyError, match=message):
            study.read(pair_file(tmp_path / "pair.toml", **change))
