"""The flags of every command, and how the words of a command line become them.

A dataclass a command: a field is a flag, and the text below it is its line in `--help`. tyro reads them; a parser by
hand would say every name, type and default twice. Nothing heavy is imported, so that `--help` is there at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from penstock.errors import RecipeError, did_you_mean
from penstock.recipe.familiar import FAMILIAR, translated
from penstock.recipe.file import Found, all_of_own_data, borrowed, find_recipe, for_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import FIELDS, Recipe

Flag = Annotated[bool, FlagCreatePairsOff]
RunName = Annotated[Positional[str], arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class RecipeArgs:
    """What every command that takes a recipe has."""

    recipe: OmitArgPrefixes[Recipe]
    json: Flag = False
    """Print one JSON object on standard output; everything else goes to standard error."""
    debug: Flag = False
    """Show tracebacks."""


@dataclasses.dataclass(frozen=True)
class TrainArgs(RecipeArgs):
    """Fine-tune every parameter of a model.

    RECIPE is a preset or a YAML file; without one and without --model, `demo`.
    """

    dry_run: Flag = False
    """Check everything and say what would happen, without loading weights or writing."""
    overwrite: Flag = False
    """Replace an earlier run in the output directory."""
    resume: str = ""
    """Go on after the newest checkpoint of the run, or after the one at a path: --resume [PATH]."""
    resume_anyway: Flag = False
    """Go on also if recipe or data are not those of the checkpoint."""
    quiet: Flag = False
    """Print nothing but the result and errors."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """How much transformers, the Hub's library and DeepSpeed say, on standard error. Without it: errors, and warnings
    of DeepSpeed."""
    gpus: int = 1
    """GPUs of this machine, one process each; on a machine without any, processes on its CPU."""
    nodes: int = 1
    """Machines. The command is given on each of them, with its --node-rank."""
    node_rank: int = 0
    """Which of the machines this is, from 0."""
    rendezvous: str = ""
    """HOST:PORT on the first machine, where all find each other."""


@dataclasses.dataclass(frozen=True)
class DataArgs(RecipeArgs):
    """Show what the model will see: tokens and mask, packing, lengths, what was cut or dropped.

    RECIPE is a preset or a YAML file; without one and without --model, `demo`.
    """

    examples: int = 3
    """Examples shown token by token."""


@dataclasses.dataclass(frozen=True)
class BenchArgs(RecipeArgs):
    """Measure a step with random weights: against forward and backward alone, the machine's ceilings, and peers.

    RECIPE is a preset or a YAML file; without one and without --model, `demo`.
    """

    against: str = ""
    """Peers to run beside ours, each in its own process: deepspeed,torchao,flashoptim."""
    modes: str = ""
    """Modes of ours: superoffload,zerooffload. Empty: the recipe's."""
    updates: str = "after-norm,in-backward"
    """When ours updates weights; in-backward runs without clipping."""
    formats: str = ""
    """State formats of ours: fp32,bf16,int8. Empty: the recipe's."""
    steps: int = 6
    """Steps that are timed, after two to warm up; the median counts."""
    to: str = ""
    """Directory for the results. Empty: benchmarks/results/DATE-MACHINE, or bench-results/ elsewhere."""
    timeout: float = 600.0
    """Seconds that one peer may take from start to end."""
    peer_modes: str = "superoffload,zerooffload"
    """Modes of DeepSpeed. With --gpu-memory or streamed weights it has one: parameters and state on the CPU."""
    peer_ratio: str = "0.3"
    """Shares of its state that DeepSpeed offloads, such as 0.3,0.8."""
    timeline: bool = False
    """Also write timeline.jsonl: when each lane was busy in three steps of each row of ours."""


@dataclasses.dataclass(frozen=True)
class PlanArgs(RecipeArgs):
    """Say in advance whether a run fits, how fast it will be, and what to change. Needs no GPU and no weights.

    RECIPE is a preset or a YAML file; without one and without --model, `demo`.
    """

    gpu: str = ""
    """A machine by name, such as h200, gh200, rtx4090. Empty: this one."""
    gpus: int = 1
    """GPUs that share the model."""
    host_memory: str = ""
    """Host memory, such as 480GiB: of the machine, whose GPUs share it; on a superchip, of one (gb200: of its two)."""
    link: str = ""
    """One-way peak between GPU and host, such as 450GB/s."""
    cores: int = 0
    """Cores of the host. 0: as known."""
    best: Flag = False
    """Choose state format, micro-batch and recompute: the fastest that fit, exact state before any other."""
    all: Flag = False
    """Every preset on 1, 2 and 4 GPUs, with the best settings."""
    remeasure: Flag = False
    """Measure this machine again, instead of reading what was measured before."""
    json: Flag = False
    """Print one JSON object, with --all an array, on standard output; everything else goes to standard error."""


