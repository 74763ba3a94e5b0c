"""Drawn rows for detection: a category of shapes in a scene, with the exact boxes of all of them, or none."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from vlmrl.tasks.detection.truth import make_truth
from vlmrl.tasks.drawn_scene import LOOKS, Drawn, Look, Scene, draw_rows, lay_out, paint
from vlmrl.tasks.own_prep import NewRow

SIZES = (0.12, 0.3)
ASKS: Mapping[str, Callable[[Look], str]] = {
    "look": lambda look: f"{look.colour} {look.kind}",
    "kind": lambda look: look.kind,
    "colour": lambda look: f"{look.colour} shape",
}
"""Kind of category -> the category of a shape."""


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
    return draw_rows("detection", counts, seed, partial(_draw, drawing), hint="lower --others, or raise --side")


def _draw(drawing: Drawing, number: int, rng: random.Random) -> Drawn | None:
    is_absent = int((number + 1) * drawing.absent) > int(number * drawing.absent)
    category_of = ASKS[rng.choice(drawing.asks or tuple(ASKS))]
    num_shapes = 1 + rng.randint(0, drawing.others)
    few = rng.sample(LOOKS, rng.randint(1, num_shapes))  # fewer looks than shapes: some look is there several times
    scene = lay_out(rng, [rng.choice(few) for _ in range(num_shapes)], drawing.side, sizes=SIZES)
    if scene is None or (category := _category(scene, category_of, rng, is_absent)) is None:
        return None
    boxes = [[float(n) for n in shape.box] for shape in scene.shapes if category_of(shape.look) == category]
    truth = make_truth(boxes, "pixels", scene.side, scene.side, category)
    return Drawn(paint(scene), truth, {"category": category})


def _category(scene: Scene, category_of: Callable[[Look], str], rng: random.Random, is_absent: bool) -> str | None:
    """Return a category that a shape of the scene has, or that none has; None if there is no such category."""
    shown = list(dict.fromkeys(category_of(shape.look) for shape in scene.shapes))
    others = [name for name in dict.fromkeys(map(category_of, LOOKS)) if name not in shown]
    names = others if is_absent else shown
    return rng.choice(names) if names else None
