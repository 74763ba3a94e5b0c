"""Names that a recipe may use, collected from the packages that define them; `vlmrl recipe check` of a recipe alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrl.data.table_values import TRAINING
from vlmrl.errors import Problem, ProblemsError, VlmrlError
from vlmrl.recipe.checks import Catalogs, check_unprepared
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.several import JOIN, label_from


def catalogs() -> Catalogs:
    """Return the tasks and rewards of this installation, each with a one-line summary, and the roles of columns."""
    from vlmrl.tasks import TASKS
    from vlmrl.tasks.builtin_rewards import REWARDS

    return Catalogs(
        tasks={name: entry.summary for name, entry in TASKS.items()},
        rewards={name: builtin.summary for name, builtin in REWARDS.items()},
        variants={name: entry.variant_names for name, entry in TASKS.items()},
        profiles={name: entry.profiles for name, entry in TASKS.items()},
        column_roles=tuple(TRAINING),
    )


def resolve_tasks(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the facts about each `[[data]]` entry that do not require its data.

    Args:
        recipe: recipe without errors by the rules of recipe/checks.py.
    Returns: for each entry: `path`; `task` ("table" also stands for the task that a prepared dataset names itself);
        `variant` (None if the task has no variants); `by_default`: whether the recipe names no variant (if the data
        lack the truth for the default variant, the baseline variant is used); `reward` (None if it depends on the
        data); `profile` (None if the recipe names another reward than the task's own).
    """
    from vlmrl.tasks import TASKS, make_task

    entries = []
    for data in recipe.data:
        several = JOIN.join(one.label or label_from(one.name) for one in data.all_rewards)
        named, profile = data.reward or recipe.reward.name, recipe.reward.profile
        entry = TASKS.get(data.task)  # None: a user's own task, whose file is not run here
        task = make_task(data.task, {}, data.variant) if entry is not None and entry.variants else None
        variant, own = (task.variant, task.profile(profile)[0]) if task else (None, None)
        entries.append(
            {
                "path": data.path,
                "task": data.task,
                "variant": variant,
                "by_default": variant is not None and data.variant is None,
                "reward": several or named or own,
                "profile": profile if not several and named in (None, own) else None,
            }
        )
    return entries


def check_alone(recipe: str | Path, overrides: Sequence[str]) -> tuple[list[Problem], list[dict[str, Any]]]:
    """Return (problems of a recipe, task and reward of each `[[data]]` entry); the second is [] if there are errors.

    Args:
        recipe: a TOML file, or the name of a shipped recipe.
    """
    try:
        loaded = load_recipe(recipe, overrides=overrides)
        problems = check_unprepared(loaded, catalogs())
        is_sound = not any(p.level == "error" for p in problems)
        return problems, resolve_tasks(loaded.recipe) if is_sound else []
    except ProblemsError as error:
        return list(error.problems), []
    except VlmrlError as error:
        return [Problem(error.message, error.where, error.hint)], []
