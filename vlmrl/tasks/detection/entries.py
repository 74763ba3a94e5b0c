"""Entry of the task detection in the table of tasks, and the kind of its rows."""

from __future__ import annotations

from vlmrl.tasks.boxes.settings import MAIN, VARIANTS
from vlmrl.tasks.detection.answer import Settings
from vlmrl.tasks.detection.command import PREP
from vlmrl.tasks.detection.play import boxes_kind
from vlmrl.tasks.detection.task import NAME, SUMMARY, detection_task
from vlmrl.tasks.entry import TaskEntry

TASKS = {
    NAME: TaskEntry(detection_task, SUMMARY, variants=VARIANTS, profiles=("default", "rllava"), prep=PREP),
}
KINDS = (boxes_kind(Settings(MAIN)),)
