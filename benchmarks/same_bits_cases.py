"""The commands that `same_bits.py` runs on both sides, each in a directory of its own."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LARGE = ("llama-8b", "qwen3-14b", "phi-4", "gpt-oss-20b", "seed-oss-36b", "qwen3-30b-a3b", "llama-70b")
PRESETS = ("demo", "smollm2-135m", *LARGE)
"""A new one shows as a difference of `help/penstock`."""
MIXED = "gpu=0.4,stream=0.3,host=0.3"
HOMES = ("gpu", "stream", "host", MIXED)
TINY = "--init random --shape num_hidden_layers=3,hidden_size=64,intermediate_size=128"
TRAIN = "train demo --output-dir run --max-length 64 --max-steps 6 --save-every 3 --log-every 1 --deterministic"
QUIET = f"{TRAIN} --validation 0.03 --eval-every 3 --json --prompt"
SMALL = f"{QUIET}= {TINY}"
"""The grid: five units, so that the mixed homes are all in use; a sixth of the time of the demo's own model."""
NARROW = f"{TRAIN} --json --prompt= --init random --dtype bf16 --batch-size 2 --micro-batch-size 1 --shape"
NARROW += (
    " num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=2,num_key_value_heads=1,head_dim=16"
)
"""For bf16 weights, whose products some CPUs compute fifty times slower."""
ROW = '{"instruction": "Say yes.", "output": "Yes."}\n'


@dataclass(frozen=True)
class Case:
    """One command in a directory of its own."""

    name: str
    words: tuple[str, ...]
    expected: int | None = 0  # exit code of OLD: two installations that refuse our own typing would be the same, too
    ranks: int = 1  # started as torchrun would
    cold: bool = False
    start: str = ""  # the case whose directory this one begins with a copy of
    takes_up: bool = False  # that of OLD, for both sides; the tensors must end as those of the run it is a copy of
    prepare: Callable[[Path], object] | None = None


def case(name: str, text: str, *more: str, **settings) -> Case:
    return Case(name, (*text.split(), *more), **settings)


