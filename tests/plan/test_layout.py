"""The list of buffers is what the engine allocates, byte for byte, and the list of parameters is the model's."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_net import offload
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.weights import StreamedWeights
from penstock.flow.transfers import link_of
from penstock.model.decoder import find_decoder
from penstock.offload.host import HostHome
from penstock.offload.resident import ResidentHome
from penstock.offload.stream import StreamHome
from penstock.plan import layout
from penstock.plan.layout import (
    CHUNK_SECONDS,
    DEFAULT_CHUNK,
    FORMATS,
    Buffer,
    Chunk,
    chunk_for,
    cut,
    largest_gradients,
    model_buffers,
    parameters,
    state_buffers,
    total,
    unit_buffers,
)
from penstock.plan.placement import deal
from penstock.recipe.presets import ARCHITECTURES, Architecture
from penstock.update.formats import torch_dtype

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


def chunks_of(states, weight_bytes, chunk_size):
    wholes = [Chunk(i, 0, p.size, FORMATS[states], weight_bytes) for i, p in enumerate(parameters(TINY))]
    return [cut(whole, chunk_size) for whole in wholes]


def allocated(optimizer, model):
    """What is really there, by the names of the layout."""
    found = {"weights": sum(p.nbytes for p in model.parameters()), "norm": optimizer._norm._sums.nbytes}
    for home, _ in optimizer._housing.homes:
        if isinstance(home, ResidentHome):
            found["resident state"] = sum(state.nbytes for state in home._state.values())
        elif isinstance(home, StreamHome):
            found["streamed state"] = home.arena.num_bytes
            found["staging"] = sum(slot.memory.nbytes for slot in home._ring._slots)
        elif isinstance(home, HostHome):
            found["host state"] = home.arena.num_bytes
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("states", list(FORMATS))
@pytest.mark.parametrize("shares", MIXES, ids=lambda shares: "+".join(shares))
def test_the_layout_is_what_the_engine_allocates(shares, states, dtype):
    model = build(TINY, dtype=dtype)
    optimizer = offload(model, homes=shares, states=states, chunk_size=1000, units=find_decoder(model).layers)
    dealt = deal(chunks_of(states, dtype.itemsize, 1000), shares)
    buffers = model_buffers([p.size for p in parameters(TINY)], dtype.itemsize) + state_buffers(dealt, on_gpu=False)
    assert {buffer.name: buffer.num_bytes for buffer in buffers} == allocated(optimizer, model)
    optimizer.close()


def test_on_a_gpu_host_chunks_have_copies_of_weight_and_gradient():
    sizes = [p.size for p in parameters(TINY)]
    dealt = deal(chunks_of("fp32", 2, 1000), {"host": 1.0})
    buffers = state_buffers(dealt)
    assert [buffer.name for buffer in buffers] == ["host state", "pinned copies"]
    copies = buffers[1].num_bytes
    assert 4 * sum(sizes) <= copies < 4 * sum(sizes) + 2 * layout.ALIGNMENT * sum(map(len, dealt.values()))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_parameters_are_those_of_the_model_in_the_order_of_its_units(name):
    architecture = ARCHITECTURES[name]
    model = build(architecture, "meta")
    in_layers = {id(p) for layer in find_decoder(model).layers for p in layer.parameters()}
    theirs = [p.numel() for p in model.parameters()]
    ours = [p.size for p in parameters(architecture)]
    assert ours == theirs
    assert sum(ours) == architecture.num_parameters()
    layer = [p.size for p in parameters(architecture) if p.name.startswith("layers.")]
    assert layer == [p.numel() for p in model.parameters() if id(p) in in_layers]


@pytest.mark.parametrize("states", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 10_000])
def test_state_bytes_are_those_of_the_tensors(states, dtype, size):
    parts = FORMATS[states].parts(dtype.itemsize)
    tensors = [torch.empty(part.count(size), dtype=torch_dtype(part)) for part in parts]
    assert FORMATS[states].num_bytes(size, dtype.itemsize) == sum(tensor.nbytes for tensor in tensors)


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 3000), st.integers(1, 700), st.integers(0, 9))
def test_a_parameter_is_cut_between_blocks_and_once(states, size, chunk_size, offset):
    chunks = cut(Chunk(3, 0, size, FORMATS[states], 2, offset=256 * offset), chunk_size)
    assert [chunk.start for chunk in chunks] == list(range(0, size, FORMATS[states].whole_blocks(chunk_size)))
    assert all(chunk.start % FORMATS[states].block == 0 for chunk in chunks)
    assert [element for chunk in chunks for element in chunk.of(range(size))] == list(range(size))
    assert {(chunk.parameter, chunk.weight_bytes, chunk.offset) for chunk in chunks} == {(3, 2, 256 * offset)}


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


@pytest.mark.parametrize("count", [1, 2, 5])
def test_units_that_stream_take_what_the_layout_says(count):
    architecture = dataclasses.replace(TINY, layers=6)
    layers = find_decoder(build(architecture)).layers[-count:]
    weights = StreamedWeights(layers, link_of(torch.device("cpu")))
    sizes = [p.size for p in layout.layer_parameters(architecture)]
    slots, at_home = unit_buffers([sizes] * count, 2)
    assert slots.num_bytes == sum(slot.memory.nbytes for slot in weights._slots._slots)
    assert at_home.num_bytes == weights.num_bytes
    weights.close()


def test_gradients_of_the_largest_streamed_layer_may_wait():
    whole = Chunk(0, 0, 10 * 256, FORMATS["int8"], 2)
    chunks = [dataclasses.replace(chunk, parameter=index) for index in range(4) for chunk in cut(whole, 256)]
    assert largest_gradients(chunks, {}) == 0, "resident ones become final one after another"
    assert largest_gradients(chunks, {0: 7, 1: 7, 2: 8}) == 2 * 10 * 256 * 2
    assert largest_gradients([], {0: 7}) == 0
