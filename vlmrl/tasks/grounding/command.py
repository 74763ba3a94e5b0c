"""Command `vlmrl prep grounding`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.errors import DataError, unknown
from vlmrl.rewards.boxes.planes import check_space
from vlmrl.rewards.boxes.reading import check_order
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.grounding.drawn import ASKS, SINGLE, USUAL, Drawing, drawn_rows
from vlmrl.tasks.grounding.rows import table_form
from vlmrl.tasks.grounding.task import grounding_task
from vlmrl.tasks.grounding.truth import TRUTH_SPACES
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import prepare_table
from vlmrl.tasks.table_request import SOURCES, TableRequest, chosen_names, table_options

PUBLISHED = "hub:Kangheng/PR1-Datasets-Grounding"
PUBLISHED_SPACE = "thousand"
"""Coordinate space of the boxes of `PUBLISHED`."""
SPACE_HELP = (
    f"Coordinate space of the true boxes: {', '.join(TRUTH_SPACES)}. Default: {PUBLISHED_SPACE} for the published "
    "table and for a column normalized_solution; else it must be given."
)
ASKS_HELP = (
    f"Drawn images: kinds of expressions, separated by commas: {', '.join(ASKS)}; default: all except {SINGLE}, which "
    "draws one large shape alone in a frame, for tiny models."
)


@table_options(PUBLISHED, validation_rows=500, test="Other source whose rows become the test split, such as RefCOCO's.")
def prep(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(SPACE_HELP)] = None,
    box_order: Annotated[str, Option("Order of the numbers of a true box: xyxy, xywh or yxyx.")] = "xyxy",
    asks: Annotated[str | None, Option(ASKS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)] = 336,
    others: Annotated[int, Option("Drawn images: largest number of shapes beside those needed.", min=0, max=10)] = 3,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    if truth_space is not None and truth_space not in TRUTH_SPACES:
        raise unknown("--truth-space", truth_space, TRUTH_SPACES, error=DataError)
    kinds = chosen_names("--asks", asks, ASKS, "kinds of expressions") or USUAL
    declared = truth_space or (PUBLISHED_SPACE if request.source is None else None)
    space = None if declared is None else check_space(declared)
    return prepare_table(
        grounding_task({}),
        request,
        limits,
        form=table_form(space, check_order(box_order)),
        settings={"truth_space": space, "box_order": box_order},
        draw=partial(drawn_rows, drawing=Drawing(side, others, kinds), seed=request.seed),
        drawn_settings={"side": side, "others": others, "asks": list(kinds)},
        force=force,
    )


PREP = PrepCommand(
    prep,
    "Texts that describe one region of an image, with its box.\n\n"
    "SOURCE: rows with an image, a text (problem, expression, question) and a box (solution, bbox, "
    f"normalized_solution) {SOURCES} Default: {PUBLISHED}. --synthetic N draws coloured shapes with exact boxes "
    "instead.\n\n"
    "Example: vlmrl prep grounding --synthetic 600 --out data/grounding\n\n"
    "Example: vlmrl prep grounding refcoco_val.json --truth-space pixels --images-root coco",
    keeps=lambda options: False,
)
