"""Boxes of truth and answers over an image, as tasks offer them to commands and pages that name no task."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vlmrl.data.images import encode_png
from vlmrl.errors import StoreError
from vlmrl.rewards.boxes.drawing import ANSWER_COLOUR, TRUTH_COLOUR, draw_boxes
from vlmrl.rewards.boxes.planes import Box, Plane, convert
from vlmrl.store.files import write_atomic
from vlmrl.types import Media
from vlmrl.untrusted import one_line

SHARES = Plane("unit", 1.0, 1.0)
"""Plane of marks: shares of the image's width and height."""
COLOURS = {"truth": TRUTH_COLOUR, "answer": ANSWER_COLOUR}
COLOUR_WORDS = "green: the truth; magenta, dashed: the answer"
LEAST_SIDE = 256
"""Pixels to which the longer side of a small image is enlarged for a picture, at least."""
MOST_CAPTION = 200
"""Longest caption of a picture, in characters."""


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
    """Return a copy of a PIL image with marks over it, small ones enlarged by a whole factor; answers are on top."""
    factor = -(-LEAST_SIDE // max(image.size)) if max(image.size) < LEAST_SIDE else 1
    image = image.convert("RGB").resize((image.width * factor, image.height * factor), 0)  # 0: pixels stay squares
    ordered = sorted(marks, key=lambda mark: mark.role != "truth")
    return draw_boxes(image, SHARES, [(mark.box, COLOURS[mark.role]) for mark in ordered])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder: {error.strerror}", where=str(folder)) from error


def caption_of(columns: Mapping[str, Any]) -> str:
    """Return the texts of a dataset row in one line, such as the expression that a box is asked for."""
    texts = [one_line(value) for value in columns.values() if isinstance(value, str) and len(value) <= MOST_CAPTION]
    return "; ".join(texts)[:MOST_CAPTION]


def with_caption(picture: Any, caption: str) -> Any:
    """Return a picture with a text in a white strip below it, in lines as wide as the picture."""
    from PIL import Image, ImageDraw

    lines = textwrap.wrap(caption, max(10, picture.width // 6))
    page = Image.new("RGB", (picture.width, picture.height + 14 * len(lines) + 4 * bool(lines)), (255, 255, 255))
    page.paste(picture, (0, 0))
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        draw.text((3, picture.height + 2 + 14 * number), line, fill=(0, 0, 0), font_size=11)
    return page


def save_overlays(
    folder: Path,
    name: str,
    media: Sequence[Media],
    marks: Sequence[Mark],
    image_of: Callable[[Media], Any],
    caption: str = "",
) -> list[Path]:
    """Write each image that has marks, with the marks over it, as `NAME.png` (a second image: `NAME-2.png`).

    Args:
        folder: it is created.
        media: images of a row.
        image_of: returns a PIL image.
        caption: text below each image; see `caption_of`.
    Returns: the files, in the order of the images.
    Raises: DataError for an image that cannot be read, StoreError if a file cannot be written.
    """
    paths: list[Path] = []
    for number, one in enumerate(media):
        own = [mark for mark in marks if mark.image == number]
        if own:
            _make_folder(folder)
            paths.append(folder / (f"{name}.png" if number == 0 else f"{name}-{number + 1}.png"))
            write_atomic(paths[-1], encode_png(with_caption(draw_marks(image_of(one), own), caption)))
    return paths
