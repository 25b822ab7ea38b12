"""What the documentation shows can be run: Python blocks and the notebook are, and every `penstock` line is parsed."""

import importlib.util
import inspect
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock import OffloadAdamW
from penstock.command import cli
from penstock.recipe.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name == "docs" and blocks(p, "python")], ids=lambda p: p.name
)
@pytest.mark.slow
def test_python_blocks_of_a_page_run_one_after_another(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr


def test_what_the_examples_of_the_library_need_is_said():
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    default = inspect.signature(OffloadAdamW).parameters["max_grad_norm"].default
    assert f"`max_grad_norm`, which is {default} by default" in page
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    examples = (ROOT / name for name in re.findall('--8<-- "(.*?)"', page))
    code = "\n".join([*blocks(ROOT / "docs" / "library.md", "python"), *(p.read_text("utf-8") for p in examples)])
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.M)) - set(sys.stdlib_module_names) - {"penstock"}
    assert "torch" in imported
    for name in imported - {re.match(r"[\w-]+", one)[0] for one in installed}:
        assert f"pip install {name.replace('_', '-')}" in page


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
    if words[0] in ("train", "data", "bench", "plan") and len(words) > 1 and not words[1].startswith("-"):
        assert words[1] in PRESETS or words[1].endswith(".yaml")


