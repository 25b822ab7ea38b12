"""The rules of the house, each checked by the tool that knows it."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.recipe.presets import PRESETS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        pytest.param(["mypy"], marks=pytest.mark.slow),
        ["lint-imports"],
    ],
    ids=lambda command: command[0] + command[1] if len(command) > 1 else command[0],
)
def test_tool_is_content(command):
    program = Path(sys.executable).parent / command[0]
    result = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def run_python(code):
    return subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)


def test_import_is_quick_and_pulls_in_no_torch():
    lines = run_python("import penstock").stderr.splitlines()
    cumulative_us = next(int(line.split("|")[1]) for line in lines if line.split("|")[2].strip() == "penstock")
    assert cumulative_us < 300_000
    assert not any(line.split("|")[2].strip() == "torch" for line in lines)


def test_the_command_parses_without_torch():
    assert run_python("import sys, penstock.command.cli; print('torch' in sys.modules)").stdout.strip() == "False"


def test_readme_and_the_page_about_models_name_every_preset():
    page = (ROOT / "docs" / "model.md").read_text()
    first_table = page[: page.index("What they need")]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", first_table, flags=re.M) == list(PRESETS)
    sentence = re.search(r"is a recipe with a name: ([^.]*)\.", (ROOT / "README.md").read_text())[1]
    assert re.findall(r"`([a-z0-9-]+)`", sentence) == list(PRESETS)


def test_the_first_screen_of_the_readme_has_a_picture_a_table_and_both_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = "\n".join(lines[:55])
    for part in ("![", "| tokens/s |", "<!-- run -->", "<!-- test -->", "It is for people with"):
        assert part in first, part


def test_launch_scripts_can_be_started():
    for path in [*ROOT.glob("examples/*.sh"), ROOT / "scripts" / "distribution.sh", ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), path


def test_constraints_pin_torch_and_its_triton():
    """torch for CPUs asks for none, and that of another torch may have another assembler."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(pinned)


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")]), ids=lambda p: p.name
)
def test_scripts_name_only_what_is_there(path):
    """They are not run here; what they import from the package must exist."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            module = importlib.import_module(node.module)
            for name in node.names:
                found = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                assert found, f"{path.name}: {node.module} has no {name.name}"


def test_the_name_to_install_is_the_one_that_is_ours():
    """On PyPI `penstock` is another project; the distribution is `penstock-train`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = settings["optional-dependencies"]
    assert settings["name"] == "penstock-train"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = [name for name in listed.splitlines() if name.endswith((".md", ".py", ".sh", ".toml", ".ipynb"))]
    for path in (ROOT / name for name in named if not name.startswith("tests/")):
        text = path.read_text(encoding="utf-8").replace("\\[", "[")
        assert not re.search(r"\bpenstock\[|pip install '?penstock[' ]", text), path
        for extra in re.findall(r"(?:penstock-train|'\.)\[([a-z]+)\]", text):
            assert extra in extras, f"{path}: there is no extra {extra}"


def test_what_the_readme_shows_needs_no_extra():
    """The charts of a report are a plain dependency; trackers and DeepSpeed are extras that are named as such."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("vl-convert-python") for name in settings["dependencies"])
    assert set(settings["optional-dependencies"]) == {"deepspeed", "test", "docs", "tensorboard", "wandb", "trackio"}
