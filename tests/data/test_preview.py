"""What `penstock data` shows is what is trained on."""

import io
import json

import pytest
from rich.console import Console

from penstock.data.cost import TokenFlops
from penstock.data.loader import prepare
from penstock.data.preview import Tokens, show, summary, visible
from penstock.errors import counted


@pytest.fixture
def data(write, recipe_for, chatml, alpaca_rows):
    rows = [*alpaca_rows(30), {"instruction": "q", "input": "", "output": ""}]
    rows.append({"instruction": "q", "input": "", "output": "long " * 200})
    return prepare(recipe_for(write(rows), max_length=256, validation=0.1), chatml, 10**6, lambda _: None)


def printed(parts, *, colour):
    console = Console(
        file=io.StringIO(), width=120, force_terminal=colour, color_system="truecolor" if colour else None
    )
    for part in parts if isinstance(parts, list) else [parts]:
        console.print(part)
    return console.file.getvalue()


def test_without_colour_trained_tokens_stand_in_brackets(chatml):
    ids = chatml("<|im_start|>user\nWhy?<|im_end|>\n", add_special_tokens=False)["input_ids"]
    answer = chatml("So.<|im_end|>", add_special_tokens=False)["input_ids"]
    tokens = Tokens(chatml, [*ids, *answer, ids[0]], [0] * len(ids) + [1] * len(answer) + [0])
    text = printed(tokens, colour=False)
    assert "⟦S|o|.|<|im_end|>⟧<|im_start|>" in text
    assert "\x1b" not in text


def test_with_colour_trained_and_other_tokens_differ(chatml):
    ids = chatml("ab", add_special_tokens=False)["input_ids"]
    trained, other = (
        printed(Tokens(chatml, ids, [1, 1]), colour=True),
        printed(Tokens(chatml, ids, [0, 0]), colour=True),
    )
    assert "⟦" not in trained
    assert trained != other
    assert trained.count("\x1b[1;") == 2, "each token in its own shade"


def test_a_long_example_shows_its_beginning_and_its_end(chatml):
    ids = chatml("x" * 1000 + "<|im_end|>", add_special_tokens=False)["input_ids"]
    text = printed(Tokens(chatml, ids, [0] + [1] * (len(ids) - 1)), colour=False)
    assert f"{len(ids) - 360:,} tokens" in text
    assert "<|im_end|>⟧" in text.replace("\n", "")


def test_control_characters_do_not_reach_the_terminal(chatml):
    ids = chatml("\x1b[31m\r\x07", add_special_tokens=False)["input_ids"]
    shown = "".join(visible(chatml, i) for i in ids)
    assert shown == "\\x1b[31m\\r\\x07"


