"""kvjax: move a prompt's KV cache between models, and decode exactly by drafted blocks, in JAX.

Public names are imported on first use, so that `import kvjax` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ finds them
    from kvjax.checkpoints.drafters import load_drafter as load_drafter
    from kvjax.checkpoints.drafters import save_drafter as save_drafter
    from kvjax.checkpoints.export import save_hf as save_hf
    from kvjax.checkpoints.load import load as load
    from kvjax.checkpoints.pull import pull as pull
    from kvjax.compilation import compile_cache as compile_cache
    from kvjax.decode.dflash import DFlash as DFlash
    from kvjax.decode.model import DraftModel as DraftModel
    from kvjax.decode.ngram import Ngram as Ngram
    from kvjax.decode.sources import Junk as Junk
    from kvjax.decode.sources import Oracle as Oracle
    from kvjax.decode.sources import Plain as Plain
    from kvjax.lm import LM as LM
    from kvjax.lm import Drafter as Drafter
    from kvjax.models import Model as Model
    from kvjax.models import build as build
    from kvjax.sharding import make_mesh as make_mesh

__version__ = "0.1.0"

_HOME = {
    "LM": "kvjax.lm",
    "Model": "kvjax.models",
    "build": "kvjax.models",
    "load": "kvjax.checkpoints.load",
    "load_drafter": "kvjax.checkpoints.drafters",
    "pull": "kvjax.checkpoints.pull",
    "save_drafter": "kvjax.checkpoints.drafters",
    "save_hf": "kvjax.checkpoints.export",
    "compile_cache": "kvjax.compilation",
    "make_mesh": "kvjax.sharding",
    "DFlash": "kvjax.decode.dflash",
    "DraftModel": "kvjax.decode.model",
    "Drafter": "kvjax.lm",
    "Ngram": "kvjax.decode.ngram",
    "Junk": "kvjax.decode.sources",
    "Oracle": "kvjax.decode.sources",
    "Plain": "kvjax.decode.sources",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
