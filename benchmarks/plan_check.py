"""A table of plans against benches: reads plan-N.json and bench-N/rows.jsonl as `plan_check.sh` leaves them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LIMITS = {"GPU GB": 0.05, "host GB": 0.05, "step s": 0.15}


def rows_of(directory: Path, number: int) -> list[dict]:
    path = directory / f"bench-{number}" / "rows.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["system"] == "penstock"]


def compared(plan: dict, row: dict) -> dict[str, tuple[float, float]]:
    return {
        "GPU GB": (plan["gpu_bytes"] / 1e9, row["gpu_bytes"] / 1e9),
        "host GB": (plan["host_bytes"] / 1e9, row["host_bytes"] / 1e9),
        "step s": (plan["seconds"]["step"], row["step_s"]),
    }


def table(directory: Path) -> list[str]:
    found = [f"{'':<34}{'':<9}{'planned':>10}{'measured':>10}{'off by':>9}"]
    for path in sorted(directory.glob("plan-*.json")):
        text = path.read_text(encoding="utf-8")
        plan = json.loads(text) if text.strip() else None
        rows = rows_of(directory, int(path.stem.split("-")[1]))
        if plan is None or not rows or rows[-1]["step_s"] is None:
            error = rows[-1]["error"] if rows else "no row"
            found.append(f"{plan['recipe'] if plan else path.stem:<34}{error or 'no plan'}")
            continue
        row, settings = rows[-1], plan["settings"]
        name = f"{plan['recipe']} {plan['schedule']} {settings['states']}"
        for what, (planned, measured) in compared(plan, row).items():
            off = planned / measured - 1
            mark = "" if abs(off) <= LIMITS[what] else "  over the limit"
            found.append(f"{name:<34}{what:<9}{planned:>10.2f}{measured:>10.2f}{off:>+9.1%}{mark}")
            name = ""
    return found


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
