"""Table of one reward in a list: `[[rewards]]`, or `[[data.rewards]]` of one source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from vlmrl.recipe.judge_table import Judge
from vlmrl.recipe.key_rules import FILE_OR_NAME, REWARD, SPEED
from vlmrl.recipe.table import Number, RecipeTable
from vlmrl.recipe.toml_lines import Key

OF_TASK = "task"
"""Name that stands for the task's own reward."""
ARGUMENTS = ("reward.args", "rewards.args", "data.rewards.args")
"""Keys of the arguments of rewards, without positions in lists."""
OF_ONE_REWARD = ("name", "profile", "style", "args", "weights", "on_timeout")
"""Keys of `[reward]` that belong to a single reward. In a list, each reward has its own."""


class ListedReward(RecipeTable):
    """One of several rewards. The score is the sum of weight times score over the rewards of the list."""

    name: Annotated[str, REWARD, FILE_OR_NAME] = Field(min_length=1)
    """"task" = the task's own reward; else a built-in reward or `path/to/file.py:function`."""
    label: Annotated[str | None, REWARD] = None
    """Name of this reward, and the first half of the names of its parts: `label.part`, or `label` alone for a plain
    number. Left out = the function of `file.py:function`, else `name`."""
    weight: Annotated[Number, REWARD] = 1.0
    """Weight of this reward's score in the sum; 0 = it is reported, and does not count."""
    args: Annotated[dict[str, Any], REWARD] = {}
    """Keyword arguments of this reward; see `reward.args`."""
    gate: Annotated[str | None, REWARD] = None
    """Part of another reward of the list, such as "grade.accuracy". This reward scores only responses in which that
    part is above 0; in the others it adds 0, and is not called."""
    weights: Annotated[dict[str, Number], REWARD] = {}
    """Weight of each part within this reward's own score; see `reward.weights`."""
    profile: Annotated[str, REWARD] = "default"
    """Profile of the task's own reward, with `name = "task"`; see `reward.profile`."""
    style: Annotated[Literal["auto", "vlmrl", "trl", "verl", "easyr1"], REWARD] = "auto"
    """Calling convention of a `file.py:function`; see `reward.style`."""
    on_timeout: Annotated[dict[str, Number], REWARD] = {}
    """Parts of the score of a response that hangs or kills this reward twice; see `reward.on_timeout`."""
    timeout_seconds: Annotated[Annotated[float, Field(ge=1e-3, le=3600)] | None, SPEED] = None
    """Maximum wall time of one call of this reward in a worker, in seconds. Left out = `reward.timeout_seconds`."""
    _judge: Judge = PrivateAttr(default_factory=Judge)


def drop_replaced(raw: dict[str, Any], layer: Mapping[str, Any]) -> list[Key]:
    """Remove from `raw` what a later file replaces: its list replaces one reward, its `reward.name` replaces a list.

    Args:
        raw: values of the earlier files; changed in place.
        layer: values of the later file.
    Returns: the keys that were removed.
    """
    earlier, later = raw.get("reward"), layer.get("reward")
    if "rewards" in layer and isinstance(earlier, dict):
        keys = [key for key in OF_ONE_REWARD if key in earlier]
        for key in keys:
            del earlier[key]
        return [("reward", key) for key in keys]
    if "rewards" in raw and isinstance(later, Mapping) and "name" in later:
        del raw["rewards"]
        return [("rewards",)]
    return []
