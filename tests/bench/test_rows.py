"""Rows on disk and the table made from them."""

import dataclasses
import errno
import json

import pytest

from penstock.bench.rows import WIDTH, Memory, Results, Row, row_of, table
from penstock.bench.run import show
from penstock.errors import DataError, DoesNotFit, OutputError

REQUIRED = [
    "date", "machine", "system", "model", "mode", "update", "states", "clip", "batch", "seq", "micro_batch",
    "recompute", "compiled", "step_s", "floor_s", "exposed_s", "tokens_per_s", "model_tflops", "matrix_tflops",
    "gpu_bytes", "host_bytes", "versions", "error",
]  # fmt: skip


def row(system="penstock", step_s=2.0, **more):
    values = {
        "date": "2026-11-15", "machine": "NVIDIA H200, 140 GiB", "system": system, "model": "llama-8b",
        "mode": "superoffload", "update": "after-norm", "states": "fp32", "clip": True, "batch": 4, "seq": 4096,
        "micro_batch": 4, "recompute": "full", "compiled": False, "step_s": step_s, "floor_s": 1.6,
        "exposed_s": step_s and step_s - 1.6, "tokens_per_s": step_s and 16384 / step_s, "model_tflops": 500.0,
        "matrix_tflops": 800.0, "gpu_bytes": 131_500_000_000, "host_bytes": 67_000_000_000,
        "versions": "torch 2.11.0", "error": "",
    }  # fmt: skip
    return Row(**(values | more))


def cells(line):
    return line.split()


def test_the_required_fields_come_first_and_in_order():
    assert [field.name for field in dataclasses.fields(Row)][: len(REQUIRED)] == REQUIRED


def test_rows_are_appended_and_the_table_is_of_all_of_them(tmp_path):
    first = row(memory=Memory(16, 16, 80, 0, 0, None), lanes={"in": 0.5})
    Results(tmp_path).add(first)
    Results(tmp_path).add(row(step_s=3.0))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
    assert Results(tmp_path).read()[0] == first
    text = (tmp_path / "table.txt").read_text()
    assert "2.000" in text
    assert "3.000" in text


def test_an_earlier_file_is_read_too():
    values = dataclasses.asdict(row())
    del values["setting"], values["memory"], values["lanes"]
    assert row_of({**values, "gone": 1}).setting == ""
    values["schedule"] = values.pop("update")
    assert row_of(values).update == "after-norm"


def test_a_file_that_is_not_ours_is_found_at_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(dataclasses.asdict(row())) + "\nnonsense\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        Results(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="--to"):
        Results(tmp_path / "file" / "inside")


def test_a_disk_that_is_full_after_the_first_row_leaves_that_row(tmp_path, monkeypatch):
    results = Results(tmp_path)
    results.add(row())

    def full(path, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.bench.rows.append_line", full)
    with pytest.raises(DoesNotFit, match=r"No space left.*\n.*--to"):
        results.add(row(step_s=3.0))
    assert results.read() == [row()]


def test_ratios_are_to_the_floor_and_to_our_best():
    peer = row("deepspeed", 6.0, mode="zerooffload", update="", setting="ratio 0.3")
    lines = table([row("floor", 1.6, mode="", update="", states=""), row(), row(step_s=3.0), peer]).splitlines()
    headings = cells(lines[1])
    of_peer = dict(
        zip([h for h in headings if h != "s"], [*cells(lines[5])[:2], "", *cells(lines[5])[2:]], strict=False)
    )
    assert (of_peer["/floor"], of_peer["/best"], of_peer["exposed"]) == ("3.750", "3.00", "4.400")
    assert cells(lines[3])[8:10] == ["1.250", "1.00"]
    assert lines[5].endswith("ratio 0.3")


def test_a_failure_is_a_line_that_says_so_and_every_line_fits():
    long = row("deepspeed", None, error="x" * 300, setting="ratio 0.8")
    memory = Memory(16 * 10**9, 16 * 10**9, 80 * 10**9, 10**9, 0, 40 * 10**9)
    text = table(
        [row(memory=memory, lanes={"in": 0.25, "exposed": 0.1}), row("deepspeed", None, error="no step"), long]
    )
    assert "no step" in text
    assert "ratio 0.8 xxx" in text
    assert "resident 80.00 GB" in text
    assert "exposed 0.100 s" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_widest_row_fits():
    wide = row(update="in-backward", step_s=1234.567, recompute="none", setting="ratio 0.35", tokens_per_s=123456.0)
    line = table([wide, row("flashoptim", 2.0)]).splitlines()[2]
    assert line.endswith("ratio 0.35")


def test_what_streams_and_what_is_allowed_stands_below_in_full():
    limit = {"gpu_limit_gb": 16.0, "driver_bytes": 15_800_000_000}
    ours = row(weights="streamed", order="layers", inputs="parked", **limit)
    peer = row(
        "deepspeed", 9.0, mode="zerooffload", update="", weights="streamed", setting="parameters on the CPU", **limit
    )
    text = table([row("floor", 1.6, mode="", update="", states=""), ours, peer, row("torchao", None, error="no")])
    assert [line for line in text.splitlines() if line.startswith("  GPU")] == [
        "  GPU, superoffload after-norm fp32 clipped: weights streamed, layers, parked, 16 GB allowed, 15.8 taken",
        "  GPU, deepspeed zerooffload fp32 clipped: parameters on the CPU, weights streamed, rows, 16 GB allowed, "
        "15.8 taken",
    ]


def test_other_work_is_another_block():
    text = table([row(), row(seq=8192)])
    assert text.count("system") == 2


def test_the_references_count_stands_below_under_its_own_name():
    assert "by the reference's formula, superoffload after-norm fp32 clipped: 635.1 TFLOP/s\n" in table(
        [row(reference_tflops=635.13)]
    )
    assert "reference" not in table([row()])


def test_what_cannot_be_is_called_noise():
    """A step contains its floor, so that it cannot take less."""
    floor = row("floor", 1.6, floor_s=1.6, exposed_s=0.0, mode="", update="", states="")
    text = table([floor, row(step_s=1.5, floor_s=1.6, exposed_s=-0.1)])
    assert "noise of the measurement" in text
    assert "under 1 is noise" in show(row(step_s=1.5, floor_s=1.6))
    fine = row(step_s=1.7, floor_s=1.6, exposed_s=0.1)
    assert "noise" not in table([floor, fine]) + show(fine)
