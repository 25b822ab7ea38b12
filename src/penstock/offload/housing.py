"""Where state lives: parameters cut into chunks, the homes that were made for them, and what is asked of all homes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.flow.arena import Arena
from penstock.flow.lanes import Tape
from penstock.offload.dtensors import local, local_start
from penstock.offload.homes import Chunk, Home, HostHome, ResidentHome, StreamHome
from penstock.plan.layout import STREAM_QUEUE, HomeName
from penstock.plan.placement import deal
from penstock.update.formats import StateFormat
from penstock.update.kernels import split


class Housing:
    """The chunks of every parameter, and the home of every chunk."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        states: StateFormat,
        shares: Mapping[HomeName, float],
        chunk_size: int,
        tape: Tape,
        *,
        in_backward: bool,
        near: Sequence[int],
        cores: Sequence[int],
    ) -> None:
        """`order`: numbers of the parameters in the order of forward. `near` cores make the arenas, `cores` update."""
        self._parameters, self._states = parameters, states
        device = parameters[0].device
        dealt = deal([self._cut(index, chunk_size) for index in order], shares)
        most_waiting = STREAM_QUEUE if in_backward else 0
        homes: dict[HomeName, Callable[[list[Chunk]], Home]] = {
            "gpu": lambda c: ResidentHome(c, device, tape),
            "stream": lambda c: StreamHome(c, device, tape, cores=near, most_waiting=most_waiting),
            "host": lambda c: HostHome(c, device, tape, cores=cores),
        }
        self.homes = [(homes[name](chunks), chunks) for name, chunks in dealt.items() if chunks]
        self.home_of = {chunk: home for home, chunks in self.homes for chunk in chunks}
        self.chunks: list[list[Chunk]] = [[] for _ in parameters]
        """By parameter, from its first element to its last."""
        for chunk in sorted(self.home_of, key=lambda chunk: chunk.start):
            self.chunks[chunk.parameter].append(chunk)

    def _cut(self, index: int, chunk_size: int) -> list[Chunk]:
        p, offset = self._parameters[index], local_start(self._parameters[index])
        size = local(p).numel()
        starts = range(0, size, chunk_size)
        return [Chunk(index, start, min(chunk_size, size - start), p.dtype, self._states, offset) for start in starts]

    @property
    def stream(self) -> StreamHome | None:
        """The home whose state may come early."""
        return next((home for home, _ in self.homes if isinstance(home, StreamHome)), None)

    @torch.no_grad()
    def start_from(self, remainders: Mapping[int, Tensor] | None = None, indices: Iterable[int] | None = None) -> None:
        """Homes learn the weights they start from, of all parameters or of these, and what was rounded off them."""
        for index in range(len(self._parameters)) if indices is None else indices:
            p, remainder = self._parameters[index], (remainders or {}).get(index)
            for chunk in self.chunks[index]:
                home = self.home_of[chunk]
                home.weight_was_set(chunk, chunk.of(local(p).view(-1)))
                if remainder is not None:
                    chunk.view(home.state(chunk)).remainder.copy_(chunk.of(remainder))

    @torch.no_grad()
    def forget_remainders(self, indices: Iterable[int]) -> None:
        """The weights of these parameters are the masters now."""
        for index in indices:
            if self._parameters[index].dtype is torch.bfloat16:
                for chunk, state in self.states(index):
                    chunk.view(state).remainder.zero_()

    def clear(self) -> None:
        """State as before the first step."""
        for home, chunks in self.homes:
            for chunk in chunks:
                home.state(chunk).zero_()

    def states(self, index: int) -> Iterator[tuple[Chunk, Tensor]]:
        """The chunks of one parameter, each with its state where it lies."""
        for chunk in self.chunks[index]:
            yield chunk, self.home_of[chunk].state(chunk)

    def num_bytes(self, indices: Sequence[int]) -> dict[str, int]:
        """Bytes of these parameters' state by home."""
        found: dict[str, int] = {}
        for chunk in (chunk for index in indices for chunk in self.chunks[index]):
            name = self.home_of[chunk].name
            found[name] = found.get(name, 0) + chunk.state_bytes
        return found

    def arenas(self) -> list[Arena]:
        """The host memory that was taken."""
        return [home.arena for home, _ in self.homes if home.arena is not None]

    def close(self) -> None:
        """Give back state, arenas and threads."""
        while self.homes:
            self.homes.pop()[0].close()


@torch.no_grad()
def round_off(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype | None, known: Mapping[nn.Parameter, Tensor]
) -> dict[int, Tensor]:
    """Round fp32 weights to bf16 if asked; the remainders keep the precision that the weights lose."""
    remainders = {index: known[p] for index, p in enumerate(parameters) if p in known}
    for index, p in enumerate(parameters):
        if dtype is torch.bfloat16 and p.dtype is torch.float32:
            assert not isinstance(p, DTensor), "FSDP2 has set itself up for the type of a parameter: round before"
            weight, remainders[index] = split(p.detach().view(-1))
            p.data = weight.view(p.shape)
    return remainders
