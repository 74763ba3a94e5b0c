"""Boxes of published tables: options of their commands, and the box of a cell."""

from __future__ import annotations

import json
from typing import Annotated, Any

from vlmrl.data.cells import plain, show
from vlmrl.errors import DataError, unknown
from vlmrl.rewards.boxes.planes import Box, Plane, Space, plane_of
from vlmrl.rewards.boxes.reading import Order, check_order, only_box, read_boxes
from vlmrl.tasks.boxes.truth import TRUTH_SPACES
from vlmrl.tasks.options import Option
from vlmrl.tasks.table_request import TableRequest
from vlmrl.types import Size

BEYOND = 0.01
"""Largest share of the image's width or height by which a published box may reach beyond the image; it is cut off."""
ELSEWHERE = "are the boxes in another space (--truth-space) or order (--box-order)?"
BoxOrder = Annotated[str, Option("Order of the numbers of a true box: xyxy, xywh or yxyx.")]


def space_help(published: Space, also: str = "") -> str:
    """Return the help of --truth-space. `published`: space of the published table; `also`: other uses of this space."""
    known = ", ".join(TRUTH_SPACES)
    default = f"Default: {published} for the published table{also}; else it must be given."
    return f"Coordinate space of the true boxes: {known}. {default}"


def declared(
    request: TableRequest, truth_space: str | None, box_order: str, published: Space
) -> tuple[Space | None, Order]:
    """Return the space that the options declare for true boxes, and the order of a box's numbers.

    Args:
        published: space of the published table.
    Returns: (None, order) if the space is not declared.
    Raises: DataError for a space that true boxes cannot have; RewardError for an unknown order.
    """
    order = check_order(box_order)
    if truth_space is None:
        return published if request.source is None else None, order
    for space in TRUTH_SPACES:
        if space == truth_space:
            return space, order
    raise unknown("--truth-space", truth_space, TRUTH_SPACES, error=DataError)


def declared_plane(space: Space | None, size: Size) -> Plane:
    """Return the plane of the true boxes of an image. Raises: DataError if no space is declared."""
    if space is None:
        known = ", ".join(TRUTH_SPACES)
        raise DataError("the coordinates of the boxes are not declared", hint=f"give --truth-space ({known})")
    return plane_of(space, size)


def read_box(cell: Any, plane: Plane, order: Order = "xyxy") -> Box:
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
        raise DataError(f"the box is {show(cell, 60)}: {reason} (the image has {extent})", hint=ELSEWHERE)
    x1, y1, x2, y2 = read.shape
    box = Box(x1, y1, min(x2, plane.width), min(y2, plane.height))
    if box.x1 >= box.x2 or box.y1 >= box.y2:
        raise DataError(f"the box is {show(cell, 60)}: it lies beyond the image")
    return box
