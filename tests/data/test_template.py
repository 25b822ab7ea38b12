"""The text a model sees is the template's own, and exactly the responses with their end tokens are trained."""

import pytest

from penstock.data.files import Row
from penstock.data.template import Template, pad_id, prompt_text
from penstock.errors import DataError, ModelError
from penstock.recipe import Recipe


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
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content | upper")
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
