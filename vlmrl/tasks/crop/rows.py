"""Rows of the task crop: from published tables, and drawn, with lines too fine for the size at which a model sees them.

A drawn picture has places in rows and columns, each filled with lines of one direction. Light and dark of the lines
cancel out, so a picture that is shrunk to the width `seen`, or below, is even there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmrl.data.table_values import IMAGES, show
from vlmrl.errors import DataError
from vlmrl.tasks.drawing import Drawn
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size

WAYS: Mapping[str, tuple[int, int]] = {"across": (0, 1), "down": (1, 0), "rising": (1, 1), "falling": (1, -1)}
"""Direction of lines, which is the answer -> factors of x and y whose sum is the same along a line."""
STRENGTH = 90
"""Half of the difference of light and dark, of 255."""
MOST_CHARS = 4000


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows.

    Args:
        side: width and height of a picture in pixels, at least 4 x `seen`.
        seen: width at which the model sees it: the lines vanish there.
        places: number of places in a row and in a column.
        right_looks: share of the demonstrations that look at the right place. The others look at any place, and answer
            what they see there.
    """

    side: int
    seen: int
    places: int
    right_looks: float = 1.0


def draw_row(drawing: Drawing, number: int, rng: random.Random) -> Drawn:
    """Return a row. Its truth also has what a demonstration looks at, and reads there (`look`, `look_answer`)."""
    import numpy as np
    from PIL import Image

    side, step = drawing.side, drawing.side // drawing.places
    period = side // drawing.seen // 2 * 2  # of a light and a dark line
    y, x = np.mgrid[0:side, 0:side]
    pixels = np.full((side, side), rng.randint(100, 156))
    places = [(column, row) for row in range(drawing.places) for column in range(drawing.places)]
    ways = [rng.choice(tuple(WAYS)) for _ in places]
    for (column, row), way in zip(places, ways, strict=True):
        area = np.s_[row * step : (row + 1) * step, column * step : (column + 1) * step]
        waves = (WAYS[way][0] * x[area] + WAYS[way][1] * y[area] + rng.randrange(period)) % period
        pixels[area] += np.where(waves < period // 2, STRENGTH, -STRENGTH)
    chosen = rng.randrange(len(places))
    look = chosen if rng.random() < drawing.right_looks else rng.randrange(len(places))
    column, row = places[chosen]
    left, top, middle = places[look][0] * step + step // 4, places[look][1] * step + step // 4, step - step // 4 * 2
    truth = {
        "answer": ways[chosen],
        "category": "place",
        "box": [column * step, row * step, (column + 1) * step, (row + 1) * step],
        "look": [left, top, left + middle, top + middle],
        "look_answer": ways[look],
        "width": side,
        "height": side,
    }
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")
    return Drawn(image, truth, {"question": f"Which way do the lines run in row {row + 1}, column {column + 1}?"})


def _read_row(cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    extra, published = (dict(cells.get(name) or {}) for name in ("extra", "published"))
    question = cells.get("question") or extra.get("question")
    answer = published.get("ground_truth") or cells.get("answer")
    texts: dict[str, str] = {}
    for name, cell in (("question", question), ("answer", answer)):
        texts[name] = " ".join(str(cell or "").replace(IMAGE, " ").split())
        if not 0 < len(texts[name]) <= MOST_CHARS:
            raise DataError(f"the {name} is {show(cell, 60)}, not a text of up to {MOST_CHARS:,} characters")
    facts = {"category": cells.get("category"), "width": size[0], "height": size[1]}
    return {"answer": texts["answer"], **facts}, {"question": texts["question"]}


ROW_FORM = RowForm(
    {
        "images": IMAGES,
        "question": ("question", "problem", "text"),
        "answer": ("answer", "label", "ground_truth", "solution"),
        "category": ("category", "data_source"),
        "extra": ("extra_info",),
        "published": ("reward_model",),
    },
    (("images",), ("question", "extra"), ("answer", "published")),
    _read_row,
    "rows have an image, a question (question, text, or extra_info with a question) and an answer (answer, label, or "
    "reward_model with a ground_truth)",
)
