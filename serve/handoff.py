"""`serve.handoff`: one model reads the prompt, another answers from the mapped cache."""

from __future__ import annotations

import dataclasses
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
from kvjax.transfer.mapper import Mapper
from kvjax.transfer.placing import place
from kvjax.transfer.repair import Repair, hand_over
from serve.generate import Result, _Run
from serve.requests import Options


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
    **options: Unpack[Options],
) -> Result:
    """Answer prompts with `target`, which reads only what `repair` says; `source` reads the rest.

    Args:
      mapper: a `Transfer` (checked against the models) or a bare `Mapper`.
      options: as for `serve.generate`; a draft source must not need the target's features or a prompt of its own.

    Returns: as `serve.generate`; `timings` has read (source), map (with its repair) and decode.

    Raises:
      ValueError: another tokenizer or geometry, a parameter that cannot be served.
    """
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
            mapper = mapper.mapper
        else:
            mapper = place(mapper, source.model.rules, target.model.rules)
        geometry = artifact.Party.of(source).geometry, artifact.Party.of(target).geometry
        if (mapper.source, mapper.target) != geometry:
            raise ValueError(
                f"the map goes from {mapper.source} to {mapper.target}, the models are {geometry}"
            )
        if (
            source.tokenizer is None
            or target.tokenizer is None
            or source.tokenizer.hash != target.tokenizer.hash
        ):
            raise ValueError(
                f"{source.id} and {target.id} have different tokenizers; use `align` to cross them"
            )
        if repair.layers > target.config.num_layers:
            raise ValueError(
                f"repair.layers = {repair.layers}: {target.id} has {target.config.num_layers} layers"
            )
        self.reader, self.mapper, self.repair = source, mapper, repair
        self.timings = {"prepare": self.timings["prepare"], "read": 0.0, "map": 0.0, "decode": 0.0}

    def _read(self) -> DecodeState:
        batch, reader = self.batch, self.reader
        longest = int(batch.length.max())
        with self._device("read", reader):
            state = loop.start(
                reader.model, Plain(), SamplerProgram(), (), batch.tokens, batch.length, batch.idle
            )
            for i in range(-(-max(longest - self.repair.tail, 0) // batch.chunk)):
                state = loop.prefill(
                    reader.model, Plain(), batch.chunk, reader.params, (), state, np.int32(i)
                )
            cache = jax.block_until_ready(state.cache)
        with self._device("map"):
            state = loop.start(
                self.lm.model,
                self.source,
                batch.program,
                self.draft_params,
                batch.tokens,
                batch.length,
                batch.idle,
            )
            state = hand_over(
                self.lm.model, self.repair, batch.chunk, self.lm.params, self.mapper, cache, state, longest
            )
            return jax.block_until_ready(state)
