"""Is a mapped cache any good: every figure beside the rows that show what it is worth.

Each condition answers the same texts: it gives a cache for the prefix, the target reads the last `tail` prefix tokens
and the suffix behind it, and its logits are compared with the target's own. A map is judged against what the source
alone knows, what no context at all gives, what words would have carried, and caches that must not work.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvjax.cache import Rows
from kvjax.lm import LM
from kvjax.models import Model
from kvjax.stats import bootstrap
from kvjax.transfer import scoring
from kvjax.transfer.conditions import Condition, Reading, limit_of, native_rows, source_alone
from kvjax.transfer.scoring import Cut, agreement, behind, first, native, positions, read, rollout
from kvjax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class Texts:
    """Whole token sequences [N, P + S] int32, one a document, and how each is cut."""

    tokens: np.ndarray
    cut: Cut

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[1] != self.cut.length:
            raise ValueError(f"texts of shape {self.tokens.shape} for a cut of {self.cut.length} tokens")


@dataclasses.dataclass(frozen=True)
class Answers:
    """Means per text, [N] float64. On the suffix: nats, KL(native || this), share of equal likeliest tokens.

    forced_*: the same over the target's own greedy continuation of the prefix, teacher-forced. free_kl: over this
    condition's own continuation; free_same: share of its tokens that equal the native one. None where nothing was
    continued. cosine: [N, L], of attention outputs; None where the rows do not stand for those of the prefix.
    """

    nats: np.ndarray
    kl: np.ndarray
    top1: np.ndarray
    forced_kl: np.ndarray | None = None
    forced_top1: np.ndarray | None = None
    free_kl: np.ndarray | None = None
    free_same: np.ndarray | None = None
    cosine: np.ndarray | None = None


class Truth(NamedTuple):
    """The target's own: logits of the suffix, rows of all tokens but the last, queries of the suffix's tokens but the
    last; and its greedy continuation of the prefix with the logits it was taken from (None: nothing is continued)."""

    logits: jax.Array
    rows: Rows
    queries: scoring.Queries
    said: jax.Array | None
    said_logits: jax.Array | None


def judge(
    source: LM,
    target: LM,
    conditions: Mapping[str, Condition],
    texts: Texts,
    *,
    batch: int = 4,
    steps: int = 0,
) -> dict[str, Answers]:
    """Every condition on every text, with "native" in front. Each text is read once by each model.

    Args:
      steps: tokens of continuation, 0 for none. batch: texts at once; another text's cache is that of a neighbour.

    Raises:
      ValueError: a text would be alone in its batch.
    """
    cut, limit = texts.cut, limit_of(target)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("native", *conditions)}
    for tokens in _batches(texts.tokens, batch):
        truth = _truth(target.model, cut, steps, limit, target.params, tokens)
        seen = _read(source.model, source.params, tokens[:, : cut.prefix])
        reading = Reading(tokens, seen, first(truth.rows, cut.prefix))
        found["native"].append(_itself(truth, tokens[:, cut.prefix :], limit))
        for name, condition in conditions.items():
            speaker = condition.speaker or target
            rows = _give(condition.give, condition.arrays, reading)
            found[name].append(
                _measure(
                    speaker.model,
                    target.model,
                    cut,
                    limit,
                    speaker.params,
                    target.params,
                    rows,
                    tokens,
                    truth,
                )
            )
    return {
        name: Answers(**{k: np.concatenate([np.asarray(p[k], np.float64) for p in parts]) for k in parts[0]})
        for name, parts in found.items()
    }


def _batches(tokens: np.ndarray, batch: int) -> Any:
    if batch < 2 or len(tokens) % batch == 1:
        raise ValueError(f"{len(tokens)} texts in batches of {batch}: each needs another beside it")
    parts = range(0, len(tokens), batch)
    bar = tqdm(parts, unit="batch", desc="judging", disable=not sys.stderr.isatty())
    return (jnp.asarray(tokens[i : i + batch]) for i in bar)


_read = jax.jit(read, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _give(give: Callable[[Any, Reading], Rows], arrays: Any, reading: Reading) -> Rows:
    return give(arrays, reading)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _truth(
    model: Model, cut: Cut, steps: int, limit: int | None, params: Params, tokens: Int[Array, "B P+S"]
) -> Truth:
    logits, rows = native(model, params, tokens, cut)
    ids = tokens[:, : cut.length - 1]
    queries = tuple(q[:, cut.prefix :] for q in model.bind(params).queries(ids, positions(ids)))
    said, said_logits = None, None
    if steps:
        said, said_logits = rollout(model, params, first(rows, cut.given), tokens, cut, steps, limit)
    return Truth(logits, rows, queries, said, said_logits)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _measure(
    speaker: Model, target: Model, cut: Cut, limit: int | None, params: Params, target_params: Params, rows: Rows,
    tokens: Int[Array, "B P+S"], truth: Truth,
) -> dict[str, jax.Array]:  # fmt: skip
    """One batch of one condition: the fields of `Answers`. Conditions whose rows have one shape share this program."""
    known = lambda logits: logits[..., :limit]  # noqa: E731  (two models may pad one vocabulary differently)
    compare = lambda a, b, labels: agreement(known(a), known(b), labels)  # noqa: E731
    compared = compare(behind(speaker, params, rows, tokens, cut), truth.logits, tokens[:, cut.prefix :])
    found = {"nats": compared.nats, "kl": compared.kl, "top1": compared.top1}
    if truth.said is not None and truth.said_logits is not None:
        steps = truth.said.shape[1]
        ahead = Cut(cut.prefix, steps, cut.tail)
        continued = lambda words: jnp.concatenate([tokens[:, : cut.prefix], words], 1)  # noqa: E731
        logits = behind(speaker, params, rows, continued(truth.said), ahead)
        forced = compare(logits, truth.said_logits, truth.said)
        own, logits = rollout(speaker, params, rows, tokens, cut, steps, limit)
        judge = behind(target, target_params, first(truth.rows, cut.given), continued(own), ahead)
        found |= {"forced_kl": forced.kl, "forced_top1": forced.top1}
        found |= {"free_kl": compare(logits, judge, own).kl, "free_same": own == truth.said}
    found = {name: jnp.mean(x, 1, dtype=jnp.float32) for name, x in found.items()}
    if speaker is target and rows[0][0].shape[2] == cut.given:
        pairs = scoring.attended_pairs(target, truth.queries, truth.rows, rows, cut.prefix)
        found["cosine"] = scoring.cosines(pairs)
    return found


def _itself(truth: Truth, labels: jax.Array, limit: int | None) -> dict[str, Any]:
    """`_measure` of the target's own answer: what it says of the suffix, and perfect agreement with itself."""
    nats = np.asarray(_nats(truth.logits[..., :limit], labels))
    none, all_ = np.zeros_like(nats), np.ones_like(nats)
    found = {"nats": nats, "kl": none, "top1": all_, "cosine": np.ones((len(nats), len(truth.rows)))}
    if truth.said is not None:
        found |= {"forced_kl": none, "forced_top1": all_, "free_kl": none, "free_same": all_}
    return found


