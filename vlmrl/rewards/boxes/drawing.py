"""Boxes drawn over an image, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrl.rewards.boxes.planes import Box, Plane, convert

TRUTH_COLOUR, ANSWER_COLOUR = (0, 170, 60), (230, 0, 200)
MOST_SIDE = 512
"""Largest width and height of a drawn image in pixels: pictures are stored with every response."""


def draw_boxes(image: Any, plane: Plane, boxes: Sequence[tuple[Box, tuple[int, int, int]]]) -> Any:
    """Return a copy of an image, at most 512 pixels wide and high, with boxes over it.

    Args:
        image: PIL image.
        plane: plane of the boxes.
        boxes: (box, colour); a later one is drawn over an earlier one.
    Returns: PIL image, RGB.
    """
    from PIL import ImageDraw

    picture = image.convert("RGB")
    picture.thumbnail((MOST_SIDE, MOST_SIDE))
    target = Plane("pixels", float(picture.width), float(picture.height))
    draw = ImageDraw.Draw(picture)
    width = max(1, round(min(picture.size) / 100))
    for box, colour in boxes:
        x1, y1, x2, y2 = convert(box, plane, target)
        draw.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), outline=colour, width=width)
    return picture
