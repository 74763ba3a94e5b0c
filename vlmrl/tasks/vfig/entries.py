"""Entry of the task figures in the table of tasks, and the kind of its rows."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.vfig.command import PREP
from vlmrl.tasks.vfig.task import FIGURES, NAME, SUMMARY, figures_task

TASKS = {NAME: TaskEntry(figures_task, SUMMARY, prep=PREP)}
KINDS = (FIGURES,)