@jax.jit
def _nats(logits: Float[Array, "B S V"], labels: Int[Array, "B S"]) -> Float[Array, " B"]:
    return agreement(logits, logits, labels).nats.mean(1)


def covered(columns: Mapping[str, np.ndarray], name: str, start: str) -> tuple[float, float, float]:
    """(start - this) / (start - native): which share of the way from `start` to native is gone, with its 95 %
    interval over documents.

    Args:
      columns: condition -> [N], a mean or a sum per document, of a figure in which native is best.
    """
    used = {k: columns[k] for k in (start, "native", name)}
    return bootstrap(used, lambda m: (m[start] - m[name]) / (m[start] - m["native"]))


def choice(
    source: LM,
    target: LM,
    conditions: Mapping[str, Condition],
    tokens: np.ndarray,
    cut: Cut,
    *,
    batch: int = 4,
) -> dict[str, np.ndarray]:
    """4-way continuation choice: [N] float64 of 0 or 1 a text, by condition ("native" and "source alone" in front).

    Each text's own suffix stands against those of the three texts after it, at the same offset; the lowest mean nats
    wins. A prefix is read once for its four candidates.
    """
    offered = np.stack([np.roll(tokens[:, cut.prefix :], -i, axis=0) for i in range(4)], 1)  # [N, 4, S]
    every = {"native": native_rows(cut), "source alone": source_alone(source, cut), **conditions}
    right: dict[str, list[np.ndarray]] = {name: [] for name in every}
    for i, part in enumerate(_batches(tokens, batch)):
        ids = part[:, : cut.prefix]
        seen = [_read(lm.model, lm.params, ids) for lm in (source, target)]
        candidates = jnp.asarray(offered[i * batch : (i + 1) * batch])
        for name, condition in every.items():
            speaker = condition.speaker or target
            rows = _give(condition.give, condition.arrays, Reading(part, *seen))
            nats = _candidates(speaker.model, cut, limit_of(target), speaker.params, rows, ids, candidates)
            right[name].append(np.asarray(nats).argmin(1) == 0)
    return {name: np.concatenate(parts).astype(np.float64) for name, parts in right.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _candidates(
    model: Model, cut: Cut, limit: int | None, params: Params, rows: Rows, ids: Int[Array, "B P"],
    offered: Int[Array, "B C S"],
) -> Float[Array, "B C"]:  # fmt: skip
    """Mean nats of each candidate suffix behind one prefix."""
    batch, count, _ = offered.shape
    suffix = offered.reshape(batch * count, -1)
    tokens = jnp.concatenate([jnp.repeat(ids, count, 0), suffix], 1)
    rows = jax.tree.map(lambda x: jnp.repeat(x, count, 0), rows)
    logits = behind(model, params, rows, tokens, cut)[..., :limit]
    return _nats(logits, suffix).reshape(batch, count)


def samples(texts: Sequence[np.ndarray], cut: Cut) -> Texts:
    """`Texts` from token sequences that are long enough, cut to length."""
    return Texts(np.stack([t[: cut.length] for t in texts]), cut)
