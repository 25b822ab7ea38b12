"""Units of any module tree: lists, modules that are named, tied and frozen weights."""

import torch
from small_net import Net
from torch import nn

from penstock.model.units import find_units


def described(model, chosen=None):
    """Unit -> names of its parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {unit.name: [names[id(p)] for p in unit.parameters] for unit in find_units(model, chosen)}


def block():
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))


def test_elements_of_a_list_are_whole_and_other_modules_have_their_own_weights():
    model = nn.Module()
    model.own = nn.Parameter(torch.ones(2))
    model.first, model.layers, model.last = nn.Linear(2, 3), nn.ModuleList([block(), block()]), block()
    assert described(model) == {
        "": ["own"],
        "first": ["first.weight", "first.bias"],
        "layers.0": [f"layers.0.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")],
        "layers.1": [f"layers.1.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")],
        "last.0": ["last.0.weight", "last.0.bias"],
        "last.1": ["last.1.weight", "last.1.bias"],
    }
    assert all(model.get_submodule(unit.name) is unit.module for unit in find_units(model))


def test_lists_and_dictionaries_in_a_list_are_taken_apart_since_nobody_calls_them():
    model = nn.ModuleList([nn.ModuleList([block(), nn.Linear(3, 3)]), nn.ModuleDict({"a": nn.Linear(3, 3)})])
    assert list(described(model)) == ["0.0", "0.1", "1.a"]


def test_a_list_in_a_layer_belongs_to_the_layer():
    layer = nn.Module()
    layer.gate, layer.experts = nn.Linear(3, 2), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model = nn.ModuleList([layer])
    assert list(described(model)) == ["0"]
    assert len(described(model)["0"]) == 6


def test_modules_that_are_chosen_are_whole_and_no_others():
    model = nn.Sequential(block(), nn.ModuleList([block(), block()]))
    assert list(described(model, [model[0], model[1][1]])) == ["0", "1.0.0", "1.0.1", "1.1"]
    assert list(described(model, [])) == ["0.0", "0.1", "1.0.0", "1.0.1", "1.1.0", "1.1.1"]


def test_a_tied_weight_is_listed_once_where_it_is_first_needed():
    found = described(Net())
    assert found["embed"] == ["embed.weight"]
    assert "head" not in found
    twice = nn.Module()
    twice.a, twice.b = nn.Linear(3, 3), nn.Linear(3, 3)
    twice.b.weight = twice.a.weight
    assert described(twice) == {"a": ["a.weight", "a.bias"], "b": ["b.bias"]}


def test_a_weight_that_a_layer_holds_twice_is_listed_once():
    layer = nn.Module()
    layer.a, layer.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    layer.b.weight = layer.a.weight
    (unit,) = find_units(nn.ModuleList([layer]))
    assert [id(p) for p in unit.parameters] == [id(layer.a.weight)]


def test_frozen_weights_are_left_out_and_units_without_others_too():
    model = Net()
    assert described(model)[""] == ["unused"], "not the frozen one"
    model.layers[1].requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    found = described(model)
    assert "layers.1" not in found
    assert found["norm"] == ["norm.weight"]


def test_every_trainable_weight_is_in_one_unit():
    model = Net()
    listed = [id(p) for unit in find_units(model) for p in unit.parameters]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
