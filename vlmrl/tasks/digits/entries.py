"""Entry of the task `digits` in the table of tasks."""

from __future__ import annotations

from vlmrl.tasks.digits import PREP, SUMMARY, digits_task
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.pairs.task import truth_form

TASKS = {"digits": TaskEntry(digits_task, SUMMARY, truth_form=truth_form, prep=PREP)}
