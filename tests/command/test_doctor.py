"""Machines that are not here, as trees of files; and this one as it is."""

import json
import socket

import pytest

from penstock.command import doctor
from penstock.command.cli import main
from penstock.command.doctor import Finding, Paths, driver_mismatch, examine, lines
from penstock.machine.hardware import pci_gpus


@pytest.fixture
def machine(tmp_path):
    """A machine with two nodes, a GPU that lost half its lanes, no huge pages, a slow governor and swapped memory."""
    root = tmp_path / "machine"
    files = {
        "proc/meminfo": "MemTotal: 131072000 kB\nSwapTotal: 8000000 kB\nSwapFree: 1000000 kB\n",
        "proc/filesystems": "nodev\tresctrl\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.60.13  Wed Nov 30\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/node/node0/cpulist": "0-63\n",
        "sys/devices/system/node/node1/cpulist": "64-127\n",
        "sys/bus/pci/devices/0000:8a:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:8a:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:8a:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:8a:00.0/local_cpulist": "64-127\n",
        "sys/bus/pci/devices/0000:8a:00.0/current_link_width": "8\n",
        "sys/bus/pci/devices/0000:8a:00.0/max_link_width": "16\n",
        "sys/bus/pci/devices/0000:8a:00.0/max_link_speed": "32.0 GT/s PCIe\n",
        "sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:00:1f.0/class": "0x060100\n",
        "cgroup/memory.max": str(64 * 2**30),
        "cgroup/memory.current": "0",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    cgroup = ((str(root / "cgroup/memory.max"), str(root / "cgroup/memory.current")),)
    return Paths(root / "proc", root / "sys", root / "resctrl", cgroup)


def by_topic(findings):
    found = {}
    for finding in findings:
        found.setdefault(finding.topic, []).append(finding)
    return found


def test_every_fault_of_that_machine_is_found_with_its_fix(machine, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    found = by_topic(examine(tmp_path, paths=machine))
    expected = {
        "huge pages": ("advice", "echo madvise"),
        "swap": ("advice", "swapoff"),
        "NUMA": ("problem", "numactl --cpunodebind=1 --membind=1"),
        "PCIe": ("problem", "Reseat"),
        "CPU governor": ("advice", "cpupower"),
        "host memory": ("advice", "--memory"),
        "allocator": ("advice", "expandable_segments:True"),
        "partitions": ("advice", "mount -t resctrl"),
    }
    for topic, (level, fix) in expected.items():
        assert [f.level for f in found[topic]] == [level], topic
        assert fix in found[topic][0].fix, topic
    assert found["PCIe"][0].what == "GPU 0000:8a:00.0 has 8 PCIe lanes of 16"
    assert found["torch"][0].level in ("problem", "ok")
    for finding in (f for group in found.values() for f in group):
        assert finding.fix or finding.level == "ok", finding


def test_gpus_are_found_without_a_driver(machine):
    (gpu,) = pci_gpus(machine.sys / "bus/pci/devices")
    assert (gpu.address, gpu.node, len(gpu.cores), gpu.below_its_width) == ("0000:8a:00.0", 1, 64, True)


def test_a_driver_that_is_too_old_is_told_from_one_that_is_not():
    old = driver_mismatch("525.60.13", "13.0", "2.11.0")
    assert old.level == "problem"
    assert "too old" in old.what
    assert "580 or newer" in old.fix
    assert "nvidia-smi" in driver_mismatch("580.1", "13.0", "2.11.0").fix


def test_partitions_are_shown_then_applied(machine, tmp_path, monkeypatch):
    root = machine.resctrl
    (root / "info/L3").mkdir(parents=True)
    (root / "info/L3/cbm_mask").write_text("ff")
    (root / "schemata").write_text("L3:0=ff\n")
    monkeypatch.setattr(doctor, "usable_cores", lambda: list(range(10)))
    shown = by_topic(examine(tmp_path, paths=machine))["partitions"]
    assert "cpus_list 9; schemata L3:0=fc" in shown[0].what
    assert "cpus_list 0-8; schemata L3:0=3" in shown[1].what
    assert not (root / "penstock-adam").exists()
    applied = by_topic(examine(tmp_path, paths=machine, apply=True))["partitions"]
    assert all(f.level == "ok" and f.what.startswith("applied") for f in applied)
    assert (root / "penstock-adam/cpus_list").read_text() == "0-8\n"


def test_partitions_of_four_sockets_are_those_of_the_four_ranks(machine, tmp_path, monkeypatch):
    """Each rank keeps a tenth of its own cores: on the first sockets too, whose cores are all among the first 90 %."""
    root, devices = machine.resctrl, machine.sys / "bus/pci/devices"
    (root / "info/L3").mkdir(parents=True)
    (root / "info/L3/cbm_mask").write_text("ff")
    (root / "schemata").write_text("L3:0=ff\n")
    for number in range(4):
        gpu = devices / f"000{number}:8a:00.0"
        gpu.mkdir(exist_ok=True)
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(number))):
            (gpu / name).write_text(text)
        (gpu / "local_cpulist").write_text(f"{72 * number}-{72 * number + 71}")
    monkeypatch.setattr(doctor, "usable_cores", lambda: list(range(288)))
    train, adam = by_topic(examine(tmp_path, paths=machine))["partitions"]
    assert "cpus_list 64-71,136-143,208-215,280-287;" in train.what
    assert "cpus_list 0-63,72-135,144-207,216-279;" in adam.what


