"""Boxes as text in a declared space: for correct example responses, and for instructions in prompts."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards.boxes.planes import LOC_BINS, Box, Plane, Space

DECIMALS = 3
"""Decimals in the space `unit`."""
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

    Example: (0.25, 0.5, 0.75, 1) of `unit` -> "[0.250, 0.500, 0.750, 1.000]".
    """
    if plane.space == "loc":
        bins = (min(LOC_BINS - 1, max(0, round(number))) for number in (box.y1, box.x1, box.y2, box.x2))
        return "".join(f"<loc{number:04d}>" for number in bins)
    if plane.space == "unit":
        return f"[{', '.join(f'{number:.{DECIMALS}f}' for number in box)}]"
    return f"[{', '.join(str(round(number)) for number in box)}]"
