"""The command: parse, call one function, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional

from penstock import __version__
from penstock.errors import RecipeError, UserError, did_you_mean
from penstock.presets import PRESETS
from penstock.recipe import Recipe, to_dict, with_values

Flag = Annotated[bool, FlagCreatePairsOff]


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
    """Fine-tune every parameter of a model. RECIPE is a preset or a YAML file; without one, `demo`."""

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


@dataclasses.dataclass(frozen=True)
class DataArgs(RecipeArgs):
    """Show what the model will see: tokens and mask, packing, lengths, what was cut or dropped."""

    examples: int = 3
    """Examples shown token by token."""


@dataclasses.dataclass(frozen=True)
class BenchArgs(RecipeArgs):
    """Measure a step with random weights: against forward and backward alone, the machine's ceilings, and peers."""

    against: str = ""
    """Peers to run beside ours, each in its own process: deepspeed,torchao,flashoptim."""
    modes: str = ""
    """Modes of ours: superoffload,zerooffload. Empty: the recipe's."""
    updates: str = "after-norm,in-backward"
    """Update schedules of ours; in-backward runs without clipping."""
    formats: str = ""
    """State formats of ours: fp32,bf16,int8. Empty: the recipe's."""
    steps: int = 6
    """Steps that are timed, after two to warm up; the median counts."""
    to: str = ""
    """Directory for the results. Empty: benchmarks/results/DATE-MACHINE, or bench-results/ elsewhere."""
    timeout: float = 600.0
    """Seconds that one peer may take from start to end."""
    peer_modes: str = "superoffload,zerooffload"
    """Modes of DeepSpeed."""
    peer_ratio: str = "0.3"
    """Shares of its state that DeepSpeed offloads, such as 0.3,0.8."""


@dataclasses.dataclass(frozen=True)
class ExportArgs:
    """Write the model of a run as a Hugging Face directory, and check that it loads and answers the same."""

    run: Positional[str]
    """Directory of the run. If the run did not end, the model is that of its newest checkpoint."""
    to: str = ""
    """Directory to write."""
    verify: Flag = False
    """Compare every byte of every checkpoint of the run with its checksum."""
    shard_size: str = "5GB"
    """Largest size of one weight file."""
    json: Flag = False
    """Print one JSON object."""
    debug: Flag = False
    """Show tracebacks."""


@dataclasses.dataclass(frozen=True)
class GenerateArgs:
    """Ask the model of a run."""

    run: Positional[str]
    """Directory of the run."""
    prompt: Positional[str]
    """What to ask."""
    max_new_tokens: int = 256
    """Longest answer."""
    temperature: float = 0.0
    """0: always the likeliest token."""
    seed: int = 0
    """Seed of the draw when the temperature is not 0."""
    device: str = "auto"
    """cuda, cpu or auto."""
    json: Flag = False
    """Print one JSON object."""
    debug: Flag = False
    """Show tracebacks."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(words)
    except UserError as error:
        if "--debug" in words:
            traceback.print_exc()
        print(f"penstock: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as error:  # tyro has printed help or a usage error already
        return error.code if isinstance(error.code, int) else 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        remedy = "" if "--debug" in words else "\n  Run it again with --debug for the traceback, and please report it."
        print(f"penstock: this is a bug: {type(error).__name__}: {error}{remedy}", file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"penstock {__version__}")
        return 0
    if command not in COMMANDS:
        raise RecipeError(f"unknown command {command!r}", remedy=did_you_mean(command, COMMANDS))
    return COMMANDS[command](rest)


def _usage() -> str:
    lines = [f"penstock {__version__}: full-parameter fine-tuning of models that do not fit their GPU", ""]
    lines += [f"  penstock {name:<9} {(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items()]
    lines += ["", f"Presets: {', '.join(PRESETS)}", "`penstock COMMAND --help` lists the flags."]
    return "\n".join(lines)


def train(words: list[str]) -> int:
    """Fine-tune a model: penstock train [RECIPE] [--flags]."""
    args = _parse_with_recipe(TrainArgs, "train", _with_value(words, "--resume", "newest"))
    _quiet_libraries(args.debug)
    from penstock.engine.ranks import find_world
    from penstock.report.console import Console
    from penstock.report.metrics import to_json
    from penstock.train import dry_run
    from penstock.train import train as run

    first = find_world().first  # every rank would say the same
    console = Console(json=args.json, quiet=args.quiet or not first)
    start = {"overwrite": args.overwrite, "resume_anyway": args.resume_anyway}
    if args.dry_run:
        outlook = dry_run(args.recipe, console, resume=args.resume, **start)
        if args.json and first:
            print(json.dumps({"recipe": to_dict(args.recipe), **dataclasses.asdict(outlook)}))
        return 0
    summary = run(args.recipe, console, resume=args.resume, **start)
    if args.json and first:
        print(to_json(summary))
    elif first:
        console.summary(summary)
    return 0


def data(words: list[str]) -> int:
    """Show what the model will see: penstock data [RECIPE] [--flags]."""
    args = _parse_with_recipe(DataArgs, "data", words)
    _quiet_libraries(args.debug)
    from penstock.data.preview import show, summary
    from penstock.report.console import Console
    from penstock.train import prepare_run

    console = Console(json=args.json)
    prepared = prepare_run(args.recipe, console)
    if args.json:
        print(json.dumps(summary(prepared.data)))
    else:
        for part in show(prepared.data, prepared.tokenizer, examples=args.examples):
            console.rich.print(part)
    return 0


def bench(words: list[str]) -> int:
    """Measure a step against its floor and against peers: penstock bench [RECIPE] [--against PEERS]."""
    # Weights are random here, so that a recipe's shape may be changed without saying so.
    args = _parse_with_recipe(BenchArgs, "bench", words, init="random")
    if args.recipe.engine != "penstock":
        raise RecipeError("--engine: bench measures ours", remedy="DeepSpeed is a peer: --against deepspeed.")
    if args.steps < 1 or args.timeout <= 0:
        raise RecipeError("--steps and --timeout must be positive")
    modes, updates = ("superoffload", "zerooffload"), ("after-norm", "in-backward")
    chosen = {
        "against": _choices("--against", args.against, ("deepspeed", "torchao", "flashoptim")),
        "modes": _choices("--modes", args.modes, modes),
        "updates": _choices("--updates", args.updates, updates) or updates,
        "formats": _choices("--formats", args.formats, ("fp32", "bf16", "int8")),
        "peer_modes": _choices("--peer-modes", args.peer_modes, modes),
    }
    ratios = _ratios(args.peer_ratio)
    _quiet_libraries(args.debug)
    from penstock.bench.run import Asked
    from penstock.bench.run import bench as run
    from penstock.report.console import Console

    console = Console(json=args.json)
    asked = Asked(steps=args.steps, timeout_s=args.timeout, peer_ratios=ratios, **chosen)
    report = run(args.recipe, asked, to=args.to, say=console.say)
    if args.json:
        rows = [dataclasses.asdict(row) for row in report.rows]
        found = {"directory": str(report.directory), "ceilings": dataclasses.asdict(report.ceilings), "rows": rows}
        print(json.dumps(found))
    return 0


def _choices(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a list with commas, each of them known."""
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in known:
            raise RecipeError(f"{flag}: unknown {word!r}", remedy=did_you_mean(word, known))
    return words


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(float(word) for word in text.split(","))
    except ValueError:
        ratios = ()
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise RecipeError(f"--peer-ratio: {text!r} must be numbers between 0 and 1", remedy="Such as 0.3,0.8.")
    return ratios


