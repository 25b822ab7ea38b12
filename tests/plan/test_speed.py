"""Seconds against the floors that were measured on the H200, and what must hold on any machine."""

from dataclasses import replace

import pytest

from penstock.machine.known import H200, MACHINES
from penstock.plan import speed
from penstock.plan.memory import Work
from penstock.plan.speed import arithmetic, exchange_seconds, model_flops, update_seconds
from penstock.recipe.presets import ARCHITECTURES, PRESETS

QWEN3_14B, LLAMA_8B = ARCHITECTURES["Qwen/Qwen3-14B"], ARCHITECTURES["meta-llama/Llama-3.1-8B"]
PHI_4 = ARCHITECTURES[PRESETS["phi-4"].model]


@pytest.mark.parametrize(
    ("architecture", "work", "times", "floor_s"),
    [(LLAMA_8B, Work(1, 4096, "none"), 4, 1.7096), (QWEN3_14B, Work(4, 4096, "full"), 1, 3.8688)],
)
def test_floors_of_the_h200(monkeypatch, architecture, work, times, floor_s):
    """benchmarks/results/2026-11-15-h200/rows.jsonl, rows of the floor; attention was flash attention's then."""
    monkeypatch.setattr(speed, "ROWS_EFFICIENCY", speed.FLASH_EFFICIENCY)
    assert times * arithmetic(architecture, work, H200).total_s == pytest.approx(floor_s, rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "work", "times", "floor_s"),
    [
        (LLAMA_8B, Work(1, 4096, "none", compiled=True), 4, 1.394),
        (QWEN3_14B, Work(4, 4096, "selected:14", compiled=True), 1, 2.560),
        (QWEN3_14B, Work(4, 4096, "selected", compiled=True), 1, 2.787),
        (QWEN3_14B, Work(4, 4096, "full:16", compiled=True), 1, 2.908),
        (PHI_4, Work(4, 4096, "selected:14", compiled=True), 1, 2.599),
        (PHI_4, Work(4, 4096, "selected", compiled=True), 1, 2.834),
    ],
)
def test_floors_of_the_h200_compiled(architecture, work, times, floor_s):
    """The same file."""
    assert times * arithmetic(architecture, work, H200).total_s == pytest.approx(floor_s, rel=0.05)


def test_forward_and_backward_apart(monkeypatch):
    """The trial's own figures: benchmarks/results/2026-11-15-h200/second/table.txt."""
    monkeypatch.setattr(speed, "ROWS_EFFICIENCY", speed.FLASH_EFFICIENCY)
    large = arithmetic(QWEN3_14B, Work(4, 4096, "full"), H200)
    assert large.forward_s == pytest.approx(1.087, rel=0.07)
    assert large.backward_s + large.recompute_s == pytest.approx(2.711, rel=0.07)


def test_a_document_that_nearly_fills_its_row_is_attended_to_as_fast_as_one_that_does():
    whole, most, short = (
        arithmetic(LLAMA_8B, Work(1, 393_216, "full", attended=attended), H200).total_s
        for attended in (0.0, 391_500**2 / 2 / 393_216, 4096 / 2)
    )
    assert 0.98 * whole < most < whole
    assert short < 0.3 * whole


def test_short_examples_take_the_kernel_for_segments():
    """In rows of 8,192 tokens two examples are a little slower a token than one of half the length a row."""
    apart = arithmetic(LLAMA_8B, Work(2, 4096, "full"), H200).total_s
    packed = arithmetic(LLAMA_8B, Work(1, 8192, "full", attended=2048), H200).total_s
    assert apart < packed < 1.2 * apart


def test_an_update_of_resident_state():
    """0.090 s for llama-8b, all state on the GPU."""
    assert update_seconds(8.03e9, 10, 2, H200) == pytest.approx(0.090, rel=0.05)


def test_model_flops_are_those_of_the_bench():
    assert model_flops(LLAMA_8B, 4, 4096) / 1.709592529296875 / 1e12 == pytest.approx(493.28551498152916, rel=1e-3)
    assert model_flops(QWEN3_14B, 4, 4096) / 3.868847900390625 / 1e12 == pytest.approx(398.11296853887876, rel=1e-3)


def test_recompute_costs_a_forward_of_its_layers():
    words = ("none", "selected:16", "selected", "full:16", "full")
    none, half, selected, mixed, full = (arithmetic(LLAMA_8B, Work(1, 4096, word), H200) for word in words)
    assert none.recompute_s == 0
    assert selected.recompute_s == pytest.approx(2 * half.recompute_s)
    assert mixed.recompute_s == pytest.approx((selected.recompute_s + full.recompute_s) / 2)
    assert full.recompute_s < full.forward_s
    assert full.forward_s == none.forward_s


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_faster_machine_is_faster(name):
    work = Work(1, 4096, "selected")
    slow = replace(H200, matrix_flops_per_s=H200.matrix_flops_per_s / 2)
    assert arithmetic(ARCHITECTURES[name], work, slow).total_s > arithmetic(ARCHITECTURES[name], work, H200).total_s


def test_exchange_grows_with_gpus():
    two, four = (exchange_seconds(10**10, 2, n, MACHINES["gh200"]) for n in (2, 4))
    assert 0 < two < four


def test_fp8_products_of_llama_8b_on_the_h200():
    """Forward and backward, compiled, nothing recomputed, four rows at once, on an instance whose products of fp8
    numbers reached 1,497 TFLOP/s where this one is said to reach 1,531 (2026-11-17-h200/fp8)."""
    work = Work(4, 4096, "none", compiled=True, matmul="fp8")
    assert arithmetic(LLAMA_8B, work, H200).total_s == pytest.approx(0.986 * 1497 / 1531, rel=0.03)


@pytest.mark.parametrize(("matmul", "measured_s", "within"), [("bf16", 1.558, 0.05), ("fp8", 1.238, 0.12)])
def test_a_step_of_one_row_at_a_time_has_sums(matmul, measured_s, within):
    """Of llama-8b, 4 x 4096, the update counted in (the same file)."""
    work = Work(4, 4096, "none", compiled=True, matmul=matmul, passes=4)
    by_rows, at_once = (arithmetic(LLAMA_8B, w, H200).total_s for w in (work, replace(work, passes=1)))
    assert by_rows > at_once + 0.04
    assert by_rows + update_seconds(8.03e9, 10, 2, H200) == pytest.approx(measured_s, rel=within)


def test_weights_are_cast_once_a_micro_batch():
    works = [Work(4, 4096, "none", matmul="fp8", passes=n, sum_bytes=2) for n in (1, 2, 4)]
    by_passes = [arithmetic(LLAMA_8B, work, H200).total_s for work in works]
    assert by_passes[2] - by_passes[1] == pytest.approx(2 * (by_passes[1] - by_passes[0]))
    assert by_passes[0] < by_passes[1]


def test_experts_gain_nothing_by_fp8():
    experts = ARCHITECTURES[PRESETS["qwen3-30b-a3b"].model]
    by_word = [arithmetic(experts, Work(4, 4096, "none", matmul=word), H200).total_s for word in ("bf16", "fp8")]
    assert 0.9 < by_word[1] / by_word[0] < 1


def test_recompute_is_in_fp8_too():
    by_word = [arithmetic(LLAMA_8B, Work(1, 4096, "full", compiled=True, matmul=w), H200) for w in ("bf16", "fp8")]
    assert by_word[1].recompute_s < 0.9 * by_word[0].recompute_s
