"""Rows of the task grounding in published tables: an image, a text, a box."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from vlmrl.data.cells import show
from vlmrl.data.columns import IMAGES
from vlmrl.errors import DataError
from vlmrl.rewards.boxes.planes import Space
from vlmrl.rewards.boxes.reading import Order
from vlmrl.tasks.boxes.rows import declared_plane, read_box
from vlmrl.tasks.grounding.truth import make_truth
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size

SPELLINGS = {
    "images": IMAGES,
    "expression": ("problem", "expression", "question", "sentence", "caption", "normal_caption"),
    "normalized": ("normalized_solution",),
    "box": ("solution", "bbox", "bbox_2d", "box", "answer"),
}
MOST_CHARS = 2_000


def table_form(space: Space | None, order: Order) -> RowForm:
    """Return the form of rows in tables.

    Args:
        space: coordinate space of the boxes; None = not declared. Boxes of a column `normalized_solution` are used
            then: its name declares 0 to 1000.
        order: order of the four numbers.
    """
    return RowForm(
        SPELLINGS,
        (("images",), ("expression",), ("box", "normalized")),
        partial(_read, space, order),
        "rows have an image, a problem (or expression, question, sentence), and a box: solution, bbox or "
        "normalized_solution",
    )


def _read(
    space: Space | None, order: Order, cells: Mapping[str, Any], size: Size
) -> tuple[dict[str, Any], dict[str, Any]]:
    text = cells.get("expression")
    if not isinstance(text, str) or not (expression := " ".join(text.replace(IMAGE, " ").split())):
        raise DataError(f"the text is {show(text, 60)}, not a text")
    if len(expression) > MOST_CHARS:
        raise DataError(f"the text has {len(expression):,} characters; the limit is {MOST_CHARS:,}")
    cell = cells.get("box")
    if space is None and "normalized" in cells:
        space, cell = "thousand", cells["normalized"]
    plane = declared_plane(space, size)
    box = read_box(cell, plane, order)
    return make_truth([*box], plane.space, size), {"expression": expression}
