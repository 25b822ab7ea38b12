"""Tests here share `tiny.py`, which pytest's importlib mode does not put on the path by itself."""

import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent))
logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def said() -> list[str]:
    """What a loader said; pass `said.append`."""
    return []
