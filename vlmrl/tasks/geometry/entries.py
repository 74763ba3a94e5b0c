"""Entries of the tasks geometry3k and mm_math in the table of tasks."""

from __future__ import annotations

from functools import partial

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.geometry.command import prep_command
from vlmrl.tasks.geometry.task import GEOMETRY3K, MM_MATH, VARIANTS, Collection, geometry_task


def _entry(collection: Collection) -> TaskEntry:
    return TaskEntry(
        partial(geometry_task, collection),
        collection.summary,
        variants=VARIANTS,
        profiles=("default", "maye"),
        prep=prep_command(collection),
    )


TASKS = {collection.name: _entry(collection) for collection in (GEOMETRY3K, MM_MATH)}
