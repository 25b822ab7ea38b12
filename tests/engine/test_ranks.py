"""Who a process is, from any starter's environment, and what ranks do for each other."""

import os
from types import SimpleNamespace

import pytest
import torch

from penstock.engine import ranks as ranks_module
from penstock.engine.ranks import ALONE, World, bind, check_gpus_differ, find_world, first_machine, gpu_of
from penstock.errors import RecipeError
from penstock.machine.launch import check_batch

STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "0"}


def test_without_a_starter_a_process_is_alone():
    assert find_world({}) == ALONE == World(0, 1, 0, 1)
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # not srun: nobody else is there
    assert find_world(batch_script) == ALONE
    assert not torch.distributed.is_initialized()


def test_launchers_say_which_rank_it_is():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    deepspeed = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1"}
    assert find_world(torchrun) == find_world(deepspeed) == World(5, 8, 1, 4)
    for tasks in ("4", "4(x2)"):
        assert find_world({**slurm, "SLURM_STEP_TASKS_PER_NODE": tasks}) == World(5, 8, 1, 4)
    assert find_world({**torchrun, "SLURM_NODEID": "1"}) == World(5, 8, 1, 4), "torchrun as a task of SLURM"


@pytest.mark.parametrize(
    ("tasks", "here"),
    [("4", [4]), ("4(x2)", [4, 4]), ("4,3", [4, 3]), ("4(x2),3", [4, 4, 3]), ("2,4(x2),1(x2)", [2, 4, 4, 1, 1])],
)
def test_every_machine_of_a_slurm_step_has_its_number_of_tasks(tasks, here):
    step = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert [find_world({**step, "SLURM_NODEID": str(node)}).local_size for node in range(len(here))] == here
    assert find_world(step).local_size == here[0]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set and LOCAL_RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "'x' is not a number"),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "2"},
            r"NODEID is 2, .* 4\(x2\), is of 2 machines",
        ),
    ],
)
def test_an_environment_that_says_half_is_refused(environment, message):
    with pytest.raises(RecipeError, match=message):
        find_world(environment)


def test_every_rank_needs_a_row():
    check_batch(3, 3)
    with pytest.raises(RecipeError, match=r"batch_size = 3: .* 4 ranks need a row each") as caught:
        check_batch(3, 4)
    assert "--batch-size 4" in caught.value.remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPUs")
