"""Drawn rows for grounding: expressions that describe exactly one shape of a scene, with its exact box."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vlmrl.rewards.boxes.overlap import centre
from vlmrl.rewards.boxes.planes import Point
from vlmrl.tasks.drawn_scene import GAP, LOOKS, Drawn, Look, Scene, Shape, draw_rows, lay_out, paint
from vlmrl.tasks.grounding.truth import make_truth
from vlmrl.tasks.own_prep import NewRow

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = (0.12, 0.32)
SINGLE = "single"
"""Kind of expression for tiny models: one shape alone, larger, and a frame around the image."""
SINGLE_SIZES = (0.2, 0.45)
FRAME = (96, 96, 96)
"""Colour of the frame, which no shape has. It covers the pixels of `GAP`, where no shape is.

Qwen2.5-VL knows only relative positions. On an even background nothing says where the edge of the image is, and a tiny
model does not learn within minutes where a shape lies; see docs/experiments/boxes.md."""
LARGER = 1.25
"""Least ratio of the widths of the largest and the next shape, so that nobody has to measure."""
APART = 0.1
"""Least distance of centres that decide a question, as a share of the image's width."""
Chosen = tuple[Shape, str]
"""Shape that is described, and the expression."""


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows.

    Args:
        side: width and height of the images in pixels.
        others: largest number of shapes beside those that the expression needs.
        asks: kinds of expressions, from `ASKS`, which take turns; none = `USUAL`.
    """

    side: int = 336
    others: int = 3
    asks: tuple[str, ...] = ()


def drawn_rows(counts: Mapping[str, int], drawing: Drawing, seed: int) -> dict[str, list[NewRow]]:
    """Return split -> drawn rows; no image is there twice. Raises: DataError if the shapes do not fit."""
    return draw_rows("grounding", counts, seed, partial(_draw, drawing), hint="lower --others, or raise --side")


def _draw(drawing: Drawing, number: int, rng: random.Random) -> Drawn | None:
    kinds = drawing.asks or USUAL
    asks = kinds[number % len(kinds)]
    scene = _scene(asks, drawing, rng)
    if scene is None or (chosen := ASKS[asks](scene, rng)) is None:
        return None
    shape, expression = chosen
    truth = make_truth([float(number) for number in shape.box], "pixels", (scene.side, scene.side), asks)
    return Drawn(_framed(paint(scene)) if asks == SINGLE else paint(scene), truth, {"expression": expression})


def _scene(asks: str, drawing: Drawing, rng: random.Random) -> Scene | None:
    """Return a scene for an expression of this kind, or None if its shapes do not fit."""
    if asks == SINGLE:
        return lay_out(rng, [rng.choice(LOOKS)], drawing.side, sizes=SINGLE_SIZES)
    looks = rng.sample(LOOKS, rng.randint(2, 2 + drawing.others))
    looks += [looks[0]] * (0 if asks == "look" else rng.randint(1, 2))
    rng.shuffle(looks)
    return lay_out(rng, looks, drawing.side, sizes=SIZES)


def _framed(image: Image) -> Image:
    """Return the image with a frame of `GAP` pixels drawn onto its edge."""
    from PIL import ImageDraw

    ImageDraw.Draw(image).rectangle((0, 0, image.width - 1, image.height - 1), outline=FRAME, width=GAP)
    return image


def _by_look(scene: Scene, rng: random.Random) -> Chosen | None:
    """Choose a shape that alone has its look: "the red square"."""
    single = [shape for shape in scene.shapes if len(_alike(scene, shape.look)) == 1]
    if not single:
        return None
    shape = rng.choice(single)
    return shape, f"the {_name(shape.look)}"


def _by_size(scene: Scene, rng: random.Random) -> Chosen | None:
    """Choose the largest or the smallest of several shapes of one look: "the largest red square"."""
    alike = _several(scene)
    word, sign = rng.choice((("largest", -1), ("smallest", 1)))
    ordered = sorted(alike, key=lambda shape: sign * _width(shape))
    if len(ordered) < 2:
        return None
    first, second = sorted((_width(ordered[0]), _width(ordered[1])))
    return (ordered[0], f"the {word} {_name(ordered[0].look)}") if second >= LARGER * first else None


def _by_side(scene: Scene, rng: random.Random) -> Chosen | None:
    """Choose the outermost of several shapes of one look: "the leftmost red square"."""
    word, along = rng.choice(SIDES)
    ordered = sorted(_several(scene), key=lambda shape: along(centre(shape.box)))
    if len(ordered) < 2:
        return None
    gap = along(centre(ordered[1].box)) - along(centre(ordered[0].box))
    return (ordered[0], f"the {word} {_name(ordered[0].look)}") if gap >= APART * scene.side else None


def _by_relation(scene: Scene, rng: random.Random) -> Chosen | None:
    """Choose one of several shapes of one look by its place beside another shape, whose look no other shape has."""
    alike = _several(scene)
    anchors = [shape for shape in scene.shapes if len(_alike(scene, shape.look)) == 1]
    if not alike or not anchors:
        return None
    anchor = rng.choice(anchors)
    words, along = rng.choice(RELATIONS)
    margins = [along(centre(anchor.box)) - along(centre(shape.box)) for shape in alike]
    beside = [shape for shape, margin in zip(alike, margins, strict=True) if margin > 0]
    if len(beside) != 1 or min(map(abs, margins)) < APART * scene.side:
        return None
    return beside[0], f"the {_name(beside[0].look)} {words} the {_name(anchor.look)}"


SIDES: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("leftmost", lambda point: point.x),
    ("rightmost", lambda point: -point.x),
    ("topmost", lambda point: point.y),
    ("bottommost", lambda point: -point.y),
)
RELATIONS: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("to the left of", lambda point: point.x),
    ("to the right of", lambda point: -point.x),
    ("above", lambda point: point.y),
    ("below", lambda point: -point.y),
)
ASKS: Mapping[str, Callable[[Scene, random.Random], Chosen | None]] = {
    "look": _by_look,
    "size": _by_size,
    "side": _by_side,
    "relation": _by_relation,
    SINGLE: _by_look,
}
"""Kind of expression -> function that chooses a shape of a scene which such an expression describes exactly."""
USUAL = tuple(kind for kind in ASKS if kind != SINGLE)
"""Kinds of expressions that are drawn unless others are named."""


def _alike(scene: Scene, look: Look) -> list[Shape]:
    return [shape for shape in scene.shapes if shape.look == look]


def _several(scene: Scene) -> Sequence[Shape]:
    """Return the shapes of the only look that several shapes have; none if there is no such look."""
    return next((alike for shape in scene.shapes if len(alike := _alike(scene, shape.look)) > 1), [])


def _width(shape: Shape) -> float:
    return shape.box.x2 - shape.box.x1


def _name(look: Look) -> str:
    return f"{look.colour} {look.kind}"