def test_part_of_a_character_is_shown_as_it_is_stored(chatml):
    ids = chatml("😀", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert all(visible(chatml, i) and "\ufffd" not in visible(chatml, i) for i in ids)
    assert visible(chatml, chatml.convert_tokens_to_ids("<|im_end|>")) == "<|im_end|>"


def test_show_has_every_part(data, chatml):
    text = printed(show(data, chatml, examples=2), colour=False)
    assert text.count(" trained ─") == 2
    assert "my.jsonl:1 · " in text
    assert "⟦w" in text
    assert f"{data.train.num_examples} examples in {data.train.num_rows} rows" in text
    assert f"form: {data.data_format}" in text
    assert "█" in text
    assert "1 to " in text
    assert "32 rows of data became 31 examples" in text
    assert "1 dropped, empty response: " in text
    assert "my.jsonl:31" in text
    assert "1 truncated: " in text
    assert "my.jsonl:32" in text
    assert f"{data.evaluation.num_examples} examples in {counted(data.evaluation.num_rows, 'row')}" in text


def test_the_pictures_have_one_bar_for_each_example(data):
    from penstock.data.preview import _picture

    longest = int(data.train.packing.row_lengths(data.train.store.lengths).max())
    for row in range(data.train.num_rows):
        bar = _picture(data.train, row, longest)
        changes = 1 + sum(a != b for a, b in zip(bar.rstrip("·"), bar.rstrip("·")[1:], strict=False))
        assert len(bar) == 60
        assert changes == len(data.train.packing.row(row))


def test_summary_is_json_and_adds_up(data):
    counts = json.loads(json.dumps(summary(data)))
    assert counts["data_format"] == "alpaca"
    assert counts["source"]["rows"] == 32
    assert counts["source"]["kept"] == 31
    assert counts["source"]["truncated"] == counts["source"]["without_end_token"] == 1
    assert counts["source"]["dropped"]["empty response"]["count"] == 1
    assert counts["source"]["dropped"]["empty response"]["first"][0].endswith("my.jsonl:31")
    assert counts["train"]["examples"] + counts["evaluation"]["examples"] == 31
    assert sum(b["examples"] for b in counts["train"]["lengths"]) == counts["train"]["examples"]
    assert counts["train"]["trained_tokens"] + counts["evaluation"]["trained_tokens"] == int(
        data.train.store.mask.sum()
    )
    assert counts["steps_per_epoch"] == data.train.steps_per_epoch()
    assert 0.5 < counts["train"]["fill"] <= 1


def test_flops_of_rows_and_of_steps_are_shown(write, recipe_for, chatml):
    """One long example a row, or several short ones: rows of about one length, whose attention differs."""
    row = {"instruction": "q", "input": ""}
    rows = [{**row, "output": "x" * n} for n in (200, *[20] * 4)]
    recipe = recipe_for(write(rows), batch_size=1, max_length=256, compile=False, shuffle=False)
    data = prepare(recipe, chatml, 10**6, lambda _: None, TokenFlops(6e12, 1e12, layers=2))
    long, *short = data.train.store.lengths.tolist()
    products, attention = [6 * long, 6 * sum(short)], [2 * long**2, 2 * sum(n**2 for n in short)]
    steps = [a + b for a, b in zip(products, attention, strict=True)]
    flops = summary(data)["train_flops"]
    for name, values in (("row_products", products), ("row_attention", attention), ("step", steps)):
        assert flops[name] == {"mean": 1e12 * sum(values) / 2, "largest": 1e12 * max(values)}
    text = " ".join(printed(show(data, chatml), colour=False).replace("│", " ").split())
    assert f"products {sum(products) / 2:,.0f} on average, {max(products):,} at most;" in text
    assert f"attention {sum(attention) / 2:,.0f} on average, {max(attention):,} at most;" in text
    assert f"the heaviest step has {2 * max(steps) / sum(steps):.2f} of the mean" in text


def test_a_data_set_of_its_own_for_evaluation_is_shown(write, recipe_for, chatml, alpaca_rows):
    path = write([*alpaca_rows(3), {"instruction": "q", "input": "", "output": " "}], "eval.jsonl")
    recipe = recipe_for(write(alpaca_rows(5)), eval_data=str(path))
    data = prepare(recipe, chatml, 10**6, lambda _: None)
    assert "rows of data for evaluation" in printed(show(data, chatml), colour=False)
    assert summary(data)["evaluation_source"]["rows"] == 4


def test_rows_that_are_split_are_told_from_the_examples_made_of_them(write, recipe_for, chatml):
    rows = [{"instruction": "q", "input": "", "output": "x " * n} for n in (2, 100, 100)]
    recipe = recipe_for(write(rows), max_length=64, too_long="split")
    data = prepare(recipe, chatml, 10**6, lambda _: None)
    counts = data.train.store.counts
    assert counts.kept > 5
    text = " ".join(printed(show(data, chatml), colour=False).replace("│", " ").split())
    assert f"3 rows of data became {counts.kept} examples; uncut, the longest has {counts.longest} tokens" in text
    assert "2 longer than max_length, each split into several examples: " in text
