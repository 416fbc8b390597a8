"""What a model would need and take on an accelerator that is not here.

`plan` compiles the programs that serving runs (`loop.prefill`, `loop.rounds`) for a named target from a
configuration alone (see `kvjax.aot`), and sets beside them what the ledger says.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax

from kvjax import aot, cost, topology
from kvjax.aot import Compiled
from kvjax.cache import check_room
from kvjax.config import ConfigError, ModelConfig
from kvjax.cost import Cost, Layout, Memory
from kvjax.resources import config_path
from kvjax.sharding import MeshError, Rules

CHUNK = 256  # what serving takes on accelerators
CONTEXT = 32768
BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Step:
    """One program. cost: the ledger's, per device with a full cache; seconds: its roofline time."""

    name: str
    rows: int
    cost: Cost
    seconds: float
    compiled: Compiled | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer of `plan`; bytes are per device. missing: why nothing was compiled, and what to install."""

    model: str
    target: topology.Target
    mesh: tuple[int, int]
    batch: int
    size: int
    chunk: int
    width: int
    dtype: str
    memory: Memory
    steps: tuple[Step, ...]
    missing: str | None = None

    @property
    def temporaries(self) -> int | None:
        """The most any compiled step needs beyond weights and state; None when not compiled."""
        known = [step.compiled.extra for step in self.steps if step.compiled and not step.compiled.error]
        return max(known) if len(known) == len(self.steps) else None

    @property
    def total(self) -> int:
        return self.memory.total + (self.temporaries or 0)

    @property
    def fits(self) -> bool:
        """Whether it all goes into the device's memory, as far as that is known."""
        refused = any(step.compiled and step.compiled.error for step in self.steps)
        return not refused and self.total <= self.target.hbm_bytes

    def to_text(self) -> str:
        """The report for people."""
        held, room, spare = self.memory, self.target.hbm_bytes, self.temporaries
        lines = [
            f"{self.model} on {self.target.name}: {self.mesh[0]}x{self.mesh[1]} of {self.target.devices} devices, "
            f"{self.dtype}, batch {self.batch}, {self.size} cache slots",
            "",
            "memory of each device",
            f"  weights      {_bytes(held.weights)}",
            f"  cache        {_bytes(held.cache)}",
            f"  temporaries  {'not compiled: unknown' if spare is None else _bytes(spare)}",
            f"  all          {_bytes(held.total + (spare or 0))} of {_bytes(room).strip()}: {self._verdict()}",
        ]
        for step in self.steps:
            if step.compiled and step.compiled.error:
                lines.append(f"  {step.name}: {step.compiled.error}")
        lines += [
            "",
            "steps, per device with the cache full (estimates: the ledger's least work, at the vendor's peak figures)",
            "  step      rows      flops       bytes of weights       cache  activations   roofline",
        ]
        for step in self.steps:
            c, bound = (
                step.cost,
                "flops" if step.cost.flops / self.target.peak_flops >= step.seconds else "bytes",
            )
            lines.append(
                f"  {step.name:8}{step.rows:6}  {c.flops / 1e9:8.2f} G         {_bytes(c.weight_bytes)}   "
                f"{_bytes(c.kv_read + c.kv_write)}    {_bytes(c.activations)}  {step.seconds * 1e3:6.2f} ms ({bound})"
            )
        if self.missing:
            return "\n".join([*lines, "", f"not compiled: {self.missing}"])
        compiled = [step for step in self.steps if step.compiled and not step.compiled.error]
        if compiled:
            lines += [
                "",
                "compiled (flops and bytes are the compiler's own counts: information, not measurements)",
            ]
        for step in compiled:
            said = step.compiled
            assert said is not None
            counts = "gives no counts"
            if said.flops is not None:
                counts = f"{said.flops / 1e9:.2f} G flops, {_bytes(int(said.bytes_accessed or 0)).strip()} accessed"
            time = f"{said.seconds:.1f} s ({said.cpu_seconds:.1f} s of CPU)"
            lines.append(f"  {step.name:8} in {time}, attention kernel {said.attention!r}; {counts}")
        return "\n".join(lines)

    def _verdict(self) -> str:
        """Whether it fits, and by how much."""
        room = self.target.hbm_bytes
        if any(step.compiled and step.compiled.error for step in self.steps):
            return "does not fit, says the compiler"
        if not self.fits:
            return f"does not fit by {_bytes(self.total - room).strip()}"
        verdict = f"fits, {_bytes(room - self.total).strip()} ({1 - self.total / room:.0%}) free"
        if self.target.platform == "gpu" and self.total > 0.75 * room:
            verdict += ", but JAX takes only 75% of a GPU unless told otherwise"
        return verdict if self.temporaries is not None else verdict + " for temporaries"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values for `json.dumps`."""
        steps = []
        for step in self.steps:
            ledger = {name: getattr(step.cost, name) for name in (*_FIELDS, "bytes", "reduced")}
            ledger["parts"] = {name: dataclasses.asdict(part) for name, part in step.cost.parts.items()}
            steps.append(
                {"name": step.name, "rows": step.rows, "ledger": ledger, "roofline_seconds": step.seconds,
                 "compiled": step.compiled and dataclasses.asdict(step.compiled)}
            )  # fmt: skip
        same = ("model", "mesh", "batch", "size", "chunk", "width", "dtype", "missing")
        return {
            **{name: getattr(self, name) for name in same},
            "target": dataclasses.asdict(self.target),
            "memory": {**dataclasses.asdict(self.memory), "temporaries": self.temporaries, "total": self.total,
                       "available": self.target.hbm_bytes, "headroom": self.target.hbm_bytes - self.total},
            "fits": self.fits,
            "steps": steps,
        }  # fmt: skip


def _bytes(n: int) -> str:
    return f"{n / 1e9:8.3f} GB"


_FIELDS = ("flops", "weight_bytes", "kv_read", "kv_write", "activations")


def plan(
    config: ModelConfig, target: str, *, model: str = "model", mesh: tuple[int, int] | None = None, batch: int = 1,
    context: int | None = None, width: int = 16, chunk: int = CHUNK, dtype: str = "bfloat16", sampled: bool = False,
    compile: bool = True, progress: bool | None = None,
) -> Plan:  # fmt: skip
    """Memory, fit and cost of serving `config` on `target`.

    Args:
      target: a name in `kvjax.topology.TARGETS`. mesh: (`data`, `model`); default all devices on `model`.
      context: cache slots per sequence (default 32,768 or what the model was made for), rounded up to chunks.
      width: rows of a decode round: 1 is plain decoding, W verifies blocks of W (drafted by n-gram look-up).
      sampled: compile rounds that can sample with top-k and top-p, not only greedy ones.
      compile: False gives the ledger alone. progress: a status line on stderr; None shows it on a terminal only.

    Raises:
      TopologyError: unknown target. MeshError, CacheFull, ValueError: an argument that cannot be, named.
      CompileError: the compiler refuses.
    """
    found = topology.target(target)
    shape = mesh or (1, found.devices)
    if shape[0] * shape[1] > found.devices:
        raise MeshError(f"mesh {shape[0]}x{shape[1]} needs more devices than the {found.devices} of {target}")
    for name, value in (
        ("batch", batch),
        ("width", width),
        ("chunk", chunk),
        ("context", 1 if context is None else context),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if dtype not in BYTES:
        raise ValueError(f"dtype {dtype!r} is not supported; use float32 or bfloat16")
    context = min(CONTEXT, config.max_positions) if context is None else context
    if context > config.max_positions:
        most = config.max_positions
        raise ValueError(f"context {context} exceeds the {most} positions {model} was made for")
    size = -(-context // chunk) * chunk
    check_room(size=size, length=1, rows=width)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    rules = Rules.create(config, jax.sharding.AbstractMesh(shape, ("data", "model"), explicit))
    layout, each = layout_of(rules), BYTES[dtype]
    steps = []
    for name, rows in (("prefill", chunk), ("round", width)):
        head = name == "round"
        ledger = cost.step_cost(
            config, batch=batch, rows=rows, context=size - rows, head=head, dtype_bytes=each, layout=layout
        )
        seconds = ledger.seconds(found.peak_flops, found.hbm_bandwidth)
        steps.append(Step(name, rows, ledger, seconds))
    held = cost.memory(config, batch=batch, size=size, dtype_bytes=each, layout=layout)
    missing = topology.missing(target) if compile else None
    if compile and missing is None:
        request = {
            "config": config, "target": target, "mesh": shape, "batch": batch, "size": size,
            "width": width, "chunk": chunk, "dtype": dtype, "sampled": sampled,
        }  # fmt: skip
        told = aot.ask("steps", request, progress=sys.stderr.isatty() if progress is None else progress)
        steps = [dataclasses.replace(step, compiled=told[step.name]) for step in steps]
    return Plan(model, found, shape, batch, size, chunk, width, dtype, held, tuple(steps), missing)


def layout_of(rules: Rules) -> Layout:
    """Where `rules` put a model, in the ledger's terms."""
    if rules.mesh is None:
        return Layout()
    split = dict(rules.axes)["kv_heads"] is not None
    return Layout(rules.mesh.shape["data"], rules.mesh.shape["model"], rules.kv_heads, split)