def export(words: list[str]) -> int:
    """Write a run's model as a Hugging Face directory, or check its checkpoints: penstock export RUN --to DIR."""
    args = tyro.cli(ExportArgs, args=words, prog="penstock export")
    _quiet_libraries(args.debug)
    if not (args.to or args.verify):
        raise RecipeError("nothing to do", remedy="Name a directory with --to, or check checkpoints with --verify.")
    from penstock.checkpoint.export import export_run, verify_run
    from penstock.report.console import Console

    console = Console(json=args.json)
    result: dict[str, object] = {}
    if args.verify:
        verified = verify_run(Path(args.run), console.say)
        result["verified"] = [{"path": str(found.path), "step": found.step} for found in verified]
        console.say(f"Every byte is as it was written: {len(verified)} checkpoints")
    if args.to:
        export_run(Path(args.run), Path(args.to), shard_size=args.shard_size, say=console.say)
        result["model_dir"] = args.to
        console.say(f"Written and checked: {args.to}")
    if args.json:
        print(json.dumps(result))
    return 0


def generate(words: list[str]) -> int:
    """Ask a run's model: penstock generate RUN "prompt"."""
    args = tyro.cli(GenerateArgs, args=words, prog="penstock generate")
    _quiet_libraries(args.debug)
    from penstock.generate import generate as run

    answer = run(
        Path(args.run),
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        device=args.device,
    )
    print(json.dumps({"prompt": args.prompt, "answer": answer}) if args.json else answer)
    return 0


def _quiet_libraries(debug: bool) -> None:
    """Their bars and warnings would break our lines; with --debug they are wanted."""
    if debug:
        return
    import warnings

    import torch
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    if not torch.cuda.is_available():  # or DeepSpeed, which transformers imports if it can, says so on standard output
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "data": data,
    "bench": bench,
    "export": export,
    "generate": generate,
}


def _with_value(words: list[str], flag: str, value: str) -> list[str]:
    """`flag` with the value that it has when none follows: tyro knows no flag that may stand alone."""
    filled: list[str] = []
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        filled += [word, value] if word == flag and following.startswith("-") else [word]
    return filled


Args = TypeVar("Args", bound=RecipeArgs)


def _parse_with_recipe(kind: type[Args], command: str, words: list[str], **changes: Any) -> Args:
    """Flags over YAML over preset: the recipe that is named, with `changes`, becomes the default of every flag."""
    named = bool(words) and not words[0].startswith("-")
    base = dataclasses.replace(find_recipe(words[0] if named else "demo"), **changes)
    return tyro.cli(kind, default=kind(recipe=base), args=words[1:] if named else words, prog=f"penstock {command}")


def find_recipe(name: str) -> Recipe:
    """A preset by name, or a recipe from a YAML file, whose `preset` key names what it starts from."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        remedy = did_you_mean(name, PRESETS) + " Or name a .yaml file."
        raise RecipeError(f"there is no preset {name!r}", remedy=remedy)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise RecipeError(f"cannot be read ({error.strerror})", where=name, remedy="Is the path right?") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"is not YAML: {' '.join(str(error).split())}", where=name) from None
    if not isinstance(values, dict):
        raise RecipeError("must hold `field: value` lines", where=name, remedy="For example: lr: 2e-5")
    preset = values.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise RecipeError(f"there is no preset {preset!r}", where=name, remedy=did_you_mean(str(preset), PRESETS))
    base = PRESETS[preset] if preset else Recipe()
    return with_values(dataclasses.replace(base, name=path.stem), values, where=name)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand once: PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
