"""`check` on tiny models: it passes, says how much it looked at, and fails where a bar is not met."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax.check import Report, check
from kvjax.check.across import judge
from kvjax.check.host import Setting
from kvjax.check.identity import Pair, arrange
from kvjax.check.programs import Answer, Request
from kvjax.check.teacher import Teacher
from kvjax.report import Bar


@pytest.fixture(scope="module", params=["llama31-rope", "qwen2-window"])
def report(request, golden_dirs):
    (path,) = [p for p in golden_dirs if p.name == request.param]
    return Report((check(kvjax.load(path), count=9, tokens=12, widths=(4,), samples=96),))


def test_a_model_passes(report):
    assert report.ok, report.text()
    (model,) = report.models
    rows = model.tables["identity"]
    assert {row["drafts"] for row in rows} >= {"oracle", "oracle, every 3rd wrong", "n-gram"}
    assert {row["mode"] for row in rows} == {"greedy", "T=0.7 top_p=0.9"}
    # every prompt in both modes under the three drafters that take whole batches, and one row alone of each batch
    assert model.facts["answers"] == 9 * 2 * 3 + 3
    assert model.facts["tokens"] == 12 * model.facts["answers"]
    assert model.tables["programs"][0]["rows"] == 18
    assert all(row["samples"] > 0 for row in model.tables["distribution"])


def test_wrong_drafts_were_rejected_and_right_ones_taken(report):
    rows = {(row["drafts"], row["mode"]): row for row in report.models[0].tables["identity"]}
    right, wrong = rows["oracle", "greedy"], rows["oracle, every 3rd wrong", "greedy"]
    assert right["rounds"] == 3 * right["rows"] and right["accepted"] == 9 * right["rows"]
    assert right["rounds"] < wrong["rounds"] < wrong["tokens"]


def test_the_report_is_json_and_text(report):
    found = json.loads(json.dumps(report.json(), allow_nan=False))
    assert found["ok"] is True and found["total"]["prompts"] == 9
    assert all(set(bar) == {"name", "value", "bound", "ok"} for bar in found["bars"])
    assert "every bar is met" in report.text()


def test_one_missed_bar_fails_the_report(report):
    (model,) = report.models
    worse = dataclasses.replace(model, bars=[*model.bars, Bar("something", 1, "<=", 0)])
    both = Report((model, worse))
    assert not both.ok and not both.json()["ok"] and "NOT every bar" in both.text()
    assert len({bar["name"] for bar in both.json()["bars"]}) > len(model.bars)  # names say whose bar it is


def test_a_mismatch_is_judged_at_its_first_position(golden_dirs):
    """Two made-up answers that part at the second token, there with the referee's best and worst id."""
    lm = kvjax.load(golden_dirs[0])
    referee = Teacher.referee(lm)
    ids = (5, 6, 7)
    text = np.zeros(64, np.int32)
    text[:4] = [*ids, 9]
    logits = referee.at(text, 4)[: lm.tokenizer.vocab]
    first, second, worst = np.argsort(-logits)[[0, 1, -1]]

    def pair(token):
        answers = []
        for tail in ([9, first, 3], [9, token, 4]):
            whole = text.copy()
            whole[3:6] = tail
            answers.append(Answer(np.asarray(tail), np.zeros(3, np.float32), whole, 3, 0, 5))
        return Pair(Request(0, ids, Setting()), 4, *answers)

    near, far = (judge(lm, referee, pair(token), tau=1e-3) for token in (second, worst))
    assert near["position"] == far["position"] == 4 and (near["width 1"], near["width W"]) == (first, second)
    assert near["gap"] == pytest.approx(float(logits[first] - logits[second]), abs=1e-6)
    assert near["gap"] == pytest.approx(near["top-2 gap"]) and not far["explained"]
    assert judge(lm, referee, pair(second), tau=near["gap"] + 1e-6)["explained"]


def test_arrangements_of_rows():
    assert arrange("same", 3, 5, 0) == [0, 1, 2, None, None]
    assert arrange("reversed", 3, 5, 0) == [None, None, 2, 1, 0]
    assert arrange("alone", 3, 5, 1) == [None, None, None, None, 1]
    with pytest.raises(ValueError, match="sideways"):
        arrange("sideways", 3, 5, 0)


@pytest.mark.parametrize(
    "options, named",
    [({"count": 0}, "prompts"), ({"tokens": 0}, "tokens"), ({"samples": 0}, "samples"), ({"widths": (1, 4)}, "widths"),
     ({"widths": ()}, "widths"), ({"tokens": 600}, "positions")],
)  # fmt: skip
def test_wrong_arguments_are_named(golden_dirs, options, named):
    with pytest.raises(ValueError, match=named):
        check(kvjax.load(golden_dirs[0]), **options)


@pytest.mark.slow
def test_a_real_model_passes(smollm2):
    report = Report((check(kvjax.load(smollm2), count=8, tokens=16, widths=(4,), samples=96),))
    assert report.ok, report.text()
