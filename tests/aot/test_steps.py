"""Prefill and decode round, as serving runs them, through the real TPU and GPU compilers; nothing runs here.

Real widths and head geometries, few layers (a layer compiles like the next one) and a short vocabulary, so that the
temporaries of the logits do not hide a copy of the cache.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from kvjax import aot, plan, topology
from kvjax.plan import Plan, Step

pytestmark = pytest.mark.aot

CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}  # how a kernel of ours shows in the compiled program
SIZE = 32768


def need(request, target: str) -> None:
    """Skip where the compiler is missing, unless these tests were asked for by name: then they fail."""
    lacking = topology.missing(target)
    if lacking is not None and "aot" not in (request.config.getoption("-m") or ""):
        pytest.skip(lacking)


def compiled_plan(request, name: str, target: str, layers: int, **options) -> tuple[Plan, dict[str, str]]:
    """The plan of the first layers of a model, compiled in this process, and the text of its programs."""
    need(request, target)
    config = dataclasses.replace(plan.find(name)[1], num_layers=layers, windows=(), vocab=16384)
    ledger = plan.plan(config, target, model=name, context=SIZE, compile=False, **options)
    texts = {}
    found = aot.compile_steps(
        config, target, mesh=ledger.mesh, batch=ledger.batch, size=ledger.size, width=ledger.width,
        chunk=ledger.chunk, dtype=ledger.dtype, inspect=lambda step, program: texts.update({step: program.as_text()}),
    )  # fmt: skip
    steps = tuple(dataclasses.replace(step, compiled=found[step.name]) for step in ledger.steps)
    return dataclasses.replace(ledger, steps=steps), texts


def check(answer: Plan, step: Step, text: str, layers: int) -> None:
    """The kernel is in the program, the cache stays in place, and sizes and flops are the ledger's."""
    said, platform = step.compiled, answer.target.platform
    assert said is not None and said.error is None
    assert said.attention == platform
    calls = re.findall(rf'custom_call_target="{CALL[platform]}\w*"', text)
    attending = (
        layers if step.name == "round" else layers - 1
    )  # a chunk's last layer ends at its keys and values
    assert len(calls) == attending
    assert said.aliased >= answer.memory.cache
    assert said.outputs - said.aliased < 4096, "part of the state is not updated in place"
    assert said.temporaries < answer.memory.cache / layers, "temporaries as large as a layer's cache"
    if step.name == "round":
        assert said.arguments == pytest.approx(answer.memory.total, rel=0.01)
    if said.flops is not None:
        assert step.cost.flops == pytest.approx(said.flops, rel=0.05)
    assert not [name for name in ("all-to-all", "collective-permute") if f"{name}(" in text]


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
@pytest.mark.parametrize("target", ["v5e-8", "v5p-16", "v6e-8", "h100"])
def test_steps_compile(request, name: str, target: str):
    answer, texts = compiled_plan(request, name, target, 2)
    for step in answer.steps:
        check(answer, step, texts[step.name], 2)
    assert answer.fits


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("llama-3.1-70b", "v5p-32", {}),  # 8 KV heads stored 16 times
        ("qwen3-32b", "v6e-8", {"mesh": (2, 4), "batch": 4, "width": 8}),
        ("qwen2.5-0.5b", "v5e-4", {}),  # 14 heads over 4 devices: attention is replicated
        ("qwen3-8b", "h100-8", {"mesh": (2, 4), "batch": 2}),
    ],
    ids=["repeated-heads", "data-axis", "replicated-attention", "gpu-mesh"],
)
def test_meshes(request, name: str, target: str, options: dict):
    answer, texts = compiled_plan(request, name, target, 2, **options)
    for step in answer.steps:
        check(answer, step, texts[step.name], 2)


def test_sampled_rounds_compile(request):
    """top-k and top-p bring passes over the vocabulary."""
    need(request, "v6e-8")
    config = dataclasses.replace(plan.find("llama-3.1-8b")[1], num_layers=1, windows=())
    found = aot.compile_steps(
        config, "v6e-8", mesh=(1, 8), batch=1, size=4096, width=4, chunk=256, dtype="bfloat16", sampled=True
    )
    assert found["round"].error is None and found["round"].attention == "tpu"


def test_what_does_not_fit_is_the_compilers_word(request):
    answer, _ = compiled_plan(request, "qwen3-8b", "v5e-8", 1, batch=1024)
    assert not answer.fits
    error = answer.steps[1].compiled.error
    assert error is not None and "hbm" in error.lower(), error


def test_through_the_child_process(request):
    """`kvjax plan` as the command runs it: the surroundings of the compilers are the child's alone."""
    need(request, "v5e-4")
    config = dataclasses.replace(plan.find("qwen3-0.6b")[1], num_layers=1, windows=())
    answer = plan.plan(config, "v5e-4", context=1024, width=1, progress=False)
    assert answer.missing is None and answer.fits
    assert answer.temporaries is not None
    assert all(step.compiled and step.compiled.attention == "tpu" for step in answer.steps)
    assert "attention kernel 'tpu'" in answer.to_text()
