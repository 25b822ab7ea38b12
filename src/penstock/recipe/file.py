"""A recipe by name: a preset, a YAML file that may start from one, or a model alone.

A model that comes without a preset gets defaults that do no harm to a trained one. Starting from `demo` was rejected:
its learning rate and its epochs are for 3 M parameters that have hardly been trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from pathlib import Path
from shlex import quote

import yaml

from penstock.errors import RecipeError, did_you_mean
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe, with_values


@dataclasses.dataclass(frozen=True)
class Found:
    """A recipe, and where it comes from."""

    recipe: Recipe
    preset: str = ""
    """The preset that it starts from; empty for none."""
    has_share: bool = False
    """Whether someone chose how much of the data it takes: a preset's own share is meant for its own data."""


def for_model(model: str) -> Recipe:
    """Defaults for a model without a preset: a low learning rate, one pass, rows as long as the data needs."""
    name = Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rpartition("/")[2]
    return Recipe(name=name.removesuffix(".gguf") or "run", model=model, data="", max_length=0)


def _meant(path: Path, name: str) -> str:
    """What a word may mean that is no preset."""
    if path.is_file():
        return f"Data is named with --data {quote(name)}."
    if "/" in name:  # a directory, or one of the Hub
        return f"A model is named with --model {quote(name)}, data with --data."
    return did_you_mean(name, PRESETS) + " Or name a .yaml file."


def find_recipe(name: str) -> Found:
    """A preset by name, or a recipe from a YAML file, whose `preset` key names what it starts from."""
    if name in PRESETS:
        return Found(PRESETS[name], name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError("there is no such preset", where=name, remedy=_meant(path, name))
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise RecipeError(
            f"cannot be read ({error.strerror})", where=name, remedy="Check the path of the recipe."
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # letters that are none, a day that no month has
        what = f"is not YAML: {' '.join(str(error).split())}"
        raise RecipeError(what, where=name, remedy="It holds lines such as lr: 2e-5, each field once.") from None
    if not isinstance(values, dict):
        raise RecipeError("must hold `field: value` lines", where=name, remedy="For example: lr: 2e-5")
    preset = values.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        remedy = "It names one, such as preset: demo"
        raise RecipeError(f"preset: {preset!r} is not a name", where=name, remedy=remedy)
    if preset is not None and preset not in PRESETS:
        raise RecipeError(f"there is no preset {preset!r}", where=name, remedy=did_you_mean(preset, PRESETS))
    base = PRESETS[preset] if preset else Recipe()
    if not preset and isinstance(values.get("model"), str) and values["model"] != base.model:
        base = for_model(values["model"])
    recipe = with_values(dataclasses.replace(base, name=path.stem), values, where=name)
    has_share = "data_percent" in values
    return Found(recipe if has_share else all_of_own_data(recipe, base), preset or "", has_share)


def all_of_own_data(recipe: Recipe, base: Recipe) -> Recipe:
    """Presets take a tenth of their set, as the runs that they follow do; nobody means that of a set of their own."""
    return recipe if recipe.data == base.data else dataclasses.replace(recipe, data_percent=100.0)


BORROWED = ("name", "data", "data_percent", "max_length", "batch_size", "epochs", "lr", "warmup", "prompt")
"""What a preset decides that someone with another model should know of."""


def borrowed(found: Found, recipe: Recipe) -> str:
    """What a recipe with another model than its preset's still has from the preset; empty without a preset."""
    preset = PRESETS.get(found.preset)
    if preset is None or recipe.model == preset.model:
        return ""
    kept = [name for name in BORROWED if getattr(recipe, name) == getattr(preset, name) not in (None, "")]
    listed = ", ".join(f"{name} {_written(getattr(preset, name))}" for name in kept)
    return f"{recipe.model} with the settings of the preset {found.preset}: {listed or 'none is left'}"


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand once: PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                problem = f"key {key!r} is not a name; is it a placeholder that nobody filled in?"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
