"""The `kvjax` command. Nothing heavy is imported until a command needs it.

Compiled programs are kept below `~/.cache/kvjax/compile` between runs; `--compile-cache DIR` moves that and
`--no-compile-cache` turns it off. What the user got wrong is one line on stderr and exit status 2; with
`--debug` the traceback is shown.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvjax.lm import LM

DTYPES = ("float32", "bfloat16", "float16")


class Commands(click.Group):
    """A command group that turns expected errors into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            if ctx.params.get("debug") or not expected(error):
                raise
            # A KeyError's text is the key's repr; the others read as they were written.
            click.echo(f"kvjax: error: {error or type(error).__name__}", err=True)
            ctx.exit(2)


def expected(error: Exception) -> bool:
    """Whether `error` speaks of the user's input or machine, not of a defect in this program.

    ConfigError, CheckpointError, MeshError and what generation refuses are ValueErrors or classes of this
    project; a missing extra is an ImportError that names it.
    """
    ours = type(error).__module__.partition(".")[0] in ("kvjax", "serve", "train")
    return ours or isinstance(error, (ValueError, OSError, ImportError))


class MeshShape(click.ParamType):
    """DATAxMODEL, two positive integers."""

    name = "DATAxMODEL"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        data, _, model = value.partition("x")
        if not (data.isdigit() and model.isdigit() and int(data) and int(model)):
            self.fail(f"{value!r} is not of the form DATAxMODEL, for example 1x4", param, ctx)
        return int(data), int(model)


def loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that loads a model."""
    for option in reversed(
        [
            click.option("--dtype", type=click.Choice(DTYPES), help="[default: float32 on CPU, else the checkpoint's]"),
            click.option("--mesh", type=MeshShape(), help="Devices, for example 1x4. [default: one device]"),
            click.option("--revision", help="Commit, tag or branch of a hub id."),
            click.option("--compile-cache", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
                         help="Where compiled programs are kept. [default: ~/.cache/kvjax/compile]"),
            click.option("--no-compile-cache", is_flag=True, help="Keep no compiled programs."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="kvjax", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("-v", "--verbose", is_flag=True, help="Say what is done while loading.")
def main(debug: bool, verbose: bool) -> None:
    """Run Llama and Qwen checkpoints, draft blocks of tokens and verify them exactly.

    MODEL is a named model (see `kvjax pull`), a Hugging Face directory, a hub id or a GGUF file.
    """
    logging.basicConfig(stream=sys.stderr, format="kvjax: %(message)s")
    logging.getLogger("kvjax").setLevel(logging.INFO if verbose else logging.WARNING)
