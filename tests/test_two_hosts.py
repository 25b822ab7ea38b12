"""benchmarks/two_hosts.sh: one run across two hosts that reach each other over a cable and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/two_hosts.sh"


def why_no_namespaces():
    if not shutil.which("ip"):
        return "there is no `ip` (iproute2)"
    name = f"penstock-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@pytest.mark.slow
def test_two_hosts_over_a_cable_learn_what_one_learns():
    if why := why_no_namespaces():
        pytest.skip(why)
    done = subprocess.run(
        ["bash", SCRIPT, sys.executable], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "two network namespaces with a cable between them"
    assert lines[-2].startswith("over the cable: ")
    assert lines[-1] == "passed"
