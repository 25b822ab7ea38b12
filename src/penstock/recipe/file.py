"""A recipe by name: a preset, or a YAML file that may start from one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from penstock.errors import RecipeError, did_you_mean
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import Recipe, with_values


def find_recipe(name: str) -> tuple[Recipe, bool]:
    """A preset by name, or a recipe from a YAML file, whose `preset` key names what it starts from.

    And whether someone chose how much of the data it takes: a preset's own share is meant for its own data.
    """
    if name in PRESETS:
        return PRESETS[name], False
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        remedy = did_you_mean(name, PRESETS) + " Or name a .yaml file."
        raise RecipeError("there is no such preset", where=name, remedy=remedy)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise RecipeError(
            f"cannot be read ({error.strerror})", where=name, remedy="Check the path of the recipe."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
    recipe = with_values(dataclasses.replace(base, name=path.stem), values, where=name)
    chosen = "data_percent" in values
    return recipe if chosen else all_of_own_data(recipe, base), chosen


def all_of_own_data(recipe: Recipe, base: Recipe) -> Recipe:
    """Presets take a tenth of their set, as the runs that they follow do; nobody means that of a set of their own."""
    return recipe if recipe.data == base.data else dataclasses.replace(recipe, data_percent=100.0)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand once: PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
