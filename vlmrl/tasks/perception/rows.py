"""Rows of grounding, detection and counting: from published tables, and drawn with exact boxes and counts.

A drawn expression describes exactly one shape of its scene; a category has the boxes of all its shapes, or none.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from vlmrl.data.table_values import IMAGES, plain, show
from vlmrl.errors import DataError, unknown
from vlmrl.rewards.boxes.planes import Box, Plane, Point, Space, centre, plane_of
from vlmrl.rewards.boxes.reading import MOST_CHARS, Order, check_order, only_box, read_boxes
from vlmrl.rewards.text_parsing import tagged_text
from vlmrl.tasks.base import NewRow
from vlmrl.tasks.drawing import (
    COLOURS,
    GAP,
    KINDS,
    LOOKS,
    Drawn,
    Look,
    Scene,
    Shape,
    draw_rows,
    lay_out,
    paint,
    plural_of,
)
from vlmrl.tasks.perception.answer import is_none
from vlmrl.tasks.perception.reward import LARGEST_COUNT
from vlmrl.tasks.perception.truth import (
    MOST_CATEGORY_CHARS,
    MOST_TRUE_BOXES,
    TRUTH_SPACES,
    make_detection_truth,
    make_grounding_truth,
)
from vlmrl.tasks.prep_options import Option, TableRequest
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size
from vlmrl.untrusted import parse_json

BEYOND = 0.01
"""Largest share of the image's width or height by which a published box may reach beyond the image; it is cut off."""
ELSEWHERE = "are the boxes in another space (--truth-space) or order (--box-order)?"
BoxOrder = Annotated[str, Option("Order of the numbers of a true box: xyxy, xywh or yxyx.")]


PUBLISHED_SPACE: Space = "thousand"
"""Coordinate space of the boxes of published tables."""


def space_help(also: str = "") -> str:
    """Return the help of --truth-space. `also`: other uses of PUBLISHED_SPACE."""
    known = ", ".join(TRUTH_SPACES)
    default = f"Default: {PUBLISHED_SPACE} for the published table{also}; else it must be given."
    return f"Coordinate space of the true boxes: {known}. {default}"


def declared(request: TableRequest, truth_space: str | None, box_order: str) -> tuple[Space | None, Order]:
    """Return the space that the options declare for true boxes, and the order of a box's numbers.

    Returns: (None, order) if the space is not declared.
    Raises: DataError for a space that true boxes cannot have; RewardError for an unknown order.
    """
    order = check_order(box_order)
    if truth_space is None:
        return PUBLISHED_SPACE if request.source is None else None, order
    for space in TRUTH_SPACES:
        if space == truth_space:
            return space, order
    raise unknown("--truth-space", truth_space, TRUTH_SPACES, error=DataError)


def declared_plane(space: Space | None, size: Size) -> Plane:
    """Return the plane of the true boxes of an image. Raises: DataError if no space is declared."""
    if space is None:
        known = ", ".join(TRUTH_SPACES)
        raise DataError("the coordinates of the boxes are not declared", hint=f"give --truth-space ({known})")
    return plane_of(space, size)


def read_box(cell: Any, plane: Plane, order: Order = "xyxy") -> Box:
    """Return the box of a cell: four numbers, in a list, in a text, or by their names.

    Raises: DataError for anything but one box, and for a box that reaches beyond the image.
    """
    if cell is None:
        raise DataError("no box")
    text = cell if isinstance(cell, str) else json.dumps(plain(cell))
    wide = Plane(plane.space, plane.width * (1 + BEYOND), plane.height * (1 + BEYOND))
    read, problem = only_box(read_boxes(text, wide, order=order))
    if read is None or read.notes:
        reason = problem or (read.notes[0] if read is not None else "")
        extent = f"{plane.width:g} x {plane.height:g} in the space `{plane.space}`"
        raise DataError(f"the box is {show(cell, 60)}: {reason} (the image has {extent})", hint=ELSEWHERE)
    x1, y1, x2, y2 = read.shape
    box = Box(x1, y1, min(x2, plane.width), min(y2, plane.height))
    if box.x1 >= box.x2 or box.y1 >= box.y2:
        raise DataError(f"the box is {show(cell, 60)}: it lies beyond the image")
    return box


