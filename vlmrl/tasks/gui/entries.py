"""Entry of the task gui, and its `vlmrl prep` command."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.gui.task import SUMMARY, VARIANTS, gui_task
from vlmrl.tasks.own_prep import rows_command

TASKS = {"gui": TaskEntry(gui_task, SUMMARY, variants=VARIANTS, prep=rows_command(gui_task({})))}
