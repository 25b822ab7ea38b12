"""The list of buffers is what the engine allocates, byte for byte, and the list of parameters is the model's."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.model.units import find_units as find_model_units
from penstock.offload.homes import HostHome, ResidentHome, StreamHome
from penstock.offload.optimizer import OffloadAdamW
from penstock.plan import layout
from penstock.plan.layout import (
    CHUNK_SECONDS,
    DEFAULT_CHUNK,
    Buffer,
    chunk_for,
    cut,
    model_buffers,
    parameters,
    state_buffers,
    state_bytes,
    total,
)
from penstock.plan.placement import deal
from penstock.recipe.presets import ARCHITECTURES, Architecture
from penstock.update.formats import FORMATS
from penstock.update.kernels import SPAN

TINY = Architecture(
    model_type="llama", layers=3, hidden=32, intermediate=80, heads=4, kv_heads=2, head_dim=8, vocab=301,
    max_positions=128, norm_eps=1e-5, rope=(("rope_type", "default"), ("rope_theta", 1e4)),
)  # fmt: skip
MIXES = [
    {"gpu": 1.0},
    {"stream": 1.0},
    {"host": 1.0},
    {"gpu": 0.5, "stream": 0.3, "host": 0.2},
    {"stream": 0.4, "host": 0.6},
]


def build(architecture, device="cpu", dtype=torch.bfloat16):
    config = AutoConfig.for_model(architecture.model_type, **architecture.config_values())
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def allocated(optimizer, model):
    """What is really there, by the names of the layout."""
    found = {"weights": sum(p.nbytes for p in model.parameters()), "norm": optimizer._norm._sums.nbytes}
    for home, _ in optimizer._housing.homes:
        if isinstance(home, ResidentHome):
            found["resident state"] = sum(state.nbytes for state in home._state.values())
        elif isinstance(home, StreamHome):
            found["streamed state"] = home.arena.num_bytes
            found["staging"] = sum(slot.nbytes for slot in home._slots)
        elif isinstance(home, HostHome):
            found["host state"] = home.arena.num_bytes
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("states", list(FORMATS))
@pytest.mark.parametrize("shares", MIXES, ids=lambda shares: "+".join(shares))
def test_the_layout_is_what_the_engine_allocates(shares, states, dtype):
    model = build(TINY, dtype=dtype)
    optimizer = OffloadAdamW(model, homes=shares, states=states, chunk_size=1000, units=find_model_units(model).layers)
    sizes = [p.size for p in parameters(TINY)]
    chunk_size = FORMATS[states].whole_blocks(1000)
    buffers = model_buffers(sizes, dtype.itemsize) + state_buffers(
        deal(cut(sizes, chunk_size), shares), states, dtype.itemsize, on_gpu=False
    )
    assert {buffer.name: buffer.num_bytes for buffer in buffers} == allocated(optimizer, model)
    optimizer.close()


def test_on_a_gpu_host_chunks_have_copies_of_weight_and_gradient():
    sizes = [p.size for p in parameters(TINY)]
    dealt = deal(cut(sizes, 1000), {"host": 1.0})
    buffers = state_buffers(dealt, "fp32", 2)
    assert [buffer.name for buffer in buffers] == ["host state", "copies for host"]
    copies = buffers[1].num_bytes
    assert 4 * sum(sizes) <= copies < 4 * sum(sizes) + 2 * layout.ALIGNMENT * sum(map(len, dealt.values()))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_parameters_are_those_of_the_model_in_the_order_of_its_units(name):
    architecture = ARCHITECTURES[name]
    model = build(architecture, "meta")
    in_layers = {id(p) for layer in find_model_units(model).layers for p in layer.parameters()}
    theirs = [p.numel() for p in model.parameters()]
    ours = [p.size for p in parameters(architecture)]
    assert ours == theirs
    assert sum(ours) == architecture.num_parameters()
    layer = [p.size for p in parameters(architecture) if p.name.startswith("layers.")]
    assert layer == [p.numel() for p in model.parameters() if id(p) in in_layers]


@pytest.mark.parametrize("states", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 10_000])
def test_state_bytes_are_those_of_the_formats(states, dtype, size):
    assert state_bytes(size, states, dtype.itemsize) == FORMATS[states].num_bytes(size, dtype)


def test_constants_that_the_kernels_fix():
    assert layout.SPAN == SPAN
    assert tuple(FORMATS) == layout.STATE_FORMATS


def test_places_are_summed_apart():
    buffers = [Buffer("a", "gpu", 3), Buffer("b", "host", 5), Buffer("c", "gpu", 4)]
    assert (total(buffers, "gpu"), total(buffers, "host")) == (7, 5)


def test_it_needs_no_torch():
    code = "import sys, penstock.plan.layout, penstock.plan.placement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(link=st.floats(1e8, 1e13), state=st.floats(1.0, 16.0))
def test_a_chunk_takes_about_the_same_time_on_every_link(link, state):
    chunk = chunk_for(link, state)
    assert chunk == 1 << (chunk.bit_length() - 1)
    if 1 << 20 < chunk < DEFAULT_CHUNK:
        assert CHUNK_SECONDS / 1.5 < chunk * state / link < CHUNK_SECONDS * 1.5
    assert chunk_for(2 * link, state) >= chunk


def test_the_chunk_measured_on_the_h200_stays():
    assert chunk_for(50.0e9, 10.0) == DEFAULT_CHUNK
