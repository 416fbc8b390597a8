"""Training on two devices gives the loss of one: two-way data and two-way model parallel, on fake CPU devices.

    python benchmarks/mesh.py [--steps 20] [--json]

A Qwen3 and a Llama of the mini family at full size, the same random tokens, of 64 kinds, on every mesh.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.training import Ours
from kvjax.report import Report
from kvjax.sharding import make_mesh

MESHES = {"one device": None, "data parallel": (2, 1), "model parallel": (1, 2)}
BATCH, LENGTH, BOUND = 4, 64, 1e-5


def losses(name: str, mesh: tuple[int, int] | None, steps: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    ours = Ours(name, None if mesh is None else make_mesh(*mesh), warmup=2)
    with ours.model.rules.context():
        return np.array(
            [ours.step(rng.integers(0, 64, (BATCH, LENGTH + 1)).astype(np.int32)) for _ in range(steps)]
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    report = Report("training on meshes", {"steps": args.steps, "batch": f"{BATCH} x {LENGTH}"})
    for name in ("mini-s", "mini-x"):
        found = {what: losses(name, mesh, args.steps) for what, mesh in MESHES.items()}
        alone = found.pop("one device")
        for what, got in found.items():
            apart = float(np.abs(got - alone).max())
            report.row("losses", model=name, mesh=what, first=got[0], last=got[-1], apart=apart)
            report.bar(f"{name}, {what}: largest difference from one device", apart, "<=", BOUND)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
