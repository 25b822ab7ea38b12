"""Exit 3 of `penstock plan`: what does not fit, the largest parts, and the cheapest change that does, to paste."""

from __future__ import annotations

import shlex
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import DoesNotFit
from penstock.machine.known import MACHINES, Machine, adjusted
from penstock.plan.layout import Buffer
from penstock.plan.predict import Plan, gpu_shortage
from penstock.plan.report import Report, job_on, make_plan
from penstock.plan.solve import TRADES, Alternative, cheapest_change, flags_between, solve
from penstock.recipe.recipe import Recipe


@dataclass(frozen=True)
class Limits:
    """What the user said of memory. Advice that drops it without a word would not fit where it is given again."""

    recipe: Recipe
    """Whose `gpu_memory` is one of them."""
    machine: Machine
    """Without them."""
    host_memory: str = ""

    @property
    def gpu_memory(self) -> str:
        """As it was said; empty for none."""
        return "" if self.recipe.gpu_memory == "auto" else self.recipe.gpu_memory

    @property
    def flags(self) -> tuple[str, ...]:
        """Those that were given."""
        said = {"--host-memory": self.host_memory, "--gpu-memory": self.gpu_memory}
        return tuple(f"{flag} {value}" for flag, value in said.items() if value)

    @property
    def limited(self) -> Machine:
        """The machine with them. A known one may be another of its kind; this one's GPU has no more than it has."""
        found = adjusted(self.machine, host_memory=self.host_memory, gpu_memory=self.gpu_memory)
        most = found.gpu_bytes if self.machine.name in MACHINES else self.machine.gpu_bytes
        return replace(found, gpu_bytes=min(found.gpu_bytes, most))

    def others(self) -> Iterator[Machine]:
        """Other machines with them. Of one memory for both they say nothing, and no GPU grows by a limit."""
        for machine in MACHINES.values():
            if machine.name == self.machine.name or (self.flags and machine.unified):
                continue
            other = replace(self, machine=machine).limited
            if other.gpu_bytes <= machine.gpu_bytes:
                yield other

    def fewer(self) -> list[Limits]:
        """Without one of them, then without any."""
        host, gpu = self.host_memory, self.gpu_memory
        one = [self.said("", gpu)] * bool(host) + [self.said(host, "")] * bool(gpu)
        return [*one, self.said("", "")] if len(one) == 2 else one

    def said(self, host_memory: str, gpu_memory: str) -> Limits:
        """Others in their place."""
        return replace(self, recipe=replace(self.recipe, gpu_memory=gpu_memory or "auto"), host_memory=host_memory)

    def plan(self, gpus: int) -> Plan:
        """The recipe within them."""
        return make_plan(self.recipe, self.limited, gpus)


def refusal(report: Report, command: Sequence[str], limits: Limits) -> DoesNotFit:
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
    return DoesNotFit(what, where=report.name, remedy=_elsewhere(plan, command, limits))


def _streaming(plan: Plan) -> str:
    """The weights that lie on the host, in words."""
    count, layers = plan.settings.streamed, plan.job.architecture.layers
    return f"the weights of {count} of {layers} layers and " if 0 < count < layers else "weights and " if count else ""


def _elsewhere(plan: Plan, command: Sequence[str], limits: Limits) -> str:
    """The machine without a limit; more GPUs of the kind, or another machine, with the limits and what else changes."""
    words = ["penstock", "plan", *command[2:]]
    here = _without_limits(plan, words, limits)
    there = _more_gpus(plan, words) or _other_machine(plan, words, limits)
    within = f" with {' and '.join(limits.flags)}; give it more, or" if limits.flags else ";"
    nowhere = f"No machine that is known here is large enough{within} take a smaller model."
    return "\n  ".join(filter(None, (here, there))) or nowhere


