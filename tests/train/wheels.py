"""Wheels and a recipe to build small corpora from."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from kvjax.resources import config_path
from train.packages import RECIPE

OSI = "Classifier: License :: OSI Approved ::"


def source(seed: str, lines: int = 60) -> str:
    """Python text no other seed shares a line with."""
    return "".join(f"def {seed}_function_number_{i}(value): return value\n" for i in range(lines))


def wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str | bytes],
    *,
    about: str = "Licence: see there",
    version: str = "1.0",
) -> Path:
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{OSI} MIT License\n"
    members = dict(files) | {
        f"{info}/METADATA": meta + f"Description-Content-Type: text/markdown\n\n{about}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, value in members.items():
            data = value.encode() if isinstance(value, str) else value
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{member},sha256={digest},{len(data)}\n"
            archive.writestr(zipfile.ZipInfo(member), data)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record + f"{info}/RECORD,,\n")
    return path


def recipe_text() -> str:
    """The real recipe's rules with three small packages."""
    text = config_path(RECIPE).read_text("utf-8")
    for package in ("alpha", "beta", "gamma"):
        text = re.sub(r"^packages = \[[^]]*\]", f'packages_ = ["{package}"]', text, count=1, flags=re.M)
    return text.replace("packages_", "packages")
