"""One process of a distributed run: `python -m tests.sharding.worker ADDRESS PROCESSES RANK MODEL OUT`.

Loads MODEL on a (2, 2) and a (1, 4) mesh over all processes' devices, generates, writes the answers to OUT.
With PROCESSES 1 it does the same on four devices of its own.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import jax
import numpy as np

DEVICES, LIMIT = 4, 150
PROMPTS = ([5, 9, 2, 30, 31, 7], [17], list(range(40, 75)))
MAX_NEW = [12, 20, 9]


def main(address: str, processes: int, rank: int, model: str, out: str) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # a process whose partner died would wait for ever
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            address, num_processes=processes, process_id=rank, initialization_timeout=60
        )

    import kvjax
    import serve

    found = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "local": jax.local_device_count(),
    }
    for data, width in ((2, 2), (1, 4)):
        lm = kvjax.load(model, mesh=kvjax.make_mesh(data, width), progress=False)
        table = np.zeros((4, 128), np.int32)
        result = serve.generate(
            lm, PROMPTS, max_new_tokens=MAX_NEW, temperature=[0.0, 0.8, 0.0], seed=3, stop_ids=(), logprobs=True,
            draft=kvjax.Oracle(width=2), draft_params=table, size=128, chunk=32,
        )  # fmt: skip
        here = sum(s.data.nbytes for x in lm.params for s in x.addressable_shards)
        found[f"{data}x{width}"] = {
            "tokens": [list(g.tokens) for g in result],
            "logprobs": [list(g.logprobs) for g in result],
            "bytes": here,
            "batch": result.program["batch"],
        }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
