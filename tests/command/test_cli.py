"""The command as a user types it."""

import errno
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from importlib.resources import files

import pytest

from penstock.command.cli import COMMANDS, main
from penstock.command.libraries import importing
from penstock.errors import RecipeError
from penstock.recipe.file import find_recipe
from penstock.recipe.presets import PRESETS


def penstock(*words, cwd=None, env=None):
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})})


def test_no_garbage_is_looked_for_during_imports_and_always_afterwards():
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_flag_over_yaml_over_preset(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: demo\nlr: 2e-4\nbatch_size: 3\n")
    recipe = find_recipe(str(path)).recipe
    assert (recipe.name, recipe.lr, recipe.batch_size) == ("mine", 2e-4, 3)
    assert recipe.max_length == PRESETS["demo"].max_length
    assert main(["train", str(path), "--lr", "3e-4", "--dry-run", "--json", "--output-dir", str(tmp_path / "o")]) == 0
    resolved = json.loads(capsys.readouterr().out)["recipe"]
    assert (resolved["lr"], resolved["batch_size"]) == (3e-4, 3)


def test_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "lr: " in out
    assert "Would train demo" in out
    assert list(tmp_path.iterdir()) == []


ODD = {"asked": "Why?", "said": "So.", "source": "x", "system": "Be kind."}


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({**ODD, "asked": f"Why {i}?"}) + "\n" for i in range(6)))
    return ["--data", str(path), "--columns", "asked=prompt,said=completion"]


