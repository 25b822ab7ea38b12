"""What benchmarks/collectives.py reads out of a trace, and that the committed rows are what it reads today."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "benchmarks/results/2026-11-18-h200/ranks"
spec = importlib.util.spec_from_file_location("collectives", ROOT / "benchmarks/collectives.py")
collectives = importlib.util.module_from_spec(spec)
spec.loader.exec_module(collectives)
ROWS = [json.loads(line) for line in (TRACES / "collectives-kinds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["trace"])
def test_committed_rows_are_what_the_traces_show(row):
    assert collectives.reread(TRACES / row["trace"]) == row


def test_kernels_of_ours_are_all_that_are_launched():
    sources = [path.read_text() for path in ROOT.glob("src/**/*.py")]
    launched = {
        name for source in sources if "@triton.jit" in source for name in re.findall(r"^ +(_\w+)\[", source, re.M)
    }
    assert launched == set(collectives.OURS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("Memcpy DtoH (Device -> Pinned)", "traffic"),
        ("Memcpy DtoD (Device -> Device)", "arithmetic"),
        ("_adamw", "ours"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "arithmetic"),
        ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)", "fsdp_copies"),
        ("void at::native::detail::chunk_cat_cuda_kernel<char, char>(char**)", "fsdp_copies"),
        ("void multi_tensor_apply_kernel<UnaryOpFunctor<BFloat16>, at::native::Copy<BFloat16> >", "fsdp_copies"),
        ("void multi_tensor_apply_kernel<BinaryOpFunctor<float>, std::plus<float> >", "arithmetic"),
    ],
)
def test_kinds(name, kind):
    assert collectives.kind_of(name) == kind


def test_what_overlaps_counts_once_and_is_nobody_s_alone():
    found = collectives.shares({"arithmetic": [(0, 2), (1, 3)], "collectives": [(2, 5)]})
    assert found == {"arithmetic": {"busy_s": 3, "alone_s": 2}, "collectives": {"busy_s": 3, "alone_s": 2}}


def test_a_pause_is_measured_whole_and_told_from_one_without_collectives():
    def event(name, start, end, stream=7):
        return {"name": name, "ts": start * 1e3, "dur": (end - start) * 1e3, "args": {"stream": stream}}

    found = collectives.waits(
        [
            event("nvjet_a", 0, 10),
            event("nccl ReduceScatter", 8, 14, 22),
            event("nvjet_b", 9.5, 11),
            event("nvjet_c", 16, 17),
            event("nvjet_d", 20, 21),
            event("nccl ReduceScatter", 21, 22, 22),
        ]
    )
    assert found == {
        "reduce_scatters": [{"s": 0.006, "begun": 1, "still_s": 0.005}, {"s": 0.001, "begun": 0, "still_s": 0.0}],
        "pauses": {"count": 2, "s": 0.008, "longest_s": 0.005},
        "pauses_without_collectives": {"count": 1, "s": 0.003, "longest_s": 0.003},
    }
