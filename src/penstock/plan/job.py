"""What is to be trained, what the solver may choose of it, and the seconds of a step: the words that plans speak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.plan.layout import parameters
from penstock.recipe.presets import Architecture


@dataclass(frozen=True)
class Job:
    """What is to be trained, whatever the machine and the settings."""

    architecture: Architecture
    batch_size: int
    length: int
    clip: bool = True
    update: str = "auto"
    overlap: bool = True
    """False: the baseline, which updates after backward on the host."""
    homes: tuple[tuple[str, float], ...] = ()
    """Shares that the recipe fixes; empty for `auto`."""
    attention: str = "varlen"
    dtype_bytes: int = 2
    checkpoints: int = 3
    """On disk at once, at the most."""
    compiled: bool = False
    accumulate_dtype: str = "fp32"

    @property
    def schedule(self) -> str:
        """When weights are updated."""
        if not self.overlap:
            return "after-norm"
        return ("after-norm" if self.clip else "in-backward") if self.update == "auto" else self.update

    @property
    def in_backward(self) -> bool:
        """Whether weights are updated while backward runs."""
        return self.schedule == "in-backward"

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [p.size for p in parameters(self.architecture)]


@dataclass(frozen=True)
class Settings:
    """What the solver may choose."""

    states: str
    micro_batch: int
    """Rows at once on one GPU."""
    recompute: str
    """As in a recipe, but for `auto`."""


@dataclass(frozen=True)
class Seconds:
    """A step by phase, and the lanes beside it."""

    forward: float
    backward: float
    recompute: float
    exposed: float
    """What no arithmetic hides: waiting for updates, the updates' own share of the GPU, exchange between GPUs."""
    link: float
    """State and weights on their way, each direction."""
    cpu: float
    update: float
    exchange: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.recompute + self.exposed
