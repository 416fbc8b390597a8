"""Functional training of a cache map through the frozen target, from a closed-form start.

The trained part is the affine map itself, or a low-rank residual (up-projection zero at the start) that is folded into
the map afterwards, so that mapping never pays for it. The loss is the KL divergence of the target's next-token
distribution behind mapped rows from its native one, over text ("suffix"), over the target's own continuation
("rollout", teacher-forced), or over the continuation the mapped cache itself leads to ("free"); plus the weighted error
of the mapped rows themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.documents import Documents
from kvjax.lm import LM
from kvjax.models import Model, build
from kvjax.sharding import Rules
from kvjax.transfer import artifact, calibrate
from kvjax.transfer.geometry import content
from kvjax.transfer.mapper import Mapper, map_content
from kvjax.transfer.scoring import Cut, agreement, behind, native, rollout
from train.config import Phase, TrainConfig, TrainError, parse

LOSSES = ("suffix", "rollout", "free")


@dataclasses.dataclass(frozen=True)
class MapperOptions:
    """The `[mapper]` table.

    source, target: models. start: directory of the closed-form map, below --data or absolute. part: "affine" or
    "residual"; rank: of the residual. loss: see the module. prefix, tail: tokens (`kvjax.transfer.scoring.Cut`); a
    phase's `length` is prefix + suffix. reconstruction: weight of the mean squared error of the mapped rows against
    the native ones, relative to their variance. held_out: texts of the selection split scored at each checkpoint.
    """

    source: str
    target: str
    start: str
    part: str = "affine"
    rank: int = 16
    loss: str = "suffix"
    prefix: int = 256
    tail: int = 1
    reconstruction: float = 0.01
    held_out: int = 64

    def __post_init__(self) -> None:
        if self.part not in ("affine", "residual"):
            raise TrainError(f"part {self.part!r} is not affine or residual")
        if self.loss not in LOSSES:
            raise TrainError(f"loss {self.loss!r} is not one of {', '.join(LOSSES)}")
        if self.rank < 1:
            raise TrainError(f"rank must be at least 1, got {self.rank}")


class MapperTask:
    """A `train.loop.Task` whose parameters are the trained part of the map."""

    metric = "kl"

    def __init__(self, config: TrainConfig, data: Path) -> None:
        """
        Raises:
          TrainError, ArtifactError, CalibrationError: options, models or map that do not fit together.
        """
        self.options = options = parse(MapperOptions, config.options, "mapper")
        self.source, self.target = kvjax.load(options.source), kvjax.load(options.target)
        calibrate.same_tokens(self.source, self.target)
        self.start, self.manifest = artifact.load(data / options.start, dtype="float32")
        artifact.check(self.manifest, self.source, self.target)
        self.cuts = {}
        for phase in config.phases:
            if phase.length <= options.prefix:
                raise TrainError(
                    f"phases.length = {phase.length} leaves no suffix behind mapper.prefix = {options.prefix}"
                )
            self.cuts[phase.length] = Cut(options.prefix, phase.length - options.prefix, options.tail)
        self.reader, self.model = (_trainable(lm, config.run.compute) for lm in (self.source, self.target))
        self.rules: Rules = self.model.rules
        self.seed = config.run.seed
        self.documents = {split: Documents(data / split) for split in ("train", "selection")}
        length = max(self.cuts)
        texts = calibrate.blocks(
            self.documents["selection"], self.target, length=length, limit=options.held_out
        )
        self.held = np.stack(list(texts))
        self.longest = Cut(options.prefix, length - options.prefix, options.tail)

    def init(self) -> tuple[Any, Any]:
        """The map's weights and biases, or the residual's two factors per layer and channel."""
        if self.options.part == "affine":
            params: Any = tuple(
                {"key": m.key, "value": m.value, "key_bias": m.key_bias, "value_bias": m.value_bias}
                for m in self.start.maps
            )
        else:
            params = tuple(
                {name: self._factors(i, c, getattr(m, name)) for c, name in enumerate(("key", "value"))}
                for i, m in enumerate(self.start.maps)
            )
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
        # A map is pulled towards its start by `reconstruction`, not towards zero.
        return params, jax.tree.map(lambda x: False, params)

    def _factors(self, layer: int, channel: int, weight: jax.Array) -> dict[str, jax.Array]:
        out, inner = weight.shape[:2], weight.shape[2:]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), layer), channel)
        size = int(np.prod(inner))
        down = jax.random.normal(key, (self.options.rank, *inner)) * size**-0.5
        return {"down": down, "up": jnp.zeros((*out, self.options.rank))}

    def mapper(self, params: Any, start: Mapper) -> Mapper:
        """The map these parameters stand for, the residual folded in."""
        maps = []
        for part, trained in zip(start.maps, params, strict=True):
            if self.options.part == "affine":
                changed = trained
            else:
                changed = {name: getattr(part, name) + folded(trained[name]) for name in ("key", "value")}
            maps.append(dataclasses.replace(part, **changed))
        return dataclasses.replace(start, maps=tuple(maps))

    def data(self, phase: Phase, index: int) -> grain.IterDataset:
        """{"tokens": [B, length]}: beginnings of documents that are long enough, in a new order every epoch."""
        encode, length = self.target.tokenizer.encode, phase.length  # type: ignore[union-attr]
        shortest = (
            2 * length
        )  # bytes; a token is two at the least on most texts, and the filter below is exact
        documents = self.documents["train"]
        chosen = np.flatnonzero(documents.sizes >= shortest)
        return (
            grain.MapDataset.source(chosen)
            .seed(self.seed + index)
            .shuffle()
            .repeat()
            .map(lambda i: {"tokens": np.asarray(encode(documents[int(i)])[:length], np.int32)})
            .filter(lambda x: len(x["tokens"]) == length)
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            .batch(phase.batch, drop_remainder=True)
        )

    @functools.cached_property
    def loss(self) -> jax.tree_util.Partial:
        """Mean KL per suffix position (plus weighted reconstruction), weighted by texts."""
        return jax.tree_util.Partial(self._loss, self._frozen)

    @property
    def _frozen(self) -> tuple[Any, Any, Any]:
        return self.source.params, self.target.params, self.start

    def _loss(
        self, frozen: Any, params: Any, batch: dict[str, jax.Array], key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        tokens = batch["tokens"]
        kl, error = self._divergence(frozen, params, tokens, self.cuts[tokens.shape[1]], self.options.loss)
        count = jnp.float32(tokens.shape[0])
        total = (kl.mean() + self.options.reconstruction * error) * count
        return total, count, {"kl": kl.mean() * count, "error": error * count}

    def _divergence(
        self, frozen: Any, params: Any, tokens: jax.Array, cut: Cut, loss: str
    ) -> tuple[jax.Array, jax.Array]:
        """(KL [B, S], relative squared error of the mapped rows)."""
        source, target, start = frozen
        given = cut.given
        pos = jnp.broadcast_to(jnp.arange(given, dtype=jnp.int32), (tokens.shape[0], given))
        read = self.reader.forward(source, tokens[:, :given], pos, logits=False)
        features = jax.lax.stop_gradient(content(read.rows, pos, start.source))
        rows = map_content(self.mapper(params, start), features, pos)
        if loss != "suffix":  # what is said instead of what the text goes on with
            behind_what = None if loss == "rollout" else jax.lax.stop_gradient(rows)
            limit = self.target.tokenizer.vocab  # type: ignore[union-attr]
            said, _ = rollout(self.model, target, behind_what, tokens, cut, cut.suffix, limit)
            tokens = jnp.concatenate([tokens[:, : cut.prefix], said], axis=1)
        teacher, truth = native(self.model, target, tokens, cut)
        logits = behind(self.model, target, rows, tokens, cut)
        kl = agreement(logits, jax.lax.stop_gradient(teacher), tokens[:, cut.prefix :]).kl
        error = jnp.float32(0)
        for mapped, real in zip(rows, truth, strict=True):
            for ours, theirs in zip(mapped, real, strict=True):
                theirs = theirs[:, :, :given].astype(jnp.float32)
                error += jnp.mean((ours - theirs) ** 2) / (jnp.var(theirs) * 2 * len(rows))
        return kl, error

    @functools.cached_property
    def _score(self) -> Any:
        def score(frozen: Any, params: Any, tokens: jax.Array) -> Any:
            return self._divergence(frozen, params, tokens, self.longest, self.options.loss)

        return jax.jit(score)

    def evaluate(self, params: Any) -> dict[str, float]:
        """Mean KL, of the kind that is trained, and reconstruction error over texts of the selection split."""
        texts = (jnp.asarray(self.held[i : i + 1]) for i in range(len(self.held)))
        found = [[float(x.mean()) for x in self._score(self._frozen, params, text)] for text in texts]
        kl, error = np.mean(found, axis=0)
        return {"kl": float(kl), "error": float(error)}

    def facts(self) -> dict[str, Any]:
        return {
            "source": calibrate.fingerprint(self.source),
            "target": calibrate.fingerprint(self.target),
            "start": self.manifest.method,
        }

    def export(self, params: Any, directory: Path, name: str) -> None:
        """A map artefact with the residual folded in."""
        options = {**self.manifest.options, **dataclasses.asdict(self.options), "name": name}
        manifest = dataclasses.replace(
            self.manifest, method=f"{self.manifest.method}+{self.options.loss}", options=options
        )
        artifact.save(directory, self.mapper(params, self.start), manifest)


def folded(factors: dict[str, jax.Array]) -> jax.Array:
    """up [K, H, r] times down [r, ...]: the residual as a weight."""
    return jnp.tensordot(factors["up"], factors["down"], axes=1)


def _trainable(lm: LM, compute: str) -> Model:
    """The same model with XLA attention, which has gradients."""
    return build(lm.config, lm.model.rules.mesh, compute, attention="xla", train=True)
