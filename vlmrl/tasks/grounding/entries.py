"""Entry of the task grounding in the table of tasks, and the kind of its rows."""

from __future__ import annotations

from vlmrl.tasks.boxes.settings import MAIN, VARIANTS
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.grounding.command import PREP
from vlmrl.tasks.grounding.play import grounding_kind
from vlmrl.tasks.grounding.reward import Settings
from vlmrl.tasks.grounding.task import NAME, SUMMARY, grounding_task

TASKS = {
    NAME: TaskEntry(grounding_task, SUMMARY, variants=VARIANTS, profiles=("default", "rllava"), prep=PREP),
}
KINDS = (grounding_kind(Settings(MAIN)),)
