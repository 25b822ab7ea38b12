"""Calls of tools and thoughts go through the template; what others say is never trained on, and nothing is lost."""

import json

import pytest

from penstock.data.files import Row
from penstock.data.messages import Call, Turn, tools_of, turn_of
from penstock.data.template import Template
from penstock.errors import DataError, ModelError
from penstock.recipe.recipe import Recipe

# Three families of templates. Tools in the system turn, calls as tagged JSON,
# , outputs in the user's turn; thoughts in and after the last question.
TAGGED = r"""
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call:
{%- for tool in tools %}

{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# One call a turn, as JSON; outputs are dumped as JSON under a role of their own; tools in the first question.
HEADED = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}}<|eom_id|>
{%- elif m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Calls have identifiers, which outputs must name; the tools stand before the last question.
BRACKETS = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == 0 %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if not call.id %}{{ raise_exception('a call needs an id') }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if not m.tool_call_id %}{{ raise_exception('an output needs the id of its call') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"""
TEMPLATES = {"tagged": TAGGED, "headed": HEADED, "brackets": BRACKETS}
TOOL = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "How is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"sky": "grey"}'},
        {"role": "assistant", "content": "Grey."},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "How is it in Oslo?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": '{"sky": "grey"}'},
        {"from": "gpt", "value": "Grey."},
    ],
    "system": "Be short.",
    "tools": json.dumps([TOOL]),
}


def render(tokenizer, fields, **changes):
    return Template(tokenizer, Recipe(**changes), "messages").render(Row(fields, "my.jsonl", 7))


def trained(example):
    return [example.text[a:b] for a, b in example.spans]


@pytest.fixture
def tagged(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = TEMPLATES["tagged"]
    return tokenizer


@pytest.fixture
def headed(make_tokenizer):
    tokenizer = make_tokenizer("llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    tokenizer.chat_template = TEMPLATES["headed"]
    return tokenizer


@pytest.fixture
def brackets(make_tokenizer):
    tokenizer = make_tokenizer(None, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATES["brackets"]
    return tokenizer


def messages_of(fields):
    """What transformers is given for the same conversation."""
    plain = json.loads(json.dumps(fields["messages"]))
    for message in plain:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


def test_openai_calls_are_written_by_the_template_and_trained_on(tagged):
    example = render(tagged, OPENAI)
    expected = tagged.apply_chat_template(messages_of(OPENAI), tools=OPENAI["tools"], tokenize=False)
    assert example.text == expected
    assert trained(example) == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nGrey.<|im_end|>",
    ]


def test_sharegpt_says_the_same(tagged):
    assert render(tagged, SHAREGPT) == render(tagged, OPENAI)


def test_a_template_with_headers_and_another_end_token_for_calls(headed):
    example = render(headed, OPENAI)
    assert trained(example) == ['{"name": "weather", "parameters": {"city": "Oslo"}}<|eom_id|>', "Grey.<|eot_id|>"]
    assert '"{\\"sky\\": \\"grey\\"}"<|eot_id|>' in example.text


def test_a_template_with_identifiers(brackets):
    fields = {**OPENAI, "messages": OPENAI["messages"][1:]}
    example = render(brackets, fields)
    call = '{"name": "weather", "arguments": {"city": "Oslo"}, "id": "call00001"}'
    assert trained(example) == [f"[TOOL_CALLS][{call}]</s>", " Grey.</s>"]
    assert example.text.startswith('<s>[AVAILABLE_TOOLS][{"type": "function"')
    with pytest.raises(DataError, match="a call needs an id") as caught:
        render(brackets, {**SHAREGPT, "system": ""})
    assert caught.value.where == "my.jsonl:7"


@pytest.mark.parametrize("kind", ["tagged", "headed"])
def test_several_questions_with_calls_between(kind, request):
    tokenizer = request.getfixturevalue(kind)
    turns = OPENAI["messages"]
    fields = {**OPENAI, "messages": [*turns, {"role": "user", "content": "And in Oslo?"}, *turns[2:]]}
    spans = trained(render(tokenizer, fields))
    assert len(spans) == 4
    assert all("Oslo" in span and "grey" not in span for span in spans[::2])
    assert [span.count("Grey.") for span in spans] == [0, 1, 0, 1]
    assert all(span.endswith(("<|im_end|>", "<|eot_id|>", "<|eom_id|>")) for span in spans)
    assert not any("How is it" in span or "Be short" in span or "And in" in span for span in spans)


def test_two_calls_and_their_two_outputs(tagged):
    turns = OPENAI["messages"]
    twice = [turns[0], turns[1], {**turns[2], "content": "Let me see.", "tool_calls": [CALL, CALL]}, turns[3], turns[3]]
    spans = trained(render(tagged, {**OPENAI, "messages": [*twice, turns[4]]}))
    assert spans[0].startswith("Let me see.\n<tool_call>")
    assert spans[0].count("Oslo") == 2
    assert spans[1] == "<think>\n\n</think>\n\nGrey.<|im_end|>"


def test_a_call_may_be_the_last_turn(tagged):
    spans = trained(render(tagged, {**OPENAI, "messages": OPENAI["messages"][:4]}))
    assert len(spans) == 1
    assert spans[0].endswith("</tool_call><|im_end|>")


def test_a_call_with_weight_zero_is_shown_and_not_trained(tagged):
    turns = OPENAI["messages"]
    example = render(tagged, {**OPENAI, "messages": [*turns[:2], {**turns[2], "weight": 0}, *turns[3:]]})
    assert trained(example) == ["<think>\n\n</think>\n\nGrey.<|im_end|>"]
    assert 'Oslo"}}\n</tool_call>' in example.text


def test_tools_without_a_call_are_shown(tagged):
    fields = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": [TOOL]}
    example = render(tagged, fields)
    assert '{"type": "function", "function": {"name": "weather"' in example.text
    assert trained(example) == ["<think>\n\n</think>\n\na<|im_end|>"]
    assert render(tagged, {**fields, "tools": [], "functions": [TOOL]}) == example


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (OPENAI, "leaves out calls of tools"),
        ({**OPENAI, "messages": [OPENAI["messages"][1], OPENAI["messages"][4]]}, "leaves out the tools"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "t"}]},
            "leaves out the thoughts",
        ),
    ],
)
def test_a_template_that_does_not_know_them_is_refused(chatml, fields, says):
    with pytest.raises(DataError, match=says) as caught:
        render(chatml, fields)
    assert caught.value.where == "my.jsonl:7"


