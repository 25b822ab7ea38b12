"""Shared by all tests: no network, a private cache, one thread a worker when tests run in parallel."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["CUDA_MODULE_LOADING"] = "LAZY"

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and then runs its kernels on the CPU
hypothesis.settings.register_profile("house", deadline=None)  # a busy machine is slow, not wrong
hypothesis.settings.load_profile("house")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory):
    """Tokenized rows go to a directory of this session, never to the user's."""
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))
