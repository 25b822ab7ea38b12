"""A checkpoint as the SuperOffload example writes it: `python deepspeed_checkpoint.py MODEL DIRECTORY`.

One step of ZeRO-3 on the CPU, saved by DeepSpeed itself; then what its two converters make of it, and in `masters.pt`
the fp32 weights as they were. In a process of its own, since DeepSpeed keeps a process group for the rest of one.
"""

import os
import subprocess
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from transformers import AutoModelForCausalLM

from penstock.engine.deepspeed_start import without_shared_memory
from penstock.machine.ports import free_port


def main(source, directory):
    port = str(free_port())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    without_shared_memory(deepspeed)
    deepspeed.init_distributed("gloo", verbose=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    offload = {"device": "cpu", "pin_memory": False}
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 100_000, "offload_optimizer": offload},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3), config=config
    )
    ids = torch.arange(16)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(directory / "zero")
    masters = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    torch.save(masters, directory / "masters.pt")
    convert_zero_checkpoint_to_fp32_state_dict(directory / "zero", directory / "bin")
    tag = (directory / "zero" / "latest").read_text().strip()
    words = ["--input_folder", directory / "zero" / tag, "--output_folder", directory / "universal", "--no_strict"]
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
