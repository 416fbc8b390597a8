"""Functional training of a cache map through the frozen target, from a closed-form start.

The trained part is the affine map itself, or a low-rank residual (up-projection zero at the start) that is folded into
the map afterwards, so that mapping never pays for it. The loss is the KL divergence of the target's next-token
distribution behind mapped rows from its native one, over text ("suffix"), over the target's own continuation
("rollout", teacher-forced), or over the continuation the mapped cache itself leads to ("free"); or the error of the
text's attention outputs under native queries ("attention", which asks for no backward pass through the model); plus the
weighted error of the mapped rows themselves.
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
from kvjax.transfer import artifact, calibrate, scoring
from kvjax.transfer.geometry import content
from kvjax.transfer.mapper import Mapper, map_content
from kvjax.transfer.scoring import Cut, agreement, behind, native, positions, read, rollout
from kvjax.typing import Array, Float
from train import whitening
from train.config import Phase, TrainConfig, TrainError, parse
from train.step import Coordinates

LOSSES = ("attention", "suffix", "rollout", "free")
ROWS = 8  # of calibration, for each input of a layer's map


@dataclasses.dataclass(frozen=True)
class MapperOptions:
    """The `[mapper]` table.

    source, target: models. start: directory of the closed-form map, below --data or absolute. part: "affine" or
    "residual"; rank: of the residual. loss: see the module; one for all phases, or a list of one for each, whose last
    is also what checkpoints are chosen by. prefix, tail: tokens (`kvjax.transfer.scoring.Cut`); a phase's `length` is
    prefix + suffix. reconstruction: weight of the mean squared error of the mapped rows against the native ones,
    relative to their variance. held_out: texts of the selection split scored at each checkpoint.
    """

    source: str
    target: str
    start: str
    part: str = "affine"
    rank: int = 16
    loss: str | tuple[str, ...] = "suffix"
    prefix: int = 256
    tail: int = 1
    reconstruction: float = 0.01
    held_out: int = 64

    def __post_init__(self) -> None:
        if self.part not in ("affine", "residual"):
            raise TrainError(f"part {self.part!r} is not affine or residual")
        for loss in self.losses:
            if loss not in LOSSES:
                raise TrainError(f"loss {loss!r} is not one of {', '.join(LOSSES)}")
        if self.rank < 1:
            raise TrainError(f"rank must be at least 1, got {self.rank}")

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss,) if isinstance(self.loss, str) else self.loss


class MapperTask:
    """A `train.loop.Task` whose parameters are the trained part of the map."""

    metric = "divergence"

    def __init__(self, config: TrainConfig, data: Path) -> None:
        """
        Raises:
          TrainError, ArtifactError, CalibrationError: options, models or map that do not fit together.
        """
        self.options = options = parse(MapperOptions, config.options, "mapper")
        self.source, self.target = (kvjax.load(x, dtype="float32") for x in (options.source, options.target))
        calibrate.same_tokens(self.source, self.target)
        self.start, self.manifest = artifact.load(data / options.start, dtype="float32")
        artifact.check(self.manifest, self.source, self.target)
        if len(options.losses) not in (1, len(config.phases)):
            raise TrainError(
                f"mapper.loss names {len(options.losses)} losses for {len(config.phases)} phases"
            )
        for phase in config.phases:
            if phase.length <= options.prefix:
                raise TrainError(
                    f"phases.length = {phase.length} leaves no suffix behind mapper.prefix = {options.prefix}"
                )
        self.reader, self.model = (_trainable(lm, config.run.compute) for lm in (self.source, self.target))
        self.rules: Rules = self.model.rules
        self.seed = config.run.seed
        self.documents = {split: Documents(data / split) for split in ("train", "selection")}
        length = config.phases[-1].length
        texts = calibrate.blocks(
            self.documents["selection"], self.target, length=length, limit=options.held_out
        )
        self.held = np.stack(list(texts))

    def init(self) -> tuple[Any, Any]:
        """The map's weights and biases, or the residual's two factors per layer and channel."""
        if self.options.part == "affine":
            params: Any = tuple(
                {"key": m.key, "value": m.value, "key_bias": m.key_bias, "value_bias": m.value_bias}
                for m in self.start.maps
            )
        else:
            factors = tuple(
                {name: self._factors(i, c, getattr(m, name)) for c, name in enumerate(whitening.NAMES)}
                for i, m in enumerate(self.start.maps)
            )
            params = self.coordinates.apply(self.coordinates.arrays, factors)
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)  # copies: a step donates
        # A map is pulled towards its start by `reconstruction`, not towards zero.
        return params, jax.tree.map(lambda x: False, params)

    @functools.cached_property
    def coordinates(self) -> Coordinates:
        """White inputs, by the moments of as many training texts as give each input ROWS rows."""
        options, start = self.options, self.start
        inputs = max(max(m.key.shape[-1], m.value.shape[-1]) for m in start.maps)
        stats = calibrate.collect(
            self.source, self.target, self.documents["train"], length=options.prefix, joint=start.joint,
            sequences=-(-ROWS * inputs // options.prefix),
        )  # fmt: skip
        apply = whitening.affine if options.part == "affine" else whitening.residual
        return Coordinates(whitening.basis(start, stats), apply)

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
        """{loss: tokens [B, length]}: beginnings of documents that are long enough, in a new order every epoch. The
        phase's loss is the key, hence static where the step is traced."""
        loss = self.options.losses[index % len(self.options.losses)]
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
            .map(lambda i: {loss: np.asarray(encode(documents[int(i)])[:length], np.int32)})
            .filter(lambda x: len(x[loss]) == length)
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            .batch(phase.batch, drop_remainder=True)
        )

    @functools.cached_property
    def loss(self) -> jax.tree_util.Partial:
        """Mean divergence per text (plus weighted reconstruction), weighted by texts."""
        return jax.tree_util.Partial(self._loss, self._frozen)

    @property
    def _frozen(self) -> tuple[Any, Any, Any]:
        return self.source.params, self.target.params, self.start

    def _loss(
        self, frozen: Any, params: Any, batch: dict[str, jax.Array], key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        ((loss, tokens),) = batch.items()
        divergence, error = (x.sum() for x in self._divergence(frozen, params, tokens, loss))
        total = divergence + self.options.reconstruction * error
        return total, jnp.float32(tokens.shape[0]), {"divergence": divergence, "error": error}

    def _divergence(
        self, frozen: Any, params: Any, tokens: jax.Array, loss: str
    ) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        """(what `loss` says, relative squared error of the mapped rows), of tokens [B, length]."""
        source, target, start = frozen
        model, options = self.model, self.options
        cut = Cut(options.prefix, tokens.shape[1] - options.prefix, options.tail)
        seen = tokens[:, : cut.given]
        features = content(read(self.reader, source, seen), positions(seen), start.source)
        rows = map_content(self.mapper(params, start), jax.lax.stop_gradient(features), positions(seen))
        if loss in ("attention", "suffix"):
            teacher, truth = native(model, target, tokens, cut)
        else:  # what is said instead of what the text goes on with
            truth = read(model, target, seen)
            speaker = truth if loss == "rollout" else jax.lax.stop_gradient(rows)
            limit = self.target.tokenizer.vocab  # type: ignore[union-attr]
            said, teacher = rollout(model, target, speaker, tokens, cut, cut.suffix, limit)
            tokens = jnp.concatenate([tokens[:, : cut.prefix], said], axis=1)
            if loss == "free":
                teacher = behind(model, target, truth, tokens, cut)
        if loss == "attention":
            ids = tokens[:, : cut.length - 1]
            queries = tuple(q[:, cut.prefix :] for q in model.bind(target).queries(ids, positions(ids)))
            divergence = scoring.attention_error(
                scoring.attended_pairs(model, queries, truth, rows, cut.prefix)
            )
        else:
            logits = behind(model, target, rows, tokens, cut)
            divergence = agreement(logits, teacher, tokens[:, cut.prefix :]).kl.mean(1)
        error = jnp.zeros(len(tokens))
        for mapped, real in zip(rows, truth, strict=True):
            for ours, theirs in zip(mapped, real, strict=True):
                theirs = theirs[:, :, : cut.given].astype(jnp.float32)
                error += jnp.mean((ours - theirs) ** 2, (1, 2, 3)) / (jnp.var(theirs) * 2 * len(rows))
        return divergence, error

    @functools.cached_property
    def _score(self) -> Any:
        return jax.jit(functools.partial(self._divergence, loss=self.options.losses[-1]))

    def evaluate(self, params: Any) -> dict[str, float]:
        """Means of what the last phase trains, and of the reconstruction error, over texts of the selection split."""
        texts = (jnp.asarray(self.held[i : i + 1]) for i in range(len(self.held)))
        found = [[float(x[0]) for x in self._score(self._frozen, params, text)] for text in texts]
        divergence, error = np.mean(found, axis=0)
        return {"divergence": float(divergence), "error": float(error)}

    def facts(self) -> dict[str, Any]:
        return {
            "source": calibrate.fingerprint(self.source),
            "target": calibrate.fingerprint(self.target),
            "start": self.manifest.method,
        }

    def export(self, params: Any, directory: Path, name: str) -> None:
        """A map artefact with the residual folded in. Its metrics are those of the trained map, and those it began
        with."""
        options = {**self.manifest.options, **dataclasses.asdict(self.options), "name": name}
        method = "+".join((self.manifest.method, *self.options.losses))
        began = self.manifest.metrics | self.evaluate(self.init()[0])
        metrics = {"held_out_texts": len(self.held), **self.evaluate(params), "start": began}
        manifest = dataclasses.replace(self.manifest, method=method, options=options, metrics=metrics)
        artifact.save(directory, self.mapper(params, self.start), manifest)


def folded(factors: dict[str, jax.Array]) -> jax.Array:
    """up [K, H, r] times down [r, ...]: the residual as a weight."""
    return jnp.tensordot(factors["up"], factors["down"], axes=1)


def _trainable(lm: LM, compute: str) -> Model:
    """The same model with XLA attention, which has gradients."""
    return build(lm.config, lm.model.rules.mesh, compute, attention="xla", train=True)
