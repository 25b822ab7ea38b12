"""Tests here share `fault_runs.py`, which pytest's importlib mode does not put on the path by itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def server(tmp_path_factory, private_cache):
    from fault_runs import RUN, Server

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fault shim")
    directory = tmp_path_factory.mktemp("server")
    shim = directory / "fault.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", shim, HERE / "fault.c", "-ldl"]
    subprocess.run(command, check=True)
    warm_up = [*RUN, "--output-dir", str(directory / "run"), "--max-steps", "1"]
    process = subprocess.Popen(
        [sys.executable, HERE / "fork_server.py", json.dumps(warm_up)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Threads do not survive a fork: a pool that the warm-up had started would never answer a child.
        env={
            **os.environ,
            "LD_PRELOAD": str(shim),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert process.stdout.readline() == "0\n"
    yield Server(process, directory)
    process.stdin.close()
    assert process.wait(timeout=10) == 0
