"""Checkpoints of a run, with Orbax: written asynchronously and atomically, newest and best kept, checked on reading.

A run's directory holds `config.json`, `metrics.jsonl`, and `checkpoints/<step>/`, each with the `TrainState` and the
position of the data. Orbax writes under a temporary name and renames, so a step directory is whole or absent.
"""

from __future__ import annotations

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

    def save(self, step: int, state: Any, position: str, metrics: dict[str, float]) -> None:
        """Start writing; the arrays are copied first, so the caller may donate them at once.

        Raises:
          TrainError: this or the previous write failed (disk full, say); older checkpoints are untouched.
        """
        self.wait()
        host = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else np.array(x), state)
        try:
            self._response = self._checkpointer.save_checkpointables_async(
                step, {"state": host, "data": {"position": position}}, metrics=metrics, force=True
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
        latest = self._checkpointer.latest
        kept = f"checkpoint {latest.step} is intact" if latest else "there is no earlier checkpoint"
        return TrainError(f"{self.directory}: writing checkpoint {step} failed ({error}); {kept}")

    def load(self, abstract: Any) -> tuple[int, Any, str] | None:
        """(step, state, data position) of the newest whole checkpoint, or None where there is none.

        Unreadable ones are named in the log and passed over.

        Raises:
          TrainError: there are checkpoints and none can be read.
        """
        found = sorted(self._checkpointer.checkpoints, key=lambda c: c.step, reverse=True)
        broken = []
        for checkpoint in found:
            try:
                loaded = self._checkpointer.load_checkpointables(
                    checkpoint.step, {"state": abstract, "data": None}
                )
                return checkpoint.step, loaded["state"], str(loaded["data"]["position"])
            except Exception as error:  # Orbax, TensorStore and JSON each have their own kinds
                reason = str(error).strip().partition("\n")[0][:200]
                log.warning("checkpoint %d in %s cannot be read: %s", checkpoint.step, self.directory, reason)
                broken.append(checkpoint.step)
        if broken:
            raise TrainError(
                f"{self.directory}: none of the checkpoints {broken} can be read; restore one from a copy or"
                " start in another directory"
            )
        return None

    def best(self) -> int | None:
        """Step of the checkpoint with the lowest metric."""
        scored = [c for c in self._checkpointer.checkpoints if c.metrics and self._best in c.metrics]
        return min(scored, key=lambda c: c.metrics[self._best]).step if scored else None

    def read(self, step: int, abstract: Any) -> Any:
        """The state of one checkpoint."""
        return self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def write_json(path: Path, value: Any) -> None:
    """JSON under a temporary name, then renamed."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    part.replace(path)
