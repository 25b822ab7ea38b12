"""Trackers: the same rows as metrics.jsonl, told to TensorBoard, Weights & Biases or trackio as well.

Each works in a thread of its own. Calling it from the loop was rejected: a service that hangs would hold up every step,
and one that raises would end the run. So a tracker that fails, at the start or in the middle, costs one warning line,
and one that hangs is left behind after a while. Keys come from the environment, where the trackers' own libraries look
for them; what they are told is the recipe and the rows.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import yaml

from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe, to_dict
from penstock.report.metrics import EvalRow, StepRow

FINISH_SECONDS = 30.0
"""How long the end of a run waits for a tracker to send what it still has."""

Values = dict[str, float]


class Tracker(Protocol):
    """A service that draws curves. Made, told and finished by one thread."""

    def log(self, step: int, values: Values) -> None:
        """Numbers of one step."""

    def finish(self) -> None:
        """There are no more."""


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, recipe: Recipe) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(recipe.run_dir / "tensorboard"))
        self._writer.add_text("recipe", "```\n" + yaml.safe_dump(to_dict(recipe), sort_keys=False) + "```")

    def log(self, step: int, values: Values) -> None:
        """A scalar a value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb; with WANDB_MODE=offline it is written to RUN/wandb only."""

    def __init__(self, recipe: Recipe) -> None:
        import wandb

        # What wandb would collect by itself is switched off: a repository's address or a command line may hold a key.
        settings = wandb.Settings(disable_git=True, disable_code=True, save_code=False, console="off", silent=True)
        self._run: Any = wandb.init(
            project=recipe.project,
            name=recipe.name,
            tags=recipe.tag_list,
            config=to_dict(recipe),
            dir=str(recipe.run_dir),
            settings=settings,
        )

    def log(self, step: int, values: Values) -> None:
        """One row."""
        self._run.log(values, step=step)

    def finish(self) -> None:
        """Send what is left."""
        self._run.finish()


class Trackio:
    """A run of trackio, in its own local database or wherever TRACKIO_SPACE_ID says."""

    def __init__(self, recipe: Recipe) -> None:
        import trackio

        config = {**to_dict(recipe), "tags": recipe.tag_list}
        self._run: Any = trackio.init(project=recipe.project, name=recipe.name, config=config, embed=False)

    def log(self, step: int, values: Values) -> None:
        """One row."""
        self._run.log(values, step=step)

    def finish(self) -> None:
        """Write what is left."""
        self._run.finish()


KINDS: dict[str, Callable[[Recipe], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def check_installed(recipe: Recipe) -> None:
    """Refuse a run whose tracker is not there, before anything is loaded. One that fails later ends no run."""
    for name in recipe.track_list:  # each is called as its package is, and as its extra
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a directory that happens to be called so is no package
            remedy = (
                f"pip install 'penstock-train[{name}]', in a checkout pip install -c constraints.txt '.[{name}]'; "
                "or leave it out of --track."
            )
            raise RecipeError(f"the package {name} is not installed", where=f"track = {recipe.track!r}", remedy=remedy)


class Trackers:
    """All trackers of a run. Nothing here raises or waits, except `finish`, which waits a while."""

    def __init__(
        self,
        recipe: Recipe,
        say: Callable[[str], None],
        *,
        kinds: dict[str, Callable[[Recipe], Tracker]] = KINDS,
        finish_seconds: float = FINISH_SECONDS,
    ) -> None:
        self._recipe, self._say, self._finish_seconds = recipe, say, finish_seconds
        self._kinds = {name: kinds[name] for name in recipe.track_list}
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def start(self, rows: Sequence[StepRow] = (), evals: Sequence[EvalRow] = ()) -> None:
        """Begin, with what was done before if the run is resumed: the curves of a resumed run are whole."""
        self._workers = [_Worker(name, kind, self._recipe, self._say) for name, kind in self._kinds.items()]
        told: list[StepRow | EvalRow] = sorted([*rows, *evals], key=lambda row: row.step)
        for row in told:
            self.row(row) if isinstance(row, StepRow) else self.evaluated(row)

    def row(self, row: StepRow) -> None:
        """A step has ended."""
        values = {
            "train/loss": row.loss,
            "train/lr": row.lr,
            "train/grad_norm": row.grad_norm,
            "train/skipped": float(row.skipped),
            "speed/tokens_per_s": row.tokens / row.step_seconds if row.step_seconds else math.nan,
            "speed/model_tflops": row.model_tflops,
            "speed/reference_tflops": row.reference_tflops,
            "speed/trained_tokens_per_s": row.trained_tokens / row.step_seconds if row.step_seconds else math.nan,
        }
        self._tell(row.step, values)

    def evaluated(self, row: EvalRow) -> None:
        """An evaluation has ended."""
        self._tell(row.step, {"eval/loss": row.eval_loss})

    def finish(self) -> None:
        """Let every tracker end, together for as long as one may take."""
        for worker in self._workers:
            worker.tell(None)
        for worker in self._workers:
            worker.join(self._finish_seconds)
            if worker.is_alive():
                self._say(f"Warning: {worker.name} does not end; what it has not sent by now is lost to it")
        self._workers = []

    def _tell(self, step: int, values: Values) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for worker in self._workers:
            worker.tell((step, finite))


class _Worker(threading.Thread):
    """One tracker and its thread: a daemon, so that one that hangs cannot keep the process alive."""

    def __init__(
        self, name: str, kind: Callable[[Recipe], Tracker], recipe: Recipe, say: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._kind, self._recipe, self._say = kind, recipe, say
        self._rows: queue.SimpleQueue[tuple[int, Values] | None] = queue.SimpleQueue()
        self.start()

    def tell(self, row: tuple[int, Values] | None) -> None:
        """Hand over a row, or None at the end."""
        self._rows.put(row)

    def run(self) -> None:
        """Until the end, or the first failure."""
        try:
            tracker = self._kind(self._recipe)
            while (row := self._rows.get()) is not None:
                tracker.log(*row)
            tracker.finish()
        except BaseException as error:  # wandb calls sys.exit where it finds no key
            lines = str(error).strip().splitlines() or [""]
            self._warn(f"{type(error).__name__}: {lines[0][:200]}")

    def _warn(self, why: str) -> None:
        self._say(without_secrets(f"Warning: the run goes on without {self.name}: {why}"))


def without_secrets(text: str) -> str:
    """`text` without the values of variables that hold keys: an error of a service may quote one."""
    for name, value in os.environ.items():
        if len(value) >= 8 and name.upper().endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")):
            text = text.replace(value, f"${name}")
    return text
