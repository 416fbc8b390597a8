"""What all commands share: the group, its errors and notes, the options of loading and compiling."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvjax import __version__

if TYPE_CHECKING:
    from kvjax.lm import LM

log = logging.getLogger("kvjax")
DTYPES = ("float32", "bfloat16")


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
            click.echo(f"kvjax: error: {error or type(error).__name__}", err=True)
            ctx.exit(2)


def expected(error: Exception) -> bool:
    """Whether `error` speaks of the user's input or machine, not of a defect in this program.

    ConfigError, CheckpointError, MeshError and what generation refuses are ValueErrors or classes of this
    project; a missing extra is an ImportError that names it.
    """
    ours = type(error).__module__.partition(".")[0] in ("kvjax", "serve", "train")
    return ours or isinstance(error, (ValueError, OSError, ImportError))


class Notes(logging.Handler):
    """Log records as lines on stderr, wherever that points when they come."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"kvjax: {record.getMessage()}", err=True)


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


class Numbers(click.ParamType):
    """Integers with commas between them."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, for example 2,4,8", param, ctx)


@dataclasses.dataclass(frozen=True)
class Loading:
    """What `loading_options` were given."""

    dtype: str | None
    mesh: tuple[int, int] | None
    revision: str | None

    def model(self, source: str, *, revision: bool = True) -> LM:
        """A loaded model, laid out on a mesh of the given shape. revision: the option speaks of this model."""
        from kvjax.checkpoints.load import load
        from kvjax.sharding import make_mesh

        mesh = None if self.mesh is None else make_mesh(*self.mesh)
        return load(source, dtype=self.dtype, mesh=mesh, revision=self.revision if revision else None)


def loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that loads a model, given to it as `loading`; and those of `caching_options`."""

    @functools.wraps(command)
    def bundled(*args: Any, dtype: Any, mesh: Any, revision: Any, **options: Any) -> Any:
        return command(*args, loading=Loading(dtype, mesh, revision), **options)

    return caching_options(
        _with(
            bundled,
            click.option("--dtype", type=click.Choice(DTYPES), help="[default: float32 on CPU, else the checkpoint's]"),
            click.option("--mesh", type=MeshShape(), help="Devices, for example 1x4. [default: one device]"),
            click.option("--revision", help="Commit, tag or branch of a hub id."),
        )
    )  # fmt: skip


def caching_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that compiles, obeyed before it runs."""

    @functools.wraps(command)
    def cached(*args: Any, compile_cache: Path | None, no_compile_cache: bool, **options: Any) -> Any:
        _keep_programs(compile_cache, no_compile_cache)
        return command(*args, **options)

    return _with(
        cached,
        click.option("--compile-cache", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
                     help="Where compiled programs are kept. [default: ~/.cache/kvjax/compile]"),
        click.option("--no-compile-cache", is_flag=True, help="Keep no compiled programs."),
    )  # fmt: skip


def _with(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def prompt_or_stdin(prompt: str | None) -> str:
    """The prompt given, or what stands on stdin.

    Raises:
      click.UsageError: there is neither.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or pipe one into stdin")
    return sys.stdin.read().removesuffix("\n")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, message="kvjax %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("-q", "--quiet", is_flag=True, help="No notes on stderr.")
@click.pass_context
def main(context: click.Context, debug: bool, quiet: bool) -> None:
    """Run Llama and Qwen checkpoints; draft blocks of tokens and verify them exactly.

    MODEL is a named model (`kvjax pull --list`), a Hugging Face directory, a hub id or a GGUF file.
    """
    if not any(isinstance(handler, Notes) for handler in log.handlers):
        log.addHandler(Notes())
    # For this command only: a program that calls it keeps its own settings. Some packages, grain among them, hang a
    # handler on the root logger, which would say everything twice.
    context.call_on_close(functools.partial(_set_log, log.level, log.propagate))
    _set_log(logging.ERROR if quiet else logging.INFO, False)


def _set_log(level: int, propagate: bool) -> None:
    log.setLevel(level)
    log.propagate = propagate


def _keep_programs(directory: Path | None, disabled: bool) -> None:
    """Turn JAX's persistent compilation cache on, or off when asked to."""
    if disabled and directory is not None:
        raise click.UsageError("--compile-cache and --no-compile-cache contradict each other")
    from kvjax.compilation import compile_cache, no_compile_cache

    if disabled:
        no_compile_cache()
    else:
        compile_cache(directory)
