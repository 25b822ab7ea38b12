"""What `penstock plan` prints: it adds up, and what it says to paste is true."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest

from penstock.command.cli import main
from penstock.data.run_length import run_length
from penstock.errors import RecipeError
from penstock.machine.known import H200, MACHINES
from penstock.plan.matrix import matrix, matrix_lines
from penstock.plan.refusal import with_flags, without_flags
from penstock.plan.report import (
    RunLength,
    compare,
    lines,
    make_plan,
    make_report,
    short,
    with_recompute,
)
from penstock.plan.values import report_json
from penstock.recipe.presets import PRESETS


def test_short_examples_take_less_than_full_rows():
    """Attention is most of a row of 131,072 tokens that one example fills, and next to nothing of one with many."""
    recipe = replace(PRESETS["llama-8b"], max_length=131072, batch_size=1)
    full = make_report(recipe, H200, length=RunLength(10, 10 * 131072, "counted"))
    assert full.step_seconds == full.plan.seconds.step
    assert not any("with these examples" in line for line in lines(full))
    short = make_report(recipe, H200, length=RunLength(10, 10 * 131072, "counted", attended=50))
    assert short.plan.settings == full.plan.settings
    assert short.plan.seconds.step == full.plan.seconds.step
    assert short.step_seconds < 0.3 * full.step_seconds
    text = "\n".join(lines(short))
    assert f"with these examples: {short.step_seconds:.3f} s a step" in text
    assert str(timedelta(seconds=round(10 * short.step_seconds))) in text
    assert report_json(short)["run"]["seconds"] == 10 * short.step_seconds


def test_the_report_has_every_part():
    text = "\n".join(lines(make_report(PRESETS["qwen3-14b"], H200, length=run_length(PRESETS["qwen3-14b"]))))
    for part in (
        "14.77 B parameters", "resident state", "streamed state", "host state", "weights", "gradients", "activations",
        "staging", "CUDA context", "Loading:", "Disk: 177.2 GB a checkpoint", "forward", "backward", "recompute",
        "exposed", "link, each way", "CPU", "tokens/s", "TFLOP/s", "Whole run: 33 steps", "Other settings that fit",
        "49% gpu", "benchmarks/results/2026-11-15-h200",
    ):  # fmt: skip
        assert part in text, part
    assert "measured" in text.splitlines()[0]
    assert "not measured" in lines(make_report(PRESETS["qwen3-14b"], MACHINES["gh200"]))[0]


def test_json_is_one_object_that_adds_up(capsys):
    assert main(["plan", "qwen3-14b", "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    on_gpu = sum(b["num_bytes"] for b in found["buffers"] if b["place"] == "gpu" and b["name"] != "CUDA context")
    assert found["gpu_bytes"] == on_gpu
    s = found["seconds"]
    assert s["step"] == pytest.approx(s["forward"] + s["backward"] + s["recompute"] + s["exposed"])
    assert found["tokens_per_s"] == pytest.approx(4 * 4096 / s["step"])
    assert found["alternatives"]
    assert found["run"]["steps"] == 33


@pytest.mark.parametrize(
    "words",
    [
        ["seed-oss-36b", "--gpu", "h200"],
        ["llama-8b", "--gpu", "h100", "--recompute", "none", "--batch-size", "32"],
        ["qwen3-14b", "--gpu", "h200", "--homes", "gpu"],
        ["gpt-oss-20b", "--gpu", "h200"],
        ["qwen3-14b", "--gpu", "rtx4090", "--host-memory", "128GiB"],
        ["llama-70b", "--gpu", "gh200"],
        ["qwen3-14b", "--gpu", "rtx4090", "--mode", "zerooffload"],
        ["llama-8b", "--gpu", "rtx4090", "--weights", "1", "--inputs", "kept", "--host-memory", "128GiB"],
        [
            "llama-70b",
            "--gpu",
            "h100",
            "--max-length",
            "512",
            "--batch-size",
            "2",
            "--homes",
            "stream",
            "--matmul",
            "fp8",
        ],
        ["gpt-oss-20b", "--gpu", "rtx4090", "--batch-size", "1", "--update", "after-norm"],
    ],
    ids=" ".join,
)
def test_what_does_not_fit_exits_3_with_a_command_that_does(words, capsys):
    assert main(["plan", *words]) == 3
    error = capsys.readouterr().err
    assert "does not fit" in error
    assert "the largest parts" in error
    command = shlex.split(error.splitlines()[-1])
    assert command[:2] == ["penstock", "plan"]
    assert main(command[1:]) == 0, command


@pytest.mark.parametrize("gpu", MACHINES)
@pytest.mark.parametrize("preset", ["llama-70b", "gpt-oss-20b", "seed-oss-36b", "qwen3-30b-a3b", "qwen3-14b", "phi-4"])
@pytest.mark.slow
def test_every_command_to_paste_is_true(preset, gpu, capsys):
    code = main(["plan", preset, "--gpu", gpu])
    error = capsys.readouterr().err
    if code == 3 and "No machine that is known" not in error:
        command = shlex.split(error.splitlines()[-1])
        assert main(command[1:]) == 0, command
        changes = {"--states", "--max-grad-norm", "--max-length"} & set(command)
        assert ("it changes" in error) == bool(changes)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--gpu h200 --order layers --weights resident", "4 of these GPUs are enough"),
        ("--gpu h100 --host-memory 2TiB --weights 2 --inputs parked", "--weights streamed"),
        ("--gpu rtx4090 --gpus 4 --host-memory 1TiB --weights 40", "--weights auto"),
        ("--gpu rtx4090 --gpus 4 --host-memory 1TiB --weights resident", "--weights auto"),
    ],
)
def test_so_is_one_where_weights_were_told_what_to_do(words, answer, capsys):
    assert main(["plan", "llama-70b", *words.split()]) == 3
    error = capsys.readouterr().err
    assert answer in error
    assert main(shlex.split(error.splitlines()[-1])[1:]) == 0


@pytest.mark.parametrize(
    ("words", "answer", "least"),
    [
        ("--host-memory 1GiB", "--host-memory 1GiB is too small. Without it this fits", "--host-memory 9GB"),
        ("--gpu-memory 1GB", "--gpu-memory 1GB is too small. Without it this fits", "--gpu-memory 11GB"),
        ("--host_memory=1GiB --gpu-memory 1GB", "--host-memory 1GiB and --gpu-memory 1GB are too small", ""),
        ("--host-memory 1GiB --gpu-memory 80GB", "--host-memory 1GiB is too small. Without it", "--host-memory"),
        ("--host-memory 1GiB --recompute none --batch-size 32", "--host-memory 1GiB is too small. Without it", ""),
    ],
)
def test_a_limit_that_is_too_small_is_said_and_not_dropped_for_another_gpu(words, answer, least, capsys):
    assert main(["plan", "llama-8b", "--gpu", "h200", *words.split()]) == 3
    error = capsys.readouterr().err
    assert answer in error
    assert "--gpu h100" not in error, "none fits with that limit either"
    command = shlex.split(error.splitlines()[-1])
    assert "--host-memory" not in command
    assert main(command[1:]) == 0
    assert ("and from " in error) == bool(least)
    if least:
        flag, size = re.search(r"and from (\S+) (\d+)GB on", error).groups()
        assert f"{flag} {size}GB".startswith(least)
        assert main([*command[1:], flag, f"{size}GB"]) == 0
        assert main([*command[1:], flag, f"{int(size) - 1}GB"]) == 3


def test_a_limit_of_a_recipes_file_is_lifted_by_a_flag(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text("preset: llama-8b\ngpu_memory: 1GB\n")
    assert main(["plan", str(tmp_path / "small.yaml"), "--gpu", "h200"]) == 3
    assert main(shlex.split(capsys.readouterr().err.splitlines()[-1])[1:]) == 0


def test_another_machine_is_advised_with_the_limits_that_were_given(capsys):
    assert main(["plan", "qwen3-14b", "--gpu", "rtx4090", "--host-memory", "40GiB", "--batch-size", "1"]) == 3
    command = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert command[command.index("--gpu") + 1] == "h200"
    assert command[command.index("--host-memory") + 1] == "40GiB"
    assert main(command[1:]) == 0, command


@pytest.mark.parametrize(
    "words",
    [
        "llama-70b --gpu rtx5090 --weights 4",
        "llama-70b --gpu rtx5090 --homes gpu",
        "llama-70b --device cpu",
        "llama-8b",
    ],
)
def test_another_machine_is_advised_for_what_runs_there(words, monkeypatch, capsys):
    """With a GPU's types and kernels, and without what this one was told; exact if it fits so."""
    monkeypatch.setattr("penstock.machine.hardware.pci_gpus", list)
    monkeypatch.setattr("penstock.plan.report.cpu_has_bf16", lambda: False)
    monkeypatch.setattr("penstock.bench.this_machine.available_host_bytes", lambda: 16 * 2**30)
    assert main(["plan", *words.split()]) == 3
    error = capsys.readouterr().err
    assert "It fits h" in error
    assert "no clipping" not in error, "as with `plan llama-70b --gpu h100`"
    assert main(shlex.split(error.splitlines()[-1])[1:]) == 0


