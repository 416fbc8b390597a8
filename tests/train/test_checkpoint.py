"""Checkpoints: whatever becomes of the newest one's files, what is loaded is what was saved; disks that are full."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.sharding import make_mesh
from train import checkpoint, step
from train.checkpoint import Checkpoints
from train.config import TrainError

ROOT = Path(__file__).parents[2]
# Orbax leaves coroutines behind where a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TRANSFORM = optax.adamw(1e-3)


def state_of(seed: int, width: int = 64) -> step.TrainState:
    rng = np.random.default_rng(seed)
    params = tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((width, 32), (32,), (4, 8, 16)))
    return step.create(params, TRANSFORM, seed)


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def position(number: int) -> str:
    return json.dumps({"next": number})


def fill(folder: Path, scores: dict[int, float], keep: int = 2) -> Path:
    """A checkpoint for each step, of the state with that seed."""
    checkpoints = Checkpoints(folder, keep=keep, best="score")
    for number, score in scores.items():
        checkpoints.save(number, state_of(number), position(number), {"score": score})
    checkpoints.close()
    return folder


def load(folder: Path) -> tuple[int, Any, str] | None:
    checkpoints = Checkpoints(folder, keep=2, best="score")
    try:
        return checkpoints.load(abstract(state_of(0)))
    finally:
        checkpoints.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("run") / "checkpoints", {10: 1.0, 20: 2.0})


def test_what_is_loaded_is_what_was_saved(written: Path) -> None:
    number, state, where = load(written)  # type: ignore[misc]
    assert number == 20 and where == position(20) and equal(state, state_of(20))


def test_an_empty_directory_has_none(tmp_path: Path) -> None:
    assert load(tmp_path / "none") is None


def test_the_arrays_may_be_donated_at_once(tmp_path: Path) -> None:
    """Saving is asynchronous; what is written are the values at the call."""
    state = state_of(3, width=4096)
    want = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path, keep=2, best="score")
    checkpoints.save(3, state, "", {})
    destroy = jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)
    jax.block_until_ready(destroy(state))
    checkpoints.wait()
    assert equal(checkpoints.load(abstract(state_of(3, width=4096)))[1], want)  # type: ignore[index]
    checkpoints.close()


# --- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Eight bytes in the middle."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(b ^ 0x55 for b in data[middle : middle + 8])
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "garbled": flip,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_file_of_the_newest_checkpoint_may_be_damaged(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Each file in turn: the newest checkpoint is loaded bit for bit, or it is named in the log, the older one is
    loaded, and the run can save that step again."""
    files = sorted(p.relative_to(written) for p in (written / "20").rglob("*") if p.is_file())
    assert len(files) >= 10
    older = 0
    for name in files:
        folder = tmp_path / "copy"
        shutil.copytree(written, folder)
        DAMAGE[damage](folder / name)
        caplog.clear()
        number, state, where = load(folder)  # type: ignore[misc]
        assert number in (10, 20) and where == position(number) and equal(state, state_of(number)), name
        if number == 10:
            older += 1
            said = [
                r.getMessage() for r in caplog.records if r.name == "kvjax" and r.levelno == logging.WARNING
            ]
            assert any(m.startswith(f"checkpoint 20 in {folder} cannot be read: ") for m in said), name
            assert f"using checkpoint 10 of {folder}, the newest whole one" in said
            fill(folder, {20: 1.5})
            assert load(folder)[0] == 20  # type: ignore[index]
        shutil.rmtree(folder)
    assert older >= (4 if damage == "garbled" else 6), "the damage did nothing"