def test_a_full_disk_or_no_memory_makes_runs_impossible(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 2**60)
    monkeypatch.setattr(doctor, "LEAST_HOST_BYTES", 2**60)
    found = by_topic(examine(tmp_path))
    assert found["disk"][0].level == found["host memory"][0].level == "impossible"
    assert "runs are impossible" in lines(examine(tmp_path))[-1]
    assert main(["doctor", "--output-dir", str(tmp_path)]) == 3


@pytest.mark.parametrize("name", ["n" * 300, "not-mounted"])
def test_a_directory_that_cannot_be_there_makes_runs_impossible(tmp_path, name):
    (tmp_path / "not-mounted").symlink_to("nowhere")
    (found,) = doctor.disk(tmp_path / name)
    assert (found.level, found.fix.endswith("ame another place with --output-dir.")) == ("impossible", True)


def test_here_it_says_what_is_and_exits_0(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    assert main(["doctor", "--output-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "a Hub token is set" in text
    assert "HF_HUB_OFFLINE is set" in text
    assert "secret" not in text
    assert main(["doctor", "--output-dir", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    found = json.loads(out)
    assert {"torch", "compiler", "host memory", "memory lock", "huge pages", "swap", "NUMA", "CPU governor", "disk",
            "Hub", "token", "partitions"} <= {f["topic"] for f in found}  # fmt: skip


@pytest.fixture
def listening(monkeypatch):
    """The port of whoever answers, and an environment that says nothing of networks."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("name", "value", "level", "what", "fix"),
    [
        ("HF_ENDPOINT", "https://no-such-host.invalid", "advice", "no-such-host.invalid cannot", "See that HF_END"),
        ("HF_ENDPOINT", "http://127.0.0.1:{}/mirror", "ok", "127.0.0.1 can be reached", ""),
        ("HTTPS_PROXY", "http://me:secret@127.0.0.1:{}", "ok", "the proxy 127.0.0.1 can be reached", ""),
        ("ALL_PROXY", "127.0.0.1:{}", "ok", "the proxy 127.0.0.1 can be reached", ""),
        ("https_proxy", "http://me:secret@no-such-host.invalid", "advice",
         "huggingface.co cannot be reached, by the proxy that is set (", "See that HTTPS_PROXY is right"),
        ("https_proxy", "http://me:x@127.0.0.1:secret", "advice", "huggingface.co cannot", "See that HTTPS_PROXY"),
        ("HF_HUB_OFFLINE", "yes", "advice", "HF_HUB_OFFLINE is set", "unset"),
    ],
)  # fmt: skip
def test_the_hub_is_looked_for_where_its_library_goes(name, value, level, what, fix, listening, monkeypatch):
    monkeypatch.setenv(name, value.format(listening))
    found = next(doctor.hub())
    assert found.level == level
    assert found.what.startswith(what)
    assert found.fix.startswith(fix)
    assert "secret" not in found.what


def test_a_fix_stands_below_what_it_mends():
    text = lines([Finding("swap", "advice", "too much", "swapoff -a"), Finding("disk", "ok", "fine")])
    assert text[0].startswith("advice   swap")
    assert text[1].strip() == "fix: swapoff -a"
    assert text[-1] == "0 problems, 1 pieces of advice; runs are possible"