@pytest.mark.slow
def test_a_limit_is_too_small_for_rows_whose_length_nobody_said(tmp_path, capsys):
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path), "--gpu", "h200", "--host-memory", "1GiB"]) == 3
    error = capsys.readouterr().err
    assert "--host-memory 1GiB is too small. Without it this fits" in error
    assert main(shlex.split(error.splitlines()[-1])[1:]) == 0


def test_where_no_machine_is_large_enough_within_the_limits_they_are_named(capsys):
    assert main(["plan", "llama-70b", "--gpu", "rtx4090", "--host-memory", "200GiB", "--batch-size", "1"]) == 3
    assert "large enough with --host-memory 200GiB; give it more, or take a smaller model." in capsys.readouterr().err


def test_the_error_counts_as_the_table_does(capsys):
    assert main(["plan", "qwen3-14b", "--gpu", "rtx4090", "--weights", "resident"]) == 3
    out, error = capsys.readouterr()
    total, size, free = re.search(r"GPU memory: ([\d.]+) GB of ([\d.]+); ([\d.]+) are kept free", out).groups()
    need, room = re.search(r"([\d.]+) GB of GPU memory, of which ([\d.]+) can be used", error).groups()
    assert need == total
    assert float(room) == pytest.approx(float(size) - float(free), abs=0.11)


