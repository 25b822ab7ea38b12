"""Who a process is, from its environment."""

import pytest

from penstock.engine.ranks import World, find_world
from penstock.errors import RecipeError


def test_the_environment_says_which_rank_this_is():
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find_world(environment) == World(5, 8, 1, 4)
    assert find_world({}) == World(0, 1, 0, 1)
    assert World().first
    assert not World().many


def test_a_half_set_environment_is_refused():
    with pytest.raises(RecipeError, match="LOCAL_RANK is not a number"):
        find_world({"RANK": "0", "WORLD_SIZE": "2"})
