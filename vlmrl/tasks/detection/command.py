"""Command `vlmrl prep detection`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.rewards.boxes.planes import Space
from vlmrl.tasks.boxes.rows import BoxOrder, declared, space_help
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.detection.drawn import ASKS, Drawing, drawn_rows
from vlmrl.tasks.detection.rows import table_form
from vlmrl.tasks.detection.task import detection_task
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import prepare_table
from vlmrl.tasks.table_request import SOURCES, TableRequest, chosen_names, table_options

PUBLISHED = "hub:laolao77/ViRFT_COCO_base65"
PUBLISHED_SPACE: Space = "thousand"
"""Coordinate space of the boxes of `PUBLISHED`."""
SPACE_HELP = space_help(PUBLISHED_SPACE)
ASKS_HELP = f"Drawn images: kinds of categories, separated by commas: {', '.join(ASKS)}; default: all of them."


@table_options(PUBLISHED, validation_rows=500)
def prep(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(SPACE_HELP)] = None,
    box_order: BoxOrder = "xyxy",
    asks: Annotated[str | None, Option(ASKS_HELP)] = None,
    absent: Annotated[
        float, Option("Drawn images: share of rows whose category no shape has.", min=0, max=1)
    ] = Drawing.absent,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)] = Drawing.side,
    others: Annotated[
        int, Option("Drawn images: largest number of shapes beside the first.", min=0, max=10)
    ] = Drawing.others,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    space, order = declared(request, truth_space, box_order, PUBLISHED_SPACE)
    kinds = chosen_names("--asks", asks, ASKS, "kinds of categories") or tuple(ASKS)
    return prepare_table(
        detection_task({}),
        request,
        limits,
        form=table_form(space, order),
        settings={"truth_space": space, "box_order": order},
        draw=partial(drawn_rows, drawing=Drawing(side, others, absent, kinds), seed=request.seed),
        drawn_settings={"side": side, "others": others, "absent": absent, "asks": list(kinds)},
        force=force,
    )


PREP = PrepCommand(
    prep,
    "Images with the boxes of all objects of a category.\n\n"
    "SOURCE: rows with an image, a category (or a problem that names it: category 'dog') and a list of boxes "
    f"(solution, boxes, objects) {SOURCES} A list without boxes, or the words No Objects, is a row without "
    "objects. "
    f"Default: {PUBLISHED}. --synthetic N draws coloured shapes with exact boxes instead.\n\n"
    "Example: vlmrl prep detection --synthetic 600 --out data/detection\n\n"
    "Example: vlmrl prep detection rows.jsonl --truth-space thousand --images-root coco",
    keeps=lambda options: False,
)
