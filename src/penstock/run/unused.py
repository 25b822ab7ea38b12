"""Settings that someone chose and that change nothing of a run. They are said, so that nobody waits for their effect.

Not refused: a recipe in a file is used with other data, another model, or no tracker, and is right all the same.
"""

from __future__ import annotations

from pathlib import Path

from penstock.data.names import looks_like_hub
from penstock.recipe.lists import is_here, parse_parts, path_of
from penstock.recipe.recipe import Recipe


def unused(recipe: Recipe) -> list[str]:
    """A line for each."""
    named = [part.name for text in (recipe.data, recipe.eval_data or "") for part in parse_parts(text) or ()]
    local = [path_of(name) for name in named if name == "demo" or is_here(name)]
    fetched = len(local) < len(named) and any(looks_like_hub(name) for name in named)
    has_splits = fetched or any(path.is_dir() for path in local)
    has_tags = bool({"wandb", "trackio"} & {*recipe.track_list})
    model = "the demo model" if recipe.model == "demo" else "a model on a disk"
    model_is_fetched = recipe.model != "demo" and not Path(recipe.model).expanduser().exists()
    default = Recipe()
    uses = {
        "data_split": (has_splits, "a file has no splits"),
        "eval_split": (has_splits, "a file has no splits"),
        "data_stream": (fetched, "only data sets of the Hub are streamed"),
        "revision": (model_is_fetched, f"{model} has no revisions"),
        "project": (has_tags, "only wandb and trackio have projects, and --track names neither"),
        "tags": (has_tags, "only wandb and trackio have tags, and --track names neither"),
    }
    chosen = {name: getattr(recipe, name) for name in uses if getattr(recipe, name) != getattr(default, name)}
    return [f"{name} {value} changes nothing: {uses[name][1]}" for name, value in chosen.items() if not uses[name][0]]
