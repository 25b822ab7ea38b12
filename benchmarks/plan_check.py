"""A table of plans against benches: reads plans.jsonl and rows.jsonl as `plan_check.sh` leaves them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LIMITS = {"GPU GB": 0.05, "host GB": 0.05, "step s": 0.15}


def row_of(plan: dict, rows: list[dict]) -> dict | None:
    """The last row with the settings of the plan."""
    settings = {"model": plan["recipe"], "update": plan["update"], **plan["settings"]}
    settings |= {"batch": plan["batch_size"], "seq": plan["max_length"]}
    rows = [{"update": row.get("schedule"), **row} for row in rows]  # what it was called before
    same = [row for row in rows if row["system"] == "penstock" and settings.items() <= row.items()]
    return same[-1] if same else None


def compared(plan: dict, row: dict) -> dict[str, tuple[float, float]]:
    both = {
        "GPU GB": (plan["gpu_bytes"] / 1e9, row["gpu_bytes"] / 1e9),
        "host GB": (plan["host_bytes"] / 1e9, row["host_bytes"] / 1e9),
        "step s": (plan["seconds"]["step"], row["step_s"]),
    }
    return {name: pair for name, pair in both.items() if pair[1]}  # a machine without a GPU holds nothing there


def table(directory: Path) -> list[str]:
    plans, rows = (
        [json.loads(line) for line in (directory / name).read_text(encoding="utf-8").splitlines()]
        for name in ("plans.jsonl", "rows.jsonl")
    )
    found = [f"{'':<34}{'':<9}{'planned':>10}{'measured':>10}{'off by':>9}"]
    for number, plan in enumerate(plans, start=1):
        row = row_of(plan, rows) if plan else None
        if row is None or row["step_s"] is None:
            why = (row["error"] if row else "no row with these settings") if plan else "no plan"
            found.append(f"{plan['recipe'] if plan else f'job {number}':<34}{why}")
            continue
        name = f"{plan['recipe']} {plan['update']} {plan['settings']['states']}"
        for what, (planned, measured) in compared(plan, row).items():
            off = planned / measured - 1
            mark = "" if abs(off) <= LIMITS[what] else "  over the limit"
            found.append(f"{name:<34}{what:<9}{planned:>10.2f}{measured:>10.2f}{off:>+9.1%}{mark}")
            name = ""
    return found


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
