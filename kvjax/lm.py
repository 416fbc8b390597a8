"""The bundles users hold: a loaded language model, a loaded drafter."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from kvjax.config import ModelConfig
from kvjax.typing import Params

if TYPE_CHECKING:
    from kvjax.models import Model
    from kvjax.models.drafter import DrafterModel
    from kvjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class LM:
    """A loaded model: static definition, parameter leaves, tokenizer, configuration and identity.

    `id` is what it was loaded from (directory, hub id, file or name), `revision` the hub commit if known.
    """

    model: Model
    params: Params
    tokenizer: Tokenizer | None
    config: ModelConfig
    id: str
    revision: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A loaded block drafter: static definition, its own leaves, and where it was loaded from.

    ids: [rows of its own head] int32, the token of each; None with the target's head.
    """

    model: DrafterModel
    params: Params
    ids: jax.Array | None
    id: str
    revision: str | None = None
