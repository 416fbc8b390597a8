"""The accept rule: sample the target on every row, keep drafts while they equal it.

Row j of a round holds the context up to draft j, so its sample is what plain decoding would have put next. The
draft at j+1 is accepted iff it is that token; the first unequal sample is the correction, and after a fully
accepted block the last row's sample comes for free. Every emitted token is thus the target's own draw, whatever
was drafted: the distribution is exactly the target's (no ratio, no residual, no epsilon).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Bool, Int


class Verdict(NamedTuple):
    """count: [B] tokens emitted this round (0 for done rows); accepted: [B] drafts among the emitted tokens;
    done: [B] bool after this round."""

    count: jax.Array
    accepted: jax.Array
    done: jax.Array


def accepted_prefix(draft: Int[Array, "B W"], target: Int[Array, "B W"]) -> Int[Array, " B"]:
    """Length of the longest chain of drafts that the target confirms, 0..W-1. draft[:, 0] is the anchor."""
    same = (draft[:, 1:] == target[:, :-1]).astype(jnp.int32)
    return jnp.cumprod(same, axis=1).sum(axis=1)


def verify(
    draft: Int[Array, "B W"], target: Int[Array, "B W"], *, stop_ids: Int[Array, "B E"], room: Int[Array, " B"],
    done: Bool[Array, " B"],
) -> Verdict:  # fmt: skip
    """Judge one round.

    Args:
      draft: anchor and W-1 proposals. target: the target's own token after each row.
      stop_ids: ids that end a row (emitted, then done), padded with -1. room: tokens the row may still emit.
      done: rows that already ended; they emit nothing.
    """
    width = draft.shape[1]
    accepted = accepted_prefix(draft, target)
    count = jnp.minimum(accepted + 1, room)
    stops = (target[:, :, None] == stop_ids[:, None, :]).any(-1)
    first = jnp.where(stops.any(1), jnp.argmax(stops, axis=1), width)
    count = jnp.where(done, 0, jnp.minimum(count, first + 1)).astype(jnp.int32)
    ended = done | (count > first) | (room - count <= 0)
    return Verdict(count, jnp.minimum(accepted, jnp.maximum(count, 0)) * (count > 0), ended)