def trainings() -> Iterator[Case]:
    grid = itertools.product(HOMES, ("fp32", "bf16", "int8"), ("after-norm", "in-backward"), (1, 2))
    for number, (homes, states, update, micro) in enumerate(grid):
        if number % 4 not in ((0, 3) if number // 4 % 2 else (1, 2)):  # half: any two settings still meet
            continue
        clip = " --max-grad-norm 0" if update == "in-backward" else ""
        flags = f"--homes {homes} --states {states} --update {update} --micro-batch-size {micro}{clip}"
        yield case(f"train/{homes} {states} {update} micro-batch {micro}", f"{SMALL} {flags}")
    for states in ("fp32", "int8"):
        yield case(f"train/zerooffload {states}", f"{SMALL} --mode zerooffload --states {states}")
    for homes, states in itertools.product(HOMES, ("fp32", "int8")):
        yield case(f"train/bf16 weights {homes} {states}", f"{NARROW} --homes {homes} --states {states}")
    yield case("train/tiny", SMALL)
    yield case("train/demo", f"{QUIET}= --homes {MIXED}")
    yield case("train/answers, no --json", f"{TRAIN} --prompt", "What is the capital of Italy?", cold=True)
    yield case("train/recompute, padded, eager", f"{SMALL} --recompute full:2 --no-packing --attention eager")
    yield case("train/linear, whole prompts", f"{SMALL} --schedule linear --warmup 0.5 --train-on-prompt --seed 7")
    for states, update in itertools.product(("fp32", "bf16"), ("after-norm", "in-backward")):
        clip = " --max-grad-norm 0" if update == "in-backward" else ""
        flags = f"--homes {MIXED} --states {states} --update {update}{clip} --micro-batch-size 1"
        yield case(f"ranks/2 {states} {update}", f"{SMALL} {flags}", ranks=2)
    yield case("ranks/--gpus 2, cold", f"{SMALL} --gpus 2", cold=True)


def resumes() -> Iterator[Case]:
    """Checkpoints of OLD at step 3, taken up by both."""
    cut_off = {"takes_up": True, "prepare": drop("run/checkpoints/step-00000006")}
    step_3 = "--resume run/checkpoints/step-00000003"
    flags = f"--homes {MIXED} --states fp32 --update after-norm --micro-batch-size 1"
    start = f"train/{MIXED} fp32 after-norm micro-batch 1"
    yield case("resume/fp32", f"{SMALL} {flags} {step_3}", start=start, **cut_off)
    yield case("resume/fp32, other homes", f"{SMALL} {flags} --homes host {step_3}", start=start, **cut_off)
    flags = f"--homes {MIXED} --states fp32 --update after-norm --micro-batch-size 1 {step_3}"
    yield case("resume/two ranks", f"{SMALL} {flags}", start="ranks/2 fp32 after-norm", ranks=2, **cut_off)
    flags = f"--homes {MIXED} --states int8 --update in-backward --micro-batch-size 2 --max-grad-norm 0"
    start = f"train/{MIXED} int8 in-backward micro-batch 2"
    yield case("resume/int8", f"{SMALL} {flags} {step_3}", start=start, **cut_off)
    flags = f"--homes {MIXED} --states int8 {step_3}"
    yield case("resume/bf16 weights", f"{NARROW} {flags}", start=f"train/bf16 weights {MIXED} int8", **cut_off)


def questions() -> Iterator[Case]:
    """Commands that only tell something, or read a run."""
    commands = ("train", "data", "plan", "bench", "doctor", "export", "generate", "report")
    yield case("help/penstock", "", cold=True)
    yield case("help/version", "--version")
    yield from (case(f"help/{command}", f"{command} --help") for command in commands)
    for preset, gpu in itertools.product(PRESETS, ("h100", "h200", "gh200", "rtx4090")):
        yield case(f"plan/{preset} {gpu}", f"plan {preset} --gpu {gpu} --json", expected=None)
    yield case("plan/qwen3-14b h200 --best", "plan qwen3-14b --gpu h200 --best --json", expected=None)
    yield case("plan/llama-70b gh200 4 GPUs", "plan llama-70b --gpu gh200 --gpus 4 --json", expected=None)
    yield case("data/json", "data demo --json", cold=True)
    yield case("data/preview", "data demo --examples 2")
    table = write("data.csv", "prompt,completion\na,b\nc,d\n")
    yield case("data/csv", "data demo --data data.csv --json", prepare=table)
    yield case("doctor", "doctor --json", cold=True)
    yield case("dry run/json", "train demo --dry-run --json")
    yield case("dry run/lines", "train smollm2-135m --model demo --data demo --dry-run")
    run = {"start": "train/answers, no --json"}
    yield case("generate/json", "generate run --json", "What is the capital of France?", **run)
    yield case("export/model", "export run --to exported", **run)
    yield case("export/verify", "export run --verify", **run)
    yield case("report", "report run --json", expected=None, **run)  # an extra: exit code 2 where it is not installed


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text, encoding="utf-8")


def flip(name: str) -> Callable[[Path], object]:
    """Damage a file: one bit in the middle of its last bytes."""

    def change(directory: Path) -> None:
        path = directory / "run/checkpoints" / name
        content = bytearray(path.read_bytes())
        content[-64] ^= 1
        path.write_bytes(content)

    return change


def drop(name: str) -> Callable[[Path], object]:
    return lambda directory: shutil.rmtree(directory / name)


def broken_rows() -> Iterator[Case]:
    texts = {
        "malformed line": ROW * 2 + '{"instruction": "x", \n' + ROW,
        "empty row": ROW + "{}\n" + ROW,
        "empty texts": ROW + '{"instruction": "", "output": ""}\n' + ROW,
        "no response anywhere": '{"instruction": "x", "output": ""}\n',
        "row is a list": ROW + "[1, 2]\n",
        "number for a text": ROW + '{"instruction": "x", "output": 3}\n',
        "unknown role": '{"messages": [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
        "unknown columns": '{"question": "x", "reply": "y"}\n',
        "empty file": "",
    }
    for name, text in texts.items():
        expected = 0 if name == "empty texts" else 2
        words = "train demo --data data.jsonl --output-dir run --max-steps 1 --json --prompt="
        yield case(f"broken/data: {name}", words, expected=expected, prepare=write("data.jsonl", text))


