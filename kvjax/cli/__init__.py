"""The `kvjax` command. Nothing heavy is imported until a command needs it.

Compiled programs are kept below `~/.cache/kvjax/compile` between runs; `--compile-cache DIR` moves that and
`--no-compile-cache` turns it off. What the user got wrong is one line on stderr and exit status 2; with
`--debug` the traceback is shown.
"""

from __future__ import annotations

import importlib

from kvjax.cli.frame import expected, main

# A command is defined where its module is imported; these import nothing but click and each other.
for _name in ("running", "training", "transfer"):
    importlib.import_module(f"kvjax.cli.{_name}")

__all__ = ["expected", "main"]
