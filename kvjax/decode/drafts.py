"""From what a user gives as `draft` to a draft source and its arrays."""

from __future__ import annotations

from typing import Any

from kvjax.decode.dflash import DFlash
from kvjax.decode.model import DraftModel
from kvjax.decode.sources import Plain
from kvjax.decode.state import DraftSource
from kvjax.lm import LM, Drafter
from kvjax.models.drafter import DrafterParams, check_target


def source_of(
    lm: LM, draft: Any, draft_params: Any = (), width: int | None = None
) -> tuple[DraftSource, Any]:
    """The source that drafts for `lm`, and its params.

    Args:
      draft: None (plain decoding), a `Drafter`, a smaller `LM` of the same vocabulary, or a draft source, whose
        arrays are `draft_params`.
      width: rows of a round; default the drafter's block, or 4 for an `LM`. A draft source has its own.

    Raises:
      ValueError: they don't fit each other; ConfigError where the drafter was made for another target.
    """
    if isinstance(draft, Drafter):
        block = draft.model.drafter
        check_target(block, lm.config)
        _same_mesh(draft, lm)
        source = DFlash(draft.model, block.block if width is None else width)
        return source, drafter_params(draft, lm)
    if isinstance(draft, LM):
        if draft.config.vocab != lm.config.vocab:
            raise ValueError(
                f"draft model {draft.id} has a vocabulary of {draft.config.vocab}, {lm.id} one of {lm.config.vocab}"
            )
        if (
            lm.tokenizer is not None
            and draft.tokenizer is not None
            and lm.tokenizer.hash != draft.tokenizer.hash
        ):
            raise ValueError(f"draft model {draft.id} and {lm.id} have different tokenizers")
        _same_mesh(draft, lm)
        return DraftModel(draft.model, 4 if width is None else width), draft.params
    if draft is None:
        if width not in (None, 1):
            raise ValueError(f"width {width} needs a draft source: plain decoding has width 1")
        return Plain(), ()
    if not hasattr(draft, "propose"):
        raise ValueError(f"draft: {draft!r} is neither a draft source nor a loaded model or drafter")
    if width not in (None, draft.width):
        raise ValueError(f"width {width} contradicts the draft source's own width, {draft.width}")
    return draft, draft_params


def drafter_params(drafter: Drafter, target: LM) -> DrafterParams:
    """The arrays a drafter runs on: its own, and the target's embedding and head, which are not copied."""
    leaf = dict(zip(target.model.names, target.params, strict=True))
    head = leaf.get("lm_head", leaf["embed"])
    if drafter.ids is not None:
        head = dict(zip(drafter.model.names, drafter.params, strict=True))["own_head"]
    return DrafterParams(drafter.params, leaf["embed"], head, drafter.ids)


def _same_mesh(draft: LM | Drafter, lm: LM) -> None:
    if draft.model.rules.mesh != lm.model.rules.mesh:
        raise ValueError(f"draft model {draft.id} and {lm.id} were loaded on different meshes")
