"""`kvjax` commands that train, and build what is trained on: train, corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvjax.cli.frame import caching_options, log, main


@main.command()
@click.argument(
    "configs", metavar="CONFIG...", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path)
)
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="What is trained on; for pretraining a corpus with its tokenizers.",
)
@click.option(
    "--out",
    default="runs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Each run is kept, and resumed, in OUT/NAME.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    help="Pause each run after about this long; the same command goes on.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@caching_options
def train(
    configs: tuple[Path, ...],
    data: Path,
    out: Path,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Train what each TOML file CONFIG describes, or go on with it, and export the model when it is done."""
    try:
        from train.config import read
        from train.run import run

        names = [read(path).name for path in configs]  # mistakes show before the first one trains
        if twice := {name for name in names if names.count(name) > 1}:
            raise click.UsageError(f"several configurations have the name {min(twice)}")
        outcomes = [run(p, data=data, out=out / n, minutes=minutes) for p, n in zip(configs, names)]
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; training needs the extra `train`: pip install 'kvjax[train]'") from error
    if as_json:
        click.echo(json.dumps({"runs": [outcome.as_dict() for outcome in outcomes]}))
        return
    for outcome in outcomes:
        scores = "".join(f", {name} {value:.4f}" for name, value in outcome.metrics.items())
        state = f"model in {outcome.model}" if outcome.model else "paused; the same command goes on"
        click.echo(f"{outcome.name}: step {outcome.step} of {outcome.steps}{scores}; {state}")


@main.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--stdlib", type=click.Path(file_okay=False, path_type=Path), help="The pinned CPython's lib/python3.x."
)
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Where wheels are kept.")
@click.option(
    "--pin",
    is_flag=True,
    help="Take the newest versions and write the manifest, instead of comparing with it.",
)
@click.option("--keep", is_flag=True, help="With --pin: leave packages that are pinned at their versions.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def corpus(directory: Path, as_json: bool, pin: bool, **options: Any) -> None:
    """Build the kvjax-mini corpus and its tokenizers in DIRECTORY, and compare both with the manifest.

    Exits 1, and leaves DIRECTORY as it was, if anything differs.
    """
    if options["keep"] and not pin:
        raise click.UsageError("--keep needs --pin")

    from train.tokenizer import rebuild

    report = rebuild(directory, pin=pin, **options)
    click.echo(report.as_json() if as_json else report.as_text())
    if not report.ok:
        differs = "{of}: {figure} {found}, pinned {pinned}"
        wrong = "; ".join(differs.format(**row) for row in report.tables["differs"])
        log.error("not what the manifest says: %s", wrong)
        raise click.exceptions.Exit(report.exit_code)
