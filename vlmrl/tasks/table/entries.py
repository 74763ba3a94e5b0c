"""Entry of the task `table` in the table of tasks."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.table import SUMMARY, table_task

TASKS = {"table": TaskEntry(table_task, SUMMARY)}
