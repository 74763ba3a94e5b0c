"""Entry of the task `pairs` in the table of tasks, the kind of its rows, and the command `vlmrl prep pairs`."""

from __future__ import annotations

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.pairs.prep import prepare_folder
from vlmrl.tasks.pairs.task import PAIRS, SUMMARY, pair_task, truth_form
from vlmrl.tasks.prep_options import PrepCommand

PREP = PrepCommand(
    prepare_folder,
    "Pairs of images, same class or not, from any labelled image folder whose path spells the hierarchy.\n\n"
    "Example: vlmrl prep pairs --source images.zip --levels family,species --out data/birds",
    keeps=lambda options: True,
)


TASKS = {"pairs": TaskEntry(pair_task, SUMMARY, truth_form=truth_form, prep=PREP)}
KINDS = (PAIRS,)
