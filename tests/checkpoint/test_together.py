"""Several ranks write one checkpoint, or none."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.checkpoint.store import find, open_checkpoint, read_document, read_tensors, verify
from penstock.checkpoint.together import save_together
from penstock.engine.ranks import World
from penstock.offload.saved_tensors import SavedTensor, whole


def rank_saves(rank, size, store, directory, broken, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    tensor = torch.full((1000,), float(rank))
    tensors = [whole("x", tensor)]
    if rank == broken:
        tensors = [SavedTensor("x", (1000,), torch.complex64, (tensor,))]  # safetensors has no name for these
    group = f"state_{rank}_of_{size}"
    try:
        saved = save_together(World(rank, size), directory, 7, {group: tensors}, {"run": {"step": 7}}, lambda _: None)
        results.put((rank, str(saved.path), sorted(saved.files)))
    except Exception as error:
        results.put((rank, type(error).__name__, str(error)))
    dist.destroy_process_group()


def save(tmp_path, size, broken=None):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    directory = tmp_path / "checkpoints"
    words = (size, tmp_path / "store", directory, broken, results)
    processes = [context.Process(target=rank_saves, args=(rank, *words)) for rank in range(size)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=120) for _ in range(size))
    for process in processes:
        process.join(timeout=60)
    return directory, found


@pytest.fixture(autouse=True)
def found_by_ranks(monkeypatch):
    """A rank is a new process that imports this module by its name, with our path to look for it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


@pytest.mark.slow
def test_every_rank_has_its_files_and_one_manifest_vouches_for_all(tmp_path):
    directory, found = save(tmp_path, 3)
    (path,) = find(directory)
    assert {where for _, where, _ in found} == {str(path)}
    assert all(files == ["run.json", *(f"state_{r}_of_3-00001.safetensors" for r in range(3))] for *_, files in found)
    checkpoint = open_checkpoint(path)
    verify(checkpoint, lambda _: None)
    assert read_document(checkpoint, "run") == {"step": 7}
    back = torch.zeros(1000)
    read_tensors(checkpoint, "state_2_of_3", [whole("x", back)], lambda _: None)
    assert torch.equal(back, torch.full((1000,), 2.0))


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_save_of_all_and_leaves_nothing(tmp_path):
    directory, found = save(tmp_path, 2, broken=1)
    assert found[0][1:] == ("RankLost", found[0][2])
    assert "rank 1: could not save" in found[0][2]
    assert found[1][1] == "KeyError"
    assert find(directory) == []
    assert list(directory.iterdir()) == []
