"""Activations: counted here, saved by autograd there; and the three figures that were measured on the H200."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.engine.packed import PackedModel
from penstock.engine.trial import full_batch
from penstock.machine.known import MACHINES
from penstock.model.attention import VARLEN
from penstock.plan import memory
from penstock.plan.architecture import from_config
from penstock.plan.job import Job, Settings
from penstock.plan.memory import Work, disk, in_flight_bytes, peaks, recomputed_inputs, saved_in_layer
from penstock.plan.predict import predict
from penstock.recipe.presets import ARCHITECTURES
from penstock.recipe.recipe import Recipe

QWEN3_14B, LLAMA_8B = ARCHITECTURES["Qwen/Qwen3-14B"], ARCHITECTURES["meta-llama/Llama-3.1-8B"]
SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "pad_token_id": 0, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4,
    "moe_intermediate_size": 96, "attention_dropout": 0.0, "residual_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip


@contextmanager
def attention_apart(inside):
    """Keep a note of when attention runs: on a CPU it keeps other tensors than the flash kernels do."""
    before = ALL_ATTENTION_FUNCTIONS[VARLEN]

    def noted(*args, **kwargs):
        inside.append(True)
        try:
            return before(*args, **kwargs)
        finally:
            inside.pop()

    AttentionInterface.register(VARLEN, noted)
    yield
    AttentionInterface.register(VARLEN, before)


def saved_bytes(kind, layers, attention="varlen"):
    """Bytes of distinct storages that autograd keeps in a forward, without weights and what attention keeps."""
    config = AutoConfig.for_model(kind, **SHAPE | {"num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    packed = PackedModel(model, Recipe(attention=attention), lambda _: None)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, inside = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not inside:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with attention_apart(inside), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = packed.loss_sum(full_batch(2, 64, 64))
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "seed_oss", "qwen3_moe", "gpt_oss"])
@pytest.mark.slow
def test_a_layer_keeps_what_the_formula_says(kind):
    a = from_config({"model_type": kind, "num_hidden_layers": 3, "sliding_window": 128, **SHAPE}, kind)
    measured = saved_bytes(kind, 3) - saved_bytes(kind, 2)
    in_attention = 2 * 64 * (2 * (a.heads + 2 * a.kv_heads) * a.head_dim + 4 * a.heads)  # all but its output
    assert saved_in_layer(a, Work(2, 64, "none")) - in_attention == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
def test_eager_attention_keeps_its_probabilities():
    architecture = from_config({"model_type": "llama", "num_hidden_layers": 3, **SHAPE}, "llama")
    measured = saved_bytes("llama", 3, "eager") - saved_bytes("llama", 2, "eager")
    assert saved_in_layer(architecture, Work(2, 64, "none", "eager")) == pytest.approx(measured, rel=0.15)


def test_activations_measured_on_the_h200(monkeypatch):
    """benchmarks/results/2026-11-15-h200/rows.jsonl; the kept figure is the trial's. Chunks of logits were larger."""
    monkeypatch.setattr(memory, "LOGITS_BYTES", 2**30)
    large = peaks(QWEN3_14B, Work(4, 4096, recompute="full"))
    assert large.activation_bytes == pytest.approx(13.588e9, rel=0.02)
    assert large.kept_bytes == pytest.approx(33.6e9, rel=0.02)
    assert peaks(LLAMA_8B, Work(1, 4096, recompute="none")).activation_bytes == pytest.approx(31.334e9, rel=0.02)


@pytest.mark.parametrize(("word", "measured"), [("selected", 36.4e9), ("selected:14", 66.1e9)])
def test_activations_of_compiled_layers_measured_on_the_h200(monkeypatch, word, measured):
    """The trials of qwen3-14b in bench.log."""
    monkeypatch.setattr(memory, "LOGITS_BYTES", 2**30)
    work = Work(4, 4096, word, compiled=True)
    assert peaks(QWEN3_14B, work).activation_bytes == pytest.approx(measured, rel=0.02)


