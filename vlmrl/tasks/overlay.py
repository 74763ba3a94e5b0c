"""Boxes of truth and answers over an image, as tasks offer them to commands and pages that name no task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vlmrl.data.images import encode_png
from vlmrl.errors import StoreError
from vlmrl.rewards.boxes.drawing import ANSWER_COLOUR, TRUTH_COLOUR, draw_boxes
from vlmrl.rewards.boxes.planes import Box, Plane, convert
from vlmrl.store.files import write_atomic
from vlmrl.types import Media

SHARES = Plane("unit", 1.0, 1.0)
"""Plane of marks: shares of the image's width and height."""
COLOURS = {"truth": TRUTH_COLOUR, "answer": ANSWER_COLOUR}
COLOUR_WORDS = "green: the truth; magenta: the answer"


class Mark(NamedTuple):
    """Box over an image.

    Args:
        role: whose box it is.
        box: in shares of the image's width and height, in [0, 1].
        label: text beside the box, written by a dataset or a model; "" = none.
        image: number of the image in the prompt, from 0.
    """

    role: Literal["truth", "answer"]
    box: Box
    label: str = ""
    image: int = 0


def shares_of(numbers: Any, plane: Plane) -> Box | None:
    """Return a saved box in shares of the image, cut at its edges; None for a value that is no box with an area.

    Args:
        numbers: JSON value of a file that may be damaged; a box has x1, y1, x2, y2 in the numbers of `plane`.
    """
    if not isinstance(numbers, list) or len(numbers) != 4:
        return None
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
        return None
    box = Box(*(min(1.0, max(0.0, share)) for share in convert(Box(*numbers), plane, SHARES)))
    return box if box.x1 < box.x2 and box.y1 < box.y2 else None


def draw_marks(image: Any, marks: Sequence[Mark]) -> Any:
    """Return a copy of a PIL image, at most 512 pixels wide and high, with marks over it; answers are on top."""
    ordered = sorted(marks, key=lambda mark: mark.role != "truth")
    return draw_boxes(image, SHARES, [(mark.box, COLOURS[mark.role]) for mark in ordered])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder: {error.strerror}", where=str(folder)) from error


def save_overlays(
    folder: Path, name: str, media: Sequence[Media], marks: Sequence[Mark], image_of: Callable[[Media], Any]
) -> list[Path]:
    """Write each image that has marks, with the marks over it, as `NAME.png` (a second image: `NAME-2.png`).

    Args:
        folder: it is created.
        media: images of a row.
        image_of: returns a PIL image.
    Returns: the files, in the order of the images.
    Raises: DataError for an image that cannot be read, StoreError if a file cannot be written.
    """
    paths: list[Path] = []
    for number, one in enumerate(media):
        own = [mark for mark in marks if mark.image == number]
        if own:
            _make_folder(folder)
            paths.append(folder / (f"{name}.png" if number == 0 else f"{name}-{number + 1}.png"))
            write_atomic(paths[-1], encode_png(draw_marks(image_of(one), own)))
    return paths
