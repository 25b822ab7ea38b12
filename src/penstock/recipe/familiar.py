"""Settings as TRL, axolotl, LLaMA-Factory and DeepSpeed spell them, and what they are here.

Nobody's spelling is accepted beside ours: two names for a setting can contradict each other. But who writes one that is
known is told ours, with the value that it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.recipe.rules import TRACKERS

Value = Callable[[object], object]


@dataclass(frozen=True)
class Ours:
    """A field of the recipe, how a value of theirs becomes one of it, and what else there is to say."""

    field: str = ""
    """Empty: there is no such field."""
    value: Value | None = None
    """Where it gives None, the field is left out."""
    note: str = ""


def _same(**names: str) -> dict[str, Ours]:
    return {theirs: Ours(ours) for theirs, ours in names.items()}


def _yes(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "auto", "on", "")


def _trackers(value: object) -> str | None:
    """Those of theirs that are ours too; `none` of theirs is a word, and ours is to name none."""
    words = value if isinstance(value, list) else str(value).split(",")
    return ",".join(word for word in words if word in TRACKERS) or None


def _schedule(value: object) -> str:
    return next((ours for ours in ("linear", "constant") if str(value).startswith(ours)), "cosine")


NO_ADAPTERS = Ours(note="leave it out: every parameter is trained, and there are no adapters")
NO_QUANTIZATION = Ours(note="leave it out: full fine-tuning needs weights that are not quantized")
WHOLE_BATCH = "rows of a step on all GPUs: rows at once x accumulation steps x GPUs"

FAMILIAR: dict[str, Ours] = {
    **_same(
        learning_rate="lr", num_train_epochs="epochs", num_epochs="epochs", logging_steps="log_every",
        save_steps="save_every", eval_steps="eval_every", save_total_limit="keep", warmup_ratio="warmup",
        gradient_clipping="max_grad_norm", adam_epsilon="eps", max_seq_length="max_length", max_seq_len="max_length",
        cutoff_len="max_length", sequence_len="max_length", model_max_length="max_length",
        model_name_or_path="model", model_name="model", base_model="model", tokenizer_name="tokenizer",
        tokenizer_name_or_path="tokenizer", model_revision="revision", dataset="data", datasets="data",
        dataset_name="data", dataset_path="data", train_file="data", eval_dataset="eval_data", val_size="validation",
        val_set_size="validation", run_name="name", wandb_project="project",
        early_stopping_patience="patience", deepspeed="deepspeed_config",
        micro_batch_size_per_gpu="micro_batch_size", data_seed="seed",
    ),
    **{theirs: Ours(ours, _yes) for theirs, ours in {"train_on_inputs": "train_on_prompt", "sample_packing": "packing",
                                                     "torch_compile": "compile"}.items()},
    "report_to": Ours("track", _trackers, f"{', '.join(TRACKERS)} or several with commas"),
    "chat_template": Ours("template", lambda value: value if value == "alpaca" else "auto",
                          "auto is the tokenizer's own if it has one"),
    "per_device_train_batch_size": Ours("micro_batch_size", note=f"batch_size is the {WHOLE_BATCH}"),
    "train_micro_batch_size_per_gpu": Ours("micro_batch_size", note=f"batch_size is the {WHOLE_BATCH}"),
    "train_batch_size": Ours("batch_size", note=f"the {WHOLE_BATCH}"),
    "gradient_accumulation_steps": Ours(note=f"it follows from batch_size, the {WHOLE_BATCH}"),
    "gradient_checkpointing": Ours("recompute", lambda value: "full" if _yes(value) else "none",
                                   "auto, the default, takes what is fastest and fits"),
    "activation_checkpointing": Ours("recompute", lambda value: "full" if _yes(value) else "none"),
    "bf16": Ours("dtype", lambda value: "bf16" if _yes(value) else "fp32", "auto is bf16 on a GPU anyway"),
    "fp16": Ours("dtype", lambda _: "bf16", "fp16 is not offered; the master weights are fp32"),
    "fp8": Ours("matmul", lambda value: "fp8" if _yes(value) else "bf16"),
    "enable_fp8_training": Ours("matmul", lambda value: "fp8" if _yes(value) else "bf16"),
    "tf32": Ours(note="leave it out: products are bf16"),
    "torch_dtype": Ours("dtype", lambda value: "fp32" if "32" in str(value) else "bf16"),
    "warmup_steps": Ours("warmup", lambda _: 0.05, "a share of all steps, not their number"),
    "lr_scheduler_type": Ours("schedule", _schedule, "cosine, linear or constant"),
    "lr_scheduler": Ours("schedule", _schedule, "cosine, linear or constant"),
    "adam_beta1": Ours("betas", lambda value: [value, 0.999]),
    "adam_beta2": Ours("betas", lambda value: [0.9, value]),
    "attn_implementation": Ours("attention", lambda value: value if value in ("sdpa", "eager") else "auto"),
    "flash_attention": Ours("attention", lambda _: "auto", "attention never crosses examples, with any kernel"),
    "flash_attn": Ours("attention", lambda _: "auto", "attention never crosses examples, with any kernel"),
    "completion_only_loss": Ours("train_on_prompt", lambda value: not _yes(value)),
    "load_best_model_at_end": Ours("keep_best", lambda value: _yes(value), "export it from the path in the summary"),
    "optim": Ours(note="leave it out: AdamW is the only one; --states sets the format of its moments"),
    "optimizer": Ours(note="leave it out: AdamW is the only one; --states sets the format of its moments"),
    "resume_from_checkpoint": Ours(note="it is a flag: --resume, or --resume PATH"),
    "overwrite_output_dir": Ours(note="it is a flag: --overwrite"),
    "load_in_4bit": NO_QUANTIZATION, "load_in_8bit": NO_QUANTIZATION, "quantization_bit": NO_QUANTIZATION,
    "adapter": NO_ADAPTERS, "lora_r": NO_ADAPTERS, "lora_rank": NO_ADAPTERS, "lora_alpha": NO_ADAPTERS,
    "lora_dropout": NO_ADAPTERS, "lora_target": NO_ADAPTERS, "use_peft": NO_ADAPTERS, "peft_config": NO_ADAPTERS,
    "finetuning_type": Ours(note="leave it out: it is always full"),
    "stage": Ours(note="leave it out: it is always supervised fine-tuning"),
    "do_train": Ours(note="leave it out: `penstock train` does"),
    "use_liger_kernel": Ours(note="leave it out: the loss never holds all logits anyway"),
}  # fmt: skip
"""By their names."""


def translated(theirs: Mapping[str, object], spell: Callable[[str, object], str]) -> str:
    """What settings are here, in a sentence; `spell` writes a field and its value as the user did."""
    found: list[str] = []
    values = dict(theirs)
    rows = _number(values.get("per_device_train_batch_size") or values.get("train_micro_batch_size_per_gpu"))
    steps = _number(values.get("gradient_accumulation_steps"))
    if rows and steps:  # together they say what neither says alone
        found.append(f"{spell('batch_size', rows * steps)} for one GPU, the {WHOLE_BATCH}")
        found.append(spell("micro_batch_size", rows))
        for name in ("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            values.pop(name, None)
    for name, value in values.items():
        ours = FAMILIAR[name]
        meant = ours.value(value) if ours.value else value
        known = f"{name}: leave it out" if meant is None else spell(ours.field, meant)
        known = known if ours.field else ""
        note = f" ({ours.note})" if ours.note and known else ours.note
        found.append(f"{known}{note}" if known else f"{name}: {note}")
    return "Here: " + "; ".join(found) + "."


def _number(value: object) -> int:
    return int(str(value)) if str(value).isdigit() else 0