def test_a_long_row_of_compiled_layers_measured_on_the_h200():
    """The trial of llama-8b, 131,072 tokens: 2026-11-18-h200/long. Without the kernel's six tensors it is 113.0 GB."""
    found = peaks(LLAMA_8B, Work(1, 131_072, "full:16", compiled=True))
    assert found.activation_bytes == pytest.approx(119.5e9, rel=0.01)
    assert found.kept_bytes == pytest.approx(120.6e9, rel=0.01)


def test_compiled_layers_that_compute_more_again_have_more_there():
    entry = 2 * 4096 * LLAMA_8B.hidden
    more = {"none": 0, "selected": entry, "full": 2 * entry}
    assert recomputed_inputs(LLAMA_8B, Work(1, 4096, "full", compiled=True)) == more
    assert recomputed_inputs(LLAMA_8B, Work(1, 4096, "full")) == {"none": 0, "selected": 0, "full": entry}


def test_layers_that_keep_products_only_measured_on_the_h200():
    """`model/compiled.py`: six layers of qwen3-14b keep 10.29 GB more than their entries."""
    entry = 2 * 4 * 4096 * QWEN3_14B.hidden
    kept = saved_in_layer(QWEN3_14B, Work(4, 4096, recompute="none", compiled=True))
    assert kept == pytest.approx(10.29e9 / 6 + entry, rel=0.02)


def test_recompute_takes_less_and_rows_more():
    by_layers = [
        peaks(LLAMA_8B, Work(2, 4096, n)).activation_bytes for n in ("none", "selected:8", "selected", "full:8", "full")
    ]
    assert by_layers == sorted(by_layers, reverse=True)
    by_rows = [peaks(LLAMA_8B, Work(n, 4096, "selected:16")).activation_bytes for n in (1, 2, 4)]
    assert by_rows == sorted(by_rows)
    kept = peaks(LLAMA_8B, Work(4, 4096, "full"))
    assert kept.activation_bytes < kept.kept_bytes < kept.activation_bytes + 2 * LLAMA_8B.num_parameters()


def test_each_of_several_gpus_keeps_a_share_of_the_gradients_beside_whole_activations():
    one, four = (peaks(LLAMA_8B, Work(1, 4096, "full"), gpus) for gpus in (1, 4))
    head = 2 * LLAMA_8B.vocab * LLAMA_8B.hidden
    assert four.activation_bytes == one.activation_bytes + 2 * head, "it is gathered while the loss is computed"
    assert four.kept_bytes < one.kept_bytes
    assert four.kept_bytes > 2 * LLAMA_8B.num_parameters() / 4 + saved_in_layer(LLAMA_8B, Work(1, 4096, "none")) / 2


def test_two_ranks_of_eight_layers_of_llama_8b():
    """On the H200 (2026-11-17-h200/ranks) each took 18.66 GB, half of the state on its GPU."""
    job = Job(replace(LLAMA_8B, layers=8), 4, 4096, compiled=True)
    plan = predict(job, Settings("fp32", 1, "full"), MACHINES["h200"], 2)
    beside_state = plan.peak_bytes("gpu") - sum(b.num_bytes for b in plan.buffers if "state" in b.name)
    assert beside_state == pytest.approx(18.66e9 - 6.99e9, rel=0.01)


def test_disk_holds_checkpoints_and_the_model():
    found = disk(10**9, 10.0, 2, checkpoints=3)
    assert found.checkpoint_bytes == 12e9
    assert found.peak_bytes == 3 * 12e9 + 2e9
    assert disk(10**9, 10.0, 2, checkpoints=0).peak_bytes == 2e9


def test_casts_to_fp8_are_beside_what_a_layer_computes():
    a = ARCHITECTURES["meta-llama/Llama-3.1-8B"]
    for compiled, in_fp32 in ((True, 0), (False, 8)):
        works = (Work(1, 4096, "none", compiled=compiled, matmul=word) for word in ("bf16", "fp8"))
        bf16, fp8 = (in_flight_bytes(a, work) for work in works)
        assert fp8 - bf16 == 4096 * ((2 + in_fp32) * a.intermediate + a.hidden) + a.intermediate * a.hidden
    assert saved_in_layer(a, Work(1, 4096, "none", matmul="fp8")) == saved_in_layer(a, Work(1, 4096, "none"))
