"""Dataset of a task from tables of others, or from drawings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.own_prep import NewRow, prepare_own
from vlmrl.tasks.table_request import TableRequest
from vlmrl.tasks.table_rows import RowForm, read_tables


def prepare_table(
    task: Task,
    request: TableRequest,
    limits: Limits,
    *,
    form: RowForm,
    settings: Mapping[str, Any],
    draw: Callable[[Mapping[str, int]], Mapping[str, list[NewRow]]],
    drawn_settings: Mapping[str, Any],
    split_names: Mapping[str, str] | None = None,
    force: bool = False,
) -> Prepared:
    """Make the dataset of a task from tables, or draw it.

    Args:
        form, settings: form of the rows in tables, and the task's own options for them.
        draw, drawn_settings: split -> number of rows -> drawn rows, and the task's own options for them.
        split_names: name of a split in published tables -> its name in the dataset.
    Raises: DataError for a source, name or row that cannot be used; nothing is written.
    """
    name, out = request.place(task.name)
    counts = request.drawn()
    splits = partial(draw, counts) if counts else partial(read_tables, request, form, split_names or {})
    args = {**request.args(), **(drawn_settings if counts else settings), **limits.args}
    return prepare_own(replace(task, prep=lambda **_: splits()), args, out, limits, name=name, force=force)
