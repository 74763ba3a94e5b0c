"""Rows of the task grounding in published tables: an image, a text, a box."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from vlmrl.data.cells import plain, show
from vlmrl.data.columns import IMAGES
from vlmrl.errors import DataError
from vlmrl.rewards.boxes.planes import Box, Plane, Space, plane_of
from vlmrl.rewards.boxes.reading import Order, only_box, read_boxes
from vlmrl.tasks.grounding.truth import TRUTH_SPACES
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
BEYOND = 0.01
"""Largest share of the image's width or height by which a published box may reach beyond the image; it is cut off."""


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
    if space is None:
        known = ", ".join(TRUTH_SPACES)
        raise DataError(f"the coordinates of the boxes are not declared: give --truth-space ({known})")
    box = read_truth(cell, plane_of(space, size), order)
    truth = {"box": [*box], "space": space, "width": size[0], "height": size[1], "asks": None}
    return truth, {"expression": expression}


def read_truth(cell: Any, plane: Plane, order: Order = "xyxy") -> Box:
    """Return the box of a cell: four numbers, in a list, in a text, or by their names.

    Raises: DataError for anything but one box, and for a box that reaches beyond the image.
    """
    if cell is None:
        raise DataError("no box")
    text = cell if isinstance(cell, str) else json.dumps(plain(cell))
    wide = Plane(plane.space, plane.width * (1 + BEYOND), plane.height * (1 + BEYOND))
    read, problem = only_box(read_boxes(text, wide, order=order))
    if read is None or read.notes:
        reason = problem or (read.notes[0] if read is not None else "")
        extent = f"{plane.width:g} x {plane.height:g} in the space `{plane.space}`"
        raise DataError(f"the box is {show(cell, 60)}: {reason} (the image has {extent})")
    x1, y1, x2, y2 = read.shape
    box = Box(x1, y1, min(x2, plane.width), min(y2, plane.height))
    if box.x1 >= box.x2 or box.y1 >= box.y2:
        raise DataError(f"the box is {show(cell, 60)}: it lies beyond the image")
    return box
