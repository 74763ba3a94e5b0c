"""Command `vlmrl prep detection`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.errors import DataError, unknown
from vlmrl.rewards.boxes.planes import check_space
from vlmrl.rewards.boxes.reading import check_order
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.detection.drawn import ASKS, Drawing, drawn_rows
from vlmrl.tasks.detection.rows import table_form
from vlmrl.tasks.detection.task import detection_task
from vlmrl.tasks.grounding.truth import TRUTH_SPACES
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import prepare_table
from vlmrl.tasks.table_request import SOURCES, TableRequest, chosen_names, table_options

PUBLISHED = "hub:laolao77/ViRFT_COCO_base65"
PUBLISHED_SPACE = "thousand"
"""Coordinate space of the boxes of `PUBLISHED`."""
SPACE_HELP = (
    f"Coordinate space of the true boxes: {', '.join(TRUTH_SPACES)}. Default: {PUBLISHED_SPACE} for the published "
    "table; else it must be given."
)
ASKS_HELP = f"Drawn images: kinds of categories, separated by commas: {', '.join(ASKS)}; default: all of them."


@table_options(PUBLISHED, validation_rows=500)
def prep(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(SPACE_HELP)] = None,
    box_order: Annotated[str, Option("Order of the numbers of a true box: xyxy, xywh or yxyx.")] = "xyxy",
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
    if truth_space is not None and truth_space not in TRUTH_SPACES:
        raise unknown("--truth-space", truth_space, TRUTH_SPACES, error=DataError)
    kinds = chosen_names("--asks", asks, ASKS, "kinds of categories") or tuple(ASKS)
    declared = truth_space or (PUBLISHED_SPACE if request.source is None else None)
    space = None if declared is None else check_space(declared)
    return prepare_table(
        detection_task({}),
        request,
        limits,
        form=table_form(space, check_order(box_order)),
        settings={"truth_space": space, "box_order": box_order},
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
