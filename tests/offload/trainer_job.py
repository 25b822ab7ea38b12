"""transformers' Trainer with our optimizer, on this rank or alone: prints the losses that it logged.

python trainer_job.py MODEL OUTPUT_DIR IN_BACKWARD; torchrun starts it on several ranks.
"""

import json
import os
import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from penstock import OffloadAdamW

ROWS_IN_STEP, MICRO_BATCHES = 8, 2
TEXTS = [f"The capital of country number {i} is city number {i * i}." for i in range(32)]


def main(directory, output, in_backward):
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    clip = 0.0 if in_backward else 1.0
    optimizer = OffloadAdamW(model, lr=1e-3, max_grad_norm=clip, homes="host", micro_batches=MICRO_BATCHES)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            max_steps=6,
            per_device_train_batch_size=ROWS_IN_STEP // MICRO_BATCHES // ranks,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_grad_norm=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
        ),
        train_dataset=[{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    optimizer.close()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    digest = float(sum(p.detach().double().square().sum() for p in model.parameters()))
    result = {"losses": losses, "weights": digest, "wrapped": type(trainer.model_wrapped).__name__}
    with open(f"{output}/result-{os.environ.get('RANK', 0)}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "True")
