"""The examples run as they are, and do what they say."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

import penstock
from penstock.recipe.presets import PRESETS

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = Path(penstock.__file__).parent / "demo" / "model"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ClippingAdamW(torch.optim.AdamW):
    """torch's own, with the clipping that the Trainer of the example leaves to the optimizer."""

    def __init__(self, model, lr, max_grad_norm, micro_batches=1):
        super().__init__(model.parameters(), lr=lr, weight_decay=0.01)
        self.max_grad_norm = max_grad_norm

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.max_grad_norm)
        return super().step(closure)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("trainer", 8), ("sft_trainer", 12)])
def test_a_trainer_with_our_optimizer_learns_as_with_torchs(name, steps, tmp_path, monkeypatch):
    example = load(name)
    ours = example.main(str(DEMO), str(tmp_path / "ours"))
    monkeypatch.setattr(penstock, "OffloadAdamW", ClippingAdamW)
    theirs = example.main(str(DEMO), str(tmp_path / "theirs"))
    assert len(ours) == steps
    assert min(ours) < 0.5 * ours[0]
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_there_is_a_launch_script_for_every_large_preset():
    found = {path.stem.removeprefix("finetune_") for path in EXAMPLES.glob("finetune_*.sh")}
    assert {name.rsplit("_", 1)[0] for name in found} == set(PRESETS) - {"demo", "smollm2-135m"}
    for path in EXAMPLES.glob("finetune_*.sh"):
        assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.stem)
def test_launch_scripts_are_bash(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["finetune_qwen3-14b_1gpu.sh"], "finetune_qwen3-14b_1gpu.sh superoffload|zerooffload [BATCH_SIZE]"),
        (["finetune_phi-4_1gpu.sh", "offload"], "finetune_phi-4_1gpu.sh superoffload|zerooffload [BATCH_SIZE]"),
        (["finetune.sh"], "finetune.sh PRESET|MODEL|RECIPE.yaml GPUS superoffload|zerooffload [BATCH_SIZE]"),
    ],
)
def test_a_launch_script_without_a_mode_says_what_it_wants(words, usage):
    result = subprocess.run(["bash", EXAMPLES / words[0], *words[1:]], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"usage: bash {usage}\n"
