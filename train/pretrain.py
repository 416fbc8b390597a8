"""Pretraining a decoder on a corpus of documents: next-token cross-entropy on packed blocks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.checkpoints.export import save_hf
from kvjax.config import ModelConfig
from kvjax.documents import Documents
from kvjax.lm import LM
from kvjax.models import Model, build
from kvjax.sharding import Rules, make_mesh
from kvjax.tokenizer import Tokenizer
from kvjax.typing import Params
from train import data
from train.config import Phase, TrainConfig, TrainError, parse
from train.head import cross_entropy


@dataclasses.dataclass(frozen=True)
class PretrainOptions:
    """The `[pretrain]` table. model: fields of a Hugging Face config.json. tokenizer: its directory, below the
    corpus. held_out: tokens of the selection split scored at every checkpoint."""

    model: dict[str, Any]
    tokenizer: str
    held_out: int = 65_536


def _loadable(fields: dict[str, Any]) -> None:
    """
    Raises:
      TrainError: transformers would refuse the exported model; better said before the training than after.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.for_model(**fields)
    except Exception as error:  # its validation has many kinds
        raise TrainError(f"pretrain.model: transformers refuses it: {' '.join(str(error).split())}") from None


class Pretrain:
    """A `train.loop.Task`. Parameters are float32; forward and backward run in `run.compute`."""

    metric = "bits_per_byte"
    coordinates = None

    def __init__(self, config: TrainConfig, corpus: Path) -> None:
        """
        Raises:
          TrainError, ConfigError, MeshError: options, model fields or mesh that cannot be, by name.
        """
        options = parse(PretrainOptions, config.options, "pretrain")
        directory = corpus / options.tokenizer
        tokenizer = Tokenizer.from_directory(directory)
        if tokenizer is None:
            raise TrainError(f"{directory}: no tokenizer.json; build the corpus with its tokenizers first")
        self.tokenizer = tokenizer
        _loadable(options.model)
        self.config = ModelConfig.from_hf({"eos_token_id": list(tokenizer.eos), **options.model})
        if tokenizer.vocab != self.config.vocab:
            raise TrainError(
                f"{directory} has {tokenizer.vocab} tokens, pretrain.model.vocab_size is {self.config.vocab}"
            )
        longest = max(phase.length for phase in config.phases)
        if self.config.max_positions and longest > self.config.max_positions:
            raise TrainError(f"a phase of length {longest} is longer than max_position_embeddings")
        run = config.run
        mesh = None if run.mesh == (1, 1) else make_mesh(*run.mesh)
        self.model: Model = build(self.config, mesh, run.compute, train=True)
        self.master: Model = build(self.config, mesh, "float32", train=True)
        self.rules: Rules = self.model.rules
        if self.rules.kv_heads != self.config.num_kv_heads:
            raise TrainError(
                f"run.mesh: a model axis of {run.mesh[1]} would store each of {self.config.num_kv_heads} KV heads"
                f" {self.rules.kv_heads // self.config.num_kv_heads} times, and the copies would be trained apart;"
                f" use a model axis that divides {self.config.num_kv_heads}"
            )
        self.seed, self.remat = run.seed, run.remat
        self.documents = {split: Documents(corpus / split) for split in ("train", "selection")}
        self.blocks, self.bytes_per_token = data.held_out(
            self.documents["selection"], tokenizer.encode,
            length=config.phases[0].length, tokens=options.held_out,
        )  # fmt: skip

    def init(self) -> tuple[Params, tuple[bool, ...]]:
        """Weights of standard deviation 0.02, those that end a residual branch 0.02 / sqrt(2 L) (as GPT-2)."""
        shrink = (2 * self.config.num_layers) ** -0.5
        params = self.master.init(self.seed)
        decayed = tuple(
            n.rsplit(".", 1)[-1].endswith(("_proj", "embed", "lm_head")) for n in self.master.names
        )
        ends = tuple(n.endswith(("o_proj", "down_proj")) for n in self.master.names)
        return tuple(x * shrink if end else x for end, x in zip(ends, params, strict=True)), decayed

    def data(self, phase: Phase, index: int) -> grain.IterDataset:
        return data.blocks(
            self.documents["train"], self.tokenizer.encode, length=phase.length, batch=phase.batch,
            seed=self.seed + index,
        )  # fmt: skip

    def loss(
        self, params: Params, batch: dict[str, jax.Array], key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Summed nats over batch["tokens"] [B, T + 1] int32, and the number of predicted tokens; batch["weights"]
        [B, T], where there, leaves tokens out with 0."""
        tokens = batch["tokens"]
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        pos = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
        pos = self.rules.reshard(pos, "batch", None)
        cast = tuple(p.astype(self.model.dtype) for p in params)
        hidden, head = self.model.hidden(cast, inputs, pos, remat=self.remat)
        weights = batch.get("weights", jnp.ones(labels.shape, jnp.float32))
        weights = self.rules.reshard(weights, "batch", None)
        return cross_entropy(hidden, head, labels, weights, self.rules), weights.sum(), {}

    def evaluate(self, params: Params) -> dict[str, float]:
        """Bits per byte over the held-out blocks of the selection split, at the first phase's length."""
        per = 8 * self.rules.data
        total, count = 0.0, 0
        for i in range(0, len(self.blocks), per):
            block, weights = _padded(self.blocks[i : i + per], per)
            laid = {"tokens": block, "weights": weights}
            laid = {k: jax.device_put(x, self.rules.sharding("batch", None)) for k, x in laid.items()}
            total += float(self._score(params, laid))
            count += int(weights.sum())
        nats = total / count
        return {"selection_loss": nats, "bits_per_byte": nats / math.log(2) / self.bytes_per_token}

    @functools.cached_property
    def _score(self) -> Any:
        return jax.jit(lambda params, batch: self.loss(params, batch, jax.random.key(0))[0])

    def facts(self) -> dict[str, Any]:
        """Hashes of tokenizer and documents."""
        return {"tokenizer": self.tokenizer.hash} | {k: _digest(d.path) for k, d in self.documents.items()}

    def export(self, params: Params, directory: Path, name: str) -> None:
        """Write a Hugging Face directory in bfloat16."""
        save_hf(LM(self.master, params, self.tokenizer, self.config, name), directory, dtype="bfloat16")


def _padded(block: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`block` filled up to `rows` rows, and the weights [rows, T] that leave the filling out."""
    weights = np.zeros((rows, block.shape[1] - 1), np.float32)
    weights[: len(block)] = 1
    return np.pad(block, ((0, rows - len(block)), (0, 0))), weights


def _digest(path: Path) -> str:
    with path.with_name(path.name + ".bin").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
