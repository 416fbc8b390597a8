"""`kvjax plan` without a compiler: the ledger, its report, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from click.testing import CliRunner

from kvjax import aot, cost, plan, topology
from kvjax.cache import CacheFull
from kvjax.checkpoints.table import CheckpointError
from kvjax.cli import main
from kvjax.config import ConfigError, ModelConfig
from kvjax.sharding import MeshError


def run(*args: str):
    return CliRunner().invoke(main, ["plan", *args])


def ledger(name: str, target: str, **options) -> plan.Plan:
    return plan.plan(plan.find(name)[1], target, model=name, compile=False, **options)


def test_json():
    result = run("qwen3-8b", "--target", "v5e-8", "--ledger", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["model"], told["mesh"], told["batch"], told["size"]) == ("qwen3-8b", [1, 8], 1, 32768)
    assert told["target"]["name"] == "v5e-8" and told["target"]["devices"] == 8
    held = told["memory"]
    assert held["weights"] == pytest.approx(8.19e9 * 2 / 8, rel=0.01)
    assert held["cache"] == 2 * 36 * 32768 * 128 * 2  # one KV head on each device
    assert held["total"] == held["weights"] + held["cache"] + held["tokens"]
    assert held["headroom"] == held["available"] - held["total"]
    assert told["fits"] is True and held["temporaries"] is None
    prefill, decode = told["steps"]
    assert (prefill["name"], prefill["rows"], decode["name"], decode["rows"]) == ("prefill", 256, "round", 16)
    for step in (prefill, decode):
        assert step["compiled"] is None
        assert step["ledger"]["bytes"] == sum(
            step["ledger"][n] for n in ("weight_bytes", "kv_read", "kv_write")
        )
        assert set(step["ledger"]["parts"]) == set(cost.COMPONENTS)
        target = told["target"]
        bounds = (
            step["ledger"]["flops"] / target["peak_flops"],
            step["ledger"]["bytes"] / target["hbm_bandwidth"],
        )
        assert step["roofline_seconds"] == max(bounds)


def test_text_says_what_is_an_estimate():
    result = run("qwen3-8b", "--target", "h100", "--ledger")
    assert result.exit_code == 0, result.output
    for words in ("qwen3-8b on h100", "not compiled: unknown", "fits, ", "estimates", "roofline"):
        assert words in result.stdout


@pytest.mark.parametrize("target", ["v5e-8", "h100"])
def test_without_the_compiler_it_says_what_is_missing(target: str):
    if topology.missing(target) is None:
        pytest.skip(f"the compiler for {target} is installed")
    result = run("smollm2-135m", "--target", target, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert "pip install" in told["missing"] and target in told["missing"]
    assert told["memory"]["weights"] > 0 and told["steps"][0]["roofline_seconds"] > 0
    assert "pip install" in run("smollm2-135m", "--target", target).stdout


def test_unknown_target_is_named_with_the_list():
    result = run("qwen3-8b", "--target", "v9-8")
    assert result.exit_code == 2
    assert "unknown target 'v9-8'" in result.stderr
    assert all(name in result.stderr for name in topology.TARGETS)


def test_what_does_not_fit_is_said():
    answer = ledger("llama-3.1-70b", "h100")
    assert not answer.fits
    assert "does not fit by" in answer.to_text()
    assert ledger("llama-3.1-70b", "v5p-32").fits


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mesh": (2, 8)}, MeshError, "mesh 2x8 needs more devices than the 8 of v5e-8"),
        ({"mesh": (1, 7)}, MeshError, "does not divide by the mesh's model axis, 7"),
        ({"mesh": (2, 4), "batch": 3}, ValueError, "batch 3 does not divide over a data axis of 2"),
        ({"context": 50_000}, ValueError, "context 50000 exceeds the 40960 positions m was made for"),
        ({"batch": 0}, ValueError, "batch must be at least 1"),
        ({"context": 0}, ValueError, "context must be at least 1"),
        ({"dtype": "int8"}, ValueError, "dtype 'int8' is not supported"),
        ({"width": 300, "context": 256}, CacheFull, "size is 256"),
    ],
    ids=str,
)
def test_refusals(options, error, words):
    config = plan.find("qwen3-8b")[1]
    with pytest.raises(error, match=words):
        plan.plan(config, "v5e-8", model="m", compile=False, **options)


def test_data_axis_splits_the_cache_not_the_weights():
    one, two = (ledger("qwen3-8b", "v5e-8", batch=8, mesh=mesh) for mesh in ((1, 4), (2, 4)))
    assert one.memory.weights == two.memory.weights
    assert one.memory.cache == 2 * two.memory.cache


def test_context_defaults_to_what_the_model_was_made_for():
    assert ledger("smollm2-135m", "v5e-8").size == 8192
    assert ledger("qwen3-0.6b", "v5e-8").size == 32768
    assert ledger("qwen3-0.6b", "v5e-8", context=1000).size == 1024


def test_find(tmp_path, golden_dirs):
    assert plan.find("Qwen3-8B") == ("qwen3-8b", plan.find("qwen3-8b")[1])
    directory = golden_dirs[0]
    assert plan.find(str(directory))[1] == ModelConfig.from_hf(
        json.loads((directory / "config.json").read_text())
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"config\.json: model_type: 'gpt2'"):
        plan.find(str(tmp_path))
    with pytest.raises(
        CheckpointError, match="qwen9 is neither|'qwen9' is neither a known geometry .*qwen3-8b"
    ):
        plan.find("qwen9")


def test_every_known_geometry_plans_on_every_target():
    """Meshes over all devices: repeated and replicated heads included."""
    for name in plan.configs():
        config = plan.find(name)[1]
        for target in topology.TARGETS:
            answer = plan.plan(config, target, model=name, compile=False)
            assert answer.memory.weights * answer.target.devices >= 0.99 * 2 * sum(
                cost.parameters(config).values()
            )
            json.dumps(answer.to_json())


def test_a_step_too_large_for_the_device():
    """What the compiler said of memory decides, whatever the ledger says."""
    fine = aot.Compiled(1.0, 1.0, "tpu", 10, 10, 10, temporaries=7, code=2)
    refused = aot.Compiled(1.0, error="Used 17.1G of 15.75G hbm")
    answer = ledger("qwen3-0.6b", "v5e-8")
    steps = [dataclasses.replace(step, compiled=fine) for step in answer.steps]
    good = dataclasses.replace(answer, steps=tuple(steps))
    assert good.temporaries == 9 and good.fits and good.total == good.memory.total + 9
    steps[1] = dataclasses.replace(steps[1], compiled=refused)
    bad = dataclasses.replace(answer, steps=tuple(steps))
    assert not bad.fits and bad.temporaries is None
    assert "does not fit, says the compiler" in bad.to_text() and "15.75G" in bad.to_text()
    assert bad.to_json()["steps"][1]["compiled"]["error"] == refused.error


def test_the_child_process_answers_or_its_end_is_reported():
    """A target whose compiler is missing is an answer; a request it cannot read is a death, told with its reason."""
    request = {
        "config": plan.find("qwen3-0.6b")[1], "mesh": (1, 1), "batch": 1, "size": 256, "width": 1, "chunk": 256,
        "dtype": "bfloat16",
    }  # fmt: skip
    with pytest.raises(aot.CompileError, match="unknown target 'v9'"):
        aot.ask("steps", {**request, "target": "v9"}, progress=False)
    with pytest.raises(aot.CompileError, match=r"compiling for h100 ended with status 1: .*nonsense"):
        aot.ask("steps", {**request, "target": "h100", "nonsense": 1}, progress=False)


def test_status_line_goes_away(capsys):
    lines = io.StringIO('{"stage": "prefill"}\n{"steps": {}}\n')
    assert aot._listen(lines, "v5e-8", True) == {"steps": {}}
    shown = capsys.readouterr().err
    assert "compiling prefill" in shown and shown.endswith("\r\x1b[K")
    assert aot._listen(io.StringIO('{"stage": "prefill"}\n'), "v5e-8", False) is None
    assert capsys.readouterr().err == ""


def test_a_real_file_and_its_known_geometry_are_planned_alike(smollm2):
    name, config = plan.find(str(smollm2))
    known = plan.find("smollm2-135m")[1]
    for field in (
        "vocab",
        "hidden",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate",
        "tie",
        "rope",
    ):
        assert getattr(config, field) == getattr(known, field), field
    assert (
        plan.plan(config, "v5e-4", model=name, compile=False).memory == ledger("smollm2-135m", "v5e-4").memory
    )
