"""Data files that travel with the package: `configs/`, installed inside `kvjax` or beside it in a checkout."""

from __future__ import annotations

import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path


class ResourceError(RuntimeError):
    """A data file of this package is missing; the message names it."""


def config_path(path: str) -> Traversable:
    """The file or directory `configs/<path>`.

    Raises:
      ResourceError: it is not installed.
    """
    packaged = importlib.resources.files("kvjax").joinpath("configs", *path.split("/"))
    checkout = Path(__file__).parents[1].joinpath("configs", *path.split("/"))
    for place in (packaged, checkout):
        if place.is_file() or place.is_dir():
            return place
    raise ResourceError(f"configs/{path} is not installed with kvjax")
