"""Compile-only meshes for the targets of `kvjax.topology`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import pytest

from kvjax import topology


@pytest.fixture
def mesh_for(request: pytest.FixtureRequest) -> Iterator[Callable[..., jax.sharding.Mesh]]:
    """Returns mesh_for(target, data=1, model=1): compile-only devices, the current mesh until the test ends.

    A target whose compiler is missing is skipped, unless the run asked for `-m aot`: then it fails.
    """
    asked = "aot" in (request.config.getoption("-m") or "")
    with contextlib.ExitStack() as stack:

        def make(name: str, data: int = 1, model: int = 1) -> jax.sharding.Mesh:
            lacking = topology.missing(name)
            if lacking is not None and not asked:
                pytest.skip(lacking)
            devices = topology.devices(name)[: data * model]
            mesh = jax.make_mesh((data, model), ("data", "model"), devices=devices)
            stack.enter_context(jax.set_mesh(mesh))
            return mesh

        yield make