def _without_limits(plan: Plan, words: Sequence[str], limits: Limits) -> str:
    """The machine without the limit that is too small. Where one alone is not, without any, and with other changes."""
    tried = [(fewer, fewer.plan(plan.gpus)) for fewer in limits.fewer()]
    if not tried:
        return ""
    fewer, free = next((way for way in tried if way[1].fits), tried[-1])
    change = Alternative(free, ()) if free.fits else cheapest_change(free)
    if change is None:
        return ""
    left_out = [flag for flag in limits.flags if flag not in fewer.flags]
    flags = list(change.flags)
    if limits.gpu_memory and not fewer.gpu_memory:
        flags.insert(0, "--gpu-memory auto")  # a recipe's file may have another
    kept = words if fewer.host_memory else without_flags(words, ("--host-memory",))
    is_, it = ("is", "it") if len(left_out) == 1 else ("are", "them")
    least = _least(limits, fewer, plan.gpus) if free.fits and len(left_out) == 1 else ""
    trade = f" (it changes: {change.trades})" if change.trades else least
    return f"{' and '.join(left_out)} {is_} too small. Without {it} this fits{trade}:\n    {with_flags(kept, flags)}"


def _least(limits: Limits, fewer: Limits, gpus: int) -> str:
    """From which size on the limit that is left out is enough; empty if only all that the machine has is."""
    is_host = limits.host_memory != fewer.host_memory
    has = fewer.machine.host_bytes if is_host else fewer.machine.gpu_bytes
    sizes = [f"{number}GB" for number in range(1, has // 10**9)]
    ways = [fewer.said(size, fewer.gpu_memory) if is_host else fewer.said(fewer.host_memory, size) for size in sizes]
    number = bisect_left(ways, True, key=lambda way: way.plan(gpus).fits)
    return f", and from --{'host' if is_host else 'gpu'}-memory {sizes[number]} on" if number < len(sizes) else ""


def _more_gpus(plan: Plan, words: Sequence[str]) -> str:
    """As many GPUs of the kind as are enough, if any number is."""
    row_by_row = replace(plan.job, order="auto", inputs="auto", tile="auto")  # as several GPUs compute
    for gpus in (2, 4, 8) if plan.machine.has_gpu else ():
        found = solve(row_by_row, plan.machine, gpus) if plan.gpus < gpus <= plan.job.batch_size else None
        if found is not None:
            kept = without_flags(words, ("--order", "--inputs", "--tile"))
            text = with_flags(kept, (f"--gpus {gpus}", *flags_between(plan, found)))
            return f"{gpus} of these GPUs are enough{_trade(plan, found)}:\n    {text}"
    return ""


def _other_machine(plan: Plan, words: Sequence[str], limits: Limits) -> str:
    """Those that are known and large enough, if any is; else the first that is with the cheapest change."""
    able = [m for m in limits.others() if plan.job.matmul != "fp8" or m.fp8_flops_per_s]
    there = [replace(plan, job=job_on(limits.recipe, m), machine=m) for m in able]  # a GPU's types and kernels
    fitting = [found for p in there if (found := solve(p.job, p.machine, p.gpus)) is not None]
    if fitting:
        flags, trade = flags_between(plan, fitting[0]), _trade(plan, fitting[0])
    else:  # with limits the advice is to lift them, and trying every change on every machine takes a minute
        change = None if limits.flags else next(filter(None, map(cheapest_change, there)), None)
        if change is None:
            return ""
        fitting, flags = [change.plan], change.flags
        trade = f" (it changes: {change.trades})" if change.trades else ""
    names = [found.machine.name for found in fitting]
    on_it = (f"--gpu {names[0]}", *["--device auto"] * (limits.recipe.device == "cpu"))
    text = with_flags(without_flags(words, ("--link", "--cores")), (*on_it, *flags))
    why = "No number of these GPUs up to a row each is enough" if plan.machine.has_gpu else "This machine has no GPU"
    return f"{why}. It fits {', '.join(names)}{trade}:\n    {text}"


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
        flag = word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
        skip = flag in names and "=" not in word
        if flag not in names:
            found.append(word)
    return found


def largest_parts(plan: Plan, where: Sequence[str], count: int = 3) -> Sequence[Buffer]:
    """What takes most in these places."""
    return sorted((b for b in plan.buffers if b.place in where), key=lambda b: -b.num_bytes)[:count]
