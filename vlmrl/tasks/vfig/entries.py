"""Entry of the task figures in the table of tasks, and the kind of its rows."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.vfig.command import PREP
from vlmrl.tasks.vfig.task import FIGURES, NAME, SUMMARY, figures_task
from vlmrl.tasks.vfig.truth import truth_form

TASKS = {NAME: TaskEntry(figures_task, SUMMARY, truth_form=truth_form, prep=PREP)}
KINDS = (FIGURES,)
