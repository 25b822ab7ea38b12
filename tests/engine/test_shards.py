"""Rows of layers that stream, on several ranks: where they lie."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from rank_jobs import silent, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.engine import shards
from penstock.engine.fsdp import shard_over_ranks
from penstock.flow.transfers import link_of
from penstock.model.decoder import find_decoder
from penstock.model.load import load_config, load_model
from penstock.offload.dtensors import local


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def rows_there(layers):
    """Bytes of each layer's rows in the memory that a gather reads."""
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
    return [sum(p._sharded_param_data.untyped_storage().size() for p in group.fsdp_params) for group in groups]


def test_layers_leave_one_by_one(two_ranks, monkeypatch):
    """All of them together are what does not fit the device."""
    recipe = tiny()
    shape = recipe.shape.replace("layers=2", "layers=4").replace("intermediate_size=48", "intermediate_size=65")
    recipe = dataclasses.replace(recipe, shape=shape)  # rows that are not of one length
    model = load_model(recipe, load_config(recipe), torch.device("cpu"), silent)
    shard_over_ranks(model, two_ranks, None)
    layers, seen = find_decoder(model).layers, []
    before = [[local(p).clone() for p in layer.parameters()] for layer in layers]
    make = shards._Shard.__init__

    def making(self, layer, device):
        seen.append([number for number, there in enumerate(rows_there(layers)) if not there])
        make(self, layer, device)

    monkeypatch.setattr(shards._Shard, "__init__", making)
    streamed = shards.StreamedShards(model, layers, link_of(torch.device("cpu")))
    assert seen == [[], [0], [0, 1], [0, 1, 2]], "those before have left when one is made on the device"
    assert rows_there(layers) == [0] * 4
    for layer, shard, rows in zip(layers, streamed._shards, before, strict=True):
        assert all(map(torch.equal, map(local, layer.parameters()), rows))
        shard.bring()
        flat = [p._sharded_param_data for p in layer._get_fsdp_state()._fsdp_param_group.fsdp_params]
        assert all(torch.equal(a[: b.numel()], b.view(-1)) for a, b in zip(flat, rows, strict=True))
    streamed.close()


def test_what_does_not_stream_is_gathered_from_where_it_is_updated(two_ranks, monkeypatch):
    """A whole after its parts: FSDP2 looks where rows lie when the module that it wraps has moved."""
    here, to = torch.device("cpu"), torch.Tensor.to
    model = load_model(tiny(), load_config(tiny()), here, silent)
    shard_over_ranks(model, two_ranks, None)
    away = find_decoder(model).layers[1]
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *how: t.clone() if how == (here,) else to(t, *how))  # as to a GPU
    streamed = shards.StreamedShards(model, [away], link_of(here))
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    read = {p._param_fqn: p._sharded_param_data for group in groups if group for p in group.fsdp_params}
    updated = {name: local(p) for name, p in model.named_parameters()}
    assert read.keys() == updated.keys()
    stay = [name for name in read if not name.startswith("model.layers.1.")]
    assert len(stay) == 12
    assert [name for name in stay if read[name].data_ptr() != updated[name].data_ptr()] == []
    streamed.close()