def test_more_ranks_than_gpus_are_refused():
    assert World(1, 2, 1, 2).pick(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(RecipeError, match="2 ranks on this machine, and torch sees 0 GPUs"):
        World(1, 2, 1, 2).pick(torch.device("cuda"))


@pytest.mark.parametrize(
    ("version", "told", "said"),
    [
        ((2, 30, 7), "1", ""),
        ((2, 30, 7), "", "here is 2.30.7"),
        ((2, 28, 9), "1", "here is 2.28.9"),
        ((), "1", "here is the NCCL that torch brings"),
    ],
)
def test_ranks_share_a_gpu_only_where_nccl_lets_them(monkeypatch, version, told, said):
    monkeypatch.setattr(ranks_module, "loaded_nccl", lambda: version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment = {"PENSTOCK_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": told}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not said:
        assert World(1, 2, 1, 2).pick(torch.device("cuda")) == torch.device("cuda", 0)
        return
    with pytest.raises(RecipeError, match=said):
        World(1, 2, 1, 2).pick(torch.device("cuda"))
    monkeypatch.delenv("PENSTOCK_SHARE_GPU")
    with pytest.raises(RecipeError, match="2 ranks on this machine, and torch sees 1 GPU"):
        World(1, 2, 1, 2).pick(torch.device("cuda"))


def test_ranks_whose_gpus_are_one_are_refused_unless_they_can_share_it(monkeypatch):
    """Under SLURM none sees it alone: each task is shown one GPU, and several may be shown the same."""
    monkeypatch.delenv("PENSTOCK_SHARE_GPU", raising=False)
    check_gpus_differ(["", "", ""])  # on CPUs
    check_gpus_differ(["host1 GPU-1", "host1 GPU-2", "host2 GPU-1"])
    gpus = ["host1 GPU-1", "host1 GPU-2", "host1 GPU-1"]
    with pytest.raises(RecipeError, match=r"ranks 0, 2 have the same GPU\n.*A run needs a GPU for each rank"):
        check_gpus_differ(gpus)
    monkeypatch.setenv("PENSTOCK_SHARE_GPU", "1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(ranks_module, "loaded_nccl", lambda: (2, 30, 7))
    check_gpus_differ(gpus)
    monkeypatch.setattr(ranks_module, "loaded_nccl", lambda: (2, 28, 9))
    with pytest.raises(RecipeError, match=r"here is 2\.28\.9"):
        check_gpus_differ(gpus)


def test_a_gpu_is_told_from_others_by_its_machine_and_uuid(monkeypatch):
    assert gpu_of(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(ranks_module.socket, "gethostname", lambda: "host1")
    assert gpu_of(torch.device("cuda", 3)) == "host1 GPU-3"


def test_no_nccl_was_preloaded_here():
    assert ranks_module.loaded_nccl() == () or "LD_PRELOAD" in os.environ


def test_ranks_share_agree_and_add_up(ranks):
    first, second = ranks("agreement", 2)
    for result in (first, second):
        assert result["shared"] == {"from": 0}
        assert result["largest"] == 15
        assert result["total"] == 2.0
    assert first["turn"] < second["turn"], "the first rank of a machine goes first"


def test_ranks_split_the_cores_of_a_machine(ranks):
    for count in (2, 4):
        results = ranks("agreement", count)
        every = sorted(results[0]["before"])
        share = len(every) // count
        bound = [result["cores"] for result in results]
        expected = [every[i * share : (i + 1) * share] for i in range(count)] if share else [every] * count
        assert bound == expected


def test_ranks_that_hosts_have_in_turn_split_the_cores_of_their_own(ranks):
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    first, second = (cores[:half], cores[half : 2 * half]) if half else (cores, cores)
    assert ranks("cores_of_hosts", 4, num_hosts=2) == [first, first, second, second]


def test_one_rank_has_no_process_group_and_no_dtensor(ranks):
    (alone,) = ranks("agreement", 1)
    assert not alone["groups"]
    assert sorted(alone["before"]) == alone["cores"]


def test_a_process_alone_keeps_to_the_cores_near_its_gpu(monkeypatch):
    bound, threads = [], torch.get_num_threads()
    monkeypatch.setattr(ranks_module, "near_cores", lambda device: [4, 5])
    monkeypatch.setattr(ranks_module, "usable_cores", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(ranks_module.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    try:
        bind(ALONE, torch.device("cuda"))
        assert (bound, torch.get_num_threads()) == ([[4, 5]], 2)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(ranks_module, "near_cores", lambda device: [0, 1, 4, 5])
    assert bind(ALONE, torch.device("cpu")) == [0, 1, 4, 5]
    assert len(bound) == 1, "nothing to bind where all cores are near"


@pytest.mark.parametrize(
    ("machines", "first"),
    [
        ("node7,other", "node7"),
        ("node[01-04,07],other", "node01"),
        ("gpu[3,5-6]-ib", "gpu3-ib"),
        ("rack[1-2]n[1-4]", "rack1n1"),
        ("rack[03,05]n[007-010]-ib,other[1-2]", "rack03n007-ib"),
        ("a-b1.example.org", "a-b1.example.org"),
    ],
)
def test_the_first_machine_of_a_slurm_step_is_where_ranks_meet(machines, first):
    step = {"SLURM_STEP_NODELIST": machines, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    assert first_machine({**step, "SLURM_STEP_NUM_NODES": "2"}) == first
    assert first_machine({**step, "SLURM_STEP_NUM_NODES": "1"}) == first_machine({}) == "127.0.0.1"