def test_the_cheapest_change_keeps_the_mathematics_if_it_can(capsys):
    assert main(["plan", "llama-8b", "--gpu", "h200", "--recompute", "none", "--batch-size", "32"]) == 3
    error = capsys.readouterr().err
    assert "the same mathematics" in error
    assert "--states" not in error


@pytest.mark.slow
def test_the_matrix_reproduces_the_references_table():
    cells = {(cell.preset, cell.gpus): cell.plan for cell in matrix(MACHINES["gh200"])}
    for name, gpus in {"llama-8b": 1, "qwen3-14b": 1, "phi-4": 1, "gpt-oss-20b": 1, "seed-oss-36b": 2,
                       "qwen3-30b-a3b": 2, "llama-70b": 4}.items():  # fmt: skip
        plan = cells[name, gpus]
        assert plan is not None, name
        assert plan.settings.states == "fp32"
    text = "\n".join(matrix_lines(MACHINES["gh200"], matrix(MACHINES["gh200"])))
    assert "seed-oss-36b: 1 is enough" in text
    assert "qwen3-30b-a3b: 1 is enough" in text
    assert "does not fit" in text


@pytest.mark.slow
def test_on_the_h200_every_preset_but_the_largest_has_a_way():
    """With the format and update that the planner picks."""
    for name in ("gpt-oss-20b", "qwen3-30b-a3b", "seed-oss-36b"):
        words = ["plan", name, "--gpu", "h200", "--states", "int8", "--max-grad-norm", "0"]
        assert main(words) == 0, name


@pytest.mark.slow
def test_the_matrix_says_where_weights_stream_on_one_gpu_and_on_several():
    lines = matrix_lines(MACHINES["rtx4090"], matrix(replace(MACHINES["rtx4090"], host_bytes=2**41), (1, 4)))
    (large,) = (line for line in lines if line.startswith("llama-70b  "))
    assert [int(count) for count in re.findall(r"streams (\d+)", large)] == [80, 70]
    assert "does not fit" not in "\n".join(lines)


