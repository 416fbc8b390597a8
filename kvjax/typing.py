"""Axis letters, array aliases and the optional run-time shape check.

Axis letters, in this order in shapes and comments:
  B batch row, T token of a call, S cache slot (= absolute position), N query head, K KV head, G query heads
  per KV head, H head width, D model width, F MLP width, V vocabulary, L layer, W block width of a round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import jax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

__all__ = ["Array", "Bool", "Float", "Int", "PRNGKeyArray", "Params", "Texts", "typed", "check_shapes"]

Params = tuple[jax.Array, ...]
"""Parameter leaves in `Model.names` order: the only form of weights that crosses a jit boundary."""


class Texts(Protocol):
    """Random access to texts: a list of str, or a split of a corpus."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")
_check = False


def check_shapes(on: bool = True) -> None:
    """Turn the run-time check of `typed` functions on; tests do, the product does not."""
    global _check
    _check = on


def typed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Check the jaxtyping annotations of `function` when `check_shapes` is on (costs trace time only)."""

    @functools.lru_cache(maxsize=1)
    def checked() -> Callable[_P, _R]:
        from beartype import beartype
        from jaxtyping import jaxtyped

        return jaxtyped(typechecker=beartype)(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (checked() if _check else function)(*args, **kwargs)

    return call
