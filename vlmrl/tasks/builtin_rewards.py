"""Table of all built-in rewards by name: the general ones (vlmrl/rewards) and those of the shipped tasks.

A folder of tasks registers its rewards as `REWARDS` in a module `rewards.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial

from vlmrl import rewards
from vlmrl.rewards import GENERAL, Builtin
from vlmrl.tasks.entry import entries_of, modules_of_folders

REWARDS: Mapping[str, Builtin] = {**entries_of(modules_of_folders("rewards"), "REWARDS"), **GENERAL}

load_reward = partial(rewards.load_reward, builtins=REWARDS)
"""`vlmrl.rewards.load_reward`, which finds all built-in rewards by name."""
load_recorded = partial(rewards.load_recorded, builtins=REWARDS)
"""`vlmrl.rewards.load_recorded`, which finds all built-in rewards by name."""
PROFILE = "profile:"
"""Prefix of a reward's name that means a profile of the task. A profile named like a built-in reward is that reward."""


def takes_any_truth(name: str | None) -> bool:
    """Return whether `name` or `profile:NAME` is a built-in reward that accepts a ground truth of any type."""
    known = REWARDS.get((name or "").removeprefix(PROFILE))
    return known is not None and known.any_truth


def takes_judge(name: str) -> bool:
    """Return whether `name` is a built-in reward that asks the judge of the recipe's table `[judge]`."""
    known = REWARDS.get(name)
    return known is not None and "judge" in inspect.signature(known.build).parameters
