"""What the documentation shows can be run: Python blocks are, and every `penstock` line is parsed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import cli
from penstock.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name == "docs" and blocks(p, "python")], ids=lambda p: p.name
)
def test_python_blocks_of_a_page_run_one_after_another(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr


def commands():
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", "").splitlines():
                words = shlex.split(line, comments=True)
                if "penstock" in words:  # perhaps behind torchrun or numactl
                    words = words[words.index("penstock") + 1 :]
                    yield pytest.param(words, id=f"{page.name}: {' '.join(words[:3])}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_name_flags_and_presets_that_exist(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("preset: demo\n")
    assert words[0] in cli.COMMANDS
    assert cli.main([*words, "--help"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    for flag in (word for word in words if word.startswith("--")):
        assert flag in shown, f"{words[0]} has no {flag}"
    if words[0] in ("train", "data", "bench") and len(words) > 1 and not words[1].startswith("-"):
        assert words[1] in PRESETS or words[1].endswith(".yaml")
