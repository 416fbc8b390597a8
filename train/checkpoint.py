"""Checkpoints of a run, with Orbax: written asynchronously and atomically, newest and best kept, checked on reading.

A run's directory holds `config.json`, `metrics.jsonl`, and `checkpoints/<step>/`, each with the `TrainState` and the
position of the data. Orbax writes under a temporary name and renames, so a step directory is whole or absent; a
checksum of what was saved, which Orbax does not keep, tells later damage.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:  # where the first releases with this interface keep it, and where it is announced to move
    import orbax.checkpoint.v1 as ocp
except ImportError:
    import orbax.checkpoint.experimental.v1 as ocp

from train.config import TrainError

log = logging.getLogger("kvjax")


class Checkpoints:
    """The checkpoints of one run.

    Args:
      keep: newest ones to keep; the one with the lowest metric `best` is kept besides.
    """

    def __init__(self, directory: Path, *, keep: int, best: str) -> None:
        policies = ocp.training.preservation_policies
        self.directory = directory
        self._drop_unreadable_metrics()
        self._best = best
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(keep),
                    policies.BestN(
                        get_metric_fn=lambda m: m[best],
                        reverse=True,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: Any, position: str, metrics: dict[str, float] | None) -> None:
        """Start writing; the arrays are copied first, so the caller may donate them at once. Without metrics
        it is never the best.

        Raises:
          TrainError: this or the previous write failed (disk full, say); older checkpoints are untouched.
        """
        self.wait()
        host = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else np.array(x), state)
        try:
            self._response = self._checkpointer.save_checkpointables_async(
                step,
                {"state": host, "data": {"position": position, "sha256": _digest(host, position)}},
                metrics=metrics,
                force=True,
            )
        except Exception as error:
            raise self._failed(step, error) from error
        self._step = step

    def wait(self) -> None:
        """Until the last write is on disk.

        Raises:
          TrainError: it failed.
        """
        response, self._response = self._response, None
        if response is None:
            return
        try:
            response.result()
        except Exception as error:
            raise self._failed(self._step, error) from error

    _response: Any = None
    _step = 0

    def _failed(self, step: int, error: Exception) -> TrainError:
        # On disk: Orbax's own list already lacks what it would have deleted after this write.
        older = [int(p.name) for p in self.directory.iterdir() if p.name.isdigit() and int(p.name) != step]
        kept = f"checkpoint {max(older)} is intact" if older else "there is no earlier checkpoint"
        return TrainError(
            f"{self.directory}: writing checkpoint {step} failed ({_first_line(error)}); {kept}"
        )

    def load(self, abstract: Any) -> tuple[int, Any, str] | None:
        """(step, state, data position) of the newest whole checkpoint, or None where there is none.

        Unreadable newer ones are named in the log and renamed, so that the run can write those steps again.

        Raises:
          TrainError: there are checkpoints and none can be read.
        """
        self.wait()
        broken: list[int] = []
        for checkpoint in reversed(self._checkpointer.checkpoints):
            step = checkpoint.step
            try:
                state, position = self._read(step, abstract)
            except Exception as error:  # Orbax, TensorStore and JSON each have their own kinds
                log.warning(
                    "checkpoint %d in %s cannot be read: %s", step, self.directory, _first_line(error)
                )
                broken.append(step)
                continue
            for other in broken:
                self._set_aside(other)
            if broken:
                log.warning("using checkpoint %d of %s, the newest whole one", step, self.directory)
                self._checkpointer.reload()
            return step, state, position
        if broken:
            raise TrainError(
                f"{self.directory}: none of the checkpoints {broken} can be read; restore one from a copy or"
                " start in another directory"
            )
        return None

    def _read(self, step: int, abstract: Any) -> tuple[Any, str]:
        """(state, data position), of which the checksum is right (checkpoints without one are taken as they are)."""
        loaded = self._checkpointer.load_checkpointables(step, {"state": abstract, "data": None})
        state, data = loaded["state"], loaded["data"]
        position = str(data["position"])
        if "sha256" in data and data["sha256"] != _digest(state, position):
            raise TrainError("its contents are not what was saved (checksum)")
        return state, position

    def _set_aside(self, step: int) -> None:
        source = self.directory / str(step)
        n = next(n for n in itertools.count() if not source.with_name(f"unreadable-{step}-{n}").exists())
        source.rename(source.with_name(f"unreadable-{step}-{n}"))

    def _drop_unreadable_metrics(self) -> None:
        """Orbax reads every checkpoint's metrics at once and would refuse all for one. The state may still be good."""
        for path in self.directory.glob("*/metrics/metrics"):
            try:
                json.loads(path.read_text("utf-8"))
            except ValueError:
                log.warning("%s cannot be read; this checkpoint no longer counts as the best", path)
                path.unlink()

    def scores(self, step: int) -> dict[str, float]:
        """The metrics checkpoint `step` was saved with; empty where there are none."""
        found = next((c.metrics for c in self._checkpointer.checkpoints if c.step == step), None)
        return dict(found or {})

    def best(self, *, after: int = 0) -> int | None:
        """Step of the checkpoint beyond `after` with the lowest metric."""
        scored = [
            c for c in self._checkpointer.checkpoints
            if c.step > after and c.metrics and self._best in c.metrics
        ]  # fmt: skip
        return min(scored, key=lambda c: c.metrics[self._best]).step if scored else None

    def read(self, step: int, abstract: Any) -> Any:
        """The state of one checkpoint.

        Raises:
          TrainError: it cannot be read.
        """
        self.wait()
        try:
            return self._read(step, abstract)[0]
        except Exception as error:
            what = f"{self.directory}: checkpoint {step} cannot be read: {_first_line(error)}"
            raise TrainError(what) from error

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def write_json(path: Path, value: Any) -> None:
    """JSON under a temporary name, then renamed."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    part.replace(path)


def _digest(state: Any, position: str) -> str:
    """SHA-256 of every leaf and of the data's position."""
    digest = hashlib.sha256(position.encode())
    for leaf in jax.tree.leaves(state):
        x = np.asarray(leaf)
        digest.update(f"{x.shape}{x.dtype}".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
