"""Two processes on this machine share one mesh: both hold half of the model and give the same answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.sharding.tiny import TIE_BOUND
from tests.sharding.worker import LIMIT, MAX_NEW, PROMPTS

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "tests" / "golden" / "qwen2-untied"  # two KV heads, biases: one head stored twice on 1x4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def started(commands: list[list[str]]):
    """Processes in groups of their own, gone when the block ends, however it ends."""
    running = [
        subprocess.Popen(
            c, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        for c in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def launch(processes: int, folder: Path, port: int = 0) -> list[dict]:
    """What each of the processes wrote."""
    outs = [folder / f"{processes}-{rank}.json" for rank in range(processes)]
    command = [sys.executable, "-m", "tests.sharding.worker", f"127.0.0.1:{port or free_port()}"]
    with started(
        [[*command, str(processes), str(r), str(MODEL), str(o)] for r, o in enumerate(outs)]
    ) as running:
        for process in running:
            said, _ = process.communicate(timeout=LIMIT + 30)
            assert process.returncode == 0, said.decode()[-3000:]
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def pair(folder):
    """Two processes of two devices each."""
    return launch(2, folder)


@pytest.fixture(scope="module")
def single(folder):
    """The same meshes in one process of four devices."""
    return launch(1, folder)[0]


MESHES = ["2x2", "1x4"]


def test_the_processes_see_one_mesh(pair):
    for each in pair:
        assert (each["processes"], each["devices"], each["local"]) == (2, 4, 2)
        assert [len(t) for t in each["2x2"]["tokens"]] == MAX_NEW


@pytest.mark.parametrize("mesh", MESHES)
def test_both_processes_give_the_same_answers(pair, mesh):
    first, second = (each[mesh] for each in pair)
    assert first["tokens"] == second["tokens"]
    assert first["logprobs"] == second["logprobs"]


@pytest.mark.parametrize("mesh", MESHES)
def test_each_process_holds_its_devices_share(pair, single, mesh):
    shares = [each[mesh]["bytes"] for each in pair]
    assert shares[0] == shares[1] and sum(shares) == single[mesh]["bytes"]


@pytest.mark.parametrize("mesh", MESHES)
def test_one_process_gives_the_same_answers(pair, single, mesh):
    """Sums across processes may run in another order than within one: a difference must be a near-tie."""
    mine, theirs = pair[0][mesh], single[mesh]
    assert mine["batch"] == theirs["batch"] == 4
    lm = kvjax.load(MODEL, progress=False)
    for b, (a, e) in enumerate(zip(mine["tokens"], theirs["tokens"], strict=True)):
        at = next((i for i, (s, t) in enumerate(zip(a, e)) if s != t), None)
        if at is None:
            np.testing.assert_allclose(mine["logprobs"][b], theirs["logprobs"][b], atol=1e-4)
            continue
        assert b != 1, "the sampled row: its noise would have to be judged too"
        ids = np.array([PROMPTS[b] + e[:at]], np.int32)
        forward = jax.jit(lambda p, i: lm.model.forward(p, i, jnp.arange(i.shape[1])[None]).logits)
        z = np.asarray(forward(lm.params, ids))[0, -1]
        assert abs(z[a[at]] - z[e[at]]) <= TIE_BOUND


def test_a_process_that_stays_alone_gives_up(folder):
    """The partner never comes: an error within the time allowed, not a hang."""
    code = (
        "import jax; jax.config.update('jax_platforms', 'cpu');"
        f"jax.distributed.initialize('127.0.0.1:{free_port()}', num_processes=2, process_id=0,"
        " initialization_timeout=3)"
    )
    with started([[sys.executable, "-c", code]]) as (process,):
        said, _ = process.communicate(timeout=60)
    assert process.returncode != 0, said.decode()
