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
        boxes: (box, colour); a later one is drawn over an earlier one. The answer's colour is dashed, so that a true
            box under it is still seen.
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
        edges = (x1, y1, max(x1, x2 - 1), max(y1, y2 - 1))
        if colour == ANSWER_COLOUR:
            _dashed(draw, edges, colour, width)
        else:
            draw.rectangle(edges, outline=colour, width=width)
    return picture


def _dashed(draw: Any, edges: tuple[float, float, float, float], colour: tuple[int, int, int], width: int) -> None:
    """Draw a rectangle with dashes. Every side begins and ends with one, so that the corners are seen."""
    x1, y1, x2, y2 = edges
    for along, across, sides in (((x1, x2), (y1, y2), True), ((y1, y2), (x1, x2), False)):
        low, high = along
        count = max(2, round((high - low) / (6 * width)))
        step = (high - low) / (2 * count - 1)
        inward = min(width - 1, across[1] - across[0])
        for a, b in ((across[0], across[0] + inward), (across[1] - inward, across[1])):
            for i in range(count):
                start, end = low + 2 * i * step, low + (2 * i + 1) * step
                draw.rectangle((start, a, end, b) if sides else (a, start, b, end), fill=colour)
