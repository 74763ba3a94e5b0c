"""Boxes as text in a declared space: for correct example responses, and for instructions in prompts."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards.boxes.overlap import iou
from vlmrl.rewards.boxes.planes import LOC_BINS, Box, Plane, Space

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
