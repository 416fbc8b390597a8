"""What a map is judged beside: caches that must work, that must not, and what can be had without a map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Rows
from kvjax.lm import LM
from kvjax.transfer.geometry import Geometry, content, rotated
from kvjax.transfer.mapper import LayerMap, Mapper, map_content
from kvjax.transfer.repair import Repair
from kvjax.transfer.scoring import Cut, cache_of, first, positions, read, rollout
from kvjax.transfer.select import matching


class Reading(NamedTuple):
    """What a condition may use: texts [B, P + S], and the rows of both models after the P tokens of the prefix."""

    tokens: jax.Array
    source: Rows
    target: Rows


@dataclasses.dataclass(frozen=True)
class Condition:
    """give: (arrays, reading) -> rows that stand before the tail, as many as there are, for positions 0..; None
    stands for the target as `speaker`. arrays (weights, maps) are arguments of the compiled program, not constants."""

    give: Callable[[Any, Reading], Rows]
    arrays: Any = ()
    speaker: LM | None = None


def native_rows(cut: Cut) -> Condition:
    """The target's own rows."""
    return Condition(lambda _, reading: first(reading.target, cut.given))


def source_alone(source: LM, cut: Cut) -> Condition:
    """The source goes on by itself, and is compared with the target."""
    return Condition(lambda _, reading: first(reading.source, cut.given), speaker=source)


def no_context(target: LM) -> Condition:
    """The target reads tail and suffix with nothing before them but what the tokenizer puts before any text."""
    lead = lead_of(target)
    return Condition(
        lambda params, reading: read(target.model, params, _begun(lead, reading.tokens[:, :0])), target.params
    )


def mapped(mapper: Mapper, cut: Cut, *, own: bool = False, shift: int = 0) -> Condition:
    """A map of the source's rows (own: of the target's), of the text `shift` before in the batch."""

    def give(mapper: Mapper, reading: Reading) -> Rows:
        rows = first(reading.target if own else reading.source, cut.given)
        rows = jax.tree.map(lambda x: jnp.roll(x, shift, axis=0), rows)
        pos = positions(reading.tokens[:, : cut.given])
        return map_content(mapper, content(rows, pos, mapper.source), pos)

    return Condition(give, mapper)


def repaired(target: LM, mapper: Mapper, cut: Cut, repair: Repair) -> Condition:
    """As `kvjax.transfer.repair.hand_over` makes the rows: first layers native, and the last of the prefix read by the
    target behind the mapped ones.

    Raises:
      ValueError: a repair of first tokens, more layers than there are, or a tail that is not between the cut's own and
        its prefix.
    """
    layers = target.config.num_layers
    if repair.head or repair.layers > layers or not cut.tail <= repair.tail <= cut.prefix:
        raise ValueError(
            f"{repair} cannot be judged on {layers} layers, a prefix of {cut.prefix} tokens and a tail of {cut.tail}"
        )
    given = cut.prefix - repair.tail
    start = mapped(mapper, Cut(cut.prefix, cut.suffix, repair.tail))

    def give(arrays: Any, reading: Reading) -> Rows:
        mapper, params = arrays
        rows = start.give(mapper, reading)
        rows = (*first(reading.target, given)[: repair.layers], *rows[repair.layers :])
        if given == cut.given:
            return rows
        model, ids = target.model, reading.tokens[:, given : cut.given]
        cache = cache_of(rows, cut.given, model.dtype)
        out = model.forward(params, ids, positions(ids, given), cache, logits=False, at=jnp.int32(given))
        join = lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], 2)  # noqa: E731
        return jax.tree.map(join, rows, out.rows)

    return Condition(give, (mapper, target.params))


def controls(source: LM, target: LM, mapper: Mapper, cut: Cut, words: int) -> dict[str, Condition | str]:
    """The conditions beside a map, or a sentence why one cannot be had for this pair.

    words: tokens of text that are handed over instead of a cache, where text is: as many as the source writes (its
    greedy continuation of the prefix), or the last ones of the prefix.
    """
    a, b = Geometry.of(source.config), Geometry.of(target.config)
    lead, limit = lead_of(target), limit_of(target)

    def placed(rows: Rows, geometry: Geometry, layers: tuple[int, ...]) -> Rows:
        """The layers' keys with their own rotation taken off and the target's put on."""
        pos = jnp.broadcast_to(jnp.arange(cut.given, dtype=jnp.int32), (rows[0][0].shape[0], cut.given))
        features = content(first(rows, cut.given), pos, geometry)
        return tuple(
            (rotated(features[:, :, i, 0], pos, b), features[:, :, i, 1].transpose(0, 2, 1, 3))
            for i in layers
        )

    def zero(_: Any, reading: Reading) -> Rows:
        return jax.tree.map(jnp.zeros_like, first(reading.target, cut.given))

    deep = tuple(i for (i,) in matching(a.layers, b.layers))

    def raw(_: Any, reading: Reading) -> Rows:
        rows = first(reading.source, cut.given)
        return tuple(rows[i] for i in deep)

    def written(params: Any, reading: Reading) -> Rows:
        theirs, ours = params
        known = first(reading.source, cut.given)
        text, _ = rollout(source.model, theirs, known, reading.tokens, cut, words, limit)
        return read(target.model, ours, _begun(lead, text))

    def last(params: Any, reading: Reading) -> Rows:
        return read(target.model, params, _begun(lead, reading.tokens[:, cut.given - words : cut.given]))

    differ = f"the source's rows are {a.kv_heads} x {a.head_dim}, the target's {b.kv_heads} x {b.head_dim}"
    same = (a.kv_heads, a.head_dim) == (b.kv_heads, b.head_dim)
    short = f"the prefix has {cut.given} tokens before its tail, {words} are to be handed over"
    turned = Condition(lambda _, reading: placed(reading.source, a, deep))
    return {
        "native, re-injected": Condition(
            lambda _, reading: placed(reading.target, b, tuple(range(b.layers)))
        ),
        "source alone": source_alone(source, cut),
        "no context": no_context(target),
        "zero cache": Condition(zero),
        "raw source cache": Condition(raw) if same else differ,
        "source cache, target's rope": turned if same else differ,
        "random map": mapped(random_map(mapper), cut),
        f"text hand-off, {words} tokens": Condition(written, (source.params, target.params)),
        f"last {words} tokens alone": Condition(last, target.params) if words <= cut.given else short,
    }


def lead_of(lm: LM) -> np.ndarray:
    """What the tokenizer puts before a text."""
    return np.asarray(lm.tokenizer.encode("") if lm.tokenizer else [], np.int32)


def _begun(lead: np.ndarray, text: jax.Array) -> jax.Array:
    ahead = jnp.broadcast_to(jnp.asarray(lead), (text.shape[0], len(lead)))
    return jnp.concatenate([ahead, text], 1)


def limit_of(lm: LM) -> int | None:
    return lm.tokenizer.vocab if lm.tokenizer else None


def random_map(mapper: Mapper, seed: int = 0) -> Mapper:
    """Gaussian weights of the same spread as the map's, and its means and biases."""

    def spoil(i: int, part: LayerMap) -> LayerMap:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
        noisy = [jax.random.normal(k, w.shape) * jnp.std(w) for k, w in zip(keys, (part.key, part.value))]
        return dataclasses.replace(part, key=noisy[0], value=noisy[1])

    return dataclasses.replace(mapper, maps=tuple(spoil(i, m) for i, m in enumerate(mapper.maps)))
