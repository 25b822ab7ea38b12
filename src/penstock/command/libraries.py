"""What other libraries are told before a command begins: torch's settings, and that nobody else speaks."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


def prepare_torch() -> None:
    """What torch reads when it is imported and when it first uses a GPU, unless the user has said something else."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Or threads that wait would spin on cores that others could use: 59 s instead of 18 for 30 steps of the demo on two
    # shared cores, and nothing gained on idle ones (benchmarks/results/2026-11-15-cpu/waiting.txt).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage: all that libraries make while they are imported stays, and the search took 1 s of 7."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def output_for_people() -> Iterator[None]:
    """What others print goes to standard error, so that one JSON object is all of standard output.

    So do lines of libraries in C, such as NCCL's with NCCL_DEBUG.
    """
    if sys.stdout is None:  # closed by whoever started us: what is number 1 now may be any file
        yield
        return
    c = ctypes.CDLL(None)
    sys.stdout.flush()
    c.fflush(None)
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        c.fflush(None)
        os.dup2(own, 1)
        os.close(own)


def quiet_libraries(debug: bool, level: str | None = None) -> None:
    """Their bars and warnings would break our lines; with --debug they are wanted. Our own are shown as one line."""
    import logging

    if level:
        logging.getLogger("penstock").setLevel(level.upper())  # where the engine deepspeed looks
    if debug:
        return
    import warnings

    import torch
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    if not torch.cuda.is_available():  # or DeepSpeed, which transformers imports if it can, says so on standard output
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    number = logging.getLevelNamesMapping()[(level or "error").upper()]
    hub_logging.set_verbosity(number)
    transformers_logging.set_verbosity(number)
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=r"penstock\.")
    warnings.formatwarning = lambda message, *_, **__: f"  WARNING: {message}\n"
