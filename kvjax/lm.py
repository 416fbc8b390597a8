"""The bundle users hold: one loaded language model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvjax.config import ModelConfig
from kvjax.typing import Params

if TYPE_CHECKING:
    from kvjax.models import Model
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