@pytest.mark.slow
def test_the_matrix_marks_what_fits_without_clipping_only():
    cells = matrix(H200, (1, 2))
    lines = matrix_lines(H200, cells)
    (row,) = (line for line in lines if line.startswith("seed-oss-36b "))
    assert row.count("*") == 1
    assert "int8" in row.split("*")[0]
    assert "*: not clipped (--max-grad-norm 0); clipped it does not fit" in lines
    assert "seed-oss-36b: 1 is enough with int8 state, not clipped (the reference uses 2 GH200)" in lines
    assert not any("*" in line for line in matrix_lines(H200, [c for c in cells if c.preset == "llama-8b"]))


def test_several_gpus_share_the_memory_of_their_host(capsys):
    main(["plan", "llama-8b", "--gpu", "h200", "--gpus", "2"])
    out = capsys.readouterr().out
    assert "2 x h200 (rates of one were measured)" in out
    assert "GB of 67.1; 3.2 are kept free for the data, the page cache, other programs" in out


def test_too_many_gpus_for_the_batch_are_refused():
    with pytest.raises(RecipeError, match="each GPU needs a row"):
        make_plan(PRESETS["llama-8b"], H200, 8)


def test_flags_replace_what_was_said_before():
    words = ["penstock", "train", "x.yaml", "--recompute", "none", "--states=fp32", "--json"]
    changed = with_flags(words, ("--recompute full", "--states bf16"))
    assert changed == "penstock train x.yaml --json --recompute full --states bf16"
    assert without_flags(["a", "--betas", "0.9", "0.99", "--lr", "1"], ["--betas"]) == ["a", "--lr", "1"]


def test_auto_recompute_is_what_the_solver_finds_for_the_rest_of_the_recipe():
    recipe = PRESETS["qwen3-14b"]
    chosen = with_recompute(recipe, H200).recompute
    steps = {word: make_plan(replace(recipe, recompute=word), H200) for word in ("none", "selected", "full", chosen)}
    fitting = {word: plan.seconds.step for word, plan in steps.items() if plan.fits}
    assert min(fitting, key=lambda word: fitting[word]) == chosen
    assert make_plan(recipe, H200).settings.recompute == chosen
    assert with_recompute(replace(recipe, recompute="full:3"), H200).recompute == "full:3", "what is asked for stays"
    assert with_recompute(recipe, None).recompute == "none", "on a CPU nothing is short"
    assert with_recompute(replace(recipe, model="some/other-model"), H200).recompute == "full"


def test_recipes_get_what_the_plan_chooses():
    recipe, card = PRESETS["llama-8b"], MACHINES["rtx4090"]
    chosen = with_recompute(recipe, card)
    assert (chosen.weights, chosen.order, chosen.inputs, chosen.recompute) == ("7", "layers", "parked", "full")
    assert make_plan(chosen, card).settings == make_plan(recipe, card).settings
    assert with_recompute(chosen, card) == chosen
    on_h200 = with_recompute(recipe, H200)
    assert (on_h200.weights, on_h200.order, on_h200.inputs) == ("auto", "auto", "auto"), "nothing has to stream"
    limit = with_recompute(replace(recipe, gpu_memory="24GB"), H200)
    assert (int(limit.weights), limit.order) >= (1, "layers"), "and with less memory something has"
    asked = with_recompute(replace(recipe, weights="streamed", inputs="parked"), H200)
    assert (asked.weights, asked.order, asked.inputs, asked.recompute) == ("streamed", "layers", "parked", "full")
    assert with_recompute(replace(recipe, order="layers"), H200).weights == "resident"
    unknown = with_recompute(replace(recipe, model="some/other-model", weights="4"), H200)
    assert (unknown.weights, unknown.order, unknown.inputs, unknown.recompute) == ("4", "layers", "kept", "full")
    fixed = with_recompute(replace(recipe, recompute="none"), card)
    assert (fixed.weights, fixed.recompute) == ("auto", "none"), "it is not computed again, so that nothing streams"


