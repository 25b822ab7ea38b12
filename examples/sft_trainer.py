"""OffloadAdamW in TRL's SFTTrainer: as with transformers.Trainer, only `optimizers` is new.

    pip install trl
    python examples/sft_trainer.py [MODEL] [OUTPUT_DIR]

Without arguments it fine-tunes the demo model that comes with Penstock, on its own examples.
"""

import sys
from pathlib import Path
from statistics import fmean

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from trl import SFTConfig, SFTTrainer

import penstock

DEMO = Path(penstock.__file__).parent / "demo"
NUM_STEPS = 12


def main(model_dir: str, output_dir: str) -> list[float]:
    """Train, and return the losses that the trainer logged."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = load_dataset("json", data_files=str(DEMO / "examples.jsonl"), split="train")
    rows = rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()}],
            "completion": [{"role": "assistant", "content": row["output"]}],
        },
        remove_columns=rows.column_names,
    )
    optimizer = penstock.OffloadAdamW(model, lr=2e-3, max_grad_norm=1.0)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=output_dir,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=8,
            max_length=128,
            max_grad_norm=0,  # the optimizer clips
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, 2, NUM_STEPS)),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    model_dir, output_dir = (sys.argv[1:] + [str(DEMO / "model"), "sft_output"][len(sys.argv) - 1 :])[:2]
    losses = main(model_dir, output_dir)
    # One step sees eight examples, so that its loss says little; three of them say more.
    print(f"loss {fmean(losses[:3]):.3f} in the first three steps, {fmean(losses[-3:]):.3f} in the last three")
