"""The homes that were made for a placement, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.flow.transfers import Link
from penstock.machine.hardware import near_cores
from penstock.offload.dtensors import local
from penstock.offload.giving import Giver
from penstock.offload.homes import Home, Surroundings
from penstock.offload.host import HostHome
from penstock.offload.resident import ResidentHome
from penstock.offload.stream import StreamHome
from penstock.offload.trained import Trained
from penstock.plan.layout import STREAM_QUEUE, Chunk, HomeName
from penstock.plan.placement import Placement
from penstock.plan.split import Manner
from penstock.update.formats import view_state
from penstock.update.rule import Rule


class Housing:
    """The chunks of every parameter, and the home of every chunk."""

    def __init__(self, trained: Trained, placement: Placement, rule: Rule, link: Link, manner: Manner) -> None:
        """`manner`: of updates in backward few may wait for a slot, since activations are there."""
        self._parameters = trained.parameters
        around = Surroundings(rule, link, trained.deadlines(), trained.streamed)
        near = near_cores(trained.device)
        makers: dict[HomeName, Callable[[Sequence[Chunk]], Home]] = {
            "gpu": lambda chunks: ResidentHome(chunks, around),
            "stream": lambda chunks: StreamHome(
                chunks,
                around,
                cores=near,
                most_waiting=STREAM_QUEUE if manner.in_backward else 0,
            ),
            "host": lambda chunks: HostHome(
                chunks,
                around,
                cores=placement.cores or near,
                masters_first=manner.masters_first and placement.masters_first,
                in_backward=manner.in_backward,
            ),
        }
        self.homes = [(makers[name](chunks), chunks) for name, chunks in placement.chunks.items() if chunks]
        self.home_of = {chunk: home for home, chunks in self.homes for chunk in chunks}
        self.giver = Giver(self.home_of, link.streams, in_backward=manner.in_backward)
        self.chunks: list[list[Chunk]] = [[] for _ in trained.parameters]
        """By parameter, from its first element to its last."""
        for chunk in sorted(self.home_of, key=lambda chunk: chunk.start):
            self.chunks[chunk.parameter].append(chunk)

    @property
    def stream(self) -> StreamHome | None:
        """The home whose state may be prefetched."""
        return next((home for home, _ in self.homes if isinstance(home, StreamHome)), None)

    def leaves(self, index: int) -> bool:
        """Whether the whole gradient of a parameter leaves the device, so that it need not be kept there."""
        chunks = self.chunks[index]  # none of an empty shard
        return bool(chunks) and all(self.home_of[chunk].sends_down(chunk) for chunk in chunks)

    @torch.no_grad()
    def start_from(self, remainders: Mapping[int, Tensor] | None = None, indices: Iterable[int] | None = None) -> None:
        """Homes learn the weights they start from, of all parameters or of these, and what was rounded off them."""
        for index in range(len(self._parameters)) if indices is None else indices:
            p, remainder = self._parameters[index], (remainders or {}).get(index)
            for chunk in self.chunks[index]:
                home = self.home_of[chunk]
                home.weight_was_set(chunk, chunk.of(local(p).view(-1)))
                if remainder is not None:
                    view_state(chunk, home.state(chunk))["remainder"].copy_(chunk.of(remainder))

    @torch.no_grad()
    def forget_remainders(self, indices: Iterable[int]) -> None:
        """The weights of these parameters are the masters now."""
        for index in indices:
            if self._parameters[index].dtype is torch.bfloat16:
                for chunk, state in self.states_of(index):
                    view_state(chunk, state)["remainder"].zero_()

    def clear(self) -> None:
        """State as before the first step."""
        for home, chunks in self.homes:
            for chunk in chunks:
                home.state(chunk).zero_()

    @contextmanager
    def ending_step(self) -> Iterator[None]:
        """Around the updates of a step; if not all can be asked for, what was asked for comes to its end."""
        try:
            yield
        finally:
            for home, _ in self.homes:
                home.end_step()

    def settle(self) -> None:
        """Return once nothing of the last step is left to do beside the updates that were waited for."""
        for home, _ in self.homes:
            home.settle()

    def states_of(self, index: int) -> Iterator[tuple[Chunk, Tensor]]:
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

    def describe_host_memory(self) -> str:
        """How much of it was taken, and how fast it was ready; nothing if all state is on the device."""
        arenas = [home.arena for home, _ in self.homes if home.arena is not None]
        if not arenas:
            return ""
        gigabytes, seconds = sum(a.num_bytes for a in arenas) / 1e9, sum(a.seconds for a in arenas)
        did = "pinned" if arenas[0].pinned else "taken"
        return f"{gigabytes:,.2f} GB of host memory {did} in {seconds:.1f} s, {gigabytes / seconds:.1f} GB/s"

    @property
    def to_close(self) -> list[Home | Giver]:
        """What holds memory or a thread, in the order in which it is given back."""
        return [self.giver, *(home for home, _ in self.homes)]

    def close(self) -> None:
        """Give back state, arenas and threads."""
        self.giver.close()
        while self.homes:
            self.homes.pop()[0].close()
