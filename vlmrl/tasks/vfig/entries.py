"""Entry of the task figures in the table of tasks."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.vfig.command import PREP
from vlmrl.tasks.vfig.task import NAME, SUMMARY, figures_task

TASKS = {NAME: TaskEntry(figures_task, SUMMARY, prep=PREP)}
