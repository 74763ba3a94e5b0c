"""Command `vlmrl prep counting`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from vlmrl.errors import DataError
from vlmrl.tasks.counting.rows import ASKS, Drawing, drawn_rows, table_form
from vlmrl.tasks.counting.task import counting_task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import TableRequest, prepare_table

PUBLISHED = "hub:BUAADreamer/clevr_count_70k"
OBJECTS_HELP = "The question column names objects (`people`), as PixMo-count's does: ask how many there are."
ASKS_HELP = f"Drawn images: kinds of questions, separated by commas: {', '.join(ASKS)}; default: all of them."


def prep(
    source: Annotated[str | None, Option("Rows, as described above.", positional=True)] = None,
    test: Annotated[str | None, Option("Other source whose rows become the test split, such as SuperCLEVR.")] = None,
    synthetic: Annotated[int | None, Option("Draw this many training rows instead of reading.", min=20)] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: counting.")] = None,
    seed: Annotated[int, Option("Seed of drawings, and of rows cut off train.")] = 0,
    validation_rows: Annotated[
        int, Option("Rows cut off train where the source has no validation split; 0: none.", min=0)
    ] = 500,
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.0,
    images_root: Annotated[
        Path | None, Option("Folder that image paths are relative to; default: the table's.")
    ] = None,
    objects: Annotated[bool, Option(OBJECTS_HELP)] = False,
    asks: Annotated[str | None, Option(ASKS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=56, max=1344)] = 224,
    most: Annotated[int, Option("Drawn images: largest count.", min=1, max=30)] = 9,
    others: Annotated[int, Option("Drawn images: largest number of shapes that do not count.", min=0, max=30)] = 6,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    kinds = tuple(kind.strip() for kind in asks.split(",")) if asks else ASKS
    if wrong := [kind for kind in kinds if kind not in ASKS]:
        raise DataError(f"--asks names `{wrong[0]}`", hint=f"kinds of questions: {', '.join(ASKS)}")
    drawing = Drawing(side, most, others, asks=kinds)
    request = TableRequest(PUBLISHED, source, test, synthetic, out, name, seed, validation_rows, max_bad, images_root)
    return prepare_table(
        counting_task({}),
        request,
        limits,
        form=table_form(objects),
        settings={"objects": objects},
        draw=partial(drawn_rows, drawing=drawing, seed=seed),
        drawn_settings={"side": side, "most": most, "others": others, "asks": list(kinds)},
        force=force,
    )


PREP = PrepCommand(
    prep,
    "Questions for the number of objects in an image.\n\n"
    "SOURCE: rows with an image, a question (problem, question) and a whole number (answer, ground_truth, count) in "
    "Parquet, JSONL, CSV or a folder of the `datasets` library, or `hub:org/name`; each with `@split` if one split is "
    f"wanted. Default: {PUBLISHED}. --synthetic N draws coloured shapes with exact counts instead.\n\n"
    "Example: vlmrl prep counting --synthetic 600 --out data/counting\n\n"
    "Example: vlmrl prep counting --test superclevr_test200_counting_problems.jsonl --images-root superclevr",
    keeps=lambda options: False,
)
