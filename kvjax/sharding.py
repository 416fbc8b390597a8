"""Logical axes onto the mesh axes `data` and `model`. Everything also works without a mesh.

Tensor parallel attention splits whole KV-head groups. With m = size of `model`:
  m <= K and K % m == 0          each device holds K/m KV heads;
  m % K == 0 and N % m == 0      every KV head is stored m/K times, so the cache still shards (K' = m);
  otherwise                      attention is replicated, MLP and vocabulary stay sharded (logged once).
F and V must divide by m; that is refused by name otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.config import ModelConfig

log = logging.getLogger("kvjax")
LOGICAL = ("batch", "kv_heads", "ffn", "vocab")


class MeshError(ValueError):
    """A mesh on which this model or batch cannot be laid out; the message names the axis."""


def make_mesh(data: int = 1, model: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A (`data`, `model`) mesh of explicit axes over the first data * model devices."""
    devices = list(jax.devices() if devices is None else devices)
    if data < 1 or model < 1:
        raise MeshError(f"mesh {data}x{model}: both axes need at least one device")
    if data * model > len(devices):
        raise MeshError(f"mesh {data}x{model} needs {data * model} devices, {len(devices)} are present")
    return jax.make_mesh(
        (data, model), ("data", "model"), devices=devices[: data * model],
        axis_types=(jax.sharding.AxisType.Explicit,) * 2,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rules:
    """Where each logical axis of one model lives. `kv_heads` is K', the number of stored KV heads."""

    mesh: Mesh | None
    kv_heads: int
    axes: tuple[tuple[str, str | None], ...]

    @classmethod
    def create(cls, config: ModelConfig, mesh: Mesh | None) -> Rules:
        """Rules of `config` on `mesh` (axes named `data` and `model`).

        Raises:
          MeshError: unknown or implicit mesh axes, or F or V does not divide by the `model` axis.
        """
        if mesh is None:
            return cls(None, config.num_kv_heads, tuple((name, None) for name in LOGICAL))
        if set(mesh.axis_names) != {"data", "model"}:
            raise MeshError(f"mesh axes are {mesh.axis_names}; they must be ('data', 'model')")
        if any(kind != jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
            kinds = ", ".join(str(kind) for kind in mesh.axis_types)
            raise MeshError(
                f"mesh axes must be explicit, these are {kinds}; kvjax.make_mesh makes such a mesh"
            )
        m = mesh.shape["model"]
        for name, size in (("intermediate (F)", config.intermediate), ("vocab (V)", config.vocab)):
            if size % m:
                raise MeshError(f"{name} = {size} does not divide by the mesh's model axis, {m}")
        kv, heads = config.num_kv_heads, config.num_heads
        stored = kv
        axis: str | None = "model"
        if kv % m:
            if m % kv == 0 and heads % m == 0:
                stored = m
            else:
                axis = None
                log.warning(
                    "attention is replicated: %d query and %d KV heads do not divide over a model axis of %d;"
                    " MLP and vocabulary stay sharded", heads, kv, m,
                )  # fmt: skip
        return cls(
            mesh, stored, (("batch", "data"), ("kv_heads", axis), ("ffn", "model"), ("vocab", "model"))
        )

    @property
    def data(self) -> int:
        """Size of the `data` axis: a batch must be a multiple of it."""
        return 1 if self.mesh is None else self.mesh.shape["data"]

    def spec(self, *logical: str | None) -> PartitionSpec | None:
        """PartitionSpec of an array with these logical axes; None without a mesh.

        Raises:
          KeyError: an unknown logical axis.
          MeshError: two logical axes of one array fall on the same mesh axis.
        """
        if self.mesh is None:
            return None
        table = dict(self.axes)
        mapped = [None if name is None else table[name] for name in logical]
        used = [axis for axis in mapped if axis is not None]
        if len(used) != len(set(used)):
            raise MeshError(f"axes {logical} collide: {mapped}")
        return PartitionSpec(*mapped)

    def sharding(self, *logical: str | None) -> NamedSharding | None:
        """NamedSharding for the same; None without a mesh."""
        spec = self.spec(*logical)
        return None if self.mesh is None or spec is None else NamedSharding(self.mesh, spec)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which traced code of this model runs: the mesh, if there is one."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def local(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """`function` run on each device's own block; `inputs` and `outputs` are specs made by `spec`.

        Without a mesh the function itself. For code with no communication: attention, cache writes,
        sampling.
        """
        if self.mesh is None:
            return function
        return jax.shard_map(function, in_specs=inputs, out_specs=outputs, check_vma=False)

    def rows(self, tree: Any) -> Any:
        """Specs of a pytree whose leaves all lead with the batch axis (for `local`)."""
        return jax.tree.map(lambda x: self.spec("batch", *(None,) * (x.ndim - 1)), tree)

    def reshard(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """`x` laid out along these logical axes; unchanged without a mesh."""
        spec = self.spec(*logical)
        return x if spec is None else jax.sharding.reshard(x, spec)
