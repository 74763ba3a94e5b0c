"""Command `vlmrl prep counting`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.tasks.counting.rows import ASKS, Drawing, drawn_rows, table_form
from vlmrl.tasks.counting.task import counting_task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import prepare_table
from vlmrl.tasks.table_request import SOURCES, TableRequest, chosen_names, table_options

PUBLISHED = "hub:BUAADreamer/clevr_count_70k"
OBJECTS_HELP = "The question column names objects (`people`), as PixMo-count's does: ask how many there are."
ASKS_HELP = f"Drawn images: kinds of questions, separated by commas: {', '.join(ASKS)}; default: all of them."


@table_options(
    PUBLISHED, validation_rows=500, test="Other source whose rows become the test split, such as SuperCLEVR."
)
def prep(
    request: TableRequest,
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
    kinds = chosen_names("--asks", asks, ASKS, "kinds of questions") or ASKS
    drawing = Drawing(side, most, others, asks=kinds)
    return prepare_table(
        counting_task({}),
        request,
        limits,
        form=table_form(objects),
        settings={"objects": objects},
        draw=partial(drawn_rows, drawing=drawing, seed=request.seed),
        drawn_settings={"side": side, "most": most, "others": others, "asks": list(kinds)},
        force=force,
    )


PREP = PrepCommand(
    prep,
    "Questions for the number of objects in an image.\n\n"
    "SOURCE: rows with an image, a question (problem, question) and a whole number (answer, ground_truth, count) "
    f"{SOURCES} Default: {PUBLISHED}. --synthetic N draws coloured shapes with exact counts instead.\n\n"
    "Example: vlmrl prep counting --synthetic 600 --out data/counting\n\n"
    "Example: vlmrl prep counting --test superclevr_test200_counting_problems.jsonl --images-root superclevr",
    keeps=lambda options: False,
)