@pytest.mark.slow
def test_the_notebook_runs_and_its_losses_fall(tmp_path):
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code.append('assert losses[-1] < 0.3 * losses[0] and rows[-1]["loss"] < 0.3 * rows[0]["loss"]')
    code.append('assert abs(losses[0] - rows[0]["loss"]) < 1e-3')
    result = subprocess.run([sys.executable, "-c", "\n".join(code)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "The capital of France is Paris." in result.stdout


def nav_pages():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return [page for entry in settings["nav"] for page in entry.values()]


def test_every_page_can_be_reached():
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(nav_pages())


@pytest.mark.skipif(not importlib.util.find_spec("mkdocstrings"), reason="needs the extra docs")
@pytest.mark.slow
def test_the_pages_build_without_a_warning_and_load_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not re.search("^WARNING", result.stderr, flags=re.M), result.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")} <= set(pages)
    for name, text in pages.items():
        loaded = re.findall(r"<(?:script|link|img|iframe|source)[^>]*(?:src|href)=\"?https?://[^ >]*", text)
        assert not loaded, name
    assert "max_grad_norm" in pages["api.html"]
    assert "in anyone's training loop" in pages["api.html"]
    assert "SFTTrainer(" in re.sub(r"<[^>]*>", "", pages["library.html"])


def test_figures_of_the_benchmarks_page_are_those_of_the_results():
    """Each row of its tables: every figure stands in one row of the results, or in the lines below them."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    results = (
        (ROOT / "benchmarks" / "results" / "2026-11-15-h200" / "table.txt").read_text(encoding="utf-8").splitlines()
    )
    rows = [line for line in page.splitlines() if re.search(r"\| \d\.\d{3} \| \d\.\d{3} \|", line)]
    assert len(rows) == 27
    for row in rows:
        step, over, tokens = re.search(r"\| (\d\.\d{3}) \| (\d\.\d{3}) \| ([\d,]+) \|", row).groups()
        assert any(f" {step}   {over} " in line and f" {tokens} " in line for line in results), row
    others = "\n".join(line for line in page.splitlines() if line not in rows)
    pairs = re.findall(r"\| (\d\.\d{3}) \| ([\d,]+) (?=\|)", others)
    assert len(pairs) == 6
    for step, tokens in pairs:
        assert any(f" {step} " in line and f" {tokens} " in line for line in results), step
    for resident, streamed, host in re.findall(r"\| ([\d.]+), ([\d.]+), ([\d.]+) GB \|", page):
        held = f"resident {resident} GB, streamed {streamed} GB, host state {host} GB"
        assert any(held in line for line in results), held


def test_figures_of_streamed_weights_and_fp8_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results"
    paths = [results / "2026-11-16-h200/streamed/more_rows.jsonl"]
    paths += [results / part / "rows.jsonl" for part in ("2026-11-17-h200/streamed", "2026-11-19-h200/fp8")]
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    measured = {
        (
            f"{row['step_s']:.2f} s",
            f"{row['step_s'] / row['floor_s']:.3f}" if row["floor_s"] else "",
            f"{row['tokens_per_s']:,.0f}",
        )
        for row in rows
        if row["system"] == "penstock" and row["step_s"]
    }
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/small-gpus.md"))
    shown = re.compile(r"weights streamed \(|fp8 products|^\| [\w-]+ \| \d+ \| ")
    lines = [line for line in pages.splitlines() if shown.search(line)]
    assert len(lines) == 12
    for line in lines:
        assert tuple(cell.strip() for cell in line.strip(" |").split("|"))[-3:] in measured, line


def rows_of(*paths):
    results = ROOT / "benchmarks" / "results"
    return [json.loads(line) for path in paths for line in (results / path).read_text(encoding="utf-8").splitlines()]


def test_speeds_with_fp8_are_those_of_the_results():
    days = ("2026-11-17-h200/fp8", "2026-11-18-h200/fp8", "2026-11-18-h200/streamed", "2026-11-19-h200/fp8")
    rows = [row for row in rows_of(*(f"{day}/rows.jsonl" for day in days)) if row["system"] == "penstock"]
    measured = {
        (
            row["model"],
            "yes" if row["clip"] else "no",
            row["recompute"],
            f"{row['step_s']:.3f} s",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_s'] / row['floor_s']:.3f}",
            f"{row['model_tflops'] / row['matrix_tflops']:.2f}" if row["matrix_tflops"] else "",
        )
        for row in rows
        if row["matmul"] == "fp8"
    }
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if re.search(r"\| all(?: but two)? \|", line)]
    assert len(lines) == 9
    for line in lines:
        name, clipped, recompute, _, *figures, _ = (cell.strip() for cell in line.split("|")[1:-1])
        assert (name.partition(",")[0], clipped, recompute, *figures) in measured, line


def test_long_rows_beside_the_code_before_are_those_of_the_results():
    page = (ROOT / "docs" / "long-rows.md").read_text(encoding="utf-8")
    rows = rows_of("2026-11-19-h200/long/rows.jsonl")
    assert len(rows) == 6
    for before, today in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{before['settings']['max_length']:,}", *(f"{row['tokens_per_s']:,.0f}" for row in (before, today))]
        for row in (before, today):
            took, planned = (f"{row[name] / 1e9:.1f}" for name in ("gpu_bytes", "planned_gpu_bytes"))
            cells.append(f"{took} GB, {planned}")
        assert f" | {' | '.join(cells)} |" in page, cells
        assert today["tokens_per_s"] > 0.95 * before["tokens_per_s"]


def test_what_fp8_does_to_a_model_is_what_was_measured():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    found = {}
    for row in rows_of("2026-11-19-h200/fp8/fp8_quality.jsonl"):
        found.setdefault((row["data"], row["matmul"]), []).append(row)
    for data, shown in (("alpaca_en_demo.json", "`alpaca_en_demo.json`"), ("demo", "the demo's")):
        bf16, fp8 = (sorted(found[data, kind], key=lambda row: row["seed"]) for kind in ("bf16", "fp8"))
        plain, narrow = ([row["eval_loss"] for row in rows] for rows in (bf16, fp8))
        apart = ", ".join(f"{b - a:+.4f}" for a, b in zip(plain, narrow, strict=True))
        after = statistics.mean(row["eval_loss_in_bf16"] for row in fp8)
        cells = (
            f"{statistics.mean(plain):.4f} | {statistics.mean(narrow):.4f} | {apart} | "
            f"{statistics.stdev(plain):.4f} | {after:.4f} |"
        )
        assert re.search(rf"^\| {re.escape(shown)}.* \| {re.escape(cells)}$", page, re.M), cells
        assert {row["lr"] for row in (*bf16, *fp8)} == {2e-5}
    whole = [
        row["eval_loss"]
        for row in rows_of("2026-11-17-h200/fp8/fp8_quality_all_layers.jsonl")
        if row["data"] == "alpaca_en_demo.json"
    ]
    assert f"end at {statistics.mean(whole):.4f} instead of 1.5700" in page
    _, layers = rows_of("2026-11-17-h200/fp8/fp8_layers.jsonl")
    alone, ends = layers["gained_by_layer"], layers["gained_by_ends"]
    text = " ".join(page.split())
    assert (
        f"add {ends['1']:.4f}: the last alone {alone[-1]:.4f}, more than any other, the first alone {alone[0]:.4f}"
        in text
    )
    assert max(alone) == alone[-1]
    assert sum(one > alone[0] for one in alone[1:-1]) == 9, "less than nine of the inner ones"
    assert f"Two at each end add {ends['2']:.4f}, three {ends['3']:.4f}" in text


def test_the_plans_that_a_page_shows_are_those_that_are_made(capsys):
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    commands = {"qwen3-14b": "qwen3-14b --gpu h200", "llama-8b": "llama-8b --gpu h200 --gpu-memory 24GB --batch-size 8"}
    shown = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if " on 1 x h200 " in block]
    assert len(shown) == 2
    for block in shown:
        command = commands[block.split()[0]]
        assert f"penstock plan {command} " in page
        assert cli.main(["plan", *command.split()]) == 0
        made = capsys.readouterr().out.splitlines()
        missing = [line for line in block.splitlines() if line not in made and line != "..."]
        assert not missing, command


@pytest.mark.slow
def test_figures_beside_a_plan_are_those_that_the_command_prints(capsys):
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("long-rows.md", "small-gpus.md"))
    shown = re.findall(r"^penstock (plan .*?) +# (.*\d.*)$", pages, re.MULTILINE)
    assert len(shown) == 7
    for command, figures in shown:
        assert cli.main(command.split()) == 0
        made = capsys.readouterr().out
        (seconds,) = re.findall(r"^Step: ([\d.]+) s", made, re.MULTILINE)
        (gigabytes,) = re.findall(r"^GPU memory.*?: ([\d.]+) GB", made, re.MULTILINE)
        printed = [
            f"{float(seconds):.1f} s a step",
            f"{gigabytes} GB of ",
            *re.findall(r"\d+ of \d+ layers stream", made),
        ]
        left = figures
        for figure in printed:
            left = left.replace(figure, "")
        assert not re.search(r"\d", left), f"penstock {command}: {printed}"


def test_no_page_knows_the_machine_it_was_written_on():
    pages = [*PAGES, ROOT / "docs" / "notebook.ipynb", ROOT / "mkdocs.yml"]
    for page in pages:
        assert not re.search(r"/(root|home|tmp|work)/", page.read_text(encoding="utf-8")), page.name