MOST_QUESTION_CHARS = 2_000


def _read_grounding_row(
    space: Space | None, order: Order, cells: Mapping[str, Any], size: Size
) -> tuple[dict[str, Any], dict[str, Any]]:
    expression = _one_line(cells.get("expression"), "text")
    cell = cells.get("box")
    if space is None and "normalized" in cells:
        space, cell = "thousand", cells["normalized"]
    plane = declared_plane(space, size)
    return make_grounding_truth([*read_box(cell, plane, order)], plane.space, size), {"expression": expression}


def _one_line(cell: Any, what: str) -> str:
    """Return the words of a cell, without marks of images. Raises: DataError for no text, and one that is too long."""
    if not isinstance(cell, str) or not (line := " ".join(cell.replace(IMAGE, " ").split())):
        raise DataError(f"the {what} is {show(cell, 60)}, not a text")
    if len(line) > MOST_QUESTION_CHARS:
        raise DataError(f"the {what} has {len(line):,} characters; the limit is {MOST_QUESTION_CHARS:,}")
    return line


QUOTED = re.compile(
    r"\bcategory\s{1,3}(?:'((?:[^'\n]|'(?=[a-zA-Z])){1,100})'|\"([^\"\n]{1,100})\"|\u2018([^\u2019\n]{1,100})\u2019)"
)
"""Category in the text of a published problem: category 'traffic light'."""
LABELS = ("label", "category", "name", "class")
"""Keys of an entry that say what is in its box."""
MOST_WORDS = 6
"""Largest number of words of a problem that is nothing but the name of a category."""


def _read_detection_row(
    space: Space | None, order: Order, cells: Mapping[str, Any], size: Size
) -> tuple[dict[str, Any], dict[str, Any]]:
    category = read_category(cells.get("category"), cells.get("problem"))
    plane = declared_plane(space, size)
    boxes = read_truths(cells.get("boxes"), plane, order, category)
    return make_detection_truth(boxes, plane.space, *size, category), {"category": category}


def read_category(category: Any, problem: Any) -> str:
    """Return the category of a row: its own cell, or the category that the problem names in quotes.

    Raises: DataError if there is none, or several.
    """
    if category is None and isinstance(problem, str):
        names = dict.fromkeys(next(filter(None, groups)) for groups in QUOTED.findall(problem[:MOST_CHARS]))
        if len(names) > 1:
            raise DataError(f"the problem names several categories: {show(', '.join(names), 60)}")
        if not names and not 0 < len(problem.replace(IMAGE, " ").split()) <= MOST_WORDS:
            raise DataError(f"the problem names no category: {show(problem, 60)}")
        category = next(iter(names), problem)
    if not isinstance(category, str) or not (name := " ".join(category.replace(IMAGE, " ").split())):
        raise DataError(f"the category is {show(category, 60)}, not a text")
    if len(name) > MOST_CATEGORY_CHARS:
        raise DataError(f"the category has {len(name):,} characters; the limit is {MOST_CATEGORY_CHARS}")
    return name


def read_truths(cell: Any, plane: Plane, order: Order = "xyxy", category: str | None = None) -> list[list[float]]:
    """Return the boxes of a cell, each once: a list of boxes, or a text of one, with an `<answer>` around it or not.

    The text is JSON, or the same with single quotes. No box: an empty list, or the words "No Objects".

    Args:
        category: that of the row; None = whatever the boxes are labelled.
    Raises: DataError for anything else, for an entry that is not one box within the image, and for a box whose label is
        another category.
    """
    if cell is None:
        raise DataError("no boxes")
    text = cell if isinstance(cell, str) else json.dumps(plain(cell))
    inner, _ = tagged_text(text, "answer")
    text = text if inner is None else inner
    if is_none(text):
        return []
    entries = _entries(text)
    if len(entries) > MOST_TRUE_BOXES:
        raise DataError(f"{len(entries):,} boxes; the limit is {MOST_TRUE_BOXES}")
    if category is not None:
        _check_labels(entries, category)
    boxes = (tuple(float(n) for n in read_box(json.dumps(entry), plane, order)) for entry in entries)
    return [list(box) for box in dict.fromkeys(boxes)]