@pytest.mark.parametrize(("field", "word"), [("order", "layers"), ("inputs", "parked"), ("tile", "4096")])
def test_several_gpus_compute_no_layers_one_by_one(field, word, capsys):
    flags = ["--weights", "streamed", f"--{field}", word]
    assert main(["plan", "llama-8b", "--gpu", "h100", "--gpus", "2", *flags]) == 2
    assert f"{field} = {word}: goes with layers that are computed one by one, on one GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--inputs parked:33", "inputs = parked:33: the model has 32 layers\n  Use parked:32 or a smaller number."),
        ("--weights 33", "weights = 33: the model has 32 layers\n  Use streamed for all."),
    ],
)
def test_no_more_layers_are_planned_than_the_model_has(flags, message, capsys):
    words = ["plan", "llama-8b", "--gpu", "rtx4090", "--order", "layers"]
    assert main([*words, *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert main([*words, *flags.replace("33", "32").split(), "--host-memory", "256GiB"]) == 0


@pytest.mark.parametrize(("flags", "count"), [(["--weights", "streamed"], 32), (["--weights", "8"], 8), ([], 0)])
def test_several_gpus_stream_as_many_layers_as_they_are_told(flags, count, capsys):
    assert main(["plan", "llama-8b", "--gpu", "h100", "--host-memory", "256GiB", "--gpus", "2", *flags]) == 0
    said = capsys.readouterr().out
    assert (f"{count} of 32 layers stream, recompute full" in said) == bool(count)
    assert ("streamed weights" in said) == bool(count)


def test_several_gpus_stream_what_does_not_fit_them(capsys):
    assert main(["plan", "llama-70b", "--gpu", "rtx4090", "--host-memory", "1TiB", "--gpus", "4"]) == 0
    said = capsys.readouterr().out
    assert "70 of 80 layers stream, recompute full" in said
    assert "unit slots" not in said  # rows of one layer come where it is gathered
    assert "Link: in " in said
    recipe = with_recompute(PRESETS["llama-70b"], replace(MACHINES["rtx4090"], host_bytes=2**40), 4)
    assert (recipe.weights, recipe.order, recipe.inputs, recipe.tile) == ("70", "rows", "kept", "none")


def test_exact_llama_70b_fits_four_80_gb_gpus(capsys):
    """Clipped: gradients of a unit go down together, and make room."""
    assert main(["plan", "llama-70b", "--gpu", "h100", "--host-memory", "1TiB", "--gpus", "4"]) == 0
    said = capsys.readouterr().out
    assert "exact fp32 state, 1 row at once, recompute full" in said
    assert "updates after-norm (clipped)" in said
    assert "stream, " not in said.partition("GPU memory")[0], "no weights need stream"


def test_what_does_not_fit_several_gpus_even_so_says_what_is_missing(capsys):
    assert main(["plan", "llama-70b", "--gpu", "rtx4090", "--host-memory", "128GiB", "--gpus", "4"]) == 3
    said = capsys.readouterr().err
    assert "GB of host memory" in said
    assert "streamed weights" in said


def test_streamed_weights_are_shown(capsys):
    assert main(["plan", "llama-70b", "--gpu", "h100", "--host-memory", "1TiB"]) == 0
    said = capsys.readouterr().out
    for part in (
        "77 of 80 layers stream, order layers, inputs parked", "unit slots", "streamed weights", "gradient landings",
        "saved inputs", "Link: in ", "weights 2", "lanes: link, each way", "CPU",
    ):  # fmt: skip
        assert part in said, part
    assert main(["plan", "llama-8b", "--gpu", "rtx4090", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["streamed_layers"] == 7
    assert [found["settings"][name] for name in ("weights", "order", "inputs")] == ["7", "layers", "parked"]
    assert {b["name"] for b in found["buffers"]} >= {"unit slots", "streamed weights", "parked inputs"}
    link = sum(c["in_bytes"] for c in found["crossings"]) / MACHINES["rtx4090"].link_bytes_per_s
    assert found["seconds"]["link"] == pytest.approx(link)


@pytest.mark.parametrize("gpu", ["rtx4090", "rtx5090", "h100", "gh200"])
def test_what_a_small_host_lacks_is_said(gpu, capsys):
    assert main(["plan", "llama-70b", "--gpu", gpu, "--host-memory", "512GiB"]) == 3
    error = capsys.readouterr().err
    need, room, missing = (
        float(number)
        for number in re.search(
            r"([\d.]+) GB of host memory, of which ([\d.]+) can be used: ([\d.]+) are missing", error
        ).groups()
    )
    assert missing == pytest.approx(need - room, abs=0.11)
    assert "with weights and state on the host" in error


@pytest.mark.slow
def test_with_enough_host_memory_every_preset_fits_one_gpu():
    machine = replace(MACHINES["rtx4090"], host_bytes=2 * 2**40)
    cells = matrix(machine, (1,))
    assert all(cell.plan is not None for cell in cells)
    said = "\n".join(matrix_lines(machine, cells))
    assert "does not fit" not in said
    assert re.search(r"llama-70b .* streams 80", said)


def test_reality_is_compared_without_the_first_steps():
    plan = make_plan(PRESETS["qwen3-14b"], H200)
    text = compare(plan, [60.0, 9.0, *([plan.seconds.step * 1.1] * 8)], int(plan.peak_bytes("gpu") * 0.99), 10**9)
    assert text.startswith(
        f"after 10 steps: {1.1 * plan.seconds.step:.3g} s a step, planned {plan.seconds.step:.3g} (+10%)"
    )
    assert "GB GPU" in text
    assert "(-1%)" in text
    assert "planned: " in short(plan)


@pytest.mark.parametrize(
    "name", [name if name in ("llama-70b", "demo") else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_it_takes_under_a_second_and_no_torch(name):
    code = (
        "import sys, time; start = time.process_time();"
        "from penstock.command.cli import main;"
        f"code = main(['plan', {name!r}, '--gpu', 'gh200', '--gpus', '4']);"
        "assert 'torch' not in sys.modules, 'torch';"
        "seconds = time.process_time() - start; assert seconds < 1, seconds; sys.exit(code)"
    )
    for _ in range(3):  # the first may find modules that were never compiled, and the machine may be busy
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if result.returncode in (0, 3):
            break
    assert result.returncode in (0, 3), result.stderr
    assert "Traceback" not in result.stderr, result.stderr


def test_the_matrix_takes_a_second_or_two():
    """In a process of its own, as for a user: here the garbage of all other tests would be searched meanwhile."""
    code = (
        "import time; from penstock.machine.known import MACHINES; from penstock.plan.matrix import matrix;"
        "start = time.process_time(); matrix(MACHINES['gh200']);"
        "seconds = time.process_time() - start; assert seconds < 3, seconds"
    )
    for _ in range(3):  # the machine may be busy
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if result.returncode == 0:
            break
    assert result.returncode == 0, result.stderr


def test_the_solver_is_free_when_asked(capsys):
    assert main(["plan", "llama-8b", "--gpu", "h200", "--micro-batch-size", "1", "--best"]) == 0
    assert "chosen by the solver: --micro-batch-size 4" in capsys.readouterr().out
    assert main(["plan", "gpt-oss-20b", "--gpu", "h200", "--best", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["settings"]["states"]) == (True, "bf16")
    assert "--states bf16" in found["flags"]


def test_a_small_gpu_keeps_little_free(capsys):
    """5.4 GB are for a GPU of 80 GB or more; of 24 GB they would be a fifth."""
    for gpu, free in (("rtx4090", "1.6"), ("rtx5090", "2.1"), ("h200", "5.4")):
        assert main(["plan", "smollm2-135m", "--gpu", gpu]) == 0
        assert f"; {free} are kept free for fragments and workspaces" in capsys.readouterr().out


def test_advice_keeps_examples_whole_before_it_cuts_them(capsys):
    assert main(["plan", "llama-8b", "--gpu", "rtx4090", "--gpu-memory", "10GB"]) == 3
    error = capsys.readouterr().err
    assert "it changes: fewer rows in a step" in error
    command = error.strip().splitlines()[-1].split()
    assert "--batch-size" in command
    assert "--max-length" not in command
    assert main(command[1:]) == 0, "what is advised fits"


@pytest.mark.parametrize(("gpus", "words"), [([], ["demo"]), (["a GPU"], ["demo", "--device", "cpu"])])
def test_without_a_gpu_no_time_is_predicted(monkeypatch, capsys, gpus, words):
    monkeypatch.setattr("penstock.machine.hardware.pci_gpus", lambda: gpus)
    monkeypatch.setattr("penstock.bench.this_machine.measure", None)  # nothing is measured either
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "Time: not predicted without a GPU" in said
    assert "Whole run: 88 steps" in said
    assert not re.search(r"tokens/s|Step:| s \(", said)
    assert main(["plan", *words, "--json", "--remeasure"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["seconds"], found["tokens_per_s"], found["model_tflops"]) == (None, None, None)
    assert found["host_bytes"] > 0
    assert "of a CPU nothing is measured" in err


@pytest.mark.parametrize("words", [["demo"], ["llama-8b", "--host-memory", "1TiB"]], ids=" ".join)
def test_ranks_are_planned_without_a_gpu_too(words, monkeypatch, capsys):
    monkeypatch.setattr("penstock.machine.hardware.pci_gpus", list)
    assert main(["plan", *words, "--gpus", "2"]) == 0
    assert "on this machine, which has no GPU" in capsys.readouterr().out


def test_a_limit_makes_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr("penstock.machine.hardware.pci_gpus", list)
    assert main(["plan", "smollm2-135m", "--gpu-memory", "8GB"]) == 2
    assert "--gpu-memory 8GB: there is no GPU to limit" in capsys.readouterr().err


def test_a_limit_makes_no_gpu_larger(monkeypatch, capsys):
    monkeypatch.setattr("penstock.machine.hardware.pci_gpus", lambda: ["a GPU"])
    here = replace(MACHINES["rtx4090"], name="this machine")
    monkeypatch.setattr("penstock.bench.this_machine.this_machine", lambda **_: here)
    said = []
    for limit in ("auto", "500GB", "12GB"):
        assert main(["plan", "smollm2-135m", "--gpu-memory", limit]) == 0
        said.append(capsys.readouterr().out)
    assert "GB of 25.8;" in said[0]
    assert said[0] == said[1] != said[2]


def test_fp8_products_are_planned_and_shown(capsys):
    assert main(["plan", "llama-8b", "--gpu", "h200", "--matmul", "fp8", "--json"]) == 0
    fp8 = json.loads(capsys.readouterr().out)
    assert main(["plan", "llama-8b", "--gpu", "h200", "--json"]) == 0
    bf16 = json.loads(capsys.readouterr().out)
    assert (fp8["matmul"], bf16["matmul"]) == ("fp8", "bf16")
    assert fp8["tokens_per_s"] > 1.2 * bf16["tokens_per_s"]
    assert main(["plan", "llama-8b", "--gpu", "h200", "--matmul", "fp8"]) == 0
    assert "fp8 products, exact fp32 state" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["a100", "mi300a"])
def test_a_machine_that_penstock_has_no_fp8_products_for_is_refused(gpu, capsys):
    assert main(["plan", "llama-8b", "--gpu", gpu, "--matmul", "fp8"]) == 2
    said = capsys.readouterr().err
    assert f"Penstock has no fp8 products for {gpu}" in said, "an MI300A itself has them"
    assert "NVIDIA's GPUs from Ada and Hopper on" in said


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("--gpu rtx4090", "host"),  # whose memory saved inputs of every layer would not fit
        ("--gpu h200 --host-memory 256GiB --gpu-memory 24GB", "GPU"),
    ],
)
def test_what_does_not_fit_names_the_memory_that_is_short(words, place, capsys):
    """Inputs of fewer layers take more of the GPU: computing some again together needs those between."""
    assert main(f"plan llama-8b {words} --batch-size 1 --max-length 131072".split()) == 3
    assert re.search(rf"GB of {place} memory, of which [\d.]+ can be used: [\d.]+ are missing", capsys.readouterr().err)


def test_what_does_not_fit_is_told_with_the_tables_figure(capsys):
    words = "plan llama-8b --gpu rtx4090 --max-length 196608 --batch-size 1 --host-memory 200GB"
    assert main(words.split()) == 3
    shown = capsys.readouterr()
    total = re.search(r"GPU memory: ([\d.]+) GB of", shown.out)
    assert total is not None
    assert f"{total[1]} GB of GPU memory" in shown.err