def broken_settings() -> Iterator[Case]:
    flags = {
        "misspelt flag": "--lrr 3",
        "lr negative": "--lr -1",
        "lr no number": "--lr fast",
        "unknown format": "--states fp8",
        "unknown home": "--homes disk",
        "half of the homes": "--homes gpu=0.5",
        "too many layers": "--recompute full:99",
        "in-backward with clipping": "--update in-backward --max-grad-norm 1",
        "missing data": "--data nowhere.jsonl",
        "missing model": "--model ./nowhere",
        "share over one": "--offload-ratio 2",
        "fewer rows than ranks": "--gpus 2 --batch-size 1",
        "long examples refused": "--max-length 16 --too-long refuse",
        "shape without random": "--shape num_hidden_layers=2",
        "unknown tracker": "--track paper",
        "nothing to resume": "--resume nowhere",
    }
    for name, text in flags.items():
        cold = name == "misspelt flag"
        expected = 5 if name == "nothing to resume" else 2
        yield case(f"broken/{name}", f"train demo --output-dir run --prompt= {text}", expected=expected, cold=cold)
    yield case("broken/json of an error", "train demo --lr -1 --json", expected=2)
    yield case("broken/json of a usage error", "train demo --lrr 3 --json", expected=2)
    yield case("broken/unknown preset", "train lama-8b", expected=2)
    yield case("broken/unknown command", "trian demo", expected=2)
    yield case("broken/unknown GPU", "plan llama-8b --gpu h1000", expected=2)
    yield case("broken/does not fit", "plan llama-70b --gpu rtx4090", expected=3)
    for name, text in {"unknown key": "preset: demo\nlearning: 1\n", "no YAML": "lr: [1\n"}.items():
        yield case(f"broken/{name}", "train my.yaml", expected=2, prepare=write("my.yaml", text))
    flags = "--lr 1e30 --max-grad-norm 0 --skip-limit 2 --schedule constant"
    yield case("broken/blocks across ranks", f"{SMALL} --states int8", expected=2, ranks=2)
    yield case("broken/diverges", f"{SMALL} {flags}", expected=4)


def broken_runs() -> Iterator[Case]:
    run = {"start": "train/tiny"}
    again = SMALL
    newest = "step-00000006"
    yield case("broken/run directory taken", again, expected=2, **run)
    yield case("broken/run has ended", f"{again} --resume", expected=0, **run)
    yield case("broken/resume with another recipe", f"{again} --lr 0.5 --resume", expected=5, **run)
    yield case("broken/resume with other data", f"{again} --data-percent 50 --resume", expected=5, **run)
    for name in ("weights-00001.safetensors", "state-00001.safetensors", "manifest.json", "run.json"):
        settings = {"expected": 5, "prepare": flip(f"{newest}/{name}"), **run}
        yield case(f"broken/resume with damaged {name}", f"{again} --max-steps 7 --resume-anyway --resume", **settings)
    verify = "export run --verify"
    yield case("broken/verify damaged", verify, expected=5, prepare=flip(f"{newest}/weights-00001.safetensors"), **run)
    yield case("broken/generate of a missing run", "generate nowhere Hello", expected=5)
    unfinished = {"expected": 5, "prepare": drop("run/model"), **run}
    yield case("broken/generate of a run without model", "generate run Hello", **unfinished)
    yield case("broken/export of a missing run", "export nowhere --to exported", expected=5)
    yield case("broken/export onto a file", "export run --to taken", expected=2, prepare=write("taken", ""), **run)
    yield case("broken/report of a missing run", "report nowhere", expected=5)


def all_cases() -> list[Case]:
    makers = (questions, broken_rows, broken_settings, broken_runs, trainings, resumes)
    return [made for maker in makers for made in maker()]
