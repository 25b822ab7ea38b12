"""Random weights: one generator a module, whoever draws."""

import pytest
import torch


@pytest.mark.slow
def test_random_weights_do_not_depend_on_the_number_of_ranks(ranks):
    presets = ["llama-8b", "qwen3-30b-a3b", "demo"]
    one, two, four = (ranks("drawing", count, presets=presets)[0] for count in (1, 2, 4))
    for number in range(len(presets)):
        for name, weight in one[number].items():
            assert torch.equal(two[number][name], weight), name
            assert torch.equal(four[number][name], weight), name
    matrices = [w for w in one[0].values() if w.ndim == 2]
    assert len({float(w.flatten()[0]) for w in matrices}) == len(matrices), "every module has a generator of its own"
