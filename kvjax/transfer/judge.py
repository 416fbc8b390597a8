"""Is a mapped cache any good: every figure beside the rows that show what it is worth.

Each condition answers the same texts: it is given a cache for the prefix (or none), the target reads the last `tail`
prefix tokens and the suffix, and its logits are compared with the target's own. A map is judged against what the source
alone knows, what no context at all gives, and against caches that must not work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Rows
from kvjax.lm import LM
from kvjax.models import Model
from kvjax.stats import bootstrap
from kvjax.transfer.geometry import Geometry, content, rotated
from kvjax.transfer.mapper import LayerMap, Mapper, map_content
from kvjax.transfer.scoring import Cut, agreement, behind, native, rollout
from kvjax.transfer.select import matching
from kvjax.typing import Array, Float, Int, Params


class Condition(NamedTuple):
    """arrays: what `give` reads (weights, maps), an argument of the compiled program rather than a constant in it.
    give: (arrays, tokens [B, P+S]) -> rows for positions 0.. of the target's cache, or None for no context."""

    arrays: Any
    give: Callable[[Any, jax.Array], Rows | None]


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
    """Per text [N] float64: mean nats of the suffix, mean KL(native || this), share of equal likeliest tokens; free:
    mean KL over the tokens it continues with when left alone; same: share of those equal to the native continuation."""

    nats: np.ndarray
    kl: np.ndarray
    top1: np.ndarray
    free: np.ndarray | None = None
    same: np.ndarray | None = None


def rows_of(model: Model, params: Params, tokens: Int[Array, "B T"]) -> Rows:
    """The rows a model's cache holds after reading `tokens` from position 0."""
    return model.forward(params, tokens, _positions(tokens), logits=False).rows


