"""Exit 3 of `penstock plan`: what does not fit, the largest parts, and the cheapest change that does, to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import DoesNotFit
from penstock.machine.known import MACHINES
from penstock.plan.layout import Buffer
from penstock.plan.predict import Plan, gpu_shortage
from penstock.plan.report import Report
from penstock.plan.solve import TRADES, cheapest_change, flags_between, solve


def refusal(report: Report, command: Sequence[str]) -> DoesNotFit:
    """Exit 3: the largest parts, and the cheapest change that fits, to paste. `command`: the words typed so far."""
    plan = report.plan
    short = gpu_shortage(plan.job, plan.settings, plan.machine) if plan.settings.by_layer and plan.gpus == 1 else 0.0
    too_large = short > 0 or plan.peak_bytes("gpu") > plan.gpu_room
    scarce = "gpu" if too_large and plan.machine.has_gpu else "host"
    where: tuple[str, ...] = (scarce,)
    room, kind = (plan.gpu_room, "GPU memory") if scarce == "gpu" else (plan.host_room, "host memory")
    if plan.machine.one_memory:
        where, room, kind = ("gpu", "host"), plan.gpu_room, "memory"
    context = sum(b.num_bytes for b in plan.buffers if b.name == "CUDA context" and b.place in where)
    need, room = float(sum(plan.peak_bytes(place) for place in where) + context), room + context
    if short > 0 and scarce == "gpu" and need <= room and not plan.machine.one_memory:
        need = room + short  # with slots for state, of which there is none yet
    parts = ", ".join(f"{b.name} {b.num_bytes / 1e9:.1f}" for b in largest_parts(plan, where))
    away = f"{_streaming(plan)}state on the host as far as {'they' if plan.settings.streamed else 'it'}"
    missing = f": {(need - max(0.0, room)) / 1e9:.1f} are missing" if need > room else ""
    what = (
        f"does not fit: with {away} can be, {need / 1e9:.1f} GB of {kind}, of which "
        f"{max(0.0, room) / 1e9:.1f} can be used{missing}; the largest parts: {parts}"
    )
    change = cheapest_change(plan)
    if change is not None:
        trade = f" (it changes: {change.trades})" if change.trades else " (the same mathematics)"
        return DoesNotFit(what, where=report.name, remedy=f"This fits{trade}:\n    {with_flags(command, change.flags)}")
    return DoesNotFit(what, where=report.name, remedy=_elsewhere(plan, command))


def _streaming(plan: Plan) -> str:
    """The weights that lie on the host, in words."""
    count, layers = plan.settings.streamed, plan.job.architecture.layers
    return f"the weights of {count} of {layers} layers and " if 0 < count < layers else "weights and " if count else ""


def _elsewhere(plan: Plan, command: Sequence[str]) -> str:
    """More GPUs of the kind, or another machine, with what else must change there."""
    words = ["penstock", "plan", *command[2:]]
    row_by_row = replace(plan.job, order="auto", inputs="auto", tile="auto")  # as several GPUs compute
    for gpus in (2, 4, 8) if plan.machine.has_gpu else ():
        found = solve(row_by_row, plan.machine, gpus) if plan.gpus < gpus <= plan.job.batch_size else None
        if found is not None:
            kept = without_flags(words, ("--order", "--inputs", "--tile"))
            text = with_flags(kept, (f"--gpus {gpus}", *flags_between(plan, found)))
            return f"{gpus} of these GPUs are enough{_trade(plan, found)}:\n    {text}"
    able = [m for m in MACHINES.values() if plan.job.matmul != "fp8" or m.fp8_flops_per_s]
    others = {m.name: solve(plan.job, m, plan.gpus) for m in able if m.name != plan.machine.name}
    fitting = {name: found for name, found in others.items() if found is not None}
    if not fitting:
        return "No machine that is known here is large enough; take a smaller model."
    name, found = next(iter(fitting.items()))
    words = without_flags(words, ("--host-memory", "--gpu-memory", "--link", "--cores"))
    text = with_flags(words, (f"--gpu {name}", *flags_between(plan, found)))
    why = "No number of these GPUs up to a row each is enough" if plan.machine.has_gpu else "This machine has no GPU"
    return f"{why}. It fits {', '.join(fitting)}{_trade(plan, found)}:\n    {text}"


def _trade(plan: Plan, found: Plan) -> str:
    """What another format changes, in brackets."""
    states = found.settings.states
    return f" (it changes: {TRADES[states]})" if states in TRADES and states != plan.settings.states else ""


def with_flags(words: Sequence[str], flags: Sequence[str]) -> str:
    """The command with these flags, in place of what was said before; they are chosen, so that `--best` is not."""
    kept = without_flags([word for word in words if word != "--best"], [flag.split()[0] for flag in flags])
    return " ".join([shlex.join(kept), *flags])


def without_flags(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The command without these flags and their values."""
    found: list[str] = []
    skip = False
    for word in words:
        if skip and not word.startswith("--"):
            continue
        skip = word in names
        if not skip and word.split("=")[0] not in names:
            found.append(word)
    return found


def largest_parts(plan: Plan, where: Sequence[str], count: int = 3) -> Sequence[Buffer]:
    """What takes most in these places."""
    return sorted((b for b in plan.buffers if b.place in where), key=lambda b: -b.num_bytes)[:count]
