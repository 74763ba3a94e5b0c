"""Entry of the task we_math in the table of tasks."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.we_math.command import PREP
from vlmrl.tasks.we_math.task import NAME, SUMMARY, VARIANTS, we_math_task

TASKS = {
    NAME: TaskEntry(we_math_task, SUMMARY, variants=tuple(VARIANTS), profiles=("default", "rllava"), prep=PREP),
}
