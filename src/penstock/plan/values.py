"""A plan and a report as plain values: `penstock plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.plan.predict import Plan
from penstock.plan.report import Report


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    return {
        "fits": plan.fits,
        "gpus": plan.gpus,
        "machine": plan.machine.name,
        "measured": plan.machine.measured,
        "batch_size": plan.job.batch_size,
        "max_length": plan.job.length,
        "settings": _settings(plan),
        "update": plan.job.chosen_update,
        "matmul": plan.job.matmul,
        "homes": plan.split.shares(),
        "streamed_layers": plan.settings.streamed,
        "crossings": [asdict(c) for c in plan.crossings],
        "gpu_bytes": plan.peak_bytes("gpu"),
        "gpu_room_bytes": plan.gpu_room if plan.machine.has_gpu else 0.0,
        "host_bytes": plan.peak_bytes("host"),
        "host_room_bytes": plan.host_room if plan.machine.has_gpu else plan.gpu_room,  # its one memory
        "buffers": [asdict(b) for b in plan.buffers],
        "activation_bytes": plan.activation_bytes,
        "loading_bytes": plan.loading,
        "disk": asdict(plan.disk),
        "seconds": asdict(plan.seconds) | {"step": plan.seconds.step} if plan.machine.predicts_time else None,
        "tokens_per_s": plan.tokens_per_s if plan.machine.predicts_time else None,
        "model_tflops": plan.tflops if plan.machine.predicts_time else None,
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """As a bench's rows have them."""
    s = plan.settings
    found = {"states": s.states, "micro_batch": s.micro_batch, "recompute": s.recompute}
    return (
        found | {"weights": plan.weights, "order": s.order, "inputs": s.inputs, "tile": s.tile} if s.by_layer else found
    )


def report_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    others = [{"flags": list(o.flags), "trades": o.trades, **as_json(o.plan)} for o in report.others]
    length = None
    if report.length:
        seconds = report.length.steps * report.step_seconds if report.plan.machine.predicts_time else None
        length = asdict(report.length) | {"seconds": seconds}
    sources = {"sources": list(report.plan.machine.sources)}
    return {
        "recipe": report.name,
        **as_json(report.plan),
        "run": length,
        "flags": report.flags,
        "note": report.note,
        "alternatives": others,
    } | sources
