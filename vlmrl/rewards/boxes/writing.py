"""Boxes as text in a declared space, for correct responses and for prompts; boxes drawn over an image, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.rewards.boxes.planes import LOC_BINS, Box, Plane, Space, convert, iou

DECIMALS = 3
"""Decimals in the space `unit`."""
MORE_DECIMALS = 3
"""Largest number of further decimals of a small box."""
CLOSE = 0.75
"""Least IoU of a written box with the true one, as far as decimals can reach it."""
FORMS: Mapping[Space, str] = {
    "pixels": "[x1, y1, x2, y2] in pixels of the original image",
    "seen": "[x1, y1, x2, y2] in pixels of the image as you see it",
    "thousand": "[x1, y1, x2, y2] with integers from 0 to 1000, relative to the image",
    "unit": "[x1, y1, x2, y2] with decimals from 0 to 1, relative to the image",
    "loc": "four location tokens",
}
"""Space -> how a prompt asks for a box."""


def write_box(box: Box, plane: Plane) -> str:
    """Return a box as an answer in its space states it, rounded to whole numbers (`unit`: to three decimals).

    A small box, from which rounding would take too much, has up to three decimals more. In `loc` it is one bin wide at
    least, because this space has no decimals.

    Example: (0.25, 0.5, 0.75, 1) of `unit` -> "[0.250, 0.500, 0.750, 1.000]".
    """
    if plane.space == "loc":
        (x1, x2), (y1, y2) = _bins(box.x1, box.x2), _bins(box.y1, box.y2)
        return "".join(f"<loc{number:04d}>" for number in (y1, x1, y2, x2))
    fewest = DECIMALS if plane.space == "unit" else 0
    for decimals in range(fewest, fewest + MORE_DECIMALS + 1):
        rounded = Box(*(round(number, decimals) for number in box))
        if rounded.x1 < rounded.x2 and rounded.y1 < rounded.y2 and iou(rounded, box) >= CLOSE:
            break
    return f"[{', '.join(f'{number:.{decimals}f}' for number in rounded)}]"


def _bins(first: float, last: float) -> tuple[int, int]:
    low, high = (min(LOC_BINS - 1, max(0, round(number))) for number in (first, last))
    if low < high:
        return low, high
    return (low, low + 1) if low + 1 < LOC_BINS else (low - 1, low)


TRUTH_COLOUR, ANSWER_COLOUR = (0, 170, 60), (230, 0, 200)
MOST_SIDE = 512
"""Largest width and height of a drawn image in pixels: pictures are stored with every response."""


def draw_boxes(image: Any, plane: Plane, boxes: Sequence[tuple[Box, tuple[int, int, int]]]) -> Any:
    """Return a copy of an image, at most 512 pixels wide and high, with boxes over it.

    Args:
        image: PIL image.
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