def _check_labels(entries: Sequence[Any], category: str) -> None:
    """Raise a DataError if an entry is labelled as something else than the category of the row."""
    for entry in entries:
        label = next((entry[key] for key in LABELS if isinstance(entry, dict) and key in entry), category)
        if " ".join(str(label).split()).casefold() != category.casefold():
            raise DataError(f"a box has the label {show(label, 60)}, the row the category {show(category, 60)}")


def _entries(text: str) -> list[Any]:
    """Return the entries of a list of boxes; a single box is a list of one."""
    value: Any = None
    for spelling in (text, text.replace("'", '"')):
        try:
            value = parse_json(spelling)
            break
        except ValueError:
            continue
    if isinstance(value, dict) or (isinstance(value, list) and value and not isinstance(value[0], (list, dict))):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"the boxes are {show(text, 60)}, not a list of boxes")
    return value


ANSWER = re.compile(r"\s*<answer>\s*([0-9]{1,7})\s*</answer>\s*|\s*([0-9]{1,7})\s*")
QUESTION_KINDS = ("both", "colour", "kind", "all")


def _read_counting_row(objects: bool, cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = _one_line(cells["problem"] if "problem" in cells else cells.get("object"), "question")
    if objects and ("?" in plain or plain.lower().startswith("how many")):
        raise DataError(f"{show(plain, 60)} is a question, and no name of objects", hint="leave out --objects")
    if objects or "problem" not in cells:
        plain = f"How many {plain} are in the image?"
    elif "?" not in plain and "how many" not in plain.lower() and "count" not in plain.lower():
        raise DataError(f"{show(plain, 60)} is not a question; if the column names objects, give --objects")
    return {"answer": read_truth(cells.get("answer")), "asks": None}, {"problem": plain}


def read_truth(cell: Any) -> int:
    """Return the count of a cell: a whole number, or a text of one, also in answer tags. Raises: DataError."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        raise DataError(f"the answer is {show(cell, 60)}, not a whole number")
    match = ANSWER.fullmatch(cell) if isinstance(cell, str) else None
    if match is not None:
        return read_truth(int(match[1] or match[2]))
    if isinstance(cell, str) or cell != cell or abs(cell) > LARGEST_COUNT or cell != int(cell) or cell < 0:
        raise DataError(f"the answer is {show(cell, 60)}, not a whole number from 0 to {LARGEST_COUNT:,}")
    return int(cell)


def grounding_form(space: Space | None, order: Order) -> RowForm:
    """Return the form of rows of grounding in tables.

    Args:
        space: coordinate space of the boxes; None = not declared. Boxes of a column `normalized_solution` are used
            then: its name declares 0 to 1000.
        order: order of the four numbers of a box.
    """
    return RowForm(
        {
            "images": IMAGES,
            "expression": ("problem", "expression", "question", "sentence", "caption", "normal_caption"),
            "normalized": ("normalized_solution",),
            "box": ("solution", "bbox", "bbox_2d", "box", "answer"),
        },
        (("images",), ("expression",), ("box", "normalized")),
        partial(_read_grounding_row, space, order),
        "rows have an image, a problem (or expression, question, sentence), and a box: solution, bbox or "
        "normalized_solution",
    )


def detection_form(space: Space | None, order: Order) -> RowForm:
    """Return the form of rows of detection in tables; see `grounding_form` for the arguments."""
    return RowForm(
        {
            "images": IMAGES,
            "category": ("category", "class_name", "class", "label"),
            "problem": ("problem", "question", "prompt"),
            "boxes": ("solution", "boxes", "bboxes", "objects", "bbox", "bbox_2d", "answer"),
        },
        (("images",), ("category", "problem"), ("boxes",)),
        partial(_read_detection_row, space, order),
        "rows have an image, a category (or a problem that names it: category 'dog'), and its boxes: solution, boxes "
        "or objects",
    )


def counting_form(objects: bool) -> RowForm:
    """Return the form of rows of counting in tables.

    Args:
        objects: whether the question column names objects ("people") and is no question.
    """
    return RowForm(
        {
            "images": IMAGES,
            "problem": ("problem", "question"),
            "object": ("label",),
            "answer": ("answer", "ground_truth", "count", "solution"),
        },
        (("images",), ("problem", "object"), ("answer",)),
        partial(_read_counting_row, objects),
        "rows have an image, a problem (or question, or label: the name of the objects), and answer, ground_truth or "
        "count",
    )


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows.

    Args:
        side: width and height of the images in pixels.
        others: largest number of shapes beside those that the text needs (counting: that do not count).
        asks: kinds of questions, expressions or categories. Those of counting and grounding take turns; each row of
            detection draws one.
        absent: detection: share of rows whose category no shape has, in [0, 1].
        most: counting: largest count that is asked for.
        overlap: counting: largest share of the smaller of two shapes' boxes that both may cover.
    """

    side: int
    others: int
    asks: tuple[str, ...]
    absent: float = 0.0
    most: int = 0
    overlap: float = 0.2


def _draw_counting_row(drawing: Drawing, number: int, rng: random.Random) -> Drawn | None:
    asks = drawing.asks[number % len(drawing.asks)]
    choices = drawing.most if asks == "all" else drawing.most + 1  # the question for all shapes is never asked of none
    count = (number // len(drawing.asks)) % choices + (1 if asks == "all" else 0)
    question, counting, others = _question(rng, asks)
    num_others = rng.randint(min(1, drawing.others), drawing.others) if others else 0
    looks = rng.choices(counting, k=count) + (rng.choices(others, k=num_others) if num_others else [])
    rng.shuffle(looks)
    scene = lay_out(rng, looks, drawing.side, max_overlap=drawing.overlap)
    return Drawn(paint(scene), {"answer": count, "asks": asks}, {"problem": question}) if scene else None


def _question(rng: random.Random, asks: str) -> tuple[str, list[Look], list[Look]]:
    """Return a question, the looks of shapes that count, and those of shapes that do not."""
    kind, colour = rng.choice(KINDS), rng.choice(tuple(COLOURS))
    names = {
        "all": "shapes",
        "colour": f"{colour} shapes",
        "kind": plural_of(kind),
        "both": f"{colour} {plural_of(kind)}",
    }
    wrong = {
        look
        for look in LOOKS
        if (asks in ("colour", "both") and look.colour != colour) or (asks in ("kind", "both") and look.kind != kind)
    }
    counting, others = ([look for look in LOOKS if (look in wrong) == is_wrong] for is_wrong in (False, True))
    return f"How many {names[asks]} are in the image?", counting, others


GROUNDING_SIZES = (0.12, 0.32)
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


def _draw_grounding_row(drawing: Drawing, number: int, rng: random.Random) -> Drawn | None:
    from PIL import ImageDraw

    asks = drawing.asks[number % len(drawing.asks)]
    scene = _scene(asks, drawing, rng)
    if scene is None or (chosen := EXPRESSION_KINDS[asks](scene, rng)) is None:
        return None
    shape, expression = chosen
    truth = make_grounding_truth([float(number) for number in shape.box], "pixels", (scene.side, scene.side), asks)
    image = paint(scene)
    if asks == SINGLE:
        ImageDraw.Draw(image).rectangle((0, 0, image.width - 1, image.height - 1), outline=FRAME, width=GAP)
    return Drawn(image, truth, {"expression": expression})


def _scene(asks: str, drawing: Drawing, rng: random.Random) -> Scene | None:
    """Return a scene for an expression of this kind, or None if its shapes do not fit."""
    if asks == SINGLE:
        return lay_out(rng, [rng.choice(LOOKS)], drawing.side, sizes=SINGLE_SIZES)
    looks = rng.sample(LOOKS, rng.randint(2, 2 + drawing.others))
    looks += [looks[0]] * (0 if asks == "look" else rng.randint(1, 2))
    rng.shuffle(looks)
    return lay_out(rng, looks, drawing.side, sizes=GROUNDING_SIZES)


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
    word, _, along = rng.choice(DIRECTIONS)
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
    _, words, along = rng.choice(DIRECTIONS)
    margins = [along(centre(anchor.box)) - along(centre(shape.box)) for shape in alike]
    beside = [shape for shape, margin in zip(alike, margins, strict=True) if margin > 0]
    if len(beside) != 1 or min(map(abs, margins)) < APART * scene.side:
        return None
    return beside[0], f"the {_name(beside[0].look)} {words} the {_name(anchor.look)}"


DIRECTIONS: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
    ("leftmost", "to the left of", lambda point: point.x),
    ("rightmost", "to the right of", lambda point: -point.x),
    ("topmost", "above", lambda point: point.y),
    ("bottommost", "below", lambda point: -point.y),
)
"""Words for a side and for a relation, and the distance from the edge of that side."""
EXPRESSION_KINDS: Mapping[str, Callable[[Scene, random.Random], Chosen | None]] = {
    "look": _by_look,
    "size": _by_size,
    "side": _by_side,
    "relation": _by_relation,
    SINGLE: _by_look,
}
"""Kind of expression -> function that chooses a shape of a scene which such an expression describes exactly."""
USUAL = tuple(kind for kind in EXPRESSION_KINDS if kind != SINGLE)
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


DETECTION_SIZES = (0.12, 0.3)
CATEGORY_KINDS: Mapping[str, Callable[[Look], str]] = {
    "look": _name,
    "kind": lambda look: look.kind,
    "colour": lambda look: f"{look.colour} shape",
}
"""Kind of category -> the category of a shape."""


def _draw_detection_row(drawing: Drawing, number: int, rng: random.Random) -> Drawn | None:
    is_absent = int((number + 1) * drawing.absent) > int(number * drawing.absent)
    category_of = CATEGORY_KINDS[rng.choice(drawing.asks)]
    num_shapes = 1 + rng.randint(0, drawing.others)
    few = rng.sample(LOOKS, rng.randint(1, num_shapes))  # fewer looks than shapes: some look is there several times
    scene = lay_out(rng, [rng.choice(few) for _ in range(num_shapes)], drawing.side, sizes=DETECTION_SIZES)
    if scene is None or (category := _category(scene, category_of, rng, is_absent)) is None:
        return None
    boxes = [[float(n) for n in shape.box] for shape in scene.shapes if category_of(shape.look) == category]
    truth = make_detection_truth(boxes, "pixels", scene.side, scene.side, category)
    return Drawn(paint(scene), truth, {"category": category})


def _category(scene: Scene, category_of: Callable[[Look], str], rng: random.Random, is_absent: bool) -> str | None:
    """Return a category that a shape of the scene has, or that none has; None if there is no such category."""
    shown = list(dict.fromkeys(category_of(shape.look) for shape in scene.shapes))
    others = [name for name in dict.fromkeys(map(category_of, LOOKS)) if name not in shown]
    names = others if is_absent else shown
    return rng.choice(names) if names else None


DRAWERS: Mapping[str, tuple[Callable[[Drawing, int, random.Random], Drawn | None], str]] = {
    "counting": (_draw_counting_row, "lower --most or --others, or raise --side"),
    "detection": (_draw_detection_row, "lower --others, or raise --side"),
    "grounding": (_draw_grounding_row, "lower --others, or raise --side"),
}
"""Task -> function that draws one row, and the hint for shapes that do not fit into the images."""


def drawn_rows(task: str, drawing: Drawing, seed: int, counts: Mapping[str, int]) -> dict[str, list[NewRow]]:
    """Return split -> drawn rows; no image is there twice. Counts and kinds of questions take turns.

    Raises: DataError if the shapes do not fit into the images.
    """
    draw, hint = DRAWERS[task]
    return draw_rows(task, counts, seed, partial(draw, drawing), hint=hint)
