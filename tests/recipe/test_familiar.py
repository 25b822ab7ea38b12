"""Names that other programs have: each is answered with ours."""

import pytest

from penstock.command.cli import main
from penstock.errors import RecipeError
from penstock.recipe.familiar import FAMILIAR, translated
from penstock.recipe.file import find_recipe
from penstock.recipe.recipe import FIELDS, Recipe, with_values


def test_each_leads_to_a_field_that_exists_or_says_why_there_is_none():
    assert not set(FAMILIAR) & set(FIELDS), "our own name is no foreign one"
    for name, ours in FAMILIAR.items():
        assert ours.field in FIELDS if ours.field else ours.note, name


@pytest.mark.parametrize("name", [name for name, ours in FAMILIAR.items() if ours.value])
@pytest.mark.parametrize("value", [True, False])
def test_a_value_that_is_advised_is_one_that_is_taken(name, value):
    ours = FAMILIAR[name]
    also = {"eval_every": 1, "validation": 0.1} if name == "load_best_model_at_end" else {}
    if name.startswith("adam"):
        value = 0.95
    if (meant := ours.value(value)) is not None:
        with_values(Recipe(), {**also, ours.field: meant}, where="test")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("learning_rate: 2e-5\n", "Here: lr: 2e-5."),
        (
            "gradient_checkpointing: true\n",
            "Here: recompute: full (auto, the default, takes what is fastest and fits).",
        ),
        ("completion_only_loss: false\n", "Here: train_on_prompt: true."),
        ("num_train_epochs: 3\nlogging_steps: 10\n", "Here: epochs: 3; log_every: 10."),
        ("report_to: [wandb, mlflow]\n", "Here: track: wandb (tensorboard, wandb, trackio or several with commas)."),
        ("lora_r:\n", "Here: lora_r: leave it out: every parameter is trained, and there are no adapters."),
        ("lora_r: 16\n", "Here: lora_r: leave it out: every parameter is trained, and there are no adapters."),
        (
            "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n",
            "Here: batch_size: 16 for one GPU, the rows of a step on all GPUs: rows at once x accumulation steps x "
            "GPUs; micro_batch_size: 2.",
        ),
    ],
)
def test_a_key_is_answered_with_ours_and_its_value(text, answer, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        find_recipe(str(path))
    assert caught.value.remedy == answer


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--learning-rate", "2e-5"], "--learning-rate: unknown flag\n  Here: --lr 2e-5."),
        (["--learning_rate=2e-5"], "--learning-rate: unknown flag\n  Here: --lr 2e-5."),
        (["--bf16"], "Here: --dtype bf16 ("),
        (["--cutoff-len", "512", "--save_steps", "50"], "Here: --max-length 512; --save-every 50."),
        (["--adam-beta2", "0.95"], "Here: --betas 0.9 0.95."),
        (["--train_file", "my data.jsonl"], "Here: --data 'my data.jsonl'."),
        (["--load-best-model-at-end"], "Here: --keep-best (export"),
        (["--torch_compile", "False"], "Here: --no-compile."),
        (["--sample-packing", "True"], "Here: --packing."),
        (["--report_to", "none"], "Here: report_to: leave it out (tensorboard, wandb, trackio or"),
        (["--chat-template", "llama3"], "Here: --template auto (auto is the tokenizer's own if it has one)."),
        (["--lr_scheduler_type", "constant_with_warmup"], "Here: --schedule constant ("),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_flag_is_answered_with_ours_and_its_value(command, words, answer, capsys):
    assert main([command, "demo", *words]) == 2
    assert answer in capsys.readouterr().err


def test_several_are_answered_at_once():
    theirs = {"model_name_or_path": "x", "bf16": True, "stage": "sft"}
    said = translated(theirs, lambda field, value: f"{field}={value}")
    assert said == (
        "Here: model=x; dtype=bf16 (auto is bf16 on a GPU anyway); "
        "stage: leave it out: it is always supervised fine-tuning."
    )
