"""What is to be trained, what the solver may choose of it, and the seconds of a step: the words that plans speak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.errors import RecipeError
from penstock.plan.layout import parameters
from penstock.recipe.presets import Architecture
from penstock.recipe.recipe import inputs_every

TILES = (16384, 8192, 4096, 2048)
"""Tokens of a tile: what a product needs to run at its rate, and less where memory asks for it. Not measured yet."""
LONG_ROW = 65536
"""Tokens from which on rows of layers that are computed one by one are so in tiles if that leaves more of the GPU to
state: a tile is a small part of such a row, and attention most of its time."""


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
    matmul: str = "bf16"
    weights: str = "resident"
    """As in a recipe, and so are the next three."""
    order: str = "auto"
    inputs: str = "auto"
    tile: str = "auto"
    attended: float = 0.0
    """Tokens that one attends to on average; 0: as in rows that one example fills."""

    @property
    def chosen_update(self) -> str:
        """When weights are updated."""
        if not self.overlap:
            return "after-norm"
        return ("after-norm" if self.clip else "in-backward") if self.update == "auto" else self.update

    @property
    def in_backward(self) -> bool:
        """Whether weights are updated while backward runs."""
        return self.chosen_update == "in-backward"

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [p.size for p in parameters(self.architecture)]

    @property
    def asks_for_layers(self) -> bool:
        """Whether it says, itself, that layers are computed one by one."""
        return self.weights not in ("auto", "resident") or self.order == "layers"

    @property
    def tile_choices(self) -> list[tuple[int, ...]]:
        """Tiles that are tried together, and then, where none of them fits, those that take less."""
        if self.tile not in ("auto", "none"):
            return [(int(self.tile),)]
        if self.tile == "none" or self.attention != "varlen":
            return [(0,)]
        largest, *smaller = TILES
        first = [(0, largest)] if self.length >= LONG_ROW else [(0,), (largest,)]
        return [*first, *((tile,) for tile in smaller)]

    @property
    def input_choices(self) -> list[tuple[str, ...]]:
        """The same of saved inputs."""
        if self.inputs != "auto":
            return [(self.inputs,)]
        fewer = [("parked:2",), ("parked:4",)] if self.length >= LONG_ROW else []
        return [("kept", "parked"), *fewer]

    @property
    def streamed_choices(self) -> range:
        """Numbers of layers that may stream, the last ones of the model."""
        layers = self.architecture.layers
        if self.weights == "resident":
            return range(1)
        if self.weights == "auto":
            return range(layers + 1)
        count = layers if self.weights == "streamed" else int(self.weights)
        if count > layers:
            what = f"the model has {layers} layers"
            raise RecipeError(what, where=f"weights = {self.weights}", remedy="Use streamed for all.")
        return range(count, count + 1)


@dataclass(frozen=True)
class Settings:
    """What the solver may choose."""

    states: str
    micro_batch: int
    """Rows at once on one GPU."""
    recompute: str
    """As in a recipe, but for `auto`."""
    streamed: int = 0
    """Layers whose weights stream, the last ones."""
    order: str = "rows"
    inputs: str = "kept"
    tile: int = 0
    """Tokens; 0 for none."""

    @property
    def parks(self) -> bool:
        """Whether saved inputs wait in host memory."""
        return self.inputs.startswith("parked")

    @property
    def every(self) -> int:
        """Layers from one saved input to the next."""
        return inputs_every(self.inputs)

    @property
    def by_layer(self) -> bool:
        """Whether layers are computed one by one, each again in backward from its saved input."""
        return self.streamed > 0 or self.order == "layers"


def weights_word(streamed: int, layers: int) -> str:
    """As a recipe says it."""
    return {0: "resident", layers: "streamed"}.get(streamed, str(streamed))


@dataclass(frozen=True)
class Crossing:
    """Bytes of a kind that cross the link in a step."""

    name: str
    in_bytes: float
    """To the GPU."""
    out_bytes: float


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
