"""Where the model of a run learns to end, and what answers first. The rest is tried by whole runs, in test_train.py."""

import dataclasses

import pytest
from torch import nn

from penstock.engine.ranks import ALONE
from penstock.model.load import load_model
from penstock.recipe.presets import PRESETS
from penstock.report.console import Console
from penstock.run import loading
from penstock.run.loading import end_tokens, start_engine, stop_at
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


@pytest.mark.parametrize("weights", ["auto", "streamed"])
def test_the_answer_before_training_is_given_in_the_arithmetic_of_the_one_after(monkeypatch, weights):
    """Which is that of the exported model, whatever the steps between multiply in."""
    recipe = dataclasses.replace(PRESETS["demo"], data_percent=10.0, device="cpu", matmul="fp8", weights=weights)
    run = prepare_run(recipe, Console(quiet=True))
    model = load_model(run.recipe, run.config, run.device, print)
    kinds = lambda: {type(module) for module in model.modules() if isinstance(module, nn.Linear)}  # noqa: E731
    asked = []
    monkeypatch.setattr(loading, "answer", lambda *_: asked.append(kinds()) or "Rome")
    engine, before = start_engine(model, {}, run, None, Console(quiet=True), ALONE)
    assert (before, asked) == ("Rome", [{nn.Linear}])
    assert any("Fp8" in kind.__name__ for kind in kinds()), "steps multiply in fp8 all the same"
    engine.release()
    assert kinds() == {nn.Linear}
