"""Saved inputs, kept or parked: of every row that the loader gives, with the empty ones of compiled layers."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_streamed import build, recipe_of, step

from penstock.data.loader import Loader, Position
from penstock.data.packing import one_a_row
from penstock.data.store import Store
from penstock.engine.parked import rows_together
from penstock.engine.trial import _together


def five_rows(order="layers", **changes):
    """Two at once: the last micro-batch has one."""
    recipe = recipe_of(rows=2, dtype="fp32", weights="resident", order=order, **changes)
    return dataclasses.replace(recipe, batch_size=5)


def micro_batches(recipe, length=12):
    """What the loader gives of five examples that fill a row each."""
    ids, starts = np.arange(5 * length, dtype=np.uint32) % 300, np.arange(6) * length
    mask = (np.arange(5 * length) % length > 0).astype(np.uint8)
    counts, places = None, np.zeros(10, np.int64)  # nobody asks
    store = Store("", (), None, counts, ids, mask, starts, np.full(5, length - 1, np.int32), places, (5,))
    fixed = length if recipe.compile else 0  # as `prepare` has it
    sizes = {"batch_size": recipe.batch_size, "rows_at_once": recipe.rows_at_once, "fixed_length": fixed}
    return Loader(store, one_a_row(np.arange(5)), pad_id=0, seed=None, **sizes).step_at(Position())[0]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_whose_last_micro_batch_is_smaller(compiled):
    """The arena has room for every row; no bit depends on where inputs wait."""
    losses = []
    for inputs in ("kept", "parked", "parked:2"):
        recipe = dataclasses.replace(five_rows(inputs=inputs), compile=compiled)
        engine, batches = build(recipe), micro_batches(recipe)
        losses.append(step(engine, batches).loss)
        engine.release()
    assert losses[0] == losses[1] == losses[2]
    rows = [len(batch.input_ids) for batch in batches]
    assert rows == [2, 2, 2 if compiled else 1]
    assert rows_together(recipe) == sum(rows)
    assert [len(trial.input_ids) for trial in _together(recipe, 300)] == rows


def test_row_by_row_a_micro_batch_is_all_that_waits():
    assert rows_together(dataclasses.replace(five_rows("rows"), compile=True)) == 2
