"""The project itself: what is in the tree, what importing costs, what gets installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = {".git", "build", "dist", "results", "__pycache__"}
SIZE_GUIDE = {
    "kvjax/models/decoder.py": 350,
    "kvjax/models/drafter.py": 250,
    "kvjax/cache.py": 200,
    "kvjax/decode/verify.py": 150,
    "kvjax/decode/loop.py": 300,
    "kvjax/checkpoints/llama.py": 80,
    "kvjax/checkpoints/qwen.py": 80,
    "kvjax/checkpoints/dflash.py": 210,
    "kvjax/kernels/*/*.py": 300,
}


def project_files() -> list[Path]:
    """Every file of the project, whether it comes from git or from an archive."""
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name
            for name in names
            if name not in GENERATED
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in (".ci", ".github"))
        ]
        found += [Path(folder) / name for name in files if not name.endswith((".pyc", ".part"))]
    return sorted(found)


def project_text() -> list[tuple[str, str]]:
    texts = []
    for path in project_files():
        try:
            texts.append((str(path.relative_to(ROOT)), path.read_text()))
        except UnicodeDecodeError:
            pass  # golden arrays and checkpoints
    return texts


def lines_matching(pattern: str) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in project_text()
        if name != "tests/test_project.py"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_the_walk_finds_the_project():
    names = {str(path.relative_to(ROOT)) for path in project_files()}
    assert {"pyproject.toml", ".ci/run", "kvjax/config.py", "tests/test_project.py", "README.md"} <= names


def test_no_path_of_one_machine():
    assert not lines_matching(r"(?<![\w.])/(work|root|home/\w+|Users/\w+)/")


def test_no_package_registry_is_named():
    """Which index serves packages is the machine's setting, never the project's."""
    assert not lines_matching(r"(?i)pypi\.(org|python\.org)|pythonhosted|--index-url|--extra-index-url")


def test_no_secret_looking_text():
    assert not lines_matching(r"\bhf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY")


@pytest.mark.parametrize("pattern, limit", SIZE_GUIDE.items())
def test_size_guide(pattern: str, limit: int):
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.glob(pattern)
        if (lines := len(path.read_text().splitlines())) > limit
    }
    assert not too_long, f"the guide says at most {limit} lines"


def test_every_toml_file_parses():
    paths = [path for path in project_files() if path.suffix == ".toml"]
    assert ROOT / "pyproject.toml" in paths
    for path in paths:
        try:
            tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            pytest.fail(f"{path.relative_to(ROOT)}: {error}")


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("kvjax", "serve", "train")
        for path in (ROOT / top).rglob("*.py")
    }
    assert present | {"kvjax.configs"} == listed


def test_every_config_is_installed():
    """The installed package carries all that configs/ holds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["kvjax.configs"]
    carried = {path for pattern in globs for path in (ROOT / "configs").glob(pattern)}
    assert {p for p in project_files() if p.is_relative_to(ROOT / "configs")} == carried


def imported_by(code: str) -> set[str]:
    """The top-level modules a fresh interpreter holds after running `code`."""
    program = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_importing_kvjax_is_cheap():
    modules = imported_by("import kvjax")
    assert "kvjax" in modules
    assert not modules & {"jax", "flax", "torch", "transformers", "tokenizers", "train", "serve"}


def test_importing_serve_needs_no_torch():
    assert not imported_by("import serve") & {"torch", "transformers", "train"}


def test_help_does_not_start_jax():
    code = "from kvjax.cli import main\ntry: main(['--help'])\nexcept SystemExit as e: assert not e.code"
    modules = imported_by(code)
    assert "click" in modules
    assert not modules & {"jax", "jaxlib", "numpy", "flax", "torch", "transformers", "serve"}


def test_the_python_of_the_readme_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert '"smollm2-135m-q4_1"' in code
    tiny = str(ROOT / "tests" / "golden" / "qwen3-tied")
    exec(code.replace('"smollm2-135m-q4_1"', repr(tiny)), {})
    assert re.search(r" (stop|length) \d+$", capsys.readouterr().out)


def test_the_readme_opens_with_the_two_commands():
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    run, test = commands[:2]
    assert run.endswith("kvjax demo") and test.endswith("-m pytest -q -n 2 --dist loadfile")
    # continuous integration runs the line that is printed, not one like it
    assert "README.md" in (ROOT / ".ci/run").read_text()
