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


@pytest.mark.parametrize("lines", [1000, 200_000])
def test_text_is_counted_in_the_documents_that_it_becomes(tmp_path, lines):
    path = tmp_path / "book.txt"
    path.write_text("a line of a book of so many characters, as they are\n" * lines)
    found = run_length(replace(DEMO, data=str(path), split_documents="lines", validation=0.0, epochs=1.0))
    assert found is not None
    assert f"{lines:,} examples" in found.how
    assert found.tokens == pytest.approx(lines * 24.75, rel=0.01)


@pytest.mark.parametrize(
    ("too_long", "steps", "said"),
    [("truncate", 20, "20 longer than a row are cut"), ("split", 80, "are split"), ("drop", 1, "are left out")],
)
def test_examples_longer_than_rows(tmp_path, too_long, steps, said):
    """One a row, and no 3 % more: packing leaves nothing over where an example fills its row."""
    (tmp_path / "long.jsonl").write_text((json.dumps({"prompt": "x" * 16000, "completion": "y" * 336}) + "\n") * 20)
    recipe = replace(DEMO, data=str(tmp_path / "long.jsonl"), max_length=1024, batch_size=1, epochs=1.0, validation=0)
    found = run_length(replace(recipe, too_long=too_long))
    assert found is not None
    assert found.steps == steps
    assert said in found.how
    apart = run_length(replace(recipe, too_long=too_long, packing=False))
    assert apart is not None
    assert apart.steps == steps
    if too_long == "truncate":
        assert (found.attended, found.tokens) == (0.0, 20 * 1024)


def test_examples_that_share_rows_attend_to_less(tmp_path):
    (tmp_path / "short.jsonl").write_text((json.dumps({"prompt": "x" * 300, "completion": "y" * 52}) + "\n") * 100)
    recipe = replace(DEMO, data=str(tmp_path / "short.jsonl"), max_length=1024)
    found = run_length(recipe)
    assert found is not None
    assert found.attended == 50
    large = run_length(replace(recipe, max_length=190))  # no row holds two
    assert large is not None
    assert large.steps == DEMO.epochs * 100 / DEMO.batch_size
    fixed = run_length(replace(recipe, max_steps=1))
    assert fixed is not None
    assert fixed.attended == 50


def test_documents_that_nearly_fill_their_rows_do_not_fill_them(tmp_path):
    """0 means rows that one example fills, whose attention takes them as rows."""
    text = json.dumps({"text": "x" * 4 * 4060})
    (tmp_path / "long.jsonl").write_text(f"{text}\n" * 10)
    recipe = replace(DEMO, data=str(tmp_path / "long.jsonl"), max_length=4096)
    found, filled = run_length(recipe), run_length(replace(recipe, max_length=4072))
    assert found is not None
    assert filled is not None
    assert found.attended == pytest.approx(4072 / 2)
    assert filled.attended == 2036
    cut = run_length(replace(recipe, max_length=4000))
    assert cut is not None
    assert cut.attended == 0.0


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
