"""Every element has one home, and what is asked of all homes reaches every chunk."""

import pytest
import torch
from torch import nn

from penstock.flow.lanes import Streams
from penstock.flow.transfers import Link
from penstock.offload.housing import Housing
from penstock.offload.placing import place
from penstock.offload.trained import find_trained
from penstock.plan.layout import FORMATS
from penstock.plan.split import Manner, Profile
from penstock.update.adamw import AdamW
from penstock.update.formats import view_state

SHARES = {"gpu": 0.4, "stream": 0.3, "host": 0.3}


@pytest.fixture
def housing():
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(size).bfloat16()) for size in (700, 30, 1200, 5)])
    trained = find_trained(model, None, None)
    placement = place(trained, FORMATS["fp32"], SHARES, Profile(), Manner(in_backward=False), chunk_size=256)
    made = Housing(trained, placement, AdamW(), Link(Streams(trained.device)), Manner(in_backward=False))
    yield made
    made.close()


def remainders(housing, index):
    return torch.cat([view_state(chunk, state)["remainder"] for chunk, state in housing.states_of(index)])


def test_chunks_cover_every_parameter_once_and_in_order(housing):
    for index, size in enumerate((700, 30, 1200, 5)):
        spans = [(chunk.start, chunk.start + chunk.size) for chunk in housing.chunks[index]]
        assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), size]
    assert {home.name for home in housing.home_of.values()} == {"gpu", "stream", "host"}


def test_bytes_by_home_add_up(housing):
    whole, parts = housing.num_bytes(range(4)), [housing.num_bytes([index]) for index in range(4)]
    assert whole == {name: sum(part.get(name, 0) for part in parts) for name in whole}
    assert sum(whole.values()) == sum(FORMATS["fp32"].num_bytes(n, weight_bytes=2) for n in (700, 30, 1200, 5))


def test_remainders_reach_every_home_and_are_forgotten_there(housing):
    given = torch.arange(1200, dtype=torch.int16)
    housing.start_from({2: given})
    assert torch.equal(remainders(housing, 2), given)
    assert not remainders(housing, 0).any()
    housing.forget_remainders(range(len(housing.chunks)))
    assert not remainders(housing, 2).any()


def test_cleared_state_is_that_of_before_the_first_step(housing):
    for index in range(4):
        for _, state in housing.states_of(index):
            state.fill_(7)
    housing.clear()
    assert not any(state.any() for index in range(4) for _, state in housing.states_of(index))
