"""Data files that travel with the package: `configs/` (inside `kvjax` or beside it in a checkout), models and maps."""

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


def packaged_models() -> dict[str, Path]:
    """The models that are installed with kvjax, name -> Hugging Face directory."""
    return _packaged("config.json")


def packaged_maps() -> dict[str, Path]:
    """The maps between caches that are installed with kvjax, name -> directory."""
    return _packaged("manifest.json")


def _packaged(mark: str) -> dict[str, Path]:
    found = sorted(path.parent for path in (Path(__file__).parent / "mini").glob(f"*/{mark}"))
    return {path.name: path for path in found}


def folder_size(directory: Path) -> int:
    """Bytes of all files below `directory`."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