def test_a_template_that_drops_outputs_is_refused(tagged):
    tagged.chat_template = tagged.chat_template.replace("<tool_response>\n{{ m.content }}", "<tool_response>\n")
    with pytest.raises(DataError, match="leaves out the output of a tool"):
        render(tagged, OPENAI)


def test_without_a_chat_template_they_are_refused(plain):
    for fields, says in (
        (OPENAI, "tool calls"),
        ({**SHAREGPT, "conversations": SHAREGPT["conversations"][::3]}, "tools"),
    ):
        with pytest.raises(DataError, match=f"the row has {says}"):
            render(plain, fields)


def test_an_end_token_against_the_template_is_refused(tagged):
    with pytest.raises(ModelError, match="ends a response with"):
        render(tagged, OPENAI, end_token="<|endoftext|>")


# --- thoughts ---------------------------------------------------------------------------------------------------------


def thoughts(*pairs):
    turns = []
    for i, (thought, answer) in enumerate(pairs):
        turns.append({"role": "user", "content": f"q{i}"})
        turns.append({"role": "assistant", "content": answer, "reasoning_content": thought})
    return {"messages": turns}


def test_thoughts_of_the_last_response_are_trained_and_earlier_ones_left_out(tagged):
    example = render(tagged, thoughts(("t0", "a0"), ("t1", "a1")))
    assert trained(example) == ["a0<|im_end|>", "<think>\nt1\n</think>\n\na1<|im_end|>"]
    assert "t0" not in example.text


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_other_names_of_thoughts(tagged, key):
    fields = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: "t"}]}
    assert trained(render(tagged, fields)) == ["<think>\nt\n</think>\n\na<|im_end|>"]


def test_thoughts_under_a_template_that_knows_them_only_in_the_content(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    assert trained(render(tokenizer, thoughts(("t0", "a0"), ("t1", "a1")))) == [
        "a0<|im_end|>",
        "<think>\nt1\n</think>\n\na1<|im_end|>",
    ]


# --- messages ---------------------------------------------------------------------------------------------------------


def turn(**item):
    return turn_of(item, "messages[2]", "my.jsonl:7")


def test_a_refusal_is_an_answer():
    assert turn(role="assistant", content=None, refusal="No.") == Turn("assistant", "No.")
    assert turn(role="assistant", refusal="No.") == Turn("assistant", "No.")
    assert turn(role="assistant", content=[{"type": "refusal", "refusal": "No."}]) == Turn("assistant", "No.")


def test_parts_of_a_content_follow_one_another():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turn(role="user", content=parts) == Turn("user", "ab")
    assert turn(role="assistant", content=[{"type": "thinking", "thinking": "t"}, *parts]).thought == "t"


def test_the_older_spelling_of_a_call():
    called = turn(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"})
    assert called.calls == (Call("f", {}),)
    listed = turn(**{"from": "function_call", "value": '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]'})
    assert listed.calls == (Call("f", {"a": 1}), Call("g", {}))


@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython"])
def test_every_spelling_of_an_output(role):
    assert turn(role=role, content="o", name="f") == Turn("tool", "o", name="f")


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("train", False), ("loss", False), ("loss_weight", 0.0)])
def test_a_response_that_is_not_to_be_trained_on(key, value):
    assert not turn(role="assistant", content="a", **{key: value}).trained
    assert turn(role="assistant", content="a", **{key: 1}).trained
    assert not turn(role="user", content="a", **{key: 0}).trained


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"role": "user", "content": "q", "train": True}, "messages[2] has the train True and is no response (user)"),
        ({"role": "assistant", "content": "a", "loss": 0.5}, "has the loss 0.5"),
        ({"role": "assistant", "content": "a", "train": "no"}, "has the train 'no'"),
        ({"role": "assistant", "content": "a", "train": True, "weight": 0}, "to be trained on and not to be"),
        ({"role": "assistant", "content": "a", "refusal": "b"}, "has content beside it"),
        ({"role": "assistant", "content": "a", "tool_calls": "f()"}, "tool_calls is text, not a list"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"type": "custom"}]}, "is of type 'custom'"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}, "tool_calls[0] has no name"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "arguments is not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, "'a' occurs twice"),
        ({"from": "function_call", "value": "f()"}, "messages[2].value is not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]}, "half of a surrogate"),
        ({"role": "tool", "content": "o", "tool_call_id": 3}, "tool_call_id is a number"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "a part of type 'image_url'"),
    ],
)
def test_faults_of_a_message(item, says):
    with pytest.raises(DataError) as caught:
        turn_of(item, "messages[2]", "my.jsonl:7")
    assert says in caught.value.what
    assert caught.value.where == "my.jsonl:7"


@pytest.mark.parametrize("tools", ["{", "3", [3], {"name": "f"}])
def test_tools_that_are_none(tools):
    with pytest.raises(DataError, match="column 'tools' is"):
        tools_of({"tools": tools}, "my.jsonl:7")
