"""The bits that must not change by themselves: see `golden.py`."""

import golden
import pytest

from penstock.offload.adamw import OffloadAdamW
from penstock.offload.placing import placement_for


def digests(homes):
    """The digest of every case, with state in these homes."""

    def one(states, update, accumulation):
        clip = 1.0 if update == "after-norm" else 0.0

        def make(model, groups, micro_batches):
            placement = placement_for(model, homes, params=groups, states=states, chunk_size=512)
            options = {"params": groups, "states": states, "homes": placement, "update": update}
            return OffloadAdamW(model, max_grad_norm=clip, micro_batches=micro_batches, **options)

        return golden.train(make, update, accumulation)

    return {name: one(*case) for name, case in golden.cases()}


MIXED = [pytest.param(homes, marks=[] if isinstance(homes, dict) else pytest.mark.slow) for homes in golden.HOMES]


@pytest.mark.parametrize("homes", MIXED, ids=str)
def test_no_bit_has_changed(homes):
    golden.expect(digests(homes))


@pytest.mark.parametrize("home", ["gpu", "stream", "host"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_no_bit_has_changed_on_two_ranks(ranks, states, home):
    results = ranks("updates", 2, states=states, home=home)
    pieces = [piece for result in results for name in sorted(result["pieces"]) for piece in result["pieces"][name]]
    golden.expect({f"two ranks {states}": golden.digest([*pieces, *(result["norm"] for result in results)])})
