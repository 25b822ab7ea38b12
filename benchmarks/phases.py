"""GPU memory phase by phase while `streamed.py` runs: `python benchmarks/phases.py` and its arguments.

Peaks are reset at every phase, so that the rows' own peaks mean nothing here.
"""

import sys

import streamed
import torch

from penstock.engine.layerwise import LayerByLayer
from penstock.engine.native import NativeEngine

LAST = 44
notes = []


def note(when):
    stats = torch.cuda.memory_stats()
    names = (
        "reserved_bytes.all.current",
        "active_bytes.all.current",
        "active_bytes.all.peak",
        "allocated_bytes.all.peak",
    )
    notes.append((when, *(stats[name] / 1e9 for name in names), stats["num_alloc_retries"]))
    torch.cuda.reset_peak_memory_stats()


def watch(owner, name):
    made = getattr(owner, name)

    def noted(*args, **kwargs):
        note(f"before {name}")
        result = made(*args, **kwargs)
        note(f"after {name}")
        return result

    setattr(owner, name, noted)


if __name__ == "__main__":
    for name in ("_forward", "_loss", "_backward", "_embedding_backward"):
        watch(LayerByLayer, name)
    watch(NativeEngine, "step")
    try:
        streamed.main(*sys.argv[1:])
    finally:
        for when, reserved, active, peak, allocated, retries in notes[-LAST:]:
            print(f"{when:28} {reserved:6.2f} GB reserved, {active:.2f} active, peak {peak:.2f}, "
                  f"{allocated:.2f} handed out, {retries} retries")  # fmt: skip
