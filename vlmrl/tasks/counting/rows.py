"""Rows of the task counting: of published tables, and drawn with exact counts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.data.cells import show
from vlmrl.data.columns import IMAGES
from vlmrl.errors import DataError
from vlmrl.tasks.counting.reward import LARGEST_COUNT
from vlmrl.tasks.drawn_scene import COLOURS, KINDS, LOOKS, Drawn, Look, draw_rows, lay_out, paint, plural_of
from vlmrl.tasks.own_prep import NewRow
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size

SPELLINGS = {
    "images": IMAGES,
    "problem": ("problem", "question"),
    "object": ("label",),
    "answer": ("answer", "ground_truth", "count", "solution"),
}
ANSWER = re.compile(r"\s*<answer>\s*([0-9]{1,7})\s*</answer>\s*|\s*([0-9]{1,7})\s*")
MOST_CHARS = 2_000
ASKS = ("both", "colour", "kind", "all")


def table_form(objects: bool) -> RowForm:
    """Return the form of rows in tables.

    Args:
        objects: whether the question column names objects ("people") and is no question.
    """
    return RowForm(
        SPELLINGS,
        (("images",), ("problem", "object"), ("answer",)),
        partial(_read, objects),
        "rows have an image, a problem (or question, or label: the name of the objects), and answer, ground_truth or "
        "count",
    )


def _read(objects: bool, cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    text = cells["problem"] if "problem" in cells else cells.get("object")
    names_objects = objects or "problem" not in cells
    if not isinstance(text, str) or not (plain := " ".join(text.replace(IMAGE, " ").split())):
        raise DataError(f"the question is {show(text, 60)}, not a text")
    if len(plain) > MOST_CHARS:
        raise DataError(f"the question has {len(plain):,} characters; the limit is {MOST_CHARS:,}")
    if objects and ("?" in plain or plain.lower().startswith("how many")):
        raise DataError(f"{show(plain, 60)} is a question, and no name of objects", hint="leave out --objects")
    if names_objects:
        plain = f"How many {plain} are in the image?"
    elif "?" not in plain and "how many" not in plain.lower() and "count" not in plain.lower():
        raise DataError(f"{show(plain, 60)} is no question; if the column names objects, give --objects")
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


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows.

    Args:
        side: width and height of the images in pixels.
        most: largest count that is asked for.
        others: largest number of shapes that do not count.
        overlap: largest share of the smaller of two shapes' boxes that both may cover.
        asks: kinds of questions, from `ASKS`, which take turns.
    """

    side: int = 224
    most: int = 9
    others: int = 6
    overlap: float = 0.2
    asks: tuple[str, ...] = ASKS


def drawn_rows(counts: Mapping[str, int], drawing: Drawing, seed: int) -> dict[str, list[NewRow]]:
    """Return split -> drawn rows. Counts and kinds of questions take turns; no image is there twice.

    Raises: DataError if the shapes do not fit into the images.
    """
    hint = "lower --most or --others, or raise --side"
    return draw_rows("counting", counts, seed, partial(_draw, drawing), hint=hint)


def _draw(drawing: Drawing, number: int, rng: random.Random) -> Drawn | None:
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
