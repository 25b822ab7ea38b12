"""One recipe's step against its floor; appends rows to $OUT/rows.jsonl. Flags are fields of the recipe: lr=1e-5."""

import dataclasses
import json
import os
import sys
from pathlib import Path

from penstock.bench.run import bench
from penstock.presets import PRESETS
from penstock.recipe import with_values


def main(preset: str, *settings: str) -> None:
    values = {
        key: json.loads(value) if value[0] in "0123456789" else value
        for key, value in (s.split("=", 1) for s in settings)
    }
    recipe = with_values(PRESETS[preset], dict(values), "command line")
    rows = bench(recipe, steps=6, say=print)
    with (Path(os.environ.get("OUT", ".")) / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
