import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from penstock.engine.ranks import ALONE
from penstock.errors import RecipeError
from penstock.machine import hardware
from penstock.machine.hardware import (
    COMPILED_FROM,
    adam_cores,
    available_host_bytes,
    cpu_has_bf16,
    near_cores,
    parse_cores,
    pick_compile,
    pick_device,
    pick_dtype,
    shares_of_cores,
    usable_cores,
)
from penstock.machine.known import H200
from penstock.plan.architecture import architecture_of
from penstock.plan.report import job_on
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe
from penstock.report.console import Console
from penstock.run.preparation import planned, prepare_run


def test_the_device_follows_the_recipe():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_layers_are_compiled_on_a_gpu_by_our_own_engine():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert pick_compile(Recipe(), gpu)
    assert not pick_compile(Recipe(), cpu)
    assert not pick_compile(Recipe(compile=False), gpu)
    assert not pick_compile(Recipe(engine="deepspeed"), gpu)


def test_a_small_model_is_not_compiled_and_its_gpu_not_measured(monkeypatch, capsys):
    """Half a minute of both for a few seconds of training. What is planned agrees with what is run."""
    gpu = torch.device("cuda")
    assert not pick_compile(Recipe(), gpu, num_params=COMPILED_FROM - 1)
    assert pick_compile(Recipe(), gpu, num_params=COMPILED_FROM)
    assert not job_on(PRESETS["demo"], H200).compiled
    assert job_on(PRESETS["smollm2-135m"], H200).compiled
    run = prepare_run(PRESETS["demo"], Console(quiet=True))
    assert run.num_params == architecture_of(PRESETS["demo"]).num_parameters()
    on_gpu = dataclasses.replace(run, device=gpu)
    memory = dataclasses.replace(H200, matrix_flops_per_s=1.0)
    monkeypatch.setattr("penstock.run.preparation.unmeasured_machine", lambda device: memory)
    monkeypatch.setattr("penstock.run.preparation.this_machine", None)
    planned(on_gpu, Console(), ALONE)
    said = capsys.readouterr().out
    assert "planned: 0." in said
    assert "s a step" not in said
    assert "state 100% gpu" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(RecipeError, match="torch sees no GPU"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512vl avx512_vnni", "fp32"),  # AVX-512, and no bf16 products
        ("flags\t\t: fpu avx512f avx512_bf16", "bf16"),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", "bf16"),
        ("Features\t: fp asimd bf16 i8mm", "bf16"),
        ("Features\t: fp asimd asimddp", "fp32"),
    ],
)
def test_the_working_precision_of_a_cpu_follows_its_instructions(line, dtype, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n")
    found = cpu_has_bf16(tmp_path / "cpuinfo")
    monkeypatch.setattr("penstock.machine.hardware.cpu_has_bf16", lambda: found)
    monkeypatch.setattr("penstock.plan.report.cpu_has_bf16", lambda: found)
    cpu, here = torch.device("cpu"), dataclasses.replace(H200, gpu_bytes=0)
    assert pick_dtype("auto", cpu) == dtype
    assert job_on(PRESETS["demo"], here).dtype_bytes == (2 if dtype == "bf16" else 4), "the plan agrees"
    assert pick_dtype("auto", torch.device("cuda")) == "bf16"
    for said in ("bf16", "fp32"):
        assert pick_dtype(said, cpu) == said


def test_a_cgroup_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("3000\n")
    (tmp_path / "current").write_text("1000\n")
    monkeypatch.setattr("penstock.machine.hardware.CGROUP_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert available_host_bytes() == 2000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\nactive_file 100\n")
    assert available_host_bytes() == 2400
    (tmp_path / "max").write_text("max\n")
    assert available_host_bytes() > 2000


def test_there_are_cores():
    assert usable_cores()


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set()), ("0-0", {0})]
)
def test_cores_are_read_as_the_kernel_writes_them(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize(("local", "expected"), [("1\n", [1]), ("64-127\n", [0, 1]), (None, [0, 1])])
def test_near_cores_are_those_of_the_gpus_node(tmp_path, monkeypatch, local, expected):
    device = tmp_path / "0000:8a:00.0"
    device.mkdir()
    if local is not None:
        (device / "local_cpulist").write_text(local)
    monkeypatch.setattr(hardware, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(hardware, "usable_cores", lambda: [0, 1])
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x8A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert near_cores(torch.device("cuda")) == expected
    assert near_cores(torch.device("cpu")) == [0, 1]


def test_a_limit_of_addresses_counts():
    code = (
        "import resource; from penstock.machine.hardware import available_host_bytes as free; before = free();"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); assert free() < min(before, 2**30), free()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranks_near_the_same_cores_split_them_and_keep_a_tenth_each():
    two_sockets = [list(range(10)), list(range(10)), list(range(10, 20)), list(range(10, 20))]
    shares = shares_of_cores(two_sockets)
    assert shares == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert [adam_cores(share) for share in shares] == [share[:4] for share in shares]
    assert adam_cores([7], 0.1) == [7]
    assert shares_of_cores([[0], [0]]) == [[], []]
