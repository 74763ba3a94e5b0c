"""The names a recipe may use, gathered from the packages that own them. No torch."""

from __future__ import annotations

from typing import Any

from vlmrl.recipe.checks import Catalogs
from vlmrl.recipe.schema import Recipe


def catalogs() -> Catalogs:
    """Return the tasks and rewards that exist in this installation, each with one line about it."""
    from vlmrl.tasks import TASKS
    from vlmrl.tasks.builtin_rewards import REWARDS

    return Catalogs(
        tasks={name: entry.summary for name, entry in TASKS.items()},
        rewards={name: builtin.summary for name, builtin in REWARDS.items()},
        variants={name: entry.variant_names for name, entry in TASKS.items()},
        profiles={name: entry.profiles for name, entry in TASKS.items()},
    )


def resolve_tasks(recipe: Recipe) -> list[dict[str, Any]]:
    """What each `[[data]]` entry comes to, as far as it can be known before its data are opened.

    Args: recipe: sound by the rules of recipe/checks.py.
    Returns: of each `path`, `task` (table: or the prepared dataset's own), `variant` (None where the task has none),
        `by_default` (the recipe names no variant: it is the baseline if the data lack the truth for this one), `reward`
        (None where only the data tell) and `profile` (None where the recipe names another reward than the task's own).
    """
    from vlmrl.tasks import TASKS, make_task

    found = []
    for data in recipe.data:
        named, profile = data.reward or recipe.reward.name, recipe.reward.profile
        entry = TASKS.get(data.task)  # None: a task of one's own, whose file is not run to say this
        task = make_task(data.task, {}, data.variant) if entry is not None and entry.variants else None
        variant, own = (task.variant, task.profile(profile)[0]) if task else (None, None)
        found.append({
            "path": data.path, "task": data.task, "variant": variant,
            "by_default": variant is not None and data.variant is None,
            "reward": named or own, "profile": profile if named in (None, own) else None,
        })  # fmt: skip
    return found
