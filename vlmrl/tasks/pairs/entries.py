"""Entry of the task `pairs` in the table of tasks, the kind of its rows, and the command `vlmrl prep pairs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.pairs.prep import parse_shares, prepare_folder
from vlmrl.tasks.pairs.task import PAIRS, SUMMARY, pair_task, truth_form
from vlmrl.tasks.prep_options import Option, PrepCommand

SHARES_HELP = "Share of each distance of different pairs: 1=0.5,2=0.5"


def prep(
    source: Annotated[Path, Option("Folder or zip archive of images; the folders above an image are its names.")],
    levels: Annotated[str, Option("Names of the last folders above an image, coarse to fine: alphabet,character")],
    name: Annotated[str | None, Option("Name of the dataset; default: that of the source.")] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    num_pairs: Annotated[int, Option("Training pairs.", flag="--pairs", min=2)] = 6000,
    validation_pairs: Annotated[int, Option("Validation pairs.", min=2)] = 300,
    test_pairs: Annotated[int, Option("Test pairs.", min=2)] = 1200,
    seed: Annotated[int, Option("Seed of splits and pairs.")] = 0,
    unseen_classes: Annotated[int, Option("Whole classes that only the test has: half of its pairs.", min=0)] = 0,
    distance_shares: Annotated[str | None, Option(SHARES_HELP)] = None,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset; see `prepare_folder`."""
    counts = {"train": num_pairs, "validation": validation_pairs, "test": test_pairs}
    return prepare_folder(
        source,
        [level.strip() for level in levels.split(",")],
        name=name,
        out=out,
        num_pairs=counts,
        seed=seed,
        unseen_classes=unseen_classes,
        distance_shares=parse_shares(distance_shares),
        limits=limits,
    )


PREP = PrepCommand(
    prep,
    "Pairs of images, same class or not, from any labelled image folder whose path spells the hierarchy.\n\n"
    "Example: vlmrl prep pairs --source images.zip --levels family,species --out data/birds",
    keeps=lambda options: True,
)


TASKS = {"pairs": TaskEntry(pair_task, SUMMARY, truth_form=truth_form, prep=PREP)}
KINDS = (PAIRS,)
