"""The text a model sees is the template's own, and exactly the responses with their end tokens are trained."""

import pytest

from penstock.data.files import Row
from penstock.data.template import Template, pad_id, prompt_text
from penstock.data.turns import Dropped
from penstock.errors import DataError, ModelError
from penstock.recipe.recipe import Recipe


def messages(*contents, system=None):
    """Alternating user and assistant turns."""
    items = [{"role": "system", "content": system}] if system else []
    items += [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return Row({"messages": items}, "my.jsonl", 7)


def render(tokenizer, row, form="messages", **fields):
    return Template(tokenizer, Recipe(**fields), form).render(row)


def trained(example):
    return [example.text[a:b] for a, b in example.spans]


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chatml_trains_responses_and_their_end_token_but_not_the_line_break_after(chatml):
    row = messages("q1", "a1", "q2", "a2", system="s")
    example = render(chatml, row)
    assert example.text == chatml.apply_chat_template(row.fields["messages"], tokenize=False)
    assert trained(example) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_llama3_trims_contents(make_tokenizer):
    tokenizer = make_tokenizer("llama3")
    example = render(tokenizer, messages("  q1 ", "\n a1 \n", "q2", "a2"))
    assert trained(example) == ["a1<|eot_id|>", "a2<|eot_id|>"]
    assert example.text.startswith("<|begin_of_text|><|start_header_id|>user")


def test_qwen3_trains_the_empty_think_block_that_it_must_produce(make_tokenizer):
    example = render(make_tokenizer("qwen3"), messages("q1", "a1", "q2", "a2"))
    assert trained(example) == ["a1<|im_end|>", "<think>\n\n</think>\n\na2<|im_end|>"]


def test_qwen3_with_thoughts_in_the_content(make_tokenizer):
    example = render(
        make_tokenizer("qwen3"), messages("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
    )
    assert trained(example) == ["a1<|im_end|>", "<think>\nt2\n</think>\n\na2<|im_end|>"]
    assert "t1" not in example.text


def test_harmony_trains_the_channel_and_each_turns_own_end_token(make_tokenizer):
    example = render(make_tokenizer("harmony"), messages("q1", "a1", "q2", "a2"))
    assert trained(example) == ["<|channel|>final<|message|>a1<|end|>", "<|channel|>final<|message|>a2<|return|>"]


@pytest.mark.parametrize("content", ["a", "final", "channel", "assistant", "message", "<|message|>", "end"])
@pytest.mark.parametrize("kind", ["harmony", "chatml", "qwen3", "llama3"])
def test_a_response_that_also_occurs_in_the_markup(make_tokenizer, kind, content):
    example = render(make_tokenizer(kind), messages(content, content, content, content))
    ends = {"harmony": ("<|end|>", "<|return|>"), "llama3": ("<|eot_id|>",) * 2}.get(kind, ("<|im_end|>",) * 2)
    for span, end in zip(trained(example), ends, strict=True):
        assert span.endswith(content + end)
        assert span.count(end) == 1


def test_a_trimmed_response_that_also_occurs_in_the_markup(make_tokenizer):
    tokenizer = make_tokenizer("harmony")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content | trim")
    example = render(tokenizer, messages("q", " final\n"))
    assert trained(example) == ["<|channel|>final<|message|>final<|return|>"]


def test_a_template_without_end_token_gets_one(make_tokenizer):
    tokenizer = make_tokenizer("no-end")
    example = render(tokenizer, messages("q1", "a1", "q2", "a2"))
    assert example.text == "user: q1\nassistant: a1\nuser: q2\nassistant: a2</s>"
    assert trained(example) == ["a1", "a2</s>"]


def test_a_template_that_looks_into_contents_is_searched(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if '/no_think' in messages[0].content %}{{ 'quick ' }}{% endif %}" + tokenizer.chat_template
    )
    assert trained(render(tokenizer, messages("/no_think q", "a1", "q", "a2"))) == ["a1<|im_end|>", "a2<|im_end|>"]
    assert trained(render(tokenizer, messages("q", "a1"))) == ["a1<|im_end|>"]


def test_a_template_that_asks_something_of_the_contents(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    check = "{% for m in messages if '!' not in m.content %}{{ raise_exception('louder') }}{% endfor %}"
    tokenizer.chat_template = check + tokenizer.chat_template
    assert trained(render(tokenizer, messages("q!", "a!"))) == ["a!<|im_end|>"]
    with pytest.raises(DataError, match="louder"):
        render(tokenizer, messages("q!", "a"))


def test_a_template_that_changes_the_response_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "(m.content | replace('answer', 'ANSWER'))")
    with pytest.raises(DataError, match="beyond recognition") as caught:
        render(tokenizer, messages("q", "answer"))
    assert caught.value.where == "my.jsonl:7"


@pytest.mark.parametrize("row", [messages("q", "a", system="s"), messages("q", "a", "b", "c", system="s")])
def test_the_templates_own_complaint_is_passed_on(make_tokenizer, row):
    with pytest.raises(DataError, match="roles must alternate") as caught:
        render(make_tokenizer("strict"), row)
    assert caught.value.where == "my.jsonl:7"
    # This template has no prompt of its own for the response, so the model must write the header itself.
    assert trained(render(make_tokenizer("strict"), messages("q", "a"))) == ["[assistant]a</s>"]


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Writes the system turn only where the last turn is the user's, so that no prompt is how a whole row begins."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}{% if '</think>' in c %}"
    "{% set t = c.split('</think>')[0].split('<think>')[-1] | trim %}{% set c = c.split('</think>')[-1] | trim %}"
    "{% if loop.last %}{{ '<think>\n' + t + '\n</think>\n\n' }}{% endif %}{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Always thinks: its prompt opens a thought, and those of earlier turns are left out."""


def test_a_question_that_holds_the_answer_is_not_taken_for_it(make_tokenizer):
    tokenizer = make_tokenizer(None, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = MISTRAL
    for question in ("Is it yes or no?", "yes yes", "q"):
        assert trained(render(tokenizer, messages(question, "yes"))) == [" yes</s>"]
    tokenizer.chat_template = MISTRAL.replace("loop.last and ", "loop.last and messages[1].role == 'user' and ")
    row = messages("Is it yes or no?", "yes", system="Be short.")
    with pytest.raises(DataError, match=r"leaves out or changes turn 1 \(system\)") as caught:
        render(tokenizer, row)
    assert caught.value.where == "my.jsonl:7"


def test_thoughts_that_hold_the_answer(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = THINKING
    row = messages("Yes or no: is 7 prime?", "<think>So Yes.</think>Yes", "Yes?", "<think>Yes, Yes.</think> Yes \n")
    assert trained(render(tokenizer, row)) == ["Yes<|im_end|>", "Yes, Yes.\n</think>\n\nYes<|im_end|>"]
    special = make_tokenizer("chatml")
    special.chat_template = THINKING.replace("assistant\n<think>\n{% endif", "assistant\n{% endif")
    special.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    last = trained(render(special, messages("Is 7 prime?", "<think>so Yes.</think>Yes")))
    assert last == ["<think>\nso Yes.\n</think>\n\nYes<|im_end|>"]


def test_thoughts_of_the_last_response_are_not_lost(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(DataError, match="leaves out the thoughts of the last response"):
        render(tokenizer, messages("q", "<think>a long one</think>a"))
    assert trained(render(tokenizer, messages("q", "<think>t</think>a", "q", "b"))) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_turn_that_is_closed_by_two_tokens_is_trained_to_the_one_that_stops(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|done|><|im_end|>")
    assert trained(render(tokenizer, messages("q", "a"))) == ["a<|done|><|im_end|>"]


def test_a_response_with_weight_zero_is_shown_and_not_trained(chatml):
    row = messages("q1", "bad", "q2", "good")
    row.fields["messages"][1]["weight"] = 0
    example = render(chatml, row)
    assert trained(example) == ["good<|im_end|>"]
    assert "bad" in example.text
    row.fields["messages"][3]["weight"] = 0
    assert render(chatml, row) == Dropped("no response with a weight")
    row.fields["messages"][3]["weight"] = 0.5
    with pytest.raises(DataError, match=r"has the weight 0\.5"):
        render(chatml, row)


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(chatml, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + tokenizer.chat_template
    assert render(tokenizer, messages("q", "a")).text.startswith("01 Jan 2026\n")


def test_an_end_token_that_is_there_is_not_doubled(plain):
    assert trained(render(plain, Row({"text": "Hello.</s>"}, "my.jsonl", 1), "text")) == ["Hello.</s>"]
    row = Row({"prompt": "q", "completion": "a</s>"}, "my.jsonl", 1)
    assert trained(render(plain, row, "prompt-completion")) == ["a</s>"]


def test_alpaca_rows_under_a_chat_template(chatml):
    row = Row({"instruction": "Add.", "input": "1, 2", "output": "3"}, "my.jsonl", 1)
    example = render(chatml, row, "alpaca")
    assert example.text == "<|im_start|>user\nAdd.\n\n1, 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    assert trained(example) == ["3<|im_end|>"]


def test_templates_run_in_a_sandbox(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(DataError, match="unsafe"):
        render(tokenizer, messages("q", "a"))


@pytest.mark.parametrize("kind", ["chatml", "llama3", "qwen3", "harmony"])
def test_every_row_is_what_transformers_writes(make_tokenizer, kind):
    """The first goes through transformers and the others to the compiled template."""
    tokenizer = make_tokenizer(kind)
    template = Template(tokenizer, Recipe(), "messages")
    for i in range(4):
        row = messages(f"q{i}", "a1", "q2", f"<think>t</think>a{i}", system="s" if i % 2 else None)
        assert template.render(row).text == tokenizer.apply_chat_template(row.fields["messages"], tokenize=False)


def test_a_tokenizer_with_a_way_of_its_own_is_asked(make_tokenizer):
    tokenizer = make_tokenizer("chatml")

    class Own(type(tokenizer)):
        def apply_chat_template(self, conversation, **options):
            return "!" + super().apply_chat_template(conversation, **options)

    tokenizer.__class__ = Own
    assert trained(render(tokenizer, messages("q", "a"))) == ["a<|im_end|>"]
    assert render(tokenizer, messages("q", "a")).text.startswith("!<|im_start|>")


# --- Alpaca, none, text -----------------------------------------------------------------------------------------------


def test_auto_is_chat_if_there_is_a_template_else_alpaca(chatml, plain):
    assert Template(chatml, Recipe(), "messages").kind == "chat"
    assert Template(plain, Recipe(), "messages").kind == "alpaca"
    assert Template(chatml, Recipe(template="alpaca"), "messages").kind == "alpaca"
    with pytest.raises(ModelError, match="no chat template"):
        Template(plain, Recipe(template="chat"), "messages")


def test_alpaca_template(plain):
    row = Row({"instruction": "Add.", "input": "1, 2", "output": "3"}, "my.jsonl", 1)
    example = render(plain, row, "alpaca")
    assert example.text == "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n3</s>"
    assert trained(example) == ["3</s>"]
    row.fields["input"] = ""
    assert render(plain, row, "alpaca").text == "### Instruction:\nAdd.\n\n### Response:\n3</s>"


def test_alpaca_template_with_several_turns(plain):
    example = render(plain, messages("q1", "a1", "q2", "a2", system="Be brief."))
    assert example.text == (
        "Be brief.\n\n### Instruction:\nq1\n\n### Response:\na1</s>\n\n### Instruction:\nq2\n\n### Response:\na2</s>"
    )
    assert trained(example) == ["a1</s>", "a2</s>"]


def test_none_template_is_raw(plain):
    row = Row({"prompt": "2 + 2 = ", "completion": "4"}, "my.jsonl", 1)
    example = render(plain, row, "prompt-completion", template="none")
    assert (example.text, trained(example)) == ("2 + 2 = 4</s>", ["4</s>"])


def test_plain_text_is_trained_as_a_whole(plain, chatml):
    row = Row({"text": "Once upon"}, "my.jsonl", 1)
    example = render(plain, row, "text")
    assert (example.text, trained(example)) == ("Once upon</s>", ["Once upon</s>"])
    assert render(chatml, row, "text").text == "Once upon<|im_end|>", "plain text has no turns for a chat template"


def test_bos_is_put_first_where_the_tokenizer_does_so(make_tokenizer):
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = make_tokenizer(None, adds_bos=True, **named)
    example = render(tokenizer, messages("q", "a"))
    assert example.text.startswith("<s>### Instruction:")
    assert trained(example) == ["a</s>"]
    text = render(tokenizer, Row({"text": "t"}, "f", 1), "text")
    assert (text.text, trained(text)) == ("<s>t</s>", ["t</s>"])
    assert render(tokenizer, Row({"text": "<s>t"}, "f", 1), "text").text == "<s>t</s>"
    assert render(make_tokenizer(None, **named), messages("q", "a")).text.startswith("### Instruction:")


# --- end token and padding --------------------------------------------------------------------------------------------


def test_end_token_of_the_recipe(make_tokenizer):
    tokenizer = make_tokenizer(None, eos_token="</s>", unk_token="<|stop|>")
    assert trained(render(tokenizer, messages("q", "a"), end_token="<|stop|>")) == ["a<|stop|>"]


def test_no_end_token_is_an_error_where_one_is_needed(make_tokenizer):
    tokenizer = make_tokenizer(None, pad_token="<pad>")
    with pytest.raises(ModelError, match="no end token") as caught:
        render(tokenizer, messages("q", "a"))
    assert "--end-token" in caught.value.remedy
    assert trained(render(tokenizer, messages("q", "a"), end_token="<pad>")) == ["a<pad>"]


def test_a_chat_template_with_its_own_end_token_needs_no_eos(make_tokenizer):
    tokenizer = make_tokenizer("chatml", pad_token="<|endoftext|>")
    assert tokenizer.eos_token is None
    assert trained(render(tokenizer, messages("q", "a"))) == ["a<|im_end|>"]


def test_an_end_token_that_is_no_token_is_refused(plain):
    with pytest.raises(ModelError, match="not one of the tokenizer's special tokens") as caught:
        render(plain, messages("q", "a"), end_token="STOP")
    assert "</s>" in caught.value.remedy


def test_an_end_token_against_the_chat_template_is_refused(chatml):
    with pytest.raises(ModelError, match=r"ends a response with '<.im_end.>'"):
        render(chatml, messages("q", "a"), end_token="<|endoftext|>")
    assert trained(render(chatml, messages("q", "a"), end_token="<|im_end|>")) == ["a<|im_end|>"]


def test_padding_rule(make_tokenizer):
    padded = make_tokenizer("chatml")
    assert pad_id(padded) == padded.convert_tokens_to_ids("<|endoftext|>")
    with_end = make_tokenizer("qwen3")
    assert pad_id(with_end) == with_end.eos_token_id
    assert pad_id(make_tokenizer(None, unk_token="<unk>")) == 0


# --- the prompt of inference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chatml", "llama3", "qwen3", "harmony", "no-end", None])
@pytest.mark.parametrize("template", ["auto", "alpaca", "none"])
def test_a_prompt_is_how_the_training_text_begins(make_tokenizer, kind, template):
    tokenizer, recipe = make_tokenizer(kind), Recipe(template=template)
    example = render(tokenizer, messages("What?", "That."), template=template)
    prompt = prompt_text(tokenizer, recipe, "What?")
    assert example.text[: example.spans[0][0]] == prompt


def test_a_prompt_for_plain_text_is_raw(make_tokenizer):
    tokenizer = make_tokenizer(None, adds_bos=True, bos_token="<s>", eos_token="</s>")
    assert prompt_text(tokenizer, Recipe(data_format="text"), "Once") == "<s>Once"
    assert prompt_text(tokenizer, Recipe(), "Once") == "<s>### Instruction:\nOnce\n\n### Response:\n"


def test_several_chat_templates_without_a_default_are_refused(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = {"short": "{{ messages }}", "long": "{{ messages }}"}
    with pytest.raises(ModelError, match="which chat template is meant cannot be told"):
        render(tokenizer, messages("q", "a"))
