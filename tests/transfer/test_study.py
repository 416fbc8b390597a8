"""`kvjax judge-transfer` from end to end, on a tiny model as both source and target."""

from __future__ import annotations

import dataclasses
import json
import random
import string
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvjax
from kvjax.cli import main
from kvjax.documents import Documents
from kvjax.report import Report
from kvjax.transfer import latency, pairfile, study, verdict
from kvjax.transfer.judge import Answers
from kvjax.transfer.pairs import FitOptions, fit_pair
from train.config import parse
from train.config import read as train_config
from train.corpus import Document, write
from train.mapper import MapperOptions

GOLDEN = Path(__file__).parents[1] / "golden"


def pair_file(path: Path, **change: str) -> Path:
    model = GOLDEN / "qwen3-tied"
    lines = {
        "head": f'source = "{model}"\ntarget = "{model}"',
        "texts": "[texts]\nprefix = 24\nsuffix = 8\ndocuments = 4",
        "fit": f"[fit]\nk = [1, 2]\nkinds = {list(pairfile.KINDS)}\nsequences = 16\nlength = 40\nridge = 1e-6",
        "rollout": "[rollout]\nsteps = 3",
        "repair": "[repair]\ntails = [1, 8]\nlayers = [0, 1]",
        "speed": "[speed]\nlengths = [32, 64]\ntail = 8\nrepeats = 1",
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


@pytest.fixture(scope="module")
def maps(corpus: Path, tmp_path_factory) -> Path:
    """A "trained" map, nearly perfect, whose control is itself: source and target are one model."""
    root = tmp_path_factory.mktemp("maps")
    lm = kvjax.load(GOLDEN / "qwen3-tied")
    options = FitOptions(k=1, layers="matching", ridge=1e-6, length=40, sequences=16, held=4)
    fit_pair(lm, lm, Documents(corpus / "train"), Documents(corpus / "selection"), root / "own", options)
    return root


TRAINED = '[trained.own]\nmap = "own"\ncontrol = "own"'


def judged(path: Path, corpus: Path, *options: str) -> tuple[dict, int]:
    done = CliRunner().invoke(
        main, ["judge-transfer", str(path), "--corpus", str(corpus), "--json", *options]
    )
    return json.loads(done.stdout), done.exit_code


def test_a_pair_is_judged_with_all_its_controls(corpus: Path, maps: Path, tmp_path: Path) -> None:
    bars = "[bars.own]\nrecovery = 0.5\ntop1 = 0.9\nquality = 0.0\n[bars.'closed form']\ntop1 = 1.5"
    path = pair_file(tmp_path / "pair.toml", trained=TRAINED, bars=bars)
    plots = tmp_path / "plots"
    report, status = judged(path, corpus, "--maps", str(maps), "--plots", str(plots))
    sweep = {(row["kind"], row["k"]): row for row in report["tables"]["sweep"]}
    assert list(sweep) == [(kind, k) for kind in pairfile.KINDS for k in (1, 2)]
    for k in (1, 2):  # fewer inputs explain less
        whole, own, local = (sweep[kind, k] for kind in pairfile.KINDS)
        assert whole["weights"] == 2 * own["weights"] > local["weights"]
    rows = {row["condition"]: row for row in report["tables"]["conditions"]}
    assert {"native", "source alone", "closed form", "own", "self-map control, own", "no context", "zero cache",
            "random map", "another text's cache, closed form", "another text's cache, own",
            "text hand-off, 3 tokens", "last 3 tokens alone"} <= set(rows)  # fmt: skip
    assert rows["closed form"]["kl"] < 1e-2 < rows["no context"]["kl"]
    assert rows["native"]["recovery"] == 1 and rows["no context"]["recovery"] == 0
    more = {row["condition"]: row for row in report["tables"]["continuations and attention"]}
    assert more["native, re-injected"]["cosine"] > 0.9999 and more["no context"]["cosine"] == ""
    assert (
        more["native"]["forced_kl"] == 0
        and more["closed form"]["forced_kl"] < more["zero cache"]["forced_kl"]
    )
    (training,) = report["tables"]["training"]
    assert abs(training["control_gain"]) < 1e-2 and abs(training["recovery_less_tuning"] - 1) < 0.3
    choice = {row["condition"]: row for row in report["tables"]["choice"]}
    assert choice["native"]["right"] == choice["closed form"]["right"]

    repair = [row for row in report["tables"]["repair"] if row["split"] == "selection"]
    assert [(row["tail"], row["layers"]) for row in repair] == [(1, 0), (1, 1), (8, 0), (8, 1)]
    (final,) = [row for row in report["tables"]["repair"] if row["split"] == "confirmation"]
    assert final["cost"] == min(row["cost"] for row in repair if row["top1"] >= study.ENOUGH)
    speed = report["tables"]["time to first token"]
    assert [row["tokens"] for row in speed] == [32, 64] and min(row["warm ms"] for row in speed) > 0
    assert {"break-even, warm", "break-even, cold"} <= set(report["facts"])

    bars = {bar["name"]: bar["ok"] for bar in report["bars"]}
    assert bars["native cache re-injected: mean KL"] and "choice is valid: native" in bars
    assert bars["own: recovery"] and bars["own: top1"]
    assert not bars["closed form: top1"] and status == 1  # more than can be
    assert {p.stem for p in plots.iterdir()} == {"sweep", "conditions", "repair", "speed"}


def test_a_context_that_does_not_matter_fails_loudly() -> None:
    """The same figures whatever the cache: the text did not need it, so the judgement is worth nothing."""
    rng = np.random.default_rng(0)
    nats = rng.normal(3, 0.1, 50)

    def results(worse: float) -> dict[str, Answers]:
        other = nats + worse + rng.normal(0, 0.01, 50)
        zero = Answers(nats, 0 * nats, nats)
        return {"native, re-injected": zero, "m": zero, **{
            name: Answers(other, nats, nats) for name in ("no context", verdict.mismatch_of("m"))
        }}  # fmt: skip

    for worse, ok in ((0.0, False), (0.011, False), (0.1, True)):
        report = Report("")
        verdict.sanity(report, results(worse), ["m"])
        assert report.bars[0].ok and [bar.ok for bar in report.bars[1:]] == [ok, ok], worse


def test_break_even() -> None:
    def rows(*ahead: float) -> list[dict]:
        return [{"tokens": 100 * (i + 1), "native ms": 5 + x, "warm ms": 5} for i, x in enumerate(ahead)]

    assert latency.break_even(rows(1, 2), "warm") == 100
    assert latency.break_even(rows(-1, 1, 2), "warm") == 150
    assert latency.break_even(rows(1, -1, 3), "warm") == 225  # from where on it stays faster
    assert latency.break_even(rows(1, -1), "warm") is None
    assert latency.told(None, rows(-1, -1)) == "not reached at 200 tokens"


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs/pairs").rglob("*.toml")), ids=lambda p: p.stem
)
def test_the_shipped_files_are_read(path: Path) -> None:
    """And every trained map a pair names is one that a shipped configuration trains, like its control."""
    if path.parent.name == "train":
        config = train_config(path)
        options = parse(MapperOptions, config.options, "mapper")
        assert len(options.losses) in (1, len(config.phases)) and config.name == path.stem
        return
    pair = pairfile.read(path)
    assert pair.trained and pair.bars
    for entry in pair.trained.values():
        made, control = (
            train_config(path.parent / "train" / f"{Path(d).parts[0]}.toml")
            for d in (entry.map, entry.control)
        )
        assert control.options["source"] == control.options["target"] == made.options["target"] == pair.target
        assert made.options["source"] == pair.source
        told = [  # the control starts with next to no loss, so its limit on divergence is its own
            (
                c.optimizer,
                c.phases,
                dataclasses.replace(c.run, diverged=2.0),
                c.options | {"source": "", "start": ""},
            )
            for c in (made, control)
        ]
        assert told[0] == told[1]


def test_a_pair_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(pairfile.StudyError, match="absent.toml: No such file"):
        pairfile.read(tmp_path / "absent.toml")
    for change, message in (
        ({"fit": "[fit]\nk = [1]\nkay = 2"}, "unknown kay; known: k, kinds, sequences"),
        (
            {"fit": '[fit]\nk = [1]\nlayers = "mathcing"'},
            "fit.layers: 'mathcing' is not one of explained, matching",
        ),
        ({"fit": '[fit]\nk = [1]\nkinds = ["all"]'}, "fit.kinds: 'all' is not one of both"),
        ({"head": 'source = "a"'}, 'missing value for field "target"'),
        ({"texts": "[texts]\nprefix = true"}, "true stands where a number should"),
        ({"trained": '[trained.x]\nmap = "a"'}, "control"),
        ({"bars": "[bars.x]\ntop1 = 0.9"}, "bars.x: there is no such map"),
        ({"choice": "[choice]\nitems = 0\n[bars.'closed form']\nquality = 0.9"}, "no quality is measured"),
    ):
        with pytest.raises(pairfile.StudyError, match=message):
            pairfile.read(pair_file(tmp_path / "pair.toml", **change))
