"""Entry of the task counting in the table of tasks."""

from __future__ import annotations

from vlmrl.tasks.counting.command import PREP
from vlmrl.tasks.counting.task import NAME, SUMMARY, VARIANTS, counting_task
from vlmrl.tasks.entry import TaskEntry

TASKS = {
    NAME: TaskEntry(counting_task, SUMMARY, variants=tuple(VARIANTS), profiles=("default", "rllava"), prep=PREP),
}
