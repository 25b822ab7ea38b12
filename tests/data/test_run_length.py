import json
from dataclasses import replace

import pytest

from penstock.data.loader import prepare
from penstock.data.run_length import SAMPLE, run_length
from penstock.errors import DataError
from penstock.model.load import load_config, load_tokenizer
from penstock.recipe.presets import PRESETS

DEMO = PRESETS["demo"]


def test_the_demo_is_estimated_near_what_the_loader_counts():
    found = run_length(DEMO)
    data = prepare(DEMO, load_tokenizer(DEMO), load_config(DEMO).vocab_size, lambda _: None)
    steps = DEMO.epochs * data.train.steps_per_epoch()
    assert found is not None
    assert found.steps == pytest.approx(steps, rel=0.25)
    assert "355 examples" in found.how


def test_presets_state_what_they_assume():
    found = run_length(PRESETS["llama-8b"])
    assert found is not None
    assert "assumed" in found.how
    assert found.tokens == 520_020


def test_a_large_file_is_sampled(tmp_path):
    path = tmp_path / "many.jsonl"
    row = json.dumps({"text": "x" * 4000})
    path.write_text(f"{row}\n" * 2 * SAMPLE)
    recipe = replace(DEMO, data=str(path), max_length=2048, batch_size=4, epochs=1.0)
    found = run_length(recipe)
    assert found is not None
    assert found.tokens == pytest.approx(2 * SAMPLE * 1012, rel=0.01)
    halved = run_length(replace(recipe, data_percent=50.0))
    assert halved is not None
    assert halved.tokens == pytest.approx(found.tokens / 2, rel=0.01)


def test_data_that_is_here_and_broken_is_not_taken_for_missing(tmp_path):
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(DataError, match=r"my\.jsonl:2: malformed JSON"):
        run_length(replace(DEMO, data=str(tmp_path / "my.jsonl")))
    assert run_length(replace(DEMO, data=str(tmp_path / "other.jsonl"))) is None


def test_what_is_not_known_is_none_unless_the_steps_are_given():
    recipe = replace(DEMO, data="nobody/nothing")
    assert run_length(recipe) is None
    fixed = run_length(replace(recipe, max_steps=7))
    assert fixed is not None
    assert (fixed.steps, fixed.tokens) == (7, 7 * 4 * 256)
    shortened = run_length(replace(DEMO, max_steps=3))
    assert shortened is not None
    assert shortened.steps == 3
