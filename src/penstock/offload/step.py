"""One step: made at its first gradient, dropped when it ends or is given up. Nothing of it outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.offload.dtensors import local
from penstock.offload.trained import TrainedUnit


@dataclass
class Step:
    """What has come of a step so far, by the numbers of the parameters."""

    late: bool = False
    """No gradient is final before `step()`: ranks that hold the same parameters reduce them after their hooks."""
    streamed: frozenset[int] = frozenset()
    """Parameters whose weights lie in host memory."""
    passes: dict[int, int] = field(default_factory=dict)
    """Gradients that came, from one micro-batch each."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Of gradients that are not final what has come so far: of one micro-batch as it came, unless there is a spare
    sum; of more in fp32."""
    spare: dict[torch.Size, list[Tensor]] = field(default_factory=dict)
    """Sums of parameters that stream, once they are final: the next unit's take their place. With fresh memory for
    each, blocks of gigabytes between gradients that leave when the link lets them, the allocator waited for the device
    62 times with gpt-oss-20b in 24 GB; with this 24 times, and 10 since a first gradient is copied there too."""
    seen: set[int] = field(default_factory=set)
    """Parameters whose gradients were final."""
    final: dict[int, Tensor] = field(default_factory=dict)
    """Final gradients on the device that no update has taken yet, flat."""
    sent: set[int] = field(default_factory=set)
    """Parameters whose gradients have all gone down."""
    watched: dict[int, int] = field(default_factory=dict)
    """Where final gradients lay."""
    coefficients: Tensor | None = None
    """Of `in-backward`: the learning rate must be set by the first final gradient; `after-norm` reads it in `step`."""

    def came(self, index: int) -> int:
        """A gradient came; how many that makes."""
        self.passes[index] = self.passes.get(index, 0) + 1
        return self.passes[index]

    def hold(self, index: int, parameter: Tensor) -> None:
        """Take a gradient that is not final away: autograd would add the next one to it in bf16, and round each time.

        Gradients of fp32 stay where they are, since nothing is lost there.
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.dtype is not torch.float32:
            held, own = self.sums.get(index), local(gradient)
            if held is None:  # at once to where the others will be added, so that it is not there beside that
                spare = self.spare.get(own.shape)
                self.sums[index] = spare.pop().copy_(own) if spare else own
            else:
                self.sums[index] = held.float().add_(own)
            parameter.grad = None

    def release(self, index: int, parameter: Tensor, unit: TrainedUnit) -> None:
        """Make the last gradient the sum of all, rounded once.

        Not where the last gradient lies: what backward still wants may share its memory, as where a parameter is added.
        """
        held = self.sums.pop(index, None)
        if held is None:
            return
        last = parameter.grad
        if last is None:  # none came in the last micro-batch, as with experts; a weight that streams lies on the host
            parameter.grad = torch.empty_like(parameter, device=held.device)
            local(parameter.grad).copy_(held)
        else:
            parameter.grad = torch.empty_like(last)
            torch.add(held, local(last), out=local(parameter.grad))
        others = self.sums.keys() - unit.parameters  # row by row all of them have sums, and no more will come
        if held.dtype is torch.float32 and index in self.streamed and self.streamed.isdisjoint(others):
            self.spare.setdefault(held.shape, []).append(held)

    def flat(self, gradient: Tensor) -> Tensor:
        """A final gradient as kernels take it; a copy if it lies in a bucket that the next backward writes to."""
        own = local(gradient).contiguous().view(-1)
        return own.clone() if self.late and own.untyped_storage().nbytes() > own.nbytes else own

    def is_final(self, index: int, gradient: Tensor, flat: Tensor) -> None:
        """A gradient will not change any more."""
        self.seen.add(index)
        self.final[index] = flat
        if not self.late:  # or whoever changes gradients has done so by now
            self.watched[index] = local(gradient).data_ptr()

    def was_sent(self, index: int) -> None:
        """All of a gradient has gone down, and the device keeps none of it."""
        self.sent.add(index)
        del self.final[index]
        self.watched.pop(index, None)

    def take(self, index: int) -> Tensor | None:
        """The final gradient, for its update."""
        self.watched.pop(index, None)
        return self.final.pop(index, None)

    def is_complete(self, unit: TrainedUnit) -> bool:
        """Whether all gradients of a unit were final."""
        return self.seen.issuperset(unit.parameters)

    @property
    def has_begun(self) -> bool:
        """Whether weights have been updated; of `in-backward`."""
        return len(self.final) < len(self.seen)

    def has_update(self, indices: Sequence[int]) -> bool:
        """Whether any of these has a gradient that no update has taken yet."""
        return any(index in self.final or index in self.sent for index in indices)
