"""Drawn rows for detection: a category of shapes in a scene, with the exact boxes of all of them, or none."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlmrl.data.images import encode_png, image_hash
from vlmrl.errors import DataError
from vlmrl.tasks.detection.truth import make_truth
from vlmrl.tasks.drawn_scene import COLOURS, KINDS, Look, Scene, lay_out, paint
from vlmrl.tasks.own_prep import NewRow
from vlmrl.types import hash64

SIZES = (0.12, 0.3)
MOST_TRIES = 500
"""Largest number of scenes for one row: a scene whose shapes do not fit, or that is there already, is not used."""
ASKS: Mapping[str, Callable[[Look], str]] = {
    "look": lambda look: f"{look.colour} {look.kind}",
    "kind": lambda look: look.kind,
    "colour": lambda look: f"{look.colour} shape",
}
"""Kind of category -> the category of a shape."""
LOOKS = tuple(Look(kind, colour) for kind in KINDS for colour in COLOURS)


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows.

    Args:
        side: width and height of the images in pixels.
        others: largest number of shapes beside the first one.
        absent: share of rows whose category no shape has, in [0, 1].
        asks: kinds of categories, from `ASKS`; each row draws one.
    """

    side: int = 336
    others: int = 4
    absent: float = 0.2
    asks: tuple[str, ...] = ()


def drawn_rows(counts: Mapping[str, int], drawing: Drawing, seed: int) -> dict[str, list[NewRow]]:
    """Return split -> drawn rows; no image is there twice. Raises: DataError if the shapes do not fit."""
    images: set[str] = set()
    return {
        split: [_row(split, number, drawing, seed, images) for number in range(num_rows)]
        for split, num_rows in counts.items()
    }


def _row(split: str, number: int, drawing: Drawing, seed: int, images: set[str]) -> NewRow:
    is_absent = int((number + 1) * drawing.absent) > int(number * drawing.absent)
    for attempt in range(MOST_TRIES):
        rng = random.Random(hash64("detection", str(seed), split, str(number), str(attempt)))
        category_of = ASKS[rng.choice(drawing.asks or tuple(ASKS))]
        num_shapes = 1 + rng.randint(0, drawing.others)
        few = rng.sample(LOOKS, rng.randint(1, num_shapes))  # fewer looks than shapes: some look is there several times
        scene = lay_out(rng, [rng.choice(few) for _ in range(num_shapes)], drawing.side, sizes=SIZES)
        if scene is None or (category := _category(scene, category_of, rng, is_absent)) is None:
            continue
        image = encode_png(paint(scene))
        if (sha256 := image_hash(image)) in images:
            continue
        images.add(sha256)
        boxes = [[float(n) for n in shape.box] for shape in scene.shapes if category_of(shape.look) == category]
        truth = make_truth(boxes, "pixels", scene.side, scene.side, category)
        return NewRow(truth, [image], {"category": category}, origin=f"drawn {split} {number}")
    raise DataError(
        f"{MOST_TRIES} drawings of {drawing.side} pixels gave no new image with such a category for row {number}",
        hint="lower --others, or raise --side",
    )


def _category(scene: Scene, category_of: Callable[[Look], str], rng: random.Random, is_absent: bool) -> str | None:
    """Return a category that a shape of the scene has, or that none has; None if there is no such category."""
    shown = list(dict.fromkeys(category_of(shape.look) for shape in scene.shapes))
    others = [name for name in dict.fromkeys(map(category_of, LOOKS)) if name not in shown]
    names = others if is_absent else shown
    return rng.choice(names) if names else None
