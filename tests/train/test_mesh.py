"""The same losses on every mesh: data parallel, model parallel and both against one device, over 20 steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.sharding import MeshError
from tests.train.test_pretrain import LLAMA, QWEN3, journal, losses, run_config, small_corpus
from train import loop
from train.pretrain import Pretrain

STEPS = 20
MODELS = {"qwen3": QWEN3, "llama": LLAMA}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def on_mesh(
    corpus: Path, model: dict[str, Any], mesh: tuple[int, int], parts: int = 1
) -> tuple[np.ndarray, Any]:
    settings = run_config(model, ((STEPS, 4, 32, parts),), run={"mesh": list(mesh)})
    task = Pretrain(settings, corpus)
    found, state = losses(task, settings, STEPS)
    return found, (task, state)


@pytest.fixture(scope="module", params=MODELS)
def alone(request: pytest.FixtureRequest, corpus: Path) -> tuple[str, np.ndarray, Any]:
    found, (_, state) = on_mesh(corpus, MODELS[request.param], (1, 1))
    return request.param, found, state


@pytest.mark.parametrize(("mesh", "parts"), [((2, 1), 2), ((1, 2), 1)])
def test_every_mesh_trains_the_same_model(
    corpus: Path, alone: tuple[str, np.ndarray, Any], mesh: tuple[int, int], parts: int
) -> None:
    name, want, state = alone
    assert want[-1] < want[0] - 0.5  # there is something to compare
    got, (task, there) = on_mesh(corpus, MODELS[name], mesh, parts)
    np.testing.assert_allclose(got, want, atol=1e-5)
    devices = {len(x.sharding.device_set) for x in there.params}
    assert devices == {mesh[0] * mesh[1]}
    for leaf, x, y in zip(task.master.names, there.params, state.params, strict=True):
        expected = task.rules.sharding(*task.master.axes(leaf))
        assert expected is not None and x.sharding.is_equivalent_to(expected, x.ndim), leaf
        np.testing.assert_allclose(x, y, atol=2e-4, err_msg=leaf)
    split = [
        m.addressable_shards[0].data.size < m.size for m in jax.tree.leaves(there.optimizer) if m.ndim > 1
    ]
    assert any(split) == (mesh[1] > 1)  # moments lie where their parameters lie


def test_a_run_on_a_mesh_resumes_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    settings = run_config(phases=((4, 4, 32),), run={"mesh": [2, 1], "every": 2})
    task = Pretrain(settings, corpus)
    loop.fit(task, settings, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "back")
    shutil.rmtree(tmp_path / "back" / loop.CHECKPOINTS / "4")
    assert loop.fit(task, settings, tmp_path / "back").done
    keys = ("step", "loss", "grad_norm")
    whole, back = ([[e[k] for k in keys] for e in journal(tmp_path / name)] for name in ("whole", "back"))
    assert whole == back and len(whole) == 4


def test_meshes_that_cannot_be_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="mesh 3x4 needs 12 devices, 8 are present"):
        Pretrain(run_config(run={"mesh": [3, 4]}), corpus)
    settings = run_config(run={"mesh": [4, 1]}, phases=((1, 2, 8),))
    with pytest.raises(ValueError, match="a batch of 2 in 1 part.* does not divide over a data axis of 4"):
        loop.fit(Pretrain(settings, corpus), settings, tmp_path / "run")
    with pytest.raises(ValueError, match="copies would be trained apart"):
        Pretrain(run_config(run={"mesh": [1, 4]}), corpus)
