"""Entry of the task crop, and its `vlmrl prep` command."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.errors import DataError
from vlmrl.tasks.crop.rows import ROW_FORM, Drawing, draw_row
from vlmrl.tasks.crop.task import SUMMARY, VARIANTS, crop_task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.drawing import draw_rows
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, table_options
from vlmrl.tasks.table_rows import prepare_table

PUBLISHED = "hub:ChenShawn/DeepEyes-Datasets-47k"


@table_options(PUBLISHED, validation_rows=500, test="Other source whose rows become the test split, such as V*'s.")
def prep_crop(
    request: TableRequest,
    side: Annotated[int, Option("Drawn pictures: width and height in pixels.", min=112, max=4096)] = 1344,
    seen: Annotated[int, Option("Drawn pictures: width at which lines vanish, in pixels.", min=14, max=1024)] = 336,
    places: Annotated[int, Option("Drawn pictures: places in a row and in a column.", min=2, max=8)] = 4,
    right_looks: Annotated[
        float, Option("Drawn pictures: share of demonstrations that look at the right place.", min=0, max=1)
    ] = 1.0,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of crop from a table, or draw it; see `prepare_table`.

    Raises: DataError for an option, source or row that cannot be used; nothing is written.
    """
    if side < 4 * seen:
        message = f"--side {side} is less than four times --seen {seen}: the lines would be seen"
        raise DataError(message, hint="draw larger pictures")
    drawing = Drawing(side, seen, places, right_looks)
    draw = partial(draw_rows, "crop", seed=request.seed, draw=partial(draw_row, drawing), hint="more --places")
    chosen = {"form": ROW_FORM, "settings": {}, "draw": draw, "drawn_settings": vars(drawing)}
    return prepare_table(crop_task({}), request, limits, **chosen)


COMMAND = PrepCommand(
    prep_crop,
    f"Questions whose answer stands in a small place of a picture.\n\nSOURCE: {ROW_FORM.help} {SOURCES} Default: "
    f"{PUBLISHED}. --synthetic N draws lines that are too fine for the width `--seen` instead.\n\n"
    "Example: vlmrl prep crop --synthetic 2000 --out data/crop",
)
TASKS = {"crop": TaskEntry(crop_task, SUMMARY, variants=VARIANTS, profiles=("default", "rllava"), prep=COMMAND)}
