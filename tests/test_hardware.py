import pytest
import torch

from penstock.errors import RecipeError
from penstock.hardware import available_host_bytes, pick_device, usable_cores


def test_the_device_follows_the_recipe():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(RecipeError, match="torch sees no GPU"):
        pick_device("cuda")


def test_a_cgroup_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("3000\n")
    (tmp_path / "current").write_text("1000\n")
    monkeypatch.setattr("penstock.hardware.CGROUP_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert available_host_bytes() == 2000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\nactive_file 100\n")
    assert available_host_bytes() == 2400
    (tmp_path / "max").write_text("max\n")
    assert available_host_bytes() > 2000


def test_there_are_cores():
    assert usable_cores()