def find(source: str, revision: str | None = None) -> tuple[str, ModelConfig]:
    """The configuration of a model, without its weights.

    Args:
      source: a name under `configs/models`, a Hugging Face directory, a GGUF file, a registered model (which is
        fetched) or a hub id, of which only `config.json` is fetched.

    Raises:
      ConfigError, CheckpointError: not found or not implemented, named.
    """
    from kvjax.checkpoints import gguf, hf, pull
    from kvjax.checkpoints.load import locate
    from kvjax.checkpoints.table import CheckpointError

    known, path = configs(), Path(source).expanduser()
    if source.lower() in known and not path.exists():
        return source.lower(), ModelConfig.from_hf(tomllib.loads(known[source.lower()]))
    if path.exists() or source in pull.registry():
        path = locate(source).path
        if path.is_file():
            return source, gguf.File(path).config()
        path = path / "config.json"
    elif hf.is_hub_id(source):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            path = Path(hf_hub_download(source, "config.json", revision=revision))
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise CheckpointError(f"{source}: config.json cannot be fetched from the hub: {error}") from error
    else:
        raise CheckpointError(
            f"{source!r} is neither a known geometry ({', '.join(sorted(known))}), nor a directory or .gguf file here, "
            "nor a registered model, nor a hub id of the form organisation/name"
        )
    try:
        return source, ModelConfig.from_hf(hf.read_json(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def configs() -> dict[str, str]:
    """TOML texts of the geometries under `configs/models`, by name."""
    files = [file for file in config_path("models").iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file.read_text("utf-8") for file in files}
