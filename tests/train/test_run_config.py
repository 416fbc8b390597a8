"""What a run may be told: every refusal names file, table and key; a stored configuration is compared key by key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.resources import config_path
from train import config
from train.config import Phase, TrainError, differences
from train.pretrain import _loadable

TEXT = """
name = "small"
task = "pretrain"
[pretrain]
tokenizer = "t"
[pretrain.model]
hidden_size = 8
[optimizer]
rate = 1e-3
[[phases]]
steps = 3
batch = 4
length = 8
[[phases]]
steps = 2
batch = 2
length = 16
accumulate = 2
[run]
mesh = [2, 1]
"""


def read(folder: Path, text: str) -> config.TrainConfig:
    path = folder / "run.toml"
    path.write_text(text)
    return config.read(path)


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    got = read(tmp_path, TEXT)
    assert (got.name, got.task, got.steps) == ("small", "pretrain", 5)
    assert got.phases == (Phase(3, 4, 8), Phase(2, 2, 16, 2)) and got.run.mesh == (2, 1)
    assert got.optimizer.clip == 1.0 and got.run.compute == "float32"
    assert got.options == {"tokenizer": "t", "model": {"hidden_size": 8}}


@pytest.mark.parametrize("name", ["mini-s", "mini-m", "mini-x"])
def test_the_packaged_configurations_are_whole(name: str) -> None:
    got = config.read(config_path(f"mini/{name}.toml"))
    assert got.name == name and got.steps == sum(phase.steps for phase in got.phases)
    _loadable(got.options["model"])


REFUSED = {
    "rate = 1e-3": {
        "rate = 0": "optimizer: optimizer.rate must be positive, got 0",
        "rate = nan": "optimizer.rate must be positive",
        "rate = '1e-3'": 'field "rate" - should be "float"',
        "rate = true": "optimizer: true stands where a number should",
        "warmup = 3": 'missing value for field "rate"',
        "rate = 1\nlr = 2": "unknown lr; known: rate, warmup",
        "rate = 1\nschedule = 'linear'": "'linear' is not one of cosine, wsd",
        "rate = 1\nb2 = 1": r"optimizer.b2 must lie in \[0, 1\)",
        "rate = 1\nfloor = 1.5": r"optimizer.floor must lie in \[0, 1\]",
        "rate = 1\nweight_decay = -1": "weight_decay must not be negative",
        "rate = 1\nwarmup = 1.5": 'field "warmup" - should be "int"',
        "rate = 1\nclip = inf": "optimizer.clip must be positive",
    },
    "steps = 3": {
        "steps = 0": r"phases\[0\]: phases.steps must be at least 1, got 0",
        "steps = 3\naccumulate = 3": "phases.batch = 4 does not divide into phases.accumulate = 3 parts",
        "steps = 3\nstep = 1": r"phases\[0\]: unknown step",
        "steps = true": r"phases\[0\]: true stands where a number should",
    },
    "mesh = [2, 1]": {
        "mesh = [2]": 'run: wrong value type for field "mesh"',
        "mesh = 2": "run: ",
        "mesh = [0, 1]": r"run.mesh must be two sizes of at least 1, got \[0, 1\]",
        "compute = 'float16'": "'float16' is not one of float32, bfloat16",
        "every = 0": "run.every must be at least 1",
        "diverged = 0.5": "run.diverged must be above 1",
        "seed = -1": "run.seed must lie in",
        "remat = 'yes'": 'field "remat" - should be "bool"',
    },
    "name = \"small\"": {"": "name is missing or not a str", "name = 3": "name is missing or not a str"},
    "[run]": {"[runs]": "unknown runs; known: name, task, optimizer, phases, run, pretrain"},
    "[[phases]]": {"[[stages]]": "phases is missing or not a list", "phases = []\n[[x]]": "unknown x"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(old, new, what) for old, news in REFUSED.items() for new, what in news.items()],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = TEXT.replace(old, new) if old.startswith("[[") else TEXT.replace(old, new, 1)
    if new.startswith("phases = []"):  # a list of tables cannot follow an empty list of the same name
        text = TEXT.split("[[phases]]")[0].replace('task = "pretrain"', 'task = "pretrain"\nphases = []')
        message = "phases is empty"
    with pytest.raises(TrainError, match=message) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "run.toml"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="absent.toml: No such file"):
        config.read(tmp_path / "absent.toml")
    with pytest.raises(TrainError, match="Is a directory"):
        config.read(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(TrainError, match="latin.toml: not TOML"):
        config.read(tmp_path / "latin.toml")
    with pytest.raises(TrainError, match="not TOML"):
        read(tmp_path, "name =")


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_every_step_lies_in_one_phase(steps: list[int]) -> None:
    base = config.TrainConfig(
        "n", "t", config.OptimizerConfig(1.0), tuple(Phase(n, 1, 1) for n in steps), config.RunConfig(), {}
    )
    places = [base.phase_at(i) for i in range(base.steps)]
    assert places == [(i, k) for i, n in enumerate(steps) for k in range(n)]
    assert base.phase_at(base.steps) == (len(steps), 0)


def test_differences_name_keys_and_both_values(tmp_path: Path) -> None:
    first = read(tmp_path, TEXT)
    stored = json.loads(json.dumps(first.flat()))
    assert differences(stored, json.loads(json.dumps(first.flat()))) == []
    second = read(
        tmp_path, TEXT.replace("rate = 1e-3", "rate = 2e-3").replace("hidden_size = 8", "hidden_size = 9")
    )
    second = dataclasses.replace(second, run=dataclasses.replace(second.run, every=7, keep=9))
    second = dataclasses.replace(second, phases=second.phases[:1])
    found = differences(stored, second.flat())
    assert "optimizer.rate: 0.001 then, 0.002 now" in found and "pretrain" not in "".join(found)
    assert "options.model.hidden_size: 8 then, 9 now" in found
    assert {f.partition(":")[0] for f in found} == {
        "optimizer.rate", "options.model.hidden_size",
        *(f"phases.1.{field.name}" for field in dataclasses.fields(Phase)),
    }  # fmt: skip
    assert any(f.endswith("'absent' now") for f in found)
