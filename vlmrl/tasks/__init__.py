"""Table of tasks. A task is made for a dataset: `make_task(name, dataset.info, variant)`.

A folder beside this file registers tasks with a module `entries.py`: its `TASKS` (name -> TaskEntry) and, if it has
them, its `KINDS` (kinds of rows) are read when this package is imported. builtin_rewards.py reads the `REWARDS` of a
folder's `rewards.py` in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from vlmrl.data.dataset import Dataset
from vlmrl.errors import RecipeError, unknown
from vlmrl.tasks.base import Task
from vlmrl.tasks.entry import TaskEntry, entries_of, modules_of_folders
from vlmrl.tasks.truth_kinds import TEXTS, RowKind, Truth, TruthForm
from vlmrl.tasks.user_task import is_own, load_own

_ENTRIES = modules_of_folders("entries")
TASKS: dict[str, TaskEntry] = entries_of(_ENTRIES, "TASKS")
KINDS: tuple[RowKind, ...] = (
    *sorted((kind for module in _ENTRIES for kind in getattr(module, "KINDS", ())), key=lambda kind: -kind.specificity),
    TEXTS,
)
"""Kinds of rows, the most specific first. A row's truth determines its kind. `TEXTS` matches every truth."""
DEFAULT = "table"
"""Default task: the rows have their own prompt, and the user provides the reward."""


def kind_of(truth: Truth) -> RowKind:
    """Return the most specific kind of rows that matches a truth. The task of the rows has no effect."""
    return next(kind for kind in KINDS if kind.matches(truth))


def task_of(dataset: Dataset, named: str | None = None, variant: str | None = None) -> Task:
    """Return the task of an open dataset: the one that the user names, else the dataset's own.

    Raises: RecipeError when only the dataset names a task file, because a task file runs only if the user names it;
        also the errors of `make_task`.
    """
    named = None if named == DEFAULT else named
    own = str(getattr(dataset, "task", DEFAULT))
    if named is None and is_own(str(dataset.info.get("task", ""))):
        raise RecipeError(
            f"{dataset.path} was made by the task `{dataset.info['task']}`, a file; data may run no code",
            hint=f'name it: [[data]] task = "{dataset.info["task"]}", or --task {dataset.info["task"]}',
        )
    return make_task(named or own, dataset.info, variant)


def find_task(name: str) -> TaskEntry:
    """Return the table's entry for a task; for a user's own task, make an entry.

    Raises: RecipeError with the nearest name when there is none of that name.
    """
    if is_own(name):
        own = load_own(name, {})
        return TaskEntry(partial(load_own, name), own.summary, truth_form=lambda *_: own.truths or TruthForm())
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def make_task(name: str, info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of that name for a dataset: one of the table, or the user's `path/to/file.py:function`.

    Args:
        info: the dataset's dataset.json.
        variant: name of the variant; None = the largest variant whose truth fields the dataset has.
    Raises: RecipeError with the nearest name when there is no such task or variant; DataError when the dataset lacks
        what the task or the variant needs.
    """
    if is_own(name):
        if variant is not None:
            raise unknown("variant", variant, [], whose=f" of task `{name}`")
        return load_own(name, info)
    entry = find_task(name)
    if variant is not None and variant not in entry.variant_names:
        raise unknown("variant", variant, entry.variant_names, whose=f" of task `{name}`")
    return entry.make(info, variant) if entry.variants else entry.make(info)