@dataclasses.dataclass(frozen=True)
class DoctorArgs:
    """Look at machine and software, and say how to fix what is not as it should be."""

    apply: Flag = False
    """Write the memory-system partitions (resctrl) that are shown. Needs root."""
    output_dir: str = "."
    """Where runs would be written: its disk is looked at."""
    json: Flag = False
    """Print a JSON array: an object for each finding."""
    debug: Flag = False
    """Show tracebacks."""


@dataclasses.dataclass(frozen=True)
class ExportArgs:
    """Write a model as a Hugging Face directory, and check that it loads and answers the same."""

    run: RunName
    """A run, a checkpoint of one (runs/x/checkpoints/step-00000012), a Hugging Face directory, or, with --model, a
    checkpoint that DeepSpeed itself has written. Of a run that did not end, the model is that of its newest
    checkpoint."""
    to: str = ""
    """Directory to write."""
    model: str = ""
    """Of a checkpoint of DeepSpeed's: Hub name or directory of the model that was trained. fp32 is written."""
    trust_pickle: Flag = False
    """Read a checkpoint of DeepSpeed's although it is a pickle, which can run any code."""
    verify: Flag = False
    """Compare every byte of a checkpoint, a model, or all that a run has of both, with its checksum."""
    shard_size: str = "5GB"
    """Largest size of one weight file."""
    json: Flag = False
    """Print one JSON object."""
    debug: Flag = False
    """Show tracebacks."""


@dataclasses.dataclass(frozen=True)
class GenerateArgs:
    """Ask a model."""

    run: RunName
    """A run, a checkpoint of one (runs/x/checkpoints/step-00000012), or a Hugging Face directory."""
    prompt: Annotated[Positional[str], arg(metavar="[PROMPT]")] = ""
    """What to ask. Without it, one line after another is asked, from a terminal or a pipe, in one conversation."""
    max_new_tokens: int = 256
    """Longest answer."""
    temperature: float = 0.0
    """0: always the likeliest token."""
    seed: int = 0
    """Seed of the draw when the temperature is not 0."""
    device: str = "auto"
    """cuda, cpu or auto."""
    json: Flag = False
    """Print one JSON object a line, for each answer."""
    debug: Flag = False
    """Show tracebacks."""


@dataclasses.dataclass(frozen=True)
class ReportArgs:
    """Write one HTML page about a run, or about several to compare them. It opens from disk and needs no network."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]")]
    """Directories of runs."""
    to: str = ""
    """File to write. Empty: report.html in the run's directory, or in this one for several runs."""
    images: Flag = False
    """Write the charts as SVG and PNG too, in report-images/ beside the page."""
    json: Flag = False
    """Print one JSON object."""
    debug: Flag = False
    """Show tracebacks."""


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _text_or_none(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[str | None] | None:
    """`--prompt STR` in the help, where tyro would write `{None}|STR`. The word None still means none."""
    if info.type != (str | None):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="STR",
        instance_from_str=lambda words: None if words[0] == "None" else words[0],
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: ["None" if value is None else value],
    )


Args = TypeVar("Args", bound=RecipeArgs)


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[Args]):
    """Arguments, and what should be said of where their recipe comes from."""

    args: Args
    note: str


def parse_with_recipe(kind: type[Args], command: str, words: list[str], **changes: Any) -> Parsed[Args]:
    """Flags over YAML over preset: the recipe that is named, with `changes`, becomes the default of every flag."""
    named = bool(words) and not words[0].startswith("-")
    if not named:
        _refuse_late_recipe(kind, command, words)
    found = find_recipe(words[0]) if named else _unnamed(words)
    refuse_familiar(words, {field.name for field in dataclasses.fields(kind)} | set(FIELDS))
    if issubclass(kind, TrainArgs) and _value(words, "resume") == "":  # an empty variable in a script
        remedy = "Name a checkpoint, or give --resume alone for the newest one; to begin anew, leave it out."
        raise RecipeError("its value is empty", where="--resume", remedy=remedy)
    base = dataclasses.replace(found.recipe, **changes)
    shown = " [RECIPE]" if {"-h", "--help"} & set(words) else ""  # which tyro does not know of
    words = with_value(words, "--split-documents", "blank-lines")
    words, prog = words[1:] if named else words, f"penstock {command}{shown}"
    args = tyro.cli(kind, default=kind(recipe=base), args=words, prog=prog, registry=_REGISTRY)
    _refuse_deepspeeds(words, args.recipe)
    if not found.has_share and _value(words, "data-percent") is None:
        args = dataclasses.replace(args, recipe=all_of_own_data(args.recipe, base))
    return Parsed(args, borrowed(found, args.recipe))


