"""`kvjax` commands that run models: pull, generate, demo, plan, plan-transfer, check, bench."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvjax.cli.frame import (
    DTYPES,
    Loading,
    MeshShape,
    Numbers,
    caching_options,
    loading_options,
    log,
    main,
    prompt_or_stdin,
)

if TYPE_CHECKING:
    from kvjax.lm import LM, Drafter


@main.command()
@click.argument("name", required=False)
@click.option("--list", "show", is_flag=True, help="Show the named models instead.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where models are kept. [default: ~/.cache/kvjax/models]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def pull(name: str | None, show: bool, directory: Path | None, as_json: bool) -> None:
    """Fetch the named model NAME, check its bytes, and print where it is."""
    from kvjax.checkpoints.pull import pull, registry
    from kvjax.resources import folder_size, packaged_models

    if show == (name is not None):
        raise click.UsageError("give the NAME of a model, or --list")
    if name is not None:
        path = str(packaged_models().get(name) or pull(name, directory))
        click.echo(json.dumps({"name": name, "path": path}) if as_json else path)
        return
    models: list[dict[str, Any]] = [
        {"name": path.name, "about": "ships with kvjax", "licence": "Apache-2.0", "bytes": folder_size(path)}
        for path in packaged_models().values()
    ]
    for entry in registry().values():
        size = sum(file.size for file in entry.files)
        models.append({"name": entry.name, "about": entry.about, "licence": entry.licence, "bytes": size})
    if as_json:
        click.echo(json.dumps({"models": models}))
        return
    for model in models:
        click.echo("{name:20} {0:7.1f} MB  {licence:12} {about}".format(model["bytes"] / 1e6, **model))


@main.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-n", "--max-new-tokens", default=128, help="Tokens to generate at most.")
@click.option("-t", "--temperature", default=0.0, help="0 is greedy.")
@click.option("--top-k", default=0, help="Sample among the K likeliest; 0 is all.")
@click.option("--top-p", default=1.0, help="Sample among the likeliest that hold this probability.")
@click.option("--min-p", default=0.0, help="Drop tokens below this share of the likeliest one's probability.")
@click.option("--seed", default=0, help="Fixes what is drawn, whatever the drafts.")
@click.option("--stop", multiple=True, help="End before this text. May be given several times.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Wrap the prompt in the chat template, or give it as it is. "
    "[default: wrap it if the tokenizer has a template]",
)
@click.option("--thinking/--no-thinking", default=None, help="For chat templates that have this switch.")
@click.option(
    "--draft",
    "--drafter",
    default="none",
    help="Where drafts come from: none, ngram (the text so far), a DFlash drafter, or a smaller MODEL of the same "
    "vocabulary. Each token is verified.",
)
@click.option(
    "--width",
    type=int,
    help="Rows the target model verifies at once. [default: the drafter's block, 8 for ngram, 4 for a model]",
)
@click.option("--stream/--no-stream", default=None, help="Print text as it is made. [default: on a terminal]")
@click.option("--logprobs", is_flag=True, help="With --json: the log-probability of each token.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@loading_options
def generate(
    model: str,
    prompt: str | None,
    chat: bool | None,
    thinking: bool | None,
    draft: str,
    width: int | None,
    stream: bool | None,
    as_json: bool,
    loading: Loading,
    **sampling: Any,
) -> None:
    """Answer PROMPT, or what stands on stdin, with MODEL."""
    prompt = prompt_or_stdin(prompt)
    if as_json and stream:
        raise click.UsageError("--json prints one object at the end; it does not go with --stream")
    if sampling["logprobs"] and not as_json:
        raise click.UsageError("--logprobs needs --json")
    import serve

    lm = loading.model(model)
    if chat is None:
        chat = lm.tokenizer is not None and lm.tokenizer.has_chat_template
        log.info(
            "prompt %s", "wrapped in the chat template (--no-chat: as it is)" if chat else "given as it is"
        )
    request = [[{"role": "user", "content": prompt}] if chat else prompt]
    source, width = draft_source(draft, width, lm, loading)
    options = {**sampling, "thinking": thinking, "draft": source, "width": width}

    if stream is None:
        stream = not as_json and sys.stdout.isatty()
    if stream:
        began = time.perf_counter()
        for event in serve.stream(lm, request, **options):
            click.echo(event.text, nl=False)
            answer = event.generation
        click.echo()
        note(answer, time.perf_counter() - began)
        return
    result = serve.generate(lm, request, **options)
    answer = result.generations[0]
    if not as_json:
        click.echo(answer.text)
        note(
            answer,
            result.timings["total"],
            f", {result.compiles} programs compiled, {result.cache_hits} from the cache",
        )
        return
    report = {"model": lm.id, "revision": lm.revision, "chat": chat, **dataclasses.asdict(answer)}
    report |= {name: getattr(result, name) for name in ("timings", "compiles", "cache_hits", "program")}
    click.echo(json.dumps(report))


@main.command()
@click.option("--tokens", default=64, help="Tokens of each answer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@caching_options
def demo(tokens: int, as_json: bool) -> None:
    """Show what kvjax does, on the small models that ship with it."""
    from kvjax.checkpoints.load import load
    from serve.demo import demo as show

    report = show(load, tokens=tokens, show=(lambda text: None) if as_json else click.echo)
    click.echo(report.as_json() if as_json else report.as_text())


@main.command()
@click.argument("model")
@click.option("--target", required=True, help="Accelerators, for example v5e-8, v5p-16, v6e-8 or h100.")
@click.option("--batch", default=1, help="Sequences at once.")
@click.option(
    "--context", type=int, help="Cache slots of each. [default: 32768, or what the model was made for]"
)
@click.option("--width", default=16, help="Rows of a decode round; 1 is plain decoding.")
@click.option("--chunk", default=256, help="Prompt tokens of a prefill step.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Of weights and cache.")
@click.option("--mesh", type=MeshShape(), help="[default: 1x(all devices of the target)]")
@click.option("--sampled", is_flag=True, help="Compile rounds that can sample, not only greedy ones.")
@click.option("--ledger", is_flag=True, help="Compile nothing; print what the configuration alone says.")
@click.option("--revision", help="Commit, tag or branch of a hub id.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(model: str, target: str, ledger: bool, revision: str | None, as_json: bool, **options: Any) -> None:
    """Say what MODEL needs on accelerators that are not here: memory, fit, cost of a step.

    No weights are read. MODEL may also be a known geometry, such as qwen3-8b or llama-3.1-70b. Prefill and decode
    round are compiled if the target's compiler is installed (BUILD.md).
    """
    from kvjax import plan as planning

    name, config = planning.find(model, revision)
    answer = planning.plan(config, target, model=name, compile=not ledger, **options)
    click.echo(json.dumps(answer.to_json()) if as_json else answer.to_text())


@main.command("plan-transfer")
@click.argument("source")
@click.argument("target")
@click.option("--on", required=True, help="Accelerators, for example v5e-8, v5p-16, v6e-8 or h100.")
@click.option("-k", default=4, help="Source layers each target layer reads.")
@click.option("--separate", is_flag=True, help="Keys read keys and values read values.")
@click.option("--local", is_flag=True, help="Each target head reads one source head.")
@click.option("--tail", default=32, help="Last prompt tokens the target reads itself.")
@click.option("--head", default=0, help="First prompt tokens it reads itself.")
@click.option("--first-layers", default=0, help="First layers it computes itself, for all tokens.")
@click.option("--group", default=0, help="Layers it computes from a mapped hidden state.")
@click.option("--length", default=8192, help="Tokens of a prompt.")
@click.option("--batch", default=1, help="Prompts at once.")
@click.option("--chunk", default=256, help="Prompt tokens of a native prefill step.")
@click.option("--mesh", type=MeshShape(), help="[default: 1x(all devices of the target)]")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Of weights and caches.")
@click.option("--map-dtype", type=click.Choice(DTYPES), default="bfloat16", help="Of the map's weights.")
@click.option(
    "--bar", type=float, help="Demand this share of native prefill at most; exits 1 when it is missed."
)
@click.option("--ledger", is_flag=True, help="Compile nothing; print what the configurations alone say.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan_transfer(
    source: str, target: str, on: str, separate: bool, tail: int, head: int, first_layers: int, group: int,
    bar: float | None, ledger: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Say what handing a prompt from SOURCE to TARGET costs against reading it natively, on accelerators not here.

    No weights are read; both may be known geometries (llama-3.1-minitron-4b, llama-3.1-8b). The programs are compiled
    if the compiler of the accelerators is installed (BUILD.md).
    """
    from kvjax import plan as planning
    from kvjax.transfer import plan as pairs
    from kvjax.transfer.repair import Repair

    (a, reader), (b, speaker) = (planning.find(name) for name in (source, target))
    hand = pairs.Hand(joint=not separate, repair=Repair(tail, head, first_layers, group), **options)
    report = pairs.plan_transfer(reader, speaker, on, hand, names=(a, b), bar=bar, compile=not ledger)
    click.echo(report.as_json() if as_json else report.as_text())
    if not report.ok:
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--prompts", "count", default=24, help="Prompts, each answered greedily and sampled.")
@click.option("--tokens", default=32, help="Tokens of an answer.")
@click.option(
    "--widths", type=Numbers(), default="2,4,8,16", help="Widths that are compared with plain decoding."
)
@click.option("--samples", default=256, help="Draws per prompt and setting, for claim (a).")
@click.option(
    "--draft",
    "--drafter",
    help="A DFlash drafter or smaller MODEL to draft with as well, up to the drafter's block.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@loading_options
def check(
    models: tuple[str, ...],
    as_json: bool,
    loading: Loading,
    draft: str | None,
    **options: Any,
) -> None:
    """Prove on each MODEL that drafting changes nothing.

    (a) The accept rule emits the model's own distribution. (b) Inside one program tokens are the same whatever the
    drafts, rows and slots. (c) Between programs every difference is a near-tie of the model, printed with its gap.
    Exits 1 if any claim fails.
    """
    import jax

    from kvjax.check import DRAFTERS, Report, drafters_of
    from kvjax.check import check as prove

    found = []
    shown = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
    for model in models:  # one at a time: only one has its weights and programs (0.3 GB) in memory
        lm = loading.model(model)
        drafters = (
            DRAFTERS if draft is None else (*DRAFTERS, *drafters_of(lm, load_draft(draft, lm, loading)))
        )
        found.append(prove(lm, progress=shown, drafters=drafters, **options))
        del lm, drafters
        jax.clear_caches()
    report = Report(tuple(found))
    click.echo(json.dumps(report.json()) if as_json else report.text())
    if not report.ok:
        raise click.exceptions.Exit(1)


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Run the benchmark NAME (none: list them); ARGUMENTS go to it, --help and --json included.

    Benchmarks are part of the source tree, one script per claim of the README.
    """
    directory = Path(__file__).parents[2] / "benchmarks"
    scripts = {path.stem: path for path in sorted(directory.glob("*.py"))}
    if not scripts:
        raise click.UsageError(
            "benchmarks are in the source tree, not in an installed kvjax: pip install -e there"
        )
    if name is None:
        for script in scripts.values():
            about = (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").partition("\n")[0]
            click.echo(f"{script.stem:12} {about}")
        return
    if name not in scripts:
        raise click.UsageError(f"no benchmark {name!r}; there are {', '.join(scripts)}")
    raise SystemExit(subprocess.run([sys.executable, str(scripts[name]), *arguments], check=False).returncode)


def draft_source(draft: str, width: int | None, lm: LM, loading: Loading) -> tuple[Any, int | None]:
    """What `serve.generate` takes as `draft` and `width`."""
    if draft == "none":
        return None, width
    if draft == "ngram":
        from kvjax.decode.ngram import Ngram

        return Ngram(width=8 if width is None else width), None
    return load_draft(draft, lm, loading), width


def load_draft(draft: str, lm: LM, loading: Loading) -> LM | Drafter:
    """A block drafter, or a smaller model, whichever `draft` names."""
    from kvjax.checkpoints.drafters import is_drafter, load_drafter

    return load_drafter(draft, lm) if is_drafter(draft) else loading.model(draft, revision=False)


def note(answer: Any, seconds: float, more: str = "") -> None:
    """One line on stderr about what an answer cost."""
    per_round = len(answer.tokens) / max(answer.rounds, 1)
    log.info(
        "%d prompt tokens, %d new (%s) in %.2f s, %.2f tokens a round%s",
        answer.prompt_tokens, len(answer.tokens), answer.finish_reason, seconds, per_round, more,
    )  # fmt: skip
