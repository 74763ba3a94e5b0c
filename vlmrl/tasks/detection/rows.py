"""Rows of the task detection in published tables: an image, a category, and the boxes of its objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.data.cells import plain, show
from vlmrl.data.columns import IMAGES
from vlmrl.errors import DataError
from vlmrl.rewards.boxes.planes import Plane, Space
from vlmrl.rewards.boxes.reading import Order
from vlmrl.rewards.boxes.scan import MOST_CHARS
from vlmrl.rewards.text_parsing import tagged_text
from vlmrl.tasks.boxes.rows import declared_plane, read_box
from vlmrl.tasks.detection.answer import is_none
from vlmrl.tasks.detection.truth import MOST_CATEGORY_CHARS, MOST_TRUE_BOXES, make_truth
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size
from vlmrl.untrusted import parse_json

SPELLINGS = {
    "images": IMAGES,
    "category": ("category", "class_name", "class", "label"),
    "problem": ("problem", "question", "prompt"),
    "boxes": ("solution", "boxes", "bboxes", "objects", "bbox", "bbox_2d", "answer"),
}
QUOTED = re.compile(
    r"\bcategory\s{1,3}(?:'((?:[^'\n]|'(?=[a-zA-Z])){1,100})'|\"([^\"\n]{1,100})\"|\u2018([^\u2019\n]{1,100})\u2019)"
)
"""Category in the text of a published problem: category 'traffic light'."""
LABELS = ("label", "category", "name", "class")
"""Keys of an entry that say what is in its box."""
MOST_WORDS = 6
"""Largest number of words of a problem that is nothing but the name of a category."""


def table_form(space: Space | None, order: Order) -> RowForm:
    """Return the form of rows in tables.

    Args:
        space: coordinate space of the boxes; None = not declared.
        order: order of the four numbers of a box.
    """
    return RowForm(
        SPELLINGS,
        (("images",), ("category", "problem"), ("boxes",)),
        partial(_read, space, order),
        "rows have an image, a category (or a problem that names it: category 'dog'), and its boxes: solution, boxes "
        "or objects",
    )


def _read(
    space: Space | None, order: Order, cells: Mapping[str, Any], size: Size
) -> tuple[dict[str, Any], dict[str, Any]]:
    category = read_category(cells.get("category"), cells.get("problem"))
    plane = declared_plane(space, size)
    boxes = read_truths(cells.get("boxes"), plane, order, category)
    return make_truth(boxes, plane.space, *size, category), {"category": category}


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