def _refuse_late_recipe(kind: type[RecipeArgs], command: str, words: list[str]) -> None:
    """A recipe after flags is an unknown option to tyro, and its flags would have had another one's defaults."""
    fields = [*dataclasses.fields(kind), *FIELDS.values()]
    switches = {field.name for field in fields if field.type in ("bool", "Flag")}
    for place, (before, word) in enumerate(itertools.pairwise(words), start=1):
        name = before.removeprefix("--").removeprefix("no-").replace("-", "_")
        is_value = before.startswith("--") and "=" not in before and name not in switches
        is_recipe = word in PRESETS or word.endswith((".yaml", ".yml"))
        if is_recipe and not is_value and not {"-h", "--help"} & set(words):
            ordered = shlex.join(["penstock", command, word, *words[:place], *words[place + 1 :]])
            raise RecipeError("a preset or a recipe's file comes before all flags", where=word, remedy=ordered)


def _refuse_deepspeeds(words: list[str], recipe: Recipe) -> None:
    """Refuse flags that only DeepSpeed reads. No rule of a recipe does: presets have its values for either engine."""
    for name in ("offload-ratio", "bucket-size") if recipe.engine == "penstock" else ():
        if _value(words, name) is not None:
            remedy = "Leave it out, or add --engine deepspeed."
            raise RecipeError("only the engine deepspeed knows it", where=f"--{name}", remedy=remedy)


def refuse_familiar(words: list[str], known: set[str]) -> None:
    """Answer a flag as other programs spell it with ours."""
    theirs: dict[str, object] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        flag, joined, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in FAMILIAR and name not in known:
            theirs[name] = value if joined else "" if following.startswith("--") else following
    if theirs:
        remedy = translated(theirs, _flag)
        raise RecipeError("unknown flag", where=f"--{next(iter(theirs)).replace('_', '-')}", remedy=remedy)


def _flag(field: str, value: object) -> str:
    if isinstance(value, bool) or value == "":
        return f"--{'no-' if value is False else ''}{field.replace('_', '-')}"
    written = shlex.join(map(str, value if isinstance(value, list) else [value]))
    return f"--{field.replace('_', '-')} {written}"


def _unnamed(words: list[str]) -> Found:
    """The recipe of a command that names none: the demo, unless it has a model of its own."""
    model, data = _value(words, "model"), _value(words, "data")
    if model and model != "demo":
        return Found(for_model(model))
    if model is None and data not in (None, "demo"):
        remedy = "Name one with --model, or a preset: such as penstock train smollm2-135m --data my.jsonl."
        raise RecipeError("no model is named for it", where=f"--data {data}", remedy=remedy)
    return find_recipe("demo")


def _value(words: list[str], name: str) -> str | None:
    """The last value that a command line gives to a flag, or None."""
    found, spellings = None, (f"--{name}", f"--{name.replace('-', '_')}")
    for word, following in zip(words, [*words, ""][1:], strict=True):
        flag, joined, value = word.partition("=")
        if flag in spellings:
            found = value if joined else following
    return found


def with_value(words: list[str], flag: str, value: str) -> list[str]:
    """`flag` with the value that it has when none follows: tyro knows no flag that may stand alone."""
    filled: list[str] = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        filled += [word, value] if word == flag and following.startswith("-") else [word]
    return filled


def without_local_rank(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """The words without the --local_rank that some launchers put before all others; it is in the environment too."""
    named = ("--local_rank=", "--local-rank=")
    return [word for word in words if not ("LOCAL_RANK" in environment and word.startswith(named))]


def read_choices(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a list with commas, each of them known."""
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in known:
            raise RecipeError(f"unknown {word!r}", where=flag, remedy=did_you_mean(word, known))
    return words


def read_ratios(text: str) -> tuple[float, ...]:
    """The numbers of a list with commas, each of them a share."""
    try:
        ratios = tuple(float(word) for word in text.split(","))
    except ValueError:
        ratios = ()
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise RecipeError("must be numbers between 0 and 1", where=f"--peer-ratio {text!r}", remedy="Such as 0.3,0.8.")
    return ratios