def test_the_tensors_bytes_are_checked(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Orbax returns garbled tensors without a word; the checksum does not let them pass."""
    folder = shutil.copytree(written, tmp_path / "copy")
    flip(max((folder / "20").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0))
    assert load(folder)[0] == 10  # type: ignore[index]
    assert "checkpoint 20" in caplog.text


@pytest.mark.parametrize("kind", ["empty directory", "temporary directory", "no state"])
def test_partial_directories_are_passed_over(written: Path, tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(written, tmp_path / "copy")
    if kind == "empty directory":
        (folder / "30").mkdir()
    elif kind == "temporary directory":
        shutil.copytree(folder / "20" / "data", folder / "30.orbax-checkpoint-tmp" / "data")
    else:
        shutil.rmtree(folder / "20" / "state")
    assert load(folder)[0] == (10 if kind == "no state" else 20)  # type: ignore[index]
    fill(folder, {30: 1.5})
    assert load(folder)[0] == 30  # type: ignore[index]


def test_nothing_is_renamed_where_none_can_be_read(written: Path, tmp_path: Path) -> None:
    """It may be the reader that is wrong."""
    folder = shutil.copytree(written, tmp_path / "copy")
    checkpoints = Checkpoints(folder, keep=2, best="score")
    with pytest.raises(TrainError, match=r"none of the checkpoints \[20, 10\] can be read; restore one"):
        checkpoints.load(abstract(state_of(0, width=65)))
    with pytest.raises(TrainError, match="checkpoint 20 cannot be read"):
        checkpoints.read(20, abstract(state_of(0, width=65)))
    checkpoints.close()
    assert load(folder)[0] == 20  # type: ignore[index]


def test_checkpoints_without_a_checksum_are_read(tmp_path: Path) -> None:
    """The first runs wrote none."""
    checkpoints = Checkpoints(tmp_path, keep=1, best="score")
    items = {"state": state_of(10), "data": {"position": position(10)}}
    checkpoints._checkpointer.save_checkpointables(10, items, metrics={"score": 1.0})
    checkpoints.close()
    number, state, where = load(tmp_path)  # type: ignore[misc]
    assert number == 10 and where == position(10) and equal(state, state_of(10))


# --- which are kept -------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = fill(tmp_path, {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: 5.0})
    assert steps(folder) == [20, 40, 50]
    checkpoints = Checkpoints(folder, keep=2, best="score")
    assert checkpoints.best() == 20 and checkpoints.scores(20) == {"score": 1.0}
    assert equal(checkpoints.read(20, abstract(state_of(0))), state_of(20))
    checkpoints.close()


def test_the_best_is_remembered_when_resumed(tmp_path: Path) -> None:
    """A later process knows the earlier scores: the best stays, until a better one comes."""
    folder = fill(tmp_path, {10: 1.0, 20: 2.0})
    for number in (30, 40, 50):
        fill(folder, {number: 3.0})
    assert steps(folder) == [10, 40, 50]
    fill(folder, {60: 0.5})
    fill(folder, {70: 3.0, 80: 3.0})
    assert steps(folder) == [60, 70, 80]


# --- failures to write ----------------------------------------------------------------------------------------------

FULL = """
import resource, sys
from pathlib import Path
from tests.train.test_checkpoint import fill, state_of, position
from train.checkpoint import Checkpoints
from train.config import TrainError

folder = fill(Path(sys.argv[1]), {10: 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
checkpoints = Checkpoints(folder, keep=1, best="score")
checkpoints.save(20, state_of(20, width=2048), position(20), {"score": 0.5})
for attempt in (checkpoints.close, lambda: checkpoints.save(30, state_of(30), "", {}), checkpoints.close):
    try:
        attempt()
        print("ok")
    except TrainError as error:
        print(f"TrainError: {error}")
"""


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """No file may grow beyond 20 kB, as on a full disk: the error names the directory, and the older one loads."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first = f"TrainError: {tmp_path}: writing checkpoint 20 failed ("
    assert lines[0].startswith(first) and lines[0].endswith("; checkpoint 10 is intact")
    number, state, where = load(tmp_path)  # type: ignore[misc]
    assert number == 10 and where == position(10) and equal(state, state_of(10))
    assert steps(tmp_path) == [10]
    fill(tmp_path, {20: 0.5})  # with room again
    assert load(tmp_path)[0] == 20  # type: ignore[index]


def test_a_checkpoint_of_a_mesh_is_laid_out_again(tmp_path: Path) -> None:
    mesh = make_mesh(2, 2)
    spread = jax.NamedSharding(mesh, jax.P("model", None))
    params = (jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), spread),)
    with jax.set_mesh(mesh):
        state = step.create(params, TRANSFORM, 0)
    checkpoints = Checkpoints(tmp_path, keep=1, best="score")
    checkpoints.save(1, state, "", {})
    _, loaded, _ = checkpoints.load(abstract(state))  # type: ignore[misc]
    checkpoints.close()
    assert equal(loaded, state)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(state)):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    checkpoint.write_json(tmp_path / "a.json", {"b": [1, 2.5]})
    checkpoint.write_json(tmp_path / "a.json", {"b": 3})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
