"""Shared by all tests: no network, a private cache, one thread a worker when tests run in parallel, and ranks."""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["CUDA_MODULE_LOADING"] = "LAZY"

import hypothesis
import pytest
from filelock import FileLock

# Containers often say otherwise, and pip was told not to compile: then every process that a test starts compiles all
# that it imports, for 10 of the 18 s that a run of the demo takes.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False
gc.disable()  # until all tests are imported
# Started in the background by a script, or by nohup, pytest inherits these ignored, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
hypothesis.settings.register_profile("house", deadline=None)  # a busy machine is slow, not wrong
hypothesis.settings.load_profile("house")
RANKS = Path(__file__).parent / "ranks"
# For rank_jobs.py, quick_products.py, small_net.py and golden.py: pytest's importlib mode does not do it.
sys.path[:0] = [str(RANKS), str(Path(__file__).parent / "offload")]


def pytest_configure(config):
    """Before any test is imported; the process that hands tests out to workers does without torch."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if config.getoption("numprocesses", None) and not is_worker:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and runs its kernels on the CPU
    if is_worker:
        torch.set_num_threads(1)
    from quick_products import use_quick_products

    use_quick_products()


def pytest_collection_modifyitems(items):
    """Those of the whole repository first: the longest of them would else be the last to begin, alone."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_collection_finish():
    """What was imported stays: no search for garbage need look at it."""
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val):
    """Bytes are named by their number: an archive holds the second it was made in, and workers must agree on names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Both devices; without a GPU the second is skipped."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    return request.param


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory):
    """Tokenized rows and compiled layers go to directories of this session, never to the user's.

    Workers share the compiler's, whose header takes as long as a layer; how often layers are compiled, dynamo counts.
    """
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(shared / "compiled")


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """A place for code that comes with models, in which transformers has found none yet."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "modules"])


@pytest.fixture
def graphs_only(monkeypatch):
    """Layers are compiled to graphs, which run as they are: no kernels are made of them, which takes longest."""
    import torch

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_with(function, backend="aot_eager", **how))


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: a place, and the text that `make(place)` returned; one of the workers makes it for all."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run(name, make):
        place, made = shared / f"once-{name}", shared / f"once-{name}.out"
        with FileLock(f"{made}.lock"):
            if not made.exists():
                made.write_text(make(place))
        return place, made.read_text()

    return run


@pytest.fixture(scope="session")
def ranks(tmp_path_factory, private_cache, pytestconfig):
    """`ranks(job, 2, ...)`: what the job returns on each of two ranks. See ranks/rank_server.py."""
    process = subprocess.Popen(
        [sys.executable, RANKS / "rank_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Threads do not survive a fork: a pool that an import had started would never answer a rank.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **({} if os.environ.get("PENSTOCK_SHARE_GPU") == "1" else {"CUDA_VISIBLE_DEVICES": ""}),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # nor does the driver, once it is begun
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        },
    )
    assert process.stdout.readline() == "[]\n", "the rank server did not start"

    import torch

    from penstock.machine.ports import free_port

    def run(job, count, **args):
        out = tmp_path_factory.mktemp(f"{job}-{count}")
        port = free_port()
        limit = 0.6 * float(
            pytestconfig.getini("timeout")
        )  # before pytest ends all, so that a test tells where they hang
        request = {"job": job, "ranks": count, "port": port, "out": str(out), "limit": limit, "args": args}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        codes = json.loads(process.stdout.readline())
        logs = "\n".join(path.read_text() for path in sorted(out.glob("*.log")))
        assert codes == [0] * count, f"{codes}\n{logs}"
        return [torch.load(out / f"{rank}.pt", "cpu", weights_only=False) for rank in range(count)]

    yield run
    process.stdin.close()
    assert process.wait(timeout=60) == 0
