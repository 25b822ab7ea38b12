"""One step: made at its first gradient, dropped when it ends or is given up. Nothing of it outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.offload.misuse import Watched
from penstock.offload.trained import TrainedUnit


@dataclass
class Step:
    """What has come of a step so far, by the numbers of the parameters."""

    passes: dict[int, int] = field(default_factory=dict)
    """Gradients that came, from one micro-batch each."""
    seen: set[int] = field(default_factory=set)
    """Parameters whose gradients were final."""
    final: dict[int, Tensor] = field(default_factory=dict)
    """Final gradients on the device that no update has taken yet, flat."""
    sent: set[int] = field(default_factory=set)
    """Parameters whose gradients have all gone down."""
    watched: dict[int, Watched] = field(default_factory=dict)
    """Final gradients as they were given."""
    coefficients: Tensor | None = None
    """Of `in-backward`: the learning rate must be set by the first final gradient; `after-norm` reads it in `step`."""

    def came(self, index: int) -> int:
        """A gradient came; how many that makes."""
        self.passes[index] = self.passes.get(index, 0) + 1
        return self.passes[index]

    def is_final(self, index: int, gradient: Tensor, flat: Tensor) -> None:
        """A gradient will not change any more."""
        self.seen.add(index)
        self.final[index] = flat
        self.watched[index] = Watched.of(gradient)

    def was_sent(self, index: int) -> None:
        """All of a gradient has gone down, and the device keeps none of it."""
        self.sent.add(index)
        del self.final[index], self.watched[index]

    def take(self, index: int) -> Tensor | None:
        """The final gradient, for its update."""
        self.watched.pop(index, None)
        return self.final.pop(index, None)

    def is_complete(self, unit: TrainedUnit) -> bool:
        """Whether all gradients of a unit were final."""
        return self.seen.issuperset(unit.parameters)

    def has_update(self, indices: Sequence[int]) -> bool:
        """Whether any of these has a gradient that no update has taken yet."""
        return any(index in self.final or index in self.sent for index in indices)
