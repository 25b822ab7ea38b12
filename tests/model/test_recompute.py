"""Recomputing changes memory, never a bit of the gradients."""

import pytest
import torch
from tiny import IN_PLACE, OTHERS, SEVEN, packed, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import RecipeError
from penstock.model.attention import use_attention
from penstock.model.decoder import find_decoder
from penstock.model.loss import packed_loss
from penstock.model.recompute import PRODUCTS, Recomputed, set_recompute
from penstock.recipe.recipe import recompute_by_layer


def gradients(model, choice):
    units = find_decoder(model)
    use_attention(model, "auto")
    set_recompute(units.layers, recompute_by_layer(choice, len(units.layers)))
    batch = packed()
    loss = packed_loss(units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:layers that change a product in place")
@pytest.mark.parametrize("name", [*SEVEN, *OTHERS, *IN_PLACE])
def test_gradients_are_the_same_bits(name):
    model = tiny_model(name)
    kept = gradients(model, "none")
    for choice in ("full", "selected:1", "selected", "full:1", "none"):
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients(model, choice), strict=True))


def test_a_product_that_is_changed_in_place_gets_full_and_that_is_said():
    """AltUp adds to a product that `selected` keeps; replayed as it is, it would be added to twice."""
    model = tiny_model("gemma3n_text")
    kept = gradients(model, "none")
    for _ in range(2):
        with pytest.warns(UserWarning, match="layers that change a product in place get `full`"):
            got = gradients(model, "selected")
        assert all(torch.equal(a, b) for a, b in zip(kept, got, strict=True))
    calls, batch, units = [], packed(), find_decoder(model)
    units.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    packed_loss(units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    assert calls == [1], "it is found out once"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.t()[1:].mul_(2),
        lambda x: torch.exp(x.detach(), out=x.detach()),
        lambda x: torch._foreach_add_([x], 1.0),
    ],
)
def test_every_way_to_change_a_product_is_noticed(change):
    def forward(x, change):
        product = torch.matmul(x, weight)
        with torch.no_grad():
            change(product[0])
        return product.sin()

    weight = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(2, 5, 3)
    Recomputed(forward, "selected")(x, lambda product: product.clone().add_(1))
    with pytest.warns(UserWarning, match="in place"):
        Recomputed(forward, "selected")(x, change)


def test_layers_run_again_in_backward_and_hooks_do_not():
    model = tiny_model("llama")
    units = find_decoder(model)
    use_attention(model, "auto")
    attention_calls, hook_calls = [0, 0], [0, 0]
    for number, layer in enumerate(units.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: hook_calls.__setitem__(n, hook_calls[n] + 1))
        layer.self_attn.register_forward_pre_hook(
            lambda *_, n=number: attention_calls.__setitem__(n, attention_calls[n] + 1)
        )
    gradients(model, "selected:1")
    assert attention_calls == [2, 1]
    assert hook_calls == [1, 1]


def products_in_backward(choice, **shape):
    model, batch = tiny_model("llama", **shape), packed()
    units = find_decoder(model)
    use_attention(model, "auto")
    set_recompute(units.layers, recompute_by_layer(choice, len(units.layers)))
    args = (units, batch.input_ids, batch.position_ids, batch.segments, batch.target_index, batch.targets)
    loss, count = packed_loss(*args), [0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            count[0] += function in PRODUCTS
            return function(*args, **kwargs or {})

    with Count():
        loss.backward()
    return count[0]


def test_selected_repeats_the_products_that_widen_and_no_other():
    shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    none, selected, full = (products_in_backward(choice, **shape) for choice in ("none", "selected", "full"))
    assert selected == none + 2 * 2, "gate and up, of two layers"
    assert full > selected
    shape["intermediate_size"] = 64
    assert products_in_backward("selected", **shape) == products_in_backward("none", **shape), "twice is not wide"


def test_a_number_counts_layers_from_the_first():
    assert recompute_by_layer("selected:1", 3) == ["selected", "none", "none"]
    assert recompute_by_layer("full:2", 3) == ["full", "full", "selected"]
    assert recompute_by_layer("selected", 2) == ["selected"] * 2


def test_nothing_is_recomputed_without_gradients():
    model = tiny_model("llama")
    units = find_decoder(model)
    set_recompute(units.layers, recompute_by_layer("full", len(units.layers)))
    calls = []
    units.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert calls == [1]


def test_none_restores_the_layer():
    layers = find_decoder(tiny_model("llama")).layers

    def replaced(*args, **kwargs):
        return type(layers[1]).forward(layers[1], *args, **kwargs)

    layers[1].forward = replaced
    for choice in ("full", "full", "none"):
        set_recompute(layers, recompute_by_layer(choice, len(layers)))
        assert (layers[1].forward is replaced) == (choice == "none")
    assert "forward" not in vars(layers[0])


def test_more_layers_than_there_are_is_an_error():
    with pytest.raises(RecipeError, match="recompute = full:3: the model has 2 layers"):
        recompute_by_layer("full:3", 2)
