"""Drawn scenes of coloured shapes with exact boxes, for data whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vlmrl.data.images import encode_png, image_hash
from vlmrl.errors import DataError
from vlmrl.rewards.boxes.planes import Box, area, shared_area
from vlmrl.tasks.base import NewRow
from vlmrl.types import hash64

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("circle", "square", "triangle")
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 200, 20),
    "purple": (140, 60, 170),
    "black": (25, 25, 25),
}
PAPERS = ((255, 255, 255), (238, 238, 230), (222, 232, 240))
"""Colours of backgrounds; every shape is clearly darker or more colourful."""
TRIES_OF_A_SHAPE = 100
MOST_TRIES = 500
"""Largest number of drawings for one row: those whose shapes do not fit, or that another row has, are thrown away."""
GAP = 2
"""Smallest distance of a shape from the edge of the image, and from other shapes if none may overlap, in pixels."""


@dataclass(frozen=True)
class Look:
    """Look of a shape: its kind and its colour, as a question names them."""

    kind: str
    colour: str


LOOKS = tuple(Look(kind, colour) for kind in KINDS for colour in COLOURS)


@dataclass(frozen=True)
class Shape:
    """Shape of a scene.

    Args:
        box: smallest box around its pixels, in whole pixels of the image.
    """

    look: Look
    box: Box


@dataclass(frozen=True)
class Scene:
    """Shapes on a background; a later shape covers an earlier one where they overlap."""

    side: int
    paper: tuple[int, int, int]
    shapes: tuple[Shape, ...]


class Drawn(NamedTuple):
    """Image of a row, its truth, and the columns for its prompt."""

    image: Image
    truth: Mapping[str, Any]
    columns: Mapping[str, Any]


def draw_rows(
    task: str, counts: Mapping[str, int], seed: int, draw: Callable[[int, random.Random], Drawn | None], *, hint: str
) -> dict[str, list[NewRow]]:
    """Return split -> drawn rows. No image is there twice, and the same seed gives the same rows.

    Args:
        task: its name; the random numbers depend on it.
        counts: split -> number of rows.
        draw: (number of a row in its split, random numbers) -> the row; None = this drawing cannot be used.
        hint: options to change if the drawings of a row cannot be used.
    Raises: DataError if no drawing of a row can be used.
    """
    images: set[str] = set()

    def row(split: str, number: int) -> NewRow:
        for attempt in range(MOST_TRIES):
            drawn = draw(number, random.Random(hash64(task, str(seed), split, str(number), str(attempt))))
            image = encode_png(drawn.image) if drawn is not None else b""
            if drawn is not None and (sha256 := image_hash(image)) not in images:
                images.add(sha256)
                return NewRow(drawn.truth, [image], drawn.columns, origin=f"drawn {split} {number}")
        raise DataError(f"{MOST_TRIES} drawings gave no new image for row {number} of {split}", hint=hint)

    return {split: [row(split, number) for number in range(num_rows)] for split, num_rows in counts.items()}


@cache
def page_template(file: Path) -> Any:
    """Return the template of drawn web pages in a file."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(file.read_text(encoding="utf-8"))


def lay_out(
    rng: random.Random,
    looks: Sequence[Look],
    side: int,
    *,
    sizes: tuple[float, float] = (0.1, 0.22),
    max_overlap: float = 0.0,
) -> Scene | None:
    """Return a scene with these shapes at random places, or None if they do not fit.

    Args:
        side: width and height of the image in pixels.
        sizes: smallest and largest width of a shape, as shares of `side`.
        max_overlap: largest share of the smaller of two shapes' boxes that both may cover.
    """
    shapes: list[Shape] = []
    for look in looks:
        width = max(5, round(side * rng.uniform(*sizes))) | 1  # odd, so that a triangle has its tip in the middle
        for _ in range(TRIES_OF_A_SHAPE):
            x, y = (rng.randint(GAP, side - width - GAP) for _ in range(2))
            box = Box(x, y, x + width, y + width)
            if all(_is_free(box, other.box, max_overlap) for other in shapes):
                shapes.append(Shape(look, box))
                break
        else:
            return None
    return Scene(side, rng.choice(PAPERS), tuple(shapes))


def _is_free(box: Box, other: Box, max_overlap: float) -> bool:
    """Return whether two boxes share at most this part of the smaller one; of 0, whether they are `GAP` apart."""
    if max_overlap > 0:
        return shared_area(box, other) <= max_overlap * min(area(box), area(other))
    return shared_area(Box(box.x1 - GAP, box.y1 - GAP, box.x2 + GAP, box.y2 + GAP), other) == 0


def paint(scene: Scene) -> Image:
    """Return the image of a scene, RGB. The pixels of a shape reach exactly to the edges of its box."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (scene.side, scene.side), scene.paper)
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        x1, y1, x2, y2 = (int(number) for number in shape.box)
        last_x, last_y = x2 - 1, y2 - 1  # Pillow's corners are pixels that belong to the shape
        fill = COLOURS[shape.look.colour]
        if shape.look.kind == "circle":
            draw.ellipse((x1, y1, last_x, last_y), fill=fill)
        elif shape.look.kind == "square":
            draw.rectangle((x1, y1, last_x, last_y), fill=fill)
        else:
            draw.polygon([((x1 + last_x) // 2, y1), (last_x, last_y), (x1, last_y)], fill=fill)
    return image


def plural_of(kind: str) -> str:
    return f"{kind}s"
