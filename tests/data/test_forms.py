"""Every known form is read from a file of its own, and every key of every row is accounted for."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data.encoding import write_examples
from penstock.data.files import Row
from penstock.data.forms import PREFERENCE, Keys, detect_format, filled, rename, sort_keys
from penstock.data.messages import tools_of
from penstock.data.source import open_source
from penstock.data.store import notes, open_store
from penstock.data.turns import Dropped, refuse_placeholders, text_of, turns_of
from penstock.errors import DataError
from penstock.recipe.recipe import Recipe

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def quiet(_):
    pass


def opened(path, tokenizer, **fields):
    return open_store(open_source(str(path), "train", quiet), tokenizer, Recipe(**fields), len(tokenizer), quiet)


def spans(store, tokenizer, i=0):
    """The runs of trained text of an example."""
    ids, mask = store.example(i)
    text = "".join(tokenizer.decode([t]) if m else "\x00" for t, m in zip(ids.tolist(), mask.tolist(), strict=True))
    return [run for run in text.split("\x00") if run]


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TOOLS = json.dumps([{"name": "f", "parameters": {"type": "object", "properties": {}}}])
CALL = '{"name": "f", "arguments": {}}'
# Form in the table of docs/data.md: the row of a small file, the settings, and what must be trained on.
TABLE = {
    "Alpaca": (
        {"instruction": "q2", "input": "i", "output": "a2", "system": "s", "history": [["q1", "a1"]]},
        {},
        ["a1<|im_end|>", "a2<|im_end|>"],
    ),
    "dolly": ({"instruction": "q", "context": "c", "response": "a", "category": "x"}, {}, ["a<|im_end|>"]),
    "messages": (
        {"messages": [{"role": "system", "content": "s"}, *CHAT, *CHAT]},
        {},
        ["a<|im_end|>", "a<|im_end|>"],
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {},
        ["a<|im_end|>"],
    ),
    "with tools": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": CALL},
                {"from": "observation", "value": "o"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": TOOLS,
        },
        {},
        ["f({})<|im_end|>", "a<|im_end|>"],
    ),
    "prompt and completion": ({"prompt": "q", "completion": "a", "system": "s"}, {}, ["a<|im_end|>"]),
    "prompt and completion as messages": (
        {"prompt": [*CHAT, CHAT[0]], "completion": [{"role": "assistant", "content": "b"}]},
        {},
        ["b<|im_end|>"],
    ),
    "prompt and response": ({"prompt": "q", "response": "a"}, {}, ["a<|im_end|>"]),
    "question and answer": ({"question": "q", "answer": "a"}, {}, ["a<|im_end|>"]),
    "plain text": ({"text": "all of it"}, {}, ["l of it<|im_end|>"]),
    "any other": ({"asked": "q", "said": "a"}, {"columns": "asked=prompt,said=completion"}, ["a<|im_end|>"]),
}
WITH_TOOLS = (
    "{% for t in tools or [] %}<|im_start|>tools\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '(' + c.function.arguments | tojson + ')' }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    made = make_tokenizer("chatml")
    made.chat_template = WITH_TOOLS
    return made


def test_the_table_of_the_documentation_has_these_forms():
    rows = re.findall(r"^\| ([^|`]+?) \|", DOCS.read_text(encoding="utf-8"), flags=re.M)
    assert [row for row in rows if row not in ("form", "---")][: len(TABLE)] == list(TABLE)


@pytest.mark.parametrize("form", TABLE)
def test_what_is_trained_of_each_form(form, write, tokenizer):
    row, fields, expected = TABLE[form]
    store = opened(write([row]), tokenizer, **fields)
    assert spans(store, tokenizer) == expected
    text = tokenizer.decode(store.example(0)[0].tolist())
    said = json.dumps([value for column, value in row.items() if column != "category"])
    for word in re.findall(r'"([qaios]\d?)"', said):  # nothing that anyone said is missing
        assert re.search(rf"\b{word}\b", text), word


# --- what carries meaning ---------------------------------------------------------------------------------------------


def test_the_system_text_replaces_that_of_the_template(write, make_tokenizer):
    made = make_tokenizer("chatml")
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Bot.<|im_end|>\n{% endif %}"
    made.chat_template = default + made.chat_template
    for row in ({"instruction": "q", "output": "a"}, {"prompt": "q", "completion": "a"}, {"conversations": CHAT}):
        assert "You are Bot." in made.decode(opened(write([row]), made).example(0)[0].tolist())
        text = made.decode(opened(write([{**row, "system": "Be kind."}]), made).example(0)[0].tolist())
        assert "Be kind." in text
        assert "You are Bot." not in text


def test_two_system_texts_are_refused():
    messages = [{"role": "system", "content": "s"}, *CHAT]
    assert next(t.content for t in turns_of(Row({"messages": messages, "system": "s"}, "f", 1), "messages")) == "s"
    with pytest.raises(DataError, match="two system texts that differ"):
        turns_of(Row({"messages": messages, "system": "other"}, "f", 1), "messages")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": CHAT, "images": ["a.png"]}, "column 'images' holds images"),
        ({"messages": CHAT, "image": "a.png"}, "column 'image' holds images"),
        ({"conversations": CHAT, "videos": ["a.mp4"]}, "column 'videos' holds images"),
        ({"text": "t", "audios": ["a.wav"]}, "column 'audios' holds images"),
        ({"conversations": CHAT, "chosen": {"from": "gpt", "value": "a"}}, "the better answer of a pair"),
        ({"messages": CHAT, "chosen": None, "rejected": "b"}, "the worse answer of a pair"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "the better answer of a pair"),
        ({"prompt": "q", "completion": "a", "label": True}, "preference training (KTO)"),
        ({"prompt": "q", "completion": "a", "label": 0}, "preference training (KTO)"),
        ({"prompt": "q", "completion": "a", "label": "False"}, "preference training (KTO)"),
        ({"messages": CHAT, "kto_tag": False}, "preference training (KTO)"),
        ({"messages": CHAT, "chat_template_kwargs": {"x": 1}}, "changes what the chat template writes"),
        ({"messages": [{**CHAT[0], "mask": 1}, CHAT[1]]}, "messages[0].mask says which turns"),
        ({"messages": [{**CHAT[0], "images": ["a"]}, CHAT[1]]}, "messages[0].images holds images"),
        ({"messages": [{**CHAT[0], "tool_calls": [{}, 3]}, CHAT[1]]}, "stands in a message that is no response"),
        ({"messages": CHAT, "history": [["q", "a"]]}, "holds earlier turns"),
        ({"prompt": "q", "completion": "a", "input": "more"}, "for which this form has no place"),
        ({"question": "q", "answer": "a", "context": "more"}, "for which this form has no place"),
        ({"prompt": "q", "response": "a", "system_prompt": "s"}, "a system text under another name"),
        ({"messages": CHAT, "system_prompt": "s"}, "a system text under another name"),
        ({"instruction": "q", "input": "more", "context": "and more", "output": "a"}, "as another column does too"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_what_it_is(fields, says):
    row = Row(fields, "my.jsonl", 7)
    with pytest.raises(DataError) as caught:
        Keys(detect_format(row)).unused(row)
    assert says in caught.value.what
    assert caught.value.where == "my.jsonl:7"


@pytest.mark.parametrize("said", ["output", "response"])
@pytest.mark.parametrize("more", [{"input": "more"}, {"context": "more"}, {"input": "", "context": "more"}])
def test_alpacas_question_may_have_a_second_part_by_either_name(said, more):
    row = Row({"instruction": "q", said: "a", **more}, "f", 1)
    assert Keys("alpaca").unused(row) == ()
    assert turns_of(row, "alpaca")[0].input == "more"


def test_what_a_refused_column_is_to_be_called_is_said():
    row = Row({"question": "q", "answer": "a", "context": "more"}, "f", 1)
    with pytest.raises(DataError) as caught:
        Keys("prompt-completion").unused(row)
    assert "--columns question=instruction,answer=output,context=input" in caught.value.remedy
    named = rename(row, (("question", "instruction"), ("answer", "output"), ("context", "input")))
    assert detect_format(named) == "alpaca"
    assert turns_of(named, "alpaca")[0].input == "more"


def test_of_two_columns_with_messages_the_one_that_says_something_is_read():
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for fields, unused in (
        ({"messages": None, "conversations": talk}, ()),
        ({"messages": CHAT, "conversations": None}, ("conversations",)),
        ({"messages": CHAT, "conversations": talk}, ("conversations",)),
    ):
        row = Row(fields, "f", 1)
        assert [turn.role for turn in turns_of(row, "messages")] == ["user", "assistant"]
        assert Keys("messages").unused(row) == unused


def test_a_class_is_no_verdict_on_an_answer():
    assert Keys("text").unused(Row({"text": "t", "label": 1}, "f", 1)) == ("label",)
    assert Keys("prompt-completion").unused(Row({"prompt": "q", "completion": "a", "label": "geo"}, "f", 1)) == (
        "label",
    )


@pytest.mark.parametrize(
    "question", ["<image>What is this?", "What is this?\n<image>", "See:\n<image>\nWhat?", "<video>"]
)
def test_marks_for_images_are_refused(write, tokenizer, question):
    path = write([{"prompt": "q", "completion": "a"}, {"prompt": question, "completion": "a"}])
    with pytest.raises(DataError, match="the mark for something that is not text") as caught:
        opened(path, tokenizer)
    assert caught.value.where == f"{path}:2"
    assert opened(path, tokenizer, columns="images=").counts.kept == 2, "as text, if its owner says so"


@pytest.mark.parametrize("question", ["Use the <video> tag.", "<image>a.png</image>", "Is <audio>, or <video>, HTML?"])
def test_words_about_html_are_text(question):
    turns = turns_of(Row({"prompt": question, "completion": "<image>"}, "f", 1), "prompt-completion")
    refuse_placeholders(turns, "f:1")


def test_a_rows_weight(write, tokenizer):
    rows = [{"prompt": "q", "completion": "a", "weight": w} for w in (1, 0, None, 1.0, True)]
    store = opened(write(rows), tokenizer)
    assert (store.counts.kept, store.counts.dropped["weight 0"].count) == (4, 1)
    path = write([{"text": "t", "weight": 0.5}])
    with pytest.raises(DataError, match=r"the row has the weight 0\.5"):
        opened(path, tokenizer)
    assert opened(write("text,weight\na,0\nb,1\nc,\n", "w.csv"), tokenizer).counts.kept == 2


def test_a_response_without_weight_is_not_trained_even_with_its_prompt(write, tokenizer):
    row = {"messages": [CHAT[0], {**CHAT[1], "content": "bad", "weight": 0}, *CHAT]}
    ids, mask = opened(write([row]), tokenizer, train_on_prompt=True).example(0)
    assert "bad" not in tokenizer.decode(ids[mask == 1].tolist())
    assert tokenizer.decode(ids[mask == 1].tolist()).count("q<|im_end|>") == 2


# --- what is not used is listed ---------------------------------------------------------------------------------------


def test_what_is_not_used_is_listed_with_the_number_of_rows(write, tokenizer):
    message = {**CHAT[0], "id": 3}
    rows = [
        {"messages": CHAT, "source": "x"},
        {"messages": [message, CHAT[1]], "source": "y"},
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}], "source": "z", "images": []},
    ]
    store = opened(write(rows), tokenizer)
    assert notes(store)[-1] == "not used: source, messages[].id (in 1 row)"
    assert store.counts.unused["messages[].id"].places == ((0, 2),)


def test_renamed_columns(write, tokenizer):
    rows = [{"asked": "q", "said": "a", "prompt": "other"}]
    store = opened(write(rows), tokenizer, columns="asked=prompt,said=completion,prompt=")
    assert spans(store, tokenizer) == ["a<|im_end|>"]
    assert store.counts.unused == {}


def test_a_renamed_column_that_rows_may_do_without(write, tokenizer):
    """Rows in JSON leave out what they do not have; but a name that no row has is a mistake."""
    rows = [{"question": "q", "answer": "a"}, {"question": "q", "answer": "a", "context": "c"}]
    columns = "question=instruction,answer=output"
    store = opened(write(rows), tokenizer, columns=f"{columns},context=input")
    assert store.lengths[0] < store.lengths[1], "the second has a context"
    assert store.counts.unused == {}
    with pytest.raises(DataError, match="no row has a column 'kontext', which is to be renamed"):
        opened(write(rows), tokenizer, columns=f"{columns},context=,kontext=input")
    system = [{"prompt": "q", "completion": "a", "system_prompt": "s"}, {"prompt": "q", "completion": "a"}]
    assert opened(write(system), tokenizer, columns="system_prompt=system").counts.kept == 2


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("asked=prompt,answer=completion", "no column 'answer', which is to be 'completion'"),
        ("asked=prompt,said=prompting", "'prompting' is no column of any form"),
        ("asked=prompt,said=system", "two columns would be 'system'"),
    ],
)
def test_columns_that_cannot_be_renamed(write, tokenizer, columns, says):
    with pytest.raises(DataError, match=says):
        opened(write([{"asked": "q", "said": "a", "system": "s"}]), tokenizer, columns=columns)


# --- every key of every row -------------------------------------------------------------------------------------------

TEXT = st.text("abc <", max_size=6)
ANY = st.one_of(st.none(), TEXT, st.booleans(), st.integers(0, 2), st.lists(TEXT, max_size=2), st.just({}), st.just([]))
NAMES = st.sampled_from(
    ["system", "history", "tools", "functions", "weight", "images", "audios", "label", "mask", "chosen", "id", "name",
     "text", "input", "context", "response", "prompt", "messages", "conversations", "kto_tag", "other", ""]
)  # fmt: skip
KEYS = st.sampled_from(
    ["name", "tool_call_id", "tool_calls", "function_call", "refusal", "thinking", "reasoning", "weight", "train",
     "loss", "mask", "images", "from", "value", "id", "index", ""]
)  # fmt: skip
ROLE = st.sampled_from(["system", "user", "assistant", "tool"])
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.just("{}")}, optional={"x": ANY})},
        optional={"id": st.just("1"), "type": st.just("function"), "index": ANY},
    ),
    max_size=2,
)


@st.composite
def message(draw):
    extra = draw(st.dictionaries(KEYS, ANY, max_size=2))
    if draw(st.booleans()):
        extra["tool_calls"] = draw(CALLS)
    role, content = draw(ROLE), draw(TEXT)
    if draw(st.booleans()):
        return {**extra, "role": role, "content": content}
    return {"from": role, "value": content, **{k: v for k, v in extra.items() if k not in ("role", "from", "value")}}


@st.composite
def rows(draw):
    bases = [
        {"instruction": TEXT, "output": TEXT},
        {"instruction": TEXT, "response": TEXT},
        {"prompt": TEXT, "completion": TEXT},
        {"prompt": st.lists(message(), max_size=2), "completion": st.lists(message(), max_size=2)},
        {"question": TEXT, "answer": TEXT},
        {"text": TEXT},
        {"messages": st.lists(message(), max_size=3)},
        {"conversations": st.lists(message(), max_size=3)},
    ]
    base = draw(st.fixed_dictionaries(draw(st.sampled_from(bases))))
    return {**draw(st.dictionaries(NAMES, ANY, max_size=3)), **base}


def all_keys(row, form):
    """Every key of a row, found without the code that sorts them."""
    for column, value in row.fields.items():
        yield column, (column,)
        read = column in {"messages": ("messages", "conversations")}.get(form, ("prompt", "completion", "response"))
        if form in ("text", "alpaca") or not read or not isinstance(value, list):
            continue
        for i, item in enumerate(value):
            for key in item if isinstance(item, dict) else ():
                yield f"{column}[{i}].{key}", (column, i, key)
                calls = item[key] if key == "tool_calls" and isinstance(item[key], list) else []
                for k, call in enumerate(calls):
                    for name in call if isinstance(call, dict) else ():
                        yield f"{column}[{i}].tool_calls[{k}].{name}", (column, i, key, k, name)
                        inner = call[name] if name == "function" and isinstance(call[name], dict) else {}
                        for last in inner:
                            path = (column, i, key, k, name, last)
                            yield f"{column}[{i}].tool_calls[{k}].function.{last}", path


def outcome(row, form):
    """What a row becomes, or why it is refused."""
    try:
        Keys(form).unused(row)
        if form == "text":
            return text_of(row)
        return turns_of(row, form), tools_of(row.fields, row.where)
    except DataError as error:
        return str(error)


def changed(row, path, value):
    fields = json.loads(json.dumps(row.fields))
    at = fields
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return Row(fields, row.file, row.line)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows())
def test_every_key_is_used_refused_or_listed(fields):
    row = Row(fields, "my.jsonl", 7)
    form = detect_format(row)
    sorted_keys = list(sort_keys(row, form))
    verdicts = dict(sorted_keys)
    keys = dict(all_keys(row, form))
    assert len(verdicts) == len(sorted_keys), "a key has one verdict"
    assert verdicts.keys() <= keys.keys(), "and is a key of the row"
    whole = outcome(row, form)
    if "refused" in verdicts.values():
        assert isinstance(whole, str), "what is refused ends the row"
        return
    unread = {key for key in keys if key not in verdicts}
    listed = {key for key, verdict in verdicts.items() if verdict == "listed"}
    # Keys within what is itself not used, or not read as messages, go with it.
    assert all(any(key.startswith((f"{other}[", f"{other}.")) for other in verdicts) for key in unread)
    assert set(Keys(form).unused(row)) == {re.sub(r"\[\d+\]", "[]", key) for key in listed}
    if isinstance(whole, (str, Dropped)) or isinstance(whole[0], Dropped):
        return
    for key, verdict in verdicts.items():
        sentinel = 12345 if key not in PREFERENCE else True if verdict == "used" else "another class"
        after = outcome(changed(row, keys[key], sentinel), form)
        if verdict == "listed":
            assert after == whole, f"{key} is listed as not used, and changes the row"
        else:
            assert after != whole, f"{key} is called used, and changes nothing"


def test_what_says_nothing_is_not_filled():
    assert not any(filled(value) for value in (None, "", [], {}, [None], {"a": None}, [{"a": []}]))
    assert all(filled(value) for value in (0, False, " ", ["x"], {"a": 0}))


def test_rename_keeps_the_place():
    assert rename(Row({"a": 1}, "f", 3), (("a", "prompt"),)) == Row({"prompt": 1}, "f", 3)


def test_two_builds_give_the_same_counts(write, tokenizer, tmp_path):
    source = open_source(str(write([{"text": "t", "id": 1}] * 3)), "train", quiet)
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        written.append(write_examples(tmp_path / name, source, tokenizer, Recipe(), quiet))
    assert written[0] == written[1]
    assert written[0].counts.unused["id"].count == 3
