"""OffloadAdamW in a transformers.Trainer: nothing changes but `optimizers=(optimizer, schedule)`.

    python examples/trainer.py [MODEL] [OUTPUT_DIR]

Without arguments it fine-tunes the demo model that comes with Penstock. The optimizer clips, so the Trainer must not:
`max_grad_norm=0`. With gradient accumulation, tell the optimizer how many micro-batches there are.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

import penstock

MICRO_BATCHES, EPOCHS = 2, 2
TEXTS = [f"The capital of country number {i} is city number {i}." for i in range(32)]


def main(model_dir: str, output_dir: str) -> list[float]:
    """Train, and return the losses that the Trainer logged."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    optimizer = penstock.OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, micro_batches=MICRO_BATCHES)
    num_steps = EPOCHS * len(rows) // (4 * MICRO_BATCHES)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output_dir,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_grad_norm=0,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, 2, num_steps)),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    demo = str(Path(penstock.__file__).parent / "demo" / "model")
    model_dir, output_dir = (sys.argv[1:] + [demo, "trainer_output"][len(sys.argv) - 1 :])[:2]
    losses = main(model_dir, output_dir)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
