"""Where the model of a run learns to end. The rest of what is loaded is tried by whole runs, in test_train.py."""

import dataclasses

import pytest

from penstock.model.load import load_model
from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.run.loading import end_tokens, stop_at
from penstock.run.preparation import prepare_run


def test_responses_end_with_a_special_token():
    run = prepare_run(dataclasses.replace(PRESETS["demo"], data_percent=10.0), Console(quiet=True))
    assert run.tokenizer.convert_ids_to_tokens(sorted(end_tokens(run))) == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("known", "expected"), [(2, [2, 7]), ([2, 9], [2, 7, 9]), (None, [7]), (7, 7), ([9, 7], [9, 7])]
)
def test_generation_stops_there_too(known, expected):
    run = prepare_run(dataclasses.replace(PRESETS["demo"], data_percent=10.0), Console(quiet=True))
    model = load_model(run.recipe, run.config, run.device, print)
    model.generation_config.eos_token_id = known
    stop_at(model, {7})
    assert model.generation_config.eos_token_id == expected
