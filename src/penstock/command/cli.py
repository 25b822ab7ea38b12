"""The command: parse, call one function, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tyro

from penstock import __version__
from penstock.checkpoint.places import check_is_run, check_target, deepspeed_form, find_place, resume_advice
from penstock.command.arguments import (
    BenchArgs,
    DataArgs,
    DoctorArgs,
    ExportArgs,
    GenerateArgs,
    PlanArgs,
    ReportArgs,
    TrainArgs,
    parse_with_recipe,
    read_choices,
    read_ratios,
    with_value,
    without_local_rank,
)
from penstock.command.libraries import importing, output_for_people, prepare_torch, quiet_libraries
from penstock.command.system import no_output, of_system
from penstock.errors import RecipeError, UserError, counted, did_you_mean, tell
from penstock.machine.signals import handling, leave_terminal
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import to_dict

if TYPE_CHECKING:
    from penstock.report.console import Console


def run() -> NoReturn:
    """The command of this process.

    A rank leaves without taking its interpreter down: a thread of gloo that still holds a tensor would then want the
    interpreter's lock, and end the process with SIGABRT (pytorch/pytorch#179291), after all of its work was done.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # or a letter that a terminal of another country lacks ends a run
        sys.stdout.reconfigure(errors="backslashreplace")
    code = main()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:  # Python would try again at its end, and fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):  # of which the reader has gone, and wants no more
                refused = no_output(error)
                code = code or _fail(str(refused), refused.exit_code, sys.argv)
    meeting = sys.modules.get("penstock.engine.meeting")
    if meeting is not None and meeting.HAS_JOINED.is_set():
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = without_local_rank(sys.argv[1:] if argv is None else argv, os.environ)
    prepare_torch()
    try:
        with handling(_end, signal.SIGTERM, signal.SIGHUP):
            return _dispatch(words)
    except UserError as error:
        if "--debug" in words:
            traceback.print_exc()
        return _fail(str(error), error.exit_code, words, error.found)
    except SystemExit as error:  # tyro has printed help or a usage error already
        code = error.code if isinstance(error.code, int) else 2
        if code and "--json" in words:
            print(json.dumps({"error": "the command line is at fault; standard error says how", "exit_code": code}))
        return code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        when = " while no step was under way" if words[:1] == ["train"] else ""
        return _fail(f"stopped by {signal.Signals(number).name}{when}", 128 + number, words)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        if refused := of_system(error):
            return _fail(str(refused), refused.exit_code, words)
        remedy = "" if "--debug" in words else "\n  Run it again with --debug for the traceback, and please report it."
        return _fail(f"this is a bug: {type(error).__name__}: {error}{remedy}", 1, words)


