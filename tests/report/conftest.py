"""A real run, small, on rows that try to break out of the page."""

import dataclasses
import json

import pytest

from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.run.train import train

EVIL = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)><!--"


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory):
    """Five steps of the demo in all three homes, with an evaluation and a question."""
    evil = [EVIL if i < 4 else "" for i in range(40)]  # the first ones are shown
    rows = [{"instruction": f"Say {i}. {evil[i]}", "input": "", "output": f"{i} it is. {evil[i]}"} for i in range(40)]
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(
        PRESETS["demo"], data=str(data), max_length=160, batch_size=2, max_steps=5, validation=0.1, eval_every=2,
        homes="gpu=0.4,stream=0.3,host=0.3", prompt=f"What is {EVIL}?", keep=1,
    )  # fmt: skip


@pytest.fixture(scope="session")
def finished_run(small_recipe, tmp_path_factory):
    recipe = dataclasses.replace(small_recipe, output_dir=str(tmp_path_factory.mktemp("runs") / "first"))
    train(recipe, Console(quiet=True))
    return recipe.run_dir
