"""Command `vlmrl prep grounding`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.rewards.boxes.planes import Space
from vlmrl.tasks.boxes.rows import BoxOrder, declared, space_help
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.grounding.drawn import ASKS, SINGLE, USUAL, Drawing, drawn_rows
from vlmrl.tasks.grounding.rows import table_form
from vlmrl.tasks.grounding.task import grounding_task
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import prepare_table
from vlmrl.tasks.table_request import SOURCES, TableRequest, chosen_names, table_options

PUBLISHED = "hub:Kangheng/PR1-Datasets-Grounding"
PUBLISHED_SPACE: Space = "thousand"
"""Coordinate space of the boxes of `PUBLISHED`."""
SPACE_HELP = space_help(PUBLISHED_SPACE, " and for a column normalized_solution")
ASKS_HELP = (
    f"Drawn images: kinds of expressions, separated by commas: {', '.join(ASKS)}; default: all except {SINGLE}, which "
    "draws one large shape alone in a frame, for tiny models."
)


@table_options(PUBLISHED, validation_rows=500, test="Other source whose rows become the test split, such as RefCOCO's.")
def prep(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(SPACE_HELP)] = None,
    box_order: BoxOrder = "xyxy",
    asks: Annotated[str | None, Option(ASKS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)] = 336,
    others: Annotated[int, Option("Drawn images: largest number of shapes beside those needed.", min=0, max=10)] = 3,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    space, order = declared(request, truth_space, box_order, PUBLISHED_SPACE)
    kinds = chosen_names("--asks", asks, ASKS, "kinds of expressions") or USUAL
    return prepare_table(
        grounding_task({}),
        request,
        limits,
        form=table_form(space, order),
        settings={"truth_space": space, "box_order": order},
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