def _end(number: int, _: object) -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, until the steps of a run have handlers of their own."""
    if number == signal.SIGHUP:
        leave_terminal()
    raise KeyboardInterrupt(number)  # nothing that takes an Exception for a fault of its own may swallow it


def _fail(message: str, exit_code: int, words: list[str], found: Mapping[str, object] | None = None) -> int:
    """Tell what went wrong; a rank leaves it to its launcher, so that it is shown once."""
    from penstock.machine.launched import leave_error

    if not leave_error(message):
        tell(f"rank {os.environ['RANK']}: {message}" if "RANK" in os.environ else message, exit_code, words, found)
    return exit_code


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"penstock {__version__}")
        return 0
    if command not in COMMANDS:
        raise RecipeError("unknown command", where=command, remedy=did_you_mean(command, COMMANDS))
    return COMMANDS[command](rest)


def _usage() -> str:
    lines = [f"penstock {__version__}: full-parameter fine-tuning of models that do not fit their GPU", ""]
    lines += [f"  penstock {name:<9} {(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items()]
    lines += ["", f"Presets: {', '.join(PRESETS)}", "`penstock COMMAND --help` lists the flags."]
    return "\n".join(lines)


def train(words: list[str]) -> int:
    """Fine-tune a model: penstock train [RECIPE] [--flags]."""
    parsed = parse_with_recipe(TrainArgs, "train", with_value(words, "--resume", "newest"))
    args = parsed.args
    from penstock.machine.launch import Machines, check_batch, launch
    from penstock.machine.launched import follow_launcher
    from penstock.plan.report import check_one_gpu

    machines = Machines(args.gpus, args.nodes, args.node_rank, args.rendezvous)
    check_batch(args.recipe.batch_size, machines.ranks)
    check_one_gpu(args.recipe, machines.ranks)  # before ranks are started, each of which would say so
    started = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and machines.ranks not in (1, int(started)):
        what = f"ask for {machines.ranks} ranks, and {started} were started"
        raise RecipeError(what, where="--gpus and --nodes", remedy="Under torchrun leave both out.")
    if machines.ranks > 1 and "RANK" not in os.environ and not args.dry_run:
        advice = partial(resume_advice, args.recipe.run_dir, args.resume)
        return launch(["train", *words], machines, debug=args.debug, advice=advice)
    follow_launcher()
    with importing():
        quiet_libraries(args.debug, args.log_level)
        from penstock.engine.ranks import find_world
        from penstock.report.console import Console
        from penstock.report.metrics import to_json
        from penstock.run.preparation import dry_run
        from penstock.run.train import train as run

    world = find_world()
    console = Console(json=args.json, quiet=args.quiet or not world.first)
    _note(console, parsed.note)
    start = {"overwrite": args.overwrite, "resume_anyway": args.resume_anyway}
    if args.dry_run:
        here = (world.size, world.local_size) if world.many else (machines.ranks, machines.gpus)
        outlook = dry_run(args.recipe, console, resume=args.resume, num_ranks=here[0], ranks_here=here[1], **start)
        if args.json and world.first:
            print(json.dumps({"recipe": to_dict(args.recipe), **dataclasses.asdict(outlook)}))
        return 0
    with output_for_people() if args.json else nullcontext():
        summary = run(args.recipe, console, resume=args.resume, world=world, **start)
    if not world.first:
        return 0
    if args.json:
        print(to_json(dataclasses.replace(summary, times=tuple(console.all_times()))))
    else:
        console.summary(summary)
    return 0


def _note(console: Console, note: str) -> None:
    """Say where the recipe comes from, if there is something to say."""
    if note:
        console.say(note)


def data(words: list[str]) -> int:
    """Show what the model will see: penstock data [RECIPE] [--flags]."""
    parsed = parse_with_recipe(DataArgs, "data", words)
    args = parsed.args
    if args.examples < 0:
        raise RecipeError("must not be negative", where=f"--examples {args.examples}", remedy="0 shows none.")
    with importing():
        quiet_libraries(args.debug)
        from penstock.data.preview import show, summary
        from penstock.report.console import Console
        from penstock.run.preparation import prepare_run

    console = Console(json=args.json)
    _note(console, parsed.note)
    prepared = prepare_run(args.recipe, console)
    if args.json:
        print(json.dumps(summary(prepared.data)))
    else:
        for part in show(prepared.data, prepared.tokenizer, examples=args.examples):
            console.rich.print(part, soft_wrap=False)  # long lines go on in the next one, inside their box
    return 0


def bench(words: list[str]) -> int:
    """Measure a step against its floor and against peers: penstock bench [RECIPE] [--against PEERS]."""
    # Weights are random here, so that a recipe's shape may be changed without saying so.
    parsed = parse_with_recipe(BenchArgs, "bench", words, init="random")
    args = parsed.args
    if args.recipe.engine != "penstock":
        raise RecipeError("bench measures ours", where="--engine", remedy="DeepSpeed is a peer: --against deepspeed.")
    if args.steps < 1:
        raise RecipeError("must be at least 1", where=f"--steps {args.steps}", remedy="6 is the default.")
    if args.timeout <= 0:
        raise RecipeError(
            "must be positive", where=f"--timeout {args.timeout}", remedy="It is in seconds, such as 600."
        )
    modes, updates = ("superoffload", "zerooffload"), ("after-norm", "in-backward")
    chosen = {
        "against": read_choices("--against", args.against, ("deepspeed", "torchao", "flashoptim")),
        "modes": read_choices("--modes", args.modes, modes),
        "updates": read_choices("--updates", args.updates, updates) or updates,
        "formats": read_choices("--formats", args.formats, ("fp32", "bf16", "int8")),
        "peer_modes": read_choices("--peer-modes", args.peer_modes, modes),
    }
    if chosen["against"] and args.recipe.matmul != "bf16":
        raise RecipeError("peers compute in bf16", where="--against", remedy="Measure them with --matmul bf16.")
    ratios = read_ratios(args.peer_ratio)
    with importing():
        quiet_libraries(args.debug)
        from penstock.bench.run import Asked
        from penstock.bench.run import bench as run
        from penstock.bench.this_machine import unmeasured_machine
        from penstock.machine.hardware import pick_device
        from penstock.report.console import Console
        from penstock.run.row_length import with_length_if_known

    console = Console(json=args.json)
    _note(console, parsed.note)
    recipe = with_length_if_known(args.recipe, unmeasured_machine(pick_device(args.recipe.device)), 1, console.say)
    asked = Asked(steps=args.steps, timeout_s=args.timeout, peer_ratios=ratios, timeline=args.timeline, **chosen)
    report = run(recipe, asked, to=args.to, say=console.say)
    if args.json:
        rows = [dataclasses.asdict(row) for row in report.rows]
        found = {"directory": str(report.directory), "ceilings": dataclasses.asdict(report.ceilings), "rows": rows}
        print(json.dumps(found))
    return 0


def plan(words: list[str]) -> int:
    """Predict memory and speed, here or on another machine: penstock plan [RECIPE] [--gpu gh200 --gpus 2]."""
    parsed = parse_with_recipe(PlanArgs, "plan", words, init="random")
    args, recipe = parsed.args, parsed.args.recipe
    if args.recipe.engine != "penstock":
        raise RecipeError(
            "the plan is of ours", where="--engine", remedy="Leave it out: of DeepSpeed nothing is predicted."
        )
    if args.gpus < 1:
        raise RecipeError("must be at least 1", where=f"--gpus {args.gpus}", remedy="1 is the default.")
    from penstock.data.run_length import run_length, why_unknown
    from penstock.machine.known import adjusted, find_machine
    from penstock.plan import report
    from penstock.plan.refusal import Limits, refusal
    from penstock.plan.values import as_json, report_json

    def aside(text: str) -> None:
        print(text, file=sys.stderr)

    if parsed.note:
        aside(parsed.note)
    on_gpu = recipe.device != "cpu"
    if args.gpu and not on_gpu:
        what, remedy = "plans for a GPU, not for a CPU", "Add --device auto, or leave --gpu out."
        raise RecipeError(what, where=f"--gpu {args.gpu}, device = cpu", remedy=remedy)
    if args.gpu:
        machine = find_machine(args.gpu, link=args.link, cores=args.cores)
    else:
        from penstock.bench.this_machine import this_machine, unmeasured_machine
        from penstock.machine.hardware import pci_gpus

        on_gpu = bool(on_gpu and pci_gpus())
        if args.remeasure and not on_gpu:
            aside("of a CPU nothing is measured, and no time is predicted")
        here = this_machine(remeasure=args.remeasure, say=aside) if on_gpu else unmeasured_machine()
        machine = adjusted(here, link=args.link, cores=args.cores)
    limits = Limits(recipe, machine, args.host_memory)
    machine = limits.limited
    if args.all:
        _check_all(args, words)
        from penstock.plan.matrix import matrix, matrix_lines

        cells = matrix(machine)
        rows = [{"preset": c.preset, "gpus": c.gpus, "plan": c.plan and as_json(c.plan)} for c in cells]
        print(json.dumps(rows) if args.json else "\n".join(matrix_lines(machine, cells)))
        return 0
    if not recipe.max_length:  # nobody has said it: a tokenizer is needed, which takes seconds
        from penstock.run.row_length import with_length_if_known

        recipe = with_length_if_known(recipe, machine, args.gpus, aside)
        limits = dataclasses.replace(limits, recipe=recipe)
    length = run_length(recipe) if recipe.data else None
    found = report.make_report(recipe, machine, args.gpus, best=args.best, length=length, unknown=why_unknown(recipe))
    planned = report_json(found)
    if found.plan.fits or not args.json:
        print(json.dumps(planned) if args.json else "\n".join(report.lines(found)))
    if not found.plan.fits:
        refused = refusal(found, ["penstock", "plan" if args.gpu or args.host_memory else "train", *words], limits)
        refused.found = planned
        raise refused
    return 0


def _check_all(args: PlanArgs, words: list[str]) -> None:
    """Refuse what `plan --all` would ignore: presets are planned as they are, whichever is named."""
    asked = dataclasses.replace(args.recipe, gpu_memory="auto")
    if not words[0].startswith("-") or asked != dataclasses.replace(PRESETS["demo"], init="random") or args.gpus > 1:
        what, remedy = "plans every preset as it is, on 1, 2 and 4 GPUs", "Leave it out, or the recipe and its flags."
        raise RecipeError(what, where="--all", remedy=remedy)


def doctor(words: list[str]) -> int:
    """Look at machine and software, and say how to fix what is wrong: penstock doctor."""
    args = tyro.cli(DoctorArgs, args=words, prog="penstock doctor")
    from penstock.command.doctor import examine, lines

    findings = examine(Path(args.output_dir), apply=args.apply)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        print("\n".join(lines(findings)))
    return 3 if any(finding.level == "impossible" for finding in findings) else 0


def export(words: list[str]) -> int:
    """Write a run's or a checkpoint's model as a Hugging Face directory, or check it: penstock export RUN --to DIR."""
    args = tyro.cli(ExportArgs, args=words, prog="penstock export")
    if not (args.to or args.verify):
        remedy = "Name a directory with --to, or check checkpoints with --verify."
        raise RecipeError("nothing to do", where="export", remedy=remedy)
    if args.to:
        check_target(Path(args.to))
    theirs = bool(deepspeed_form(Path(args.run)))
    if not (theirs or args.model or args.trust_pickle):
        find_place(Path(args.run))  # before torch is imported, which takes seconds
    with importing():
        quiet_libraries(args.debug)
        from penstock.checkpoint.export import export_from, verify_all
        from penstock.checkpoint.from_deepspeed import export_deepspeed
        from penstock.report.console import Console

    console = Console(json=args.json)
    result: dict[str, object] = {}
    if args.verify:
        verified = verify_all(Path(args.run), console.say)
        result["verified"] = [{"path": str(found.path), "step": found.step} for found in verified.checkpoints]
        result["verified_model"] = str(verified.model) if verified.model else None
        told = [counted(len(verified.checkpoints), "checkpoint")] if verified.checkpoints else []
        told += ["the model"] if verified.model else []
        console.say(f"Every byte is as it was written: {' and '.join(told) or 'there is nothing'}")
    if args.to:
        how: dict[str, Any] = {"file_size": args.shard_size, "say": console.say}
        if args.model or args.trust_pickle or theirs:
            export_deepspeed(Path(args.run), Path(args.to), args.model, trust_pickle=args.trust_pickle, **how)
        else:
            export_from(Path(args.run), Path(args.to), **how)
        result["model_dir"] = args.to
        console.say(f"Written and checked: {args.to}")
    if args.json:
        print(json.dumps(result))
    return 0


def generate(words: list[str]) -> int:
    """Ask the model of a run or a checkpoint, once or in a conversation: penstock generate RUN ["prompt"]."""
    args = tyro.cli(GenerateArgs, args=words, prog="penstock generate")
    place = find_place(Path(args.run))  # before torch is imported, which takes seconds
    if not args.prompt and sys.stdin is None:
        remedy = "Name one behind the run, or give lines on standard input."
        raise RecipeError("there is no question, and standard input is closed", where="generate", remedy=remedy)
    with importing():
        quiet_libraries(args.debug)
        from penstock.run.generate import Chat, questions

    chat = Chat(place, args.max_new_tokens, args.temperature, args.seed, args.device)
    if not args.prompt and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused as a prompt is
    at_terminal = not args.prompt and sys.stdin.isatty()
    invited = at_terminal and not args.json and sys.stdout is not None and sys.stdout.isatty()
    if at_terminal:
        print("Ask something; `exit` or Ctrl-D ends.", file=sys.stderr)
    asked = [args.prompt] if args.prompt else questions(sys.stdin, invite="> " if invited else "")
    for prompt in asked:
        answer = chat.ask(prompt)
        print(json.dumps({"prompt": prompt, "answer": answer}) if args.json else answer, flush=True)
    return 0


def report(words: list[str]) -> int:
    """Write a page about a run, or compare several: penstock report RUN [RUN2 ...]."""
    args = tyro.cli(ReportArgs, args=words, prog="penstock report")
    if not args.runs:
        raise RecipeError("no run is named", where="report", remedy="Such as: penstock report runs/demo")
    for name in args.runs:
        check_is_run(Path(name))  # before torch is imported, which takes seconds
    with importing():
        from penstock.report.page import report as run

    written = run([Path(name) for name in args.runs], to=args.to, images=args.images)
    for what in written.left_out:
        print(f"WARNING: damaged, and left out: {what}", file=sys.stderr)
    if args.json:
        found = {"page": str(written.page), "images": [str(path) for path in written.images]}
        print(json.dumps(found | {"left_out": written.left_out}))
    else:
        print(*[f"Written: {path}" for path in (written.page, *written.images)], sep="\n")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "data": data,
    "plan": plan,
    "bench": bench,
    "doctor": doctor,
    "export": export,
    "generate": generate,
    "report": report,
}
