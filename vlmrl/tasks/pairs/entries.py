"""Entry of the task `pairs` in the table of tasks, and the kind of its rows."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.pairs.command import PREP
from vlmrl.tasks.pairs.task import SUMMARY, pair_task
from vlmrl.tasks.pairs.truth_kind import PAIRS, truth_form

TASKS = {"pairs": TaskEntry(pair_task, SUMMARY, truth_form=truth_form, prep=PREP)}
KINDS = (PAIRS,)