def features_of(model: Model, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T L 2 K H"]:
    return content(rows_of(model, params, tokens), _positions(tokens), Geometry.of(model.config))


def mapped(source: LM, mapper: Mapper, cut: Cut, *, shift: int = 0) -> Condition:
    """The condition a map is judged in: its source reads the prefix (of the text `shift` before, in its batch)."""

    def give(arrays: Any, tokens: jax.Array) -> Rows:
        params, mapper = arrays
        read = jnp.roll(tokens[:, : cut.given], shift, axis=0)
        return map_content(mapper, features_of(source.model, params, read), _positions(read))

    return Condition((source.params, mapper), give)


def controls(source: LM, target: LM, mapper: Mapper, cut: Cut) -> dict[str, Condition | str]:
    """The conditions beside a map, or a sentence why one cannot be had for this pair."""
    a, b = Geometry.of(source.config), Geometry.of(target.config)

    def placed(features: jax.Array, layers: tuple[int, ...], tokens: jax.Array) -> Rows:
        return tuple(
            (rotated(features[:, :, i, 0], _positions(tokens), b), features[:, :, i, 1].transpose(0, 2, 1, 3))
            for i in layers
        )

    def injected(params: Any, tokens: jax.Array) -> Rows:
        read = tokens[:, : cut.given]
        return placed(features_of(target.model, params, read), tuple(range(b.layers)), read)

    def zero(_: Any, tokens: jax.Array) -> Rows:
        shape = (tokens.shape[0], b.kv_heads, cut.given, b.head_dim)
        return ((jnp.zeros(shape), jnp.zeros(shape)),) * b.layers

    deep = tuple(i for (i,) in matching(a.layers, b.layers))

    def raw(params: Any, tokens: jax.Array) -> Rows:
        rows = rows_of(source.model, params, tokens[:, : cut.given])
        return tuple(rows[i] for i in deep)

    def turned(params: Any, tokens: jax.Array) -> Rows:
        read = tokens[:, : cut.given]
        return placed(features_of(source.model, params, read), deep, read)

    differ = f"the source's rows are {a.kv_heads} x {a.head_dim}, the target's {b.kv_heads} x {b.head_dim}"
    same = (a.kv_heads, a.head_dim) == (b.kv_heads, b.head_dim)
    return {
        "native, re-injected": Condition(target.params, injected),
        "no context": Condition((), lambda _, tokens: None),
        "zero cache": Condition((), zero),
        "raw source cache": Condition(source.params, raw) if same else differ,
        "source cache, target's rope": Condition(source.params, turned) if same else differ,
        "random map": mapped(source, random_map(mapper), cut),
        "another text's cache": mapped(source, mapper, cut, shift=1),
    }


def _positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def random_map(mapper: Mapper, seed: int = 0) -> Mapper:
    """Gaussian weights of the same spread as the map's, and its means and biases."""

    def spoil(i: int, part: LayerMap) -> LayerMap:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
        noisy = [jax.random.normal(k, w.shape) * jnp.std(w) for k, w in zip(keys, (part.key, part.value))]
        return dataclasses.replace(part, key=noisy[0], value=noisy[1])

    return dataclasses.replace(mapper, maps=tuple(spoil(i, m) for i, m in enumerate(mapper.maps)))


def judge(
    source: LM, target: LM, conditions: Mapping[str, Condition], texts: Texts, *, batch: int = 4, steps: int = 0,
    progress: Callable[[str], Any] = lambda name: None,
) -> dict[str, Answers]:  # fmt: skip
    """Every condition on every text, with "native" and "source alone" in front.

    Args:
      steps: tokens of free continuation, 0 for none. batch: texts at once; "another text" is one of the same batch, so
        at least 2.

    Raises:
      ValueError: fewer than two texts a batch.
    """
    cut, count = texts.cut, len(texts.tokens)
    if batch < 2 or count % batch == 1:
        raise ValueError(f"{count} texts in batches of {batch}: each needs another beside it")
    parts = [jnp.asarray(texts.tokens[i : i + batch]) for i in range(0, count, batch)]
    truths = [native(target.model, target.params, tokens, cut)[0] for tokens in parts]
    compare = jax.jit(agreement)
    limit = target.tokenizer.vocab if target.tokenizer else None
    said = [
        rollout(target.model, target.params, None, tokens, cut, steps, limit)[0] if steps else None
        for tokens in parts
    ]
    results = {}
    for name in ("native", "source alone", *conditions):
        progress(name)
        found: list[list[np.ndarray]] = []
        for tokens, truth, theirs in zip(parts, truths, said, strict=True):
            logits = answer(source, target, name, conditions, tokens, cut)
            columns = [
                np.asarray(x, np.float64).mean(1) for x in compare(logits, truth, tokens[:, cut.prefix :])
            ]
            if theirs is not None and name in conditions:
                columns += _free(target, conditions[name], tokens, theirs, cut, limit)
            found.append(columns)
        results[name] = Answers(*(np.concatenate(c) for c in zip(*found, strict=True)))
    return results


def answer(
    source: LM,
    target: LM,
    name: str,
    conditions: Mapping[str, Condition],
    tokens: Int[Array, "B P+S"],
    cut: Cut,
) -> Float[Array, "B S V"]:
    """Logits of the suffix in one condition."""
    if name in ("native", "source alone"):
        lm = target if name == "native" else source
        return native(lm.model, lm.params, tokens, cut)[0]
    condition = conditions[name]
    return _given(target.model, condition.give, cut, target.params, condition.arrays, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _given(
    model: Model, give: Callable, cut: Cut, params: Params, arrays: Any, tokens: jax.Array
) -> jax.Array:
    return behind(model, params, give(arrays, tokens), tokens, cut)


def _free(
    target: LM, condition: Condition, tokens: jax.Array, theirs: jax.Array, cut: Cut, limit: int | None
) -> list[np.ndarray]:
    """[KL over the condition's own continuation, share of tokens that equal the native continuation], each [B].

    theirs: the native continuation, [B, R] int32.
    """
    rows = jax.jit(condition.give)(condition.arrays, tokens)
    if rows is None:  # nothing stands before the tail, and a cache cannot say so
        nothing = np.full(len(tokens), np.nan)
        return [nothing, nothing]
    steps = theirs.shape[1]
    chosen, logits = rollout(target.model, target.params, rows, tokens, cut, steps, limit)
    whole = jnp.concatenate([tokens[:, : cut.prefix], chosen], 1)
    truth, _ = native(target.model, target.params, whole, Cut(cut.prefix, steps, cut.tail))
    kl = agreement(logits, truth, chosen).kl
    return [np.asarray(kl, np.float64).mean(1), np.asarray(chosen == theirs, np.float64).mean(1)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _cosines(
    model: Model, give: Callable, cut: Cut, params: Params, arrays: Any, tokens: jax.Array
) -> jax.Array:
    """[L, B]: cosine between a layer's attention outputs over given and over native rows, under native queries, mean
    over the suffix and the heads."""
    read = tokens[:, : cut.length - 1]
    pos = _positions(read)
    queries = model.bind(params).queries(read, pos)
    truth = model.forward(params, read, pos, logits=False).rows
    rows = give(arrays, tokens)
    assert rows is not None
    seen = jnp.arange(read.shape[1])[None] <= jnp.arange(cut.prefix, read.shape[1])[:, None]  # [S - 1, T]

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgh,bksh->bkgts", q, k, precision="highest") * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        return jnp.einsum("bkgts,bksh->bkgth", weights, v, precision="highest")

    found = []
    for q, (k, v), (near_k, near_v) in zip(queries, truth, rows, strict=True):
        put = lambda whole, part: whole.at[:, :, : cut.given].set(part[:, :, : cut.given].astype(whole.dtype))  # noqa: E731
        q = q[:, cut.prefix :].astype(jnp.float32)
        a, b = attended(q, k, v), attended(q, put(k, near_k), put(v, near_v))
        norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
        found.append((jnp.sum(a * b, -1) / jnp.maximum(norms, 1e-30)).mean((1, 2, 3)))
    return jnp.stack(found)


def similarity(
    target: LM, conditions: Mapping[str, Condition], texts: Texts, *, batch: int = 4
) -> dict[str, tuple[float, float]]:
    """Attention-output cosine, (mean over layers, worst layer), of every condition that gives rows (full attention)."""
    found = {}
    for name, condition in conditions.items():
        parts = []
        for i in range(0, len(texts.tokens), batch):
            tokens = jnp.asarray(texts.tokens[i : i + batch])
            if jax.eval_shape(condition.give, condition.arrays, tokens) is None:
                break
            parts.append(
                _cosines(target.model, condition.give, texts.cut, target.params, condition.arrays, tokens)
            )
        if parts:
            layers = np.concatenate(parts, 1).mean(1)
            found[name] = float(layers.mean()), float(layers.min())
    return found


def recovery(results: Mapping[str, Answers], name: str) -> tuple[float, float, float]:
    """Native context recovery, (none - this) / (none - native) in nats, with its 95 % interval over texts."""
    columns = {k: results[k].nats for k in ("no context", "native", name)}
    return bootstrap(columns, lambda m: (m["no context"] - m[name]) / (m["no context"] - m["native"]))


def gap_closed(results: Mapping[str, Answers], name: str) -> tuple[float, float, float]:
    """(source - this) / (source - native) in nats: what is gained over letting the source answer."""
    columns = {k: results[k].nats for k in ("source alone", "native", name)}
    return bootstrap(columns, lambda m: (m["source alone"] - m[name]) / (m["source alone"] - m["native"]))


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
    wins.
    """
    count = len(tokens)
    offered = np.stack([np.roll(tokens[:, cut.prefix :], -i, axis=0) for i in range(4)], 1)  # [N, 4, S]
    every = np.concatenate([np.repeat(tokens[:, None, : cut.prefix], 4, 1), offered], 2)
    nats = jax.jit(lambda logits, labels: agreement(logits, logits, labels).nats.mean(1))
    results = {}
    for name in ("native", "source alone", *conditions):
        right = np.zeros(count)
        for i in range(0, count, batch):
            part = jnp.asarray(every[i : i + batch].reshape(-1, cut.length))
            logits = answer(source, target, name, conditions, part, cut)
            found = np.asarray(nats(logits, part[:, cut.prefix :])).reshape(-1, 4)
            right[i : i + batch] = found.argmin(1) == 0
        results[name] = right
    return results


def quality(right: Mapping[str, np.ndarray], name: str) -> tuple[float, float, float]:
    """Normalised quality of a choice: (this - no context) / (native - no context), with its interval."""
    columns = {k: right[k] for k in ("no context", "native", name)}
    return bootstrap(columns, lambda m: (m[name] - m["no context"]) / (m["native"] - m["no context"]))


def samples(texts: Sequence[np.ndarray], cut: Cut) -> Texts:
    """`Texts` from token sequences that are long enough, cut to length."""
    return Texts(np.stack([t[: cut.length] for t in texts]), cut)