def test_columns_that_are_not_used_are_named_in_data_and_in_a_dry_run(odd, tmp_path, capsys):
    assert main(["data", "demo", *odd]) == 0
    assert "not used: source" in capsys.readouterr().out
    assert main(["data", "demo", *odd, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"]["unused"]["source"]["count"] == 6
    assert main(["train", "demo", *odd, "--dry-run", "--json", "--output-dir", str(tmp_path / "o")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["unused"] == ["source"]
    assert "not used: source" in captured.err
    assert json.loads(captured.out)["recipe"]["columns"] == "asked=prompt,said=completion"


@pytest.mark.slow
def test_a_run_names_them_saves_the_columns_and_goes_on_with_no_others(odd, tmp_path, capsys):
    words = ["train", "demo", *odd, "--max-steps", "1", "--no-compile", "--output-dir", str(tmp_path / "run")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unused"] == ["source"]
    assert "columns: asked=prompt,said=completion" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "columns not used" in page
    assert main([*words, "--resume"]) == 0
    other = [word.replace("asked=prompt,", "asked=prompt,system=,") for word in words]
    assert main([*other, "--resume"]) == 5
    assert "columns was 'asked=prompt,said=completion'" in capsys.readouterr().err


def test_split_documents_needs_no_word(tmp_path, capsys):
    (tmp_path / "my.txt").write_text("One.\n\nTwo.\n")
    assert main(["data", "demo", "--data", str(tmp_path / "my.txt"), "--split-documents", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"]["rows"] == 2


def test_a_plan_reads_a_mixture(odd, tmp_path, capsys):
    (tmp_path / "more.jsonl").write_text('{"text": "more"}\n' * 4)
    data = f"{odd[1]}:0.5,{tmp_path / 'more.jsonl'}:0.5"
    assert main(["plan", "llama-8b", "--gpu", "h200", "--host-memory", "500GiB", "--data", data]) == 0
    assert "10 examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "lama-8b"], "Did you mean 'llama-8b'?"),
        (["train", "demo", "--lrr", "1"], "--lr"),
        (["train", "demo", "--batch-size", "x"], "--batch-size"),
        (["train", "demo", "--batch-size", "-1"], "batch_size = -1: must be at least 1"),
        (["train", "demo", "--warmup", "100"], "warmup = 100.0: must be between 0 and 1"),
        (["train", "demo", "--schedule", "cosin"], "schedule"),
        (["train", "none.yaml"], "none.yaml: cannot be read"),
        (["train", "demo", "--data", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["train", "demo", "--model", "no/such/dir"], "no/such/dir"),
        (["bench", "demo", "--against", "deepsped"], "Did you mean 'deepspeed'?"),
        (["bench", "demo", "--updates", "after-nrm"], "Did you mean 'after-norm'?"),
        (["bench", "demo", "--peer-ratio", "2"], "between 0 and 1"),
        (["bench", "demo", "--steps", "0"], "--steps 0: must be at least 1"),
        (["data", "demo", "--examples", "-1"], "--examples -1: must not be negative"),
        (["plan", "llama-8b", "--gpu", "h20"], "Did you mean 'h200'?"),
        (["plan", "llama-8b", "--gpu", "h200", "--gpus", "0"], "--gpus 0: must be at least 1"),
        (["train", "demo", "--data", ""], "--data: no data is named"),
        (["train", "--model", "some/model"], "--data: no data is named"),
        (["data", "--model", "some/model"], "--data: no data is named"),
        (["train", "--data", "my.jsonl"], "--data my.jsonl: no model is named for it"),
        (["plan", "llama-8b", "--gpu", "h200", "--host-memory", "lots"], "is not a size"),
        (["plan", "demo", "--model", "nobody/nothing", "--gpu", "h200"], "neither here nor in Hugging Face's cache"),
        (["generate", "no-such-run", "hello"], "no-such-run: there is no such directory"),
        (["export", "no-such-run", "--to", "x"], "no-such-run: there is no such directory"),
        (["export", "no-such-run", "--verify"], "no-such-run: there is no such directory"),
        (["report", "no-such-run"], "no-such-run: there is no such directory"),
        (["generate", ".", "hello"], ".: is neither a run, nor a checkpoint, nor a model"),
        (["report", "."], ".: is not the directory of a run"),
        (["report"], "no run is named"),
        (["export", "any-run"], "nothing to do"),
        (["train", "demo", "--keep", "-1"], "keep = -1: must not be negative"),
        (["train", "demo", "--recompute", "full:99"], "the model has 4 layers"),
        (["train", "demo", "--save-every", "5", "--keep", "0"], "save_every = 5: does not go with keep = 0"),
        (["train", "demo", "--gpus", "2", "--tile", "64"], "On several leave it out."),
        (["train", "demo", "--gpus", "2", "--inputs", "parked"], "On several leave it out."),
        (["train", "demo", "--gpus", "2", "--order", "layers"], "penstock: order = layers: goes with layers that"),
        (
            ["train", "demo", "--gpus", "2", "--order", "layers", "--inputs", "parked", "--tile", "64"],
            "order = layers, inputs = parked, tile = 64: goes with layers that are computed one by one, on one GPU\n"
            "  Leave them out, or use one GPU.",
        ),
        (["train", "demo", "--rope", "linear:0.5"], "rope = 'linear:0.5': the factor must be greater than 1"),
    ],
)
def test_a_mistake_is_one_message_and_no_traceback(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err
    assert len(out.splitlines()) <= 1, "at most what it was about to do"
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "bench-results").exists()


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["train", "demo", "--data", "no-such-file.jsonl"], 2, "no-such-file.jsonl: no such file"),
        (["train", "demo", "--lr", "much"], 2, "the command line"),
        (["train", "no-such-preset"], 2, "no-such-preset: there is no such preset"),
        (["plan", "llama-70b", "--gpu", "rtx4090"], 3, "llama-70b: does not fit"),
    ],
)
def test_with_json_a_failure_is_an_object_too(words, code, what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    assert found["error"].startswith(what)
    assert ("gpu_bytes" in found) == (words[0] == "plan"), "what there is beside the error"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2\n", "key 'lr' stands twice"),
        ("learning_rate: 1\n", "unknown key 'learning_rate'"),
        ("- 1\n", "must hold `field: value` lines"),
        ("lr: [\n", "is not YAML"),
        ("name: 2024-13-45\n", "is not YAML"),
        ("preset: [demo]\n", r"preset: \['demo'\] is not a name"),
        ("lr: {{ lr }}\n", r"is not YAML: key \{'lr': None\} is not a name; is it a placeholder"),
        ("? [lr]\n: 1\n", r"is not YAML: key \['lr'\] is not a name"),
        ("preset: lama\n", "there is no preset 'lama'"),
        ("batch_size: many\n", "'many' is not a whole number"),
    ],
)
def test_a_bad_yaml_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        find_recipe(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.slow
def test_a_signal_before_the_first_step_is_said(number, code, tmp_path, monkeypatch, capsys):
    def loads_for_long(*_, **__):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except Exception as error:  # as libraries do
            raise AssertionError("swallowed") from error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("penstock.run.loading.load", loads_for_long)
    assert main(["train", "demo", "--json", "--output-dir", str(tmp_path / "run")]) == code
    said = capsys.readouterr()
    assert f"stopped by {number.name} while no step was under way" in said.err
    assert json.loads(said.out)["exit_code"] == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_output_directory_that_cannot_be_written_is_found_first(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["train", "demo", "--model", "/no/such/model", "--output-dir", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main(["train", "demo", "--output-dir", str(tmp_path)]) == 2
    assert "holds files of something else" in capsys.readouterr().err
    assert main(["train", "demo", "--output-dir", "/proc/none/run"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


LONG = "What is a penstock? " * 20
"""Such as a question to nobody."""


@pytest.mark.parametrize(
    "words",
    [
        ["generate", LONG],
        ["report", LONG],
        ["export", LONG, "--to", "x"],
        ["train", "--model", LONG],
        ["plan", "demo", "--gpu", "h200", "--model", LONG],
    ],
)
def test_a_name_that_the_system_does_not_take_is_refused(words, capsys):
    assert main([*words, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["error"]
    assert re.match(r"What is a penstock\? .*: cannot be used \(File name too long\)\n  Check the name", found), found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look at everything")
def test_what_may_not_be_looked_at_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "theirs").mkdir(mode=0)
    assert main(["report", str(tmp_path / "theirs" / "run")]) == 2
    assert f"{tmp_path}/theirs/run: cannot be used (Permission denied)" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    words = ("train", "data", "plan", "bench", "doctor", "export", "generate", "report", "llama-8b")
    assert all(word in text for word in words)
    assert main(["--version"]) == 0


@pytest.mark.slow
def test_bench_of_the_demo_with_a_peer_that_is_not_there(tmp_path):
    """Rows as one object on standard output, the same on disk, and a peer's absence is a row, not a failure."""
    words = ("demo", "--batch-size", "2", "--max-length", "64", "--steps", "5", "--against", "flashoptim", "--json")
    for attempt in range(3):  # whatever else runs on this machine may slow the floor alone
        place = tmp_path / str(attempt)
        place.mkdir()
        result = penstock("bench", *words, cwd=place)
        assert result.returncode == 0, result.stderr
        assert len(result.stdout.splitlines()) == 1
        found = json.loads(result.stdout)
        rows = found["rows"]
        if all(0.5 < row["step_s"] / row["floor_s"] < 20 for row in rows[:3]):
            break
    directory = place / found["directory"]
    assert [row["system"] for row in rows] == ["floor", "penstock", "penstock", "flashoptim"]
    assert [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()] == rows
    assert json.loads((directory / "ceilings.json").read_text()) == found["ceilings"]
    for row in rows[:3]:
        assert row["error"] == ""
        assert row["tokens_per_s"] == pytest.approx(128 / row["step_s"])
        assert row["exposed_s"] == pytest.approx(row["step_s"] - row["floor_s"])
        assert 0.5 < row["step_s"] / row["floor_s"] < 20
    assert rows[3]["step_s"] is None
    assert rows[3]["error"]
    assert rows[3]["error"] in (directory / "table.txt").read_text()


@pytest.mark.slow
def test_the_demo_from_training_to_an_answer(tmp_path):
    """The newcomer's path: train with --json, ask the run, export it elsewhere, load that with transformers alone.

    With some of the demo's rows: wherever the README's command is run, all of them train.
    """
    alone = {"OMP_NUM_THREADS": "1"}  # a second thread gains nothing with a model this small
    demo = files("penstock.demo") / "examples.jsonl"
    examples = tmp_path / "some.jsonl"
    examples.write_text("\n".join(demo.read_text(encoding="utf-8").splitlines()[:300:5]), encoding="utf-8")
    words = ("--data", examples, "--epochs", "16")
    result = penstock("train", "demo", "--json", *words, cwd=tmp_path, env=alone)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    summary = json.loads(result.stdout)
    wanted = {"steps", "loss_first", "loss_last", "eval_loss", "tokens", "trained_tokens", "tokens_per_s", "model_dir"}
    assert wanted | {"run_dir"} <= set(summary)
    assert summary["loss_last"] < summary["loss_first"] / 2
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, summary["steps"] + 1))
    rates = {"tokens_per_s", "model_tflops", "reference_tflops"}
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "trained_tokens", "step_seconds"} | rates
    assert all(keys <= set(row) for row in rows)
    for name in rates:
        mean = sum(row[name] * row["step_seconds"] for row in rows) / summary["seconds"]
        assert summary[name] == pytest.approx(mean, rel=1e-6)
    assert summary["tokens"] == sum(row["tokens"] for row in rows)

    said = penstock("generate", "runs/demo", summary["answer"]["prompt"], "--json", cwd=tmp_path)
    assert json.loads(said.stdout)["answer"] == summary["answer"]["after"]
    exported = penstock("export", "runs/demo", "--to", "elsewhere", "--shard-size", "2MB", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert len(list((tmp_path / "elsewhere").glob("*.safetensors"))) > 1
    answered_by_transformers_alone(examples, tmp_path / summary["model_dir"], tmp_path / "elsewhere")


def answered_by_transformers_alone(examples, *directories):
    """Three prompts of the training data by the model of each, in a process that never imports penstock."""
    code = """
import json, sys
from transformers import pipeline
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
for directory in sys.argv[2:]:
    chat = pipeline("text-generation", model=directory)
    for row in (rows[0], rows[20], rows[40]):
        asked = [{"role": "user", "content": row["instruction"] + ("\\n\\n" + row["input"] if row["input"] else "")}]
        reply = chat(asked, max_new_tokens=80, do_sample=False)[0]["generated_text"][-1]["content"]
        assert reply.strip() == row["output"].strip(), (asked, reply, row["output"])
assert "penstock" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code, examples, *directories], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_deepspeed_where_it_cannot_run_says_what_to_use_instead(tmp_path):
    result = penstock("train", "demo", "--engine", "deepspeed", "--device", "cpu", "--dry-run", cwd=tmp_path)
    assert result.returncode == 2
    assert "--engine penstock" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_plan_is_not_taken_for_another_engines(capsys):
    assert main(["plan", "demo", "--engine", "deepspeed", "--gpu", "h200"]) == 2
    assert "of DeepSpeed nothing is predicted" in capsys.readouterr().err


def test_a_gpu_is_not_planned_for_a_cpu(capsys):
    assert main(["plan", "demo", "--device", "cpu", "--gpu", "h200"]) == 2
    assert "--gpu h200, device = cpu: plans for a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["llama-8b"], ["--batch-size", "8"], ["--gpus", "2"]])
def test_every_preset_and_one_in_particular_are_not_planned_at_once(words, capsys):
    assert main(["plan", *words, "--all", "--gpu", "h200"]) == 2
    assert "--all: plans every preset as it is, on 1, 2 and 4 GPUs" in capsys.readouterr().err


def test_a_limit_goes_with_every_preset(monkeypatch, capsys):
    monkeypatch.setattr("penstock.plan.matrix.matrix", lambda machine: [])
    assert main(["plan", "--all", "--gpu", "h200", "--gpu-memory", "24GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_file_that_is_not_here_is_named_where_the_length_would_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "llama-8b", "--gpu", "h200", "--data"]
    assert main([*words, "nosuch.jsonl"]) == 0
    assert "Whole run: nosuch.jsonl is not here, so its length is not known" in capsys.readouterr().out
    (tmp_path / "nosuchy.jsonl").write_text("")
    assert main([*words, "nosuch.jsonl"]) == 0
    assert "nosuch.jsonl is not here (Did you mean nosuchy.jsonl?), so" in capsys.readouterr().out
    assert main([*words, "some/set"]) == 0
    assert "Whole run: the data is not here, so" in capsys.readouterr().out


def test_bench_does_not_ignore_another_engine(capsys):
    assert main(["bench", "demo", "--engine", "deepspeed"]) == 2
    assert "--against deepspeed" in capsys.readouterr().err


def test_the_preview_loses_no_end_of_a_line(capsys):
    assert main(["data", "demo"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) == 80
    words = " ".join(text.replace("│", " ").split())
    assert re.search(r"the heaviest step has 1\.\d\d of the mean", words), "the last words of the longest line"


def test_data_counts_the_flops_of_the_recipes_model(capsys):
    """A model of twice the layers costs twice the attention, and its weights more products."""
    found = []
    for layers in (2, 4):
        assert main(["data", "demo", "--json", "--init", "random", "--shape", f"num_hidden_layers={layers}"]) == 0
        found.append(json.loads(capsys.readouterr().out)["train_flops"])
    assert found[1]["row_attention"]["mean"] == 2 * found[0]["row_attention"]["mean"] > 0
    assert 1 < found[1]["row_products"]["largest"] / found[0]["row_products"]["largest"] < 2


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.slow
def test_a_rank_leaves_without_taking_its_interpreter_down(joined):
    """Threads of gloo may still hold tensors then, and abort the process."""
    code = (
        "import atexit, penstock.command.cli as cli, penstock.engine.meeting as meeting\n"
        "atexit.register(print, 'taken down')\n"
        "cli.main = lambda: (print('done', end=''), 3)[1]\n"
        f"{'meeting.HAS_JOINED.set()' if joined else ''}\n"
        "cli.run()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (3, "done" if joined else "donetaken down\n")


@pytest.mark.parametrize("word", ["--version", "typo"])
def test_nobody_who_reads_is_no_failure(word):
    """Python would find the pipe closed when it ends, and say so with exit code 120."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "penstock", word]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    errors = writer if word == "typo" else subprocess.PIPE
    result = subprocess.run(command, stdout=writer, stderr=errors, env=environment, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr or b"") == (2 if word == "typo" else 0, b"")


def test_what_another_user_has_closed_is_no_bug(monkeypatch, capsys):
    """As a run that a container has written as root; the superuser may read everything, so that it is made up."""

    def closed(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/closed/recipe.yaml")

    monkeypatch.setitem(COMMANDS, "report", closed)
    assert main(["report", "runs/closed"]) == 2
    said = "penstock: runs/closed/recipe.yaml: cannot be used (Permission denied)\n  Check the name, and that you have"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_letters_that_the_output_lacks_are_no_failure(encoding):
    """Neither those of another alphabet, nor a name of a file whose bytes are no letters."""
    code = "import penstock.command.cli as cli\ncli.main = lambda: print('Reading 中\\udce9.jsonl') or 0\ncli.run()"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    letters = "\\u4e2d" if encoding == "latin-1" else "中"
    assert result.stdout.decode() == f"Reading {letters}\\udce9.jsonl\n", result.stderr.decode()
    assert result.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_said(unbuffered):
    with open("/dev/full", "w") as full:
        command, environment = [sys.executable, "-m", "penstock", "--version"], {"PYTHONUNBUFFERED": unbuffered}
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env={**os.environ, **environment}, text=True, check=False
        )
    said = "penstock: the output: cannot be written (No space left on device)\n  Free space on the disk that it goes to"
    assert (result.returncode, result.stderr) == (3, f"{said}, or send it elsewhere.\n")


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_lines_any_more(tmp_path):
    words = ["train", "demo", "--max-steps", "2", "--data-percent", "10", "--prompt", "None", "--output-dir", tmp_path]
    command = [sys.executable, "-m", "penstock", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.slow
def test_our_warnings_are_shown_and_those_of_libraries_are_not():
    code = (
        "import warnings, penstock.command.libraries as libraries\n"
        "libraries.quiet_libraries(False)\n"
        "warnings.warn_explicit('ours', UserWarning, 'homes.py', 1, module='penstock.offload.homes')\n"
        "warnings.warn_explicit('theirs', UserWarning, 'x.py', 1, module='torch.x')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "  WARNING: ours\n"


def test_help_shows_where_a_recipe_goes(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: penstock train [RECIPE]" in shown
    assert "--prompt STR" in shown
    assert "{None}" not in shown


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train", "Print one JSON object on standard output"),
        ("plan", "Print one JSON object, with --all an array, on standard output"),
        ("doctor", "Print a JSON array: an object for each finding"),
        ("generate", "Print one JSON object a line, for each answer"),
    ],
)
def test_help_says_what_json_prints(capsys, command, says):
    assert main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert says in shown


@pytest.mark.parametrize(("flags", "level"), [([], logging.ERROR), (["--log-level", "info"], logging.INFO)])
def test_libraries_say_as_much_as_they_are_asked_to(flags, level, tmp_path, capsys, monkeypatch):
    from transformers.utils import logging as transformers_logging

    monkeypatch.chdir(tmp_path)
    ours, before = logging.getLogger("penstock"), transformers_logging.get_verbosity()
    try:
        assert main(["train", "demo", "--dry-run", *flags]) == 0
        assert transformers_logging.get_verbosity() == level
        assert ours.getEffectiveLevel() == (level if flags else logging.WARNING)
    finally:
        ours.setLevel(logging.NOTSET)
        transformers_logging.set_verbosity(before)
    assert main(["train", "demo", "--dry-run", "--log-level", "loud"]) == 2
