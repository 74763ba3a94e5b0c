"""Entries of the tasks geometry3k, mm_math, geoqa and text_math in the table of tasks."""

from __future__ import annotations

from functools import partial

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.geometry.command import prep_command
from vlmrl.tasks.geometry.task import COLLECTIONS, Collection, geometry_task


def _entry(collection: Collection) -> TaskEntry:
    return TaskEntry(
        partial(geometry_task, collection),
        collection.summary,
        variants=collection.variants,
        profiles=collection.profiles,
        prep=prep_command(collection),
    )


TASKS = {collection.name: _entry(collection) for collection in COLLECTIONS}
