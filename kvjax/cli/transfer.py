"""`kvjax` commands about moving caches: fit, handoff, judge-transfer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvjax.cli.frame import Loading, caching_options, loading_options, main, prompt_or_stdin

if TYPE_CHECKING:
    from kvjax.lm import LM


@main.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    help="Calibration text: a corpus split (DIR/train), a folder of text files or a JSONL file.",
)
@click.option(
    "--held-out",
    "held_out",
    required=True,
    type=click.Path(path_type=Path),
    help="Other text, for the figures that are stored with the map.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Where the map is written.")
@click.option("-k", default=4, help="Source layers each target layer reads.")
@click.option(
    "--layers",
    type=click.Choice(("explained", "matching")),
    default="explained",
    help="Which: those that explain most, or those of the same depth.",
)
@click.option("--ridge", default=1e-3, help="Strength, relative to the mean variance of each kind of input.")
@click.option(
    "--method",
    type=click.Choice(("ridge", "recolour", "weighted")),
    default="ridge",
    help="weighted: rows count by the attention they receive; reads the text twice.",
)
@click.option("--local", is_flag=True, help="Each target head reads one source head.")
@click.option(
    "--separate", is_flag=True, help="Keys read keys and values read values; otherwise both read both."
)
@click.option("--hidden", type=int, help="Also fit what enters this target layer, for handoff --group.")
@click.option("--length", default=512, help="Tokens of a calibration text.")
@click.option("--sequences", default=200, help="Calibration texts.")
@click.option("--every", default=1, help="Take one token in so many.")
@click.option("--batch", default=4, help="Texts read at once.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="File of moments: an interrupted pass goes on from it.",
)
@click.option(
    "--map-dtype",
    type=click.Choice(("float32", "bfloat16", "int8")),
    default="float32",
    help="Of the stored weights.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@loading_options
def fit(
    source: str,
    target: str,
    data: Path,
    held_out: Path,
    out: Path,
    separate: bool,
    keep: Path | None,
    map_dtype: str,
    as_json: bool,
    loading: Loading,
    **options: Any,
) -> None:
    """Fit a map from SOURCE's cache to TARGET's, in closed form, in one pass over text."""
    from kvjax import documents
    from kvjax.transfer.pairs import FitOptions, fit_pair

    how = FitOptions(joint=not separate, dtype=map_dtype, **options)
    texts, held = documents.read(data), documents.read(held_out)
    first, second = _both(loading, source, target)
    report = fit_pair(first, second, texts, held, out, how, data=data.name, keep=keep)
    click.echo(report.as_json() if as_json else report.as_text())


@main.command()
@click.argument("source")
@click.argument("map_", metavar="MAP", type=click.Path(path_type=Path))
@click.argument("target")
@click.argument("prompt", required=False)
@click.option("-n", "--max-new-tokens", default=128, help="Tokens to generate at most.")
@click.option("--tail", default=32, help="Last prompt tokens the target reads itself.")
@click.option("--head", default=0, help="First prompt tokens the target reads itself.")
@click.option("--first-layers", default=0, help="First layers the target computes itself, for all tokens.")
@click.option(
    "--group", default=0, help="Layers it computes from the hidden state the map gives (fit --hidden)."
)
@click.option(
    "--exact",
    is_flag=True,
    help="The target reads everything too, and takes back what it disagrees with.",
)
@click.option("-t", "--temperature", default=0.0, help="0 is greedy.")
@click.option("--seed", default=0)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@loading_options
def handoff(
    source: str,
    map_: Path,
    target: str,
    prompt: str | None,
    max_new_tokens: int,
    tail: int,
    head: int,
    first_layers: int,
    group: int,
    exact: bool,
    temperature: float,
    seed: int,
    as_json: bool,
    loading: Loading,
) -> None:
    """Let SOURCE read PROMPT (or stdin), and TARGET answer from the cache that MAP makes of it."""
    prompt = prompt_or_stdin(prompt)
    from kvjax.transfer.repair import Repair
    from serve.handoff import Transfer
    from serve.handoff import handoff as hand

    reader, speaker = _both(loading, source, target)
    transfer = Transfer.load(map_, reader, speaker)
    repair = Repair(tail, head, first_layers, group)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    result = hand(reader, transfer, speaker, [prompt], repair=repair, exact=exact, **options)
    if not as_json:
        click.echo(result.text)
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.timings.items())
        click.echo(f"kvjax: {spent}", err=True)
        return
    report = {"source": reader.id, "target": speaker.id, "repair": vars(repair), "exact": exact}
    report |= dataclasses.asdict(result.generations[0]) | {
        "timings": result.timings,
        "program": result.program,
        "warnings": result.warnings,
    }
    if result.course is not None:
        report["course"] = dataclasses.asdict(result.course)
    click.echo(json.dumps(report))


@main.command("judge-transfer")
@click.argument("pair", metavar="PAIR.toml", type=click.Path(path_type=Path))
@click.option(
    "--corpus", required=True, type=click.Path(exists=True, path_type=Path), help="Directory of the splits."
)
@click.option(
    "--maps",
    default=".",
    type=click.Path(path_type=Path),
    help="Directory of the trained maps the pair names.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="File of moments: an interrupted pass goes on from it."
)
@click.option("--plots", type=click.Path(path_type=Path), help="Directory for PNG plots.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@caching_options
def judge_transfer(
    pair: Path,
    corpus: Path,
    maps: Path,
    keep: Path | None,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Judge the maps of PAIR.toml beside every control. Exits 1 when a bar is missed."""
    from kvjax.transfer import study

    report = study.run(pair, corpus=corpus, maps=maps, keep=keep)
    if plots is not None:
        from kvjax.transfer.plots import draw

        draw(report, plots)
    click.echo(report.as_json() if as_json else report.as_text())
    if not report.ok:
        raise click.exceptions.Exit(1)


def _both(loading: Loading, source: str, target: str) -> tuple[LM, LM]:
    if loading.revision is not None:
        raise click.UsageError("--revision speaks of one hub id, and here are two models; give directories")
    return loading.model(source), loading.model(target)
