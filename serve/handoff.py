"""`serve.handoff`: one model reads the prompt, another answers from the mapped cache."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from kvjax.decode import loop
from kvjax.decode.sampler import SamplerProgram
from kvjax.decode.sources import Plain, Stateless
from kvjax.decode.state import DecodeState
from kvjax.lm import LM
from kvjax.transfer import artifact
from kvjax.transfer.geometry import Geometry
from kvjax.transfer.mapper import Mapper
from kvjax.transfer.placing import place
from kvjax.transfer.repair import Repair, finish, map_chunk, span
from serve.generate import Result, _Run
from serve.requests import Options

log = logging.getLogger("kvjax")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A map with its manifest, checked against the two models and laid out on their mesh."""

    mapper: Mapper
    manifest: artifact.Manifest

    @classmethod
    def load(cls, directory: str | Path, source: LM, target: LM, *, dtype: str | None = None) -> Transfer:
        """
        Raises:
          kvjax.transfer.artifact.ArtifactError: damaged, or made for other models.
          kvjax.sharding.MeshError: the models are on different meshes.
        """
        mapper, manifest = artifact.load(directory, dtype=dtype)
        artifact.check(manifest, source, target)
        return cls(place(mapper, source.model.rules, target.model.rules), manifest)


def handoff(
    source: LM,
    mapper: Mapper | Transfer,
    target: LM,
    prompts: Any,
    *,
    repair: Repair = Repair(),
    exact: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Answer prompts with `target`, which reads only what `repair` says; `source` reads the rest.

    Args:
      mapper: a `Transfer` (checked against the models) or a bare `Mapper`.
      exact: answer as `target` would natively, token for token; see `serve.exact`, whose `stream_exact` tells the
        course of it as it happens. options are then those of `stream_exact`.
      options: as for `serve.generate`; a draft source must not need the target's features or a prompt of its own.

    Returns: as `serve.generate`; `timings` has read (source, with what is mapped meanwhile), map (the rest of it, and
      the repair) and decode; `course` how an exact hand-off went. `warnings` says when a prompt is longer than the
      texts the map was fitted on.

    Raises:
      ValueError: models the map was not made for, or swapped; a parameter that cannot be served.
      kvjax.sharding.MeshError: the models are on different meshes.
    """
    if exact:
        from serve.exact import Exact  # which builds on this module

        return Exact(source, mapper, target, prompts, repair, **options).answer()
    run = _Handoff(source, mapper, target, prompts, repair, **options)
    for _ in run.events(2**31 - 1 if not any(run.batch.stop) else 8):
        pass
    return run.result()


class _Handoff(_Run):
    def __init__(
        self, source: LM, mapper: Mapper | Transfer, target: LM, prompts: Any, repair: Repair, **options: Any
    ) -> None:
        super().__init__(target, prompts, **options)
        if not isinstance(self.source, Stateless):
            raise ValueError(
                f"draft source {type(self.source).__name__} needs features of every prompt token, which a handoff does"
                " not compute"
            )
        if isinstance(mapper, Transfer):
            artifact.check(mapper.manifest, source, target)
            self.warnings = _too_long(mapper.manifest, self.batch.length)
            mapper = mapper.mapper
        else:
            _check(mapper, source, target)
            mapper = place(mapper, source.model.rules, target.model.rules)
        repair.check(mapper, target.config)
        self.reader, self.mapper, self.repair = source, mapper, repair
        self.timings = {"prepare": self.timings["prepare"], "read": 0.0, "map": 0.0, "decode": 0.0}

    def _read(self) -> DecodeState:
        """Each span of the prompt is given to be mapped as soon as its last chunk is given to be read; nothing waits in
        between, so on an accelerator the host is ahead of both. "read" ends with the last row read, "map" is what is
        left then."""
        batch, reader, lm, repair = self.batch, self.reader, self.lm, self.repair
        model = lm.model
        once = span(model, batch.chunk, batch.tokens.shape[1])
        rows = max(int(batch.length.max()) - repair.tail, 0)
        chunks = -(-rows // batch.chunk)
        with self._device("read", reader):
            read = loop.start(
                reader.model, Plain(), SamplerProgram(), (), batch.tokens, batch.length, batch.idle
            )
        with self._device("map"):
            state = loop.start(
                model, self.source, batch.program, self.draft_params, batch.tokens, batch.length, batch.idle
            )
        for i in range(chunks):
            with self._device("read", reader):
                read = loop.prefill(reader.model, Plain(), batch.chunk, reader.params, (), read, np.int32(i))
            done = (i + 1) * batch.chunk
            if done % once == 0 or i == chunks - 1:
                at = np.int32((done - 1) // once)
                with self._device("map"):
                    state = map_chunk(model, repair, once, lm.params, self.mapper, read.cache, state, at)
        with self._device("read", reader):
            jax.block_until_ready(read)
        with self._device("map"):
            return jax.block_until_ready(finish(model, repair, lm.params, state))


def _too_long(manifest: artifact.Manifest, length: np.ndarray) -> tuple[str, ...]:
    """One sentence if prompts go beyond what the map was fitted on, which is logged as well."""
    longest, most = manifest.longest, int(length.max())
    if most <= longest:
        return ()
    said = (
        f"a prompt of {most} tokens: the map was fitted on texts of at most {longest}, and is unproved beyond"
    )
    log.warning(said)
    return (said,)


def _check(mapper: Mapper, source: LM, target: LM) -> None:
    """
    Raises:
      ValueError: the map cannot go from `source` to `target`.
    """
    models = Geometry.of(source.config), Geometry.of(target.config)
    made = mapper.source, mapper.target
    if made == models[::-1] != models:
        raise ValueError(f"the map goes the other way: {source.id} and {target.id} are swapped")
    if made != models:
        raise ValueError(f"the map goes from {made[0]} to {made[1]}, the models are {models}")
    if not source.tokenizer or not target.tokenizer or source.tokenizer.hash != target.tokenizer.hash:
        raise ValueError(f"{source.id} and {target.id} have different tokenizers; use `align` to cross them")
