"""The table of tasks. A task is made for a dataset: `TASKS[name](dataset.info)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from vlmrl.errors import RecipeError
from vlmrl.tasks.base import Task
from vlmrl.tasks.digits.task import SUMMARY as DIGITS_SUMMARY
from vlmrl.tasks.digits.task import digits_task
from vlmrl.tasks.pairs.task import SUMMARY as PAIRS_SUMMARY
from vlmrl.tasks.pairs.task import pair_task
from vlmrl.tasks.table.task import SUMMARY as TABLE_SUMMARY
from vlmrl.tasks.table.task import table_task


@dataclass(frozen=True)
class TaskEntry:
    """A task in the table: `entry(info)` makes it for a dataset, `summary` is its line in `vlmrl recipe list`."""

    make: Callable[[Mapping[str, Any]], Task]
    summary: str

    def __call__(self, info: Mapping[str, Any]) -> Task:
        return self.make(info)


TASKS: dict[str, TaskEntry] = {
    "digits": TaskEntry(digits_task, DIGITS_SUMMARY),
    "pairs": TaskEntry(pair_task, PAIRS_SUMMARY),
    "table": TaskEntry(table_task, TABLE_SUMMARY),
}


def make_task(name: str, info: Mapping[str, Any]) -> Task:
    """The task of that name for this dataset. Raises: RecipeError with the nearest name when there is none."""
    if name not in TASKS:
        close = get_close_matches(name, TASKS, 1)
        meant = f"did you mean `{close[0]}`?  " if close else ""
        raise RecipeError(f"unknown task `{name}`", hint=f"{meant}tasks: {', '.join(TASKS)}")
    return TASKS[name](info)
