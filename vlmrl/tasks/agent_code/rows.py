"""Rows of the task agent_code: from published tables, and drawn, with damage whose repair is known.

A drawn picture has coloured shapes in four corners. It is damaged in one of seven ways, or not at all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vlmrl.data.table_values import IMAGES, show
from vlmrl.errors import DataError, cell_text
from vlmrl.rewards.boxes.planes import Box
from vlmrl.tasks.drawing import COLOURS, GAP, KINDS, PAPERS, Drawn, Look, Scene, Shape, paint
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size
from vlmrl.untrusted import parse_json

if TYPE_CHECKING:
    from PIL.Image import Image

PROBLEM, CODE, ANSWER = "problem", "code", "answer"
STEPS: Mapping[str, str] = {"pre_problem": PROBLEM, "pre_code": CODE, "pre_answer": ANSWER}
"""Type of a published row -> the tag of the step that is asked for."""
INPUT_NAME, OUTPUT_NAME = "path_to_input_image.jpg", "path_to_output_image.jpg"
COPY = f"from PIL import Image\nImage.open('{INPUT_NAME}').save('{OUTPUT_NAME}')"
"""Code that repairs nothing: it loses what saving as JPEG loses."""
NONE = "none"
MOST_CHARS = 20_000
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
READ = f"from PIL import Image, ImageFilter\nimage = Image.open('{INPUT_NAME}')\n"
WRITE = f"image.save('{OUTPUT_NAME}')"


Damage = Callable[["Image", random.Random], tuple["Image", str]]
"""(Picture, random numbers) -> (damaged picture, the line of Python that repairs `image`)."""


def _turned(degrees: int) -> Damage:
    def do(image: Image, _: random.Random) -> tuple[Image, str]:
        return image.rotate(-degrees, expand=True), f"image = image.rotate({degrees}, expand=True)"

    return do


def _dark(image: Image, rng: random.Random) -> tuple[Image, str]:
    factor = rng.choice((4, 5, 6))
    return image.point([p // factor for p in range(256)] * 3), f"image = image.point(lambda p: min(255, p * {factor}))"


def _bright(image: Image, rng: random.Random) -> tuple[Image, str]:
    factor = rng.choice((4, 5, 6))
    repair = f"image = image.point(lambda p: max(0, 255 - (255 - p) * {factor}))"
    return image.point([255 - (255 - p) // factor for p in range(256)] * 3), repair


def _blurred(image: Image, rng: random.Random) -> tuple[Image, str]:
    from PIL import ImageFilter

    radius = rng.choice((1, 2))
    repair = f"image = image.filter(ImageFilter.UnsharpMask({radius}, 100, 0))"
    return image.filter(ImageFilter.GaussianBlur(radius)), repair


def _noisy(image: Image, rng: random.Random) -> tuple[Image, str]:
    damaged = image.copy()
    for _ in range(image.width * image.height // 12):
        place = rng.randrange(image.width), rng.randrange(image.height)
        damaged.putpixel(place, rng.choice(((0, 0, 0), (255, 255, 255))))
    return damaged, "image = image.filter(ImageFilter.MedianFilter(3))"


def _on_a_page(image: Image, rng: random.Random) -> tuple[Image, str]:
    """Make the picture a part of a page with other shapes. The question is about that part."""
    from PIL import Image as pil
    from PIL import ImageDraw

    width, height = 2 * image.width, 2 * image.height
    page = pil.new("RGB", (width, height), rng.choice(PAPERS))
    draw = ImageDraw.Draw(page)
    for _ in range(12):
        x, y, size = rng.randrange(width), rng.randrange(height), max(4, image.width // 8)
        draw.rectangle((x, y, x + size, y + size), fill=COLOURS[rng.choice(tuple(COLOURS))])
    left, top = rng.randrange(image.width), rng.randrange(image.height)
    page.paste(image, (left, top))
    ImageDraw.Draw(page).rectangle((left, top, left + image.width - 1, top + image.height - 1), outline="black")
    return page, f"image = image.crop(({left}, {top}, {left + image.width}, {top + image.height}))"


DAMAGES: Mapping[str, Damage] = {
    "rotation90": _turned(90),
    "rotation180": _turned(180),
    "dark": _dark,
    "overexposure": _bright,
    "blur": _blurred,
    "noise": _noisy,
    "crop": _on_a_page,
}
"""Label of a damage, as published rows name it -> the damage."""
LABELS = (*DAMAGES, NONE)
CORNERS = ("top left", "top right", "bottom left", "bottom right")


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows.

    Args:
        side: width and height of the undamaged picture in pixels.
        damages: labels to draw from.
        stepwise: whether a row asks for one step (its damage, its repair, its answer) instead of all in an episode.
    """

    side: int
    damages: Sequence[str]
    stepwise: bool = False


def draw_row(drawing: Drawing, number: int, rng: random.Random) -> Drawn:
    """Return a row. Its truth has the damage and the code that repairs it."""
    looks = rng.sample([Look(kind, colour) for kind in KINDS for colour in COLOURS], 4)
    half, shapes = drawing.side // 2, list[Shape]()
    for place, look in enumerate(looks):
        width = max(5, round(drawing.side * rng.uniform(0.25, 0.4))) | 1
        left, top = (place % 2) * half + GAP, (place // 2) * half + GAP
        x, y = (start + rng.randrange(max(1, half - width - 2 * GAP)) for start in (left, top))
        shapes.append(Shape(look, Box(x, y, x + width, y + width)))
    whole = paint(Scene(drawing.side, rng.choice(PAPERS), tuple(shapes)))
    label, corner = drawing.damages[number % len(drawing.damages)], rng.randrange(4)
    image, repair = (whole, "") if label == NONE else DAMAGES[label](whole, rng)
    truth: dict[str, Any] = {
        "answer": [f"{looks[corner].colour} {looks[corner].kind}"],
        "damage": [label],
        "code": f"{READ}{repair}\n{WRITE}" if repair else "",
    }
    columns = {"question": f"Which shape is at the {CORNERS[corner]} of the picture?"}
    if drawing.stepwise:
        steps = (PROBLEM, CODE, ANSWER) if repair else (PROBLEM, ANSWER)
        step = truth["step"] = rng.choice(steps)
        columns["context"] = "\n".join(written(one, truth) for one in steps[: steps.index(step)])
    return Drawn(image, truth, columns)


def written(step: str, truth: Mapping[str, Any]) -> str:
    """Return a right step of a row, in its tags."""
    texts = {
        PROBLEM: "{" + ", ".join(repr(label) for label in truth.get("damage") or [NONE]) + "}",
        CODE: f"```python\n{truth.get('code')}\n```",
        ANSWER: str((truth.get("answer") or [""])[0]),
    }
    return f"<{step}>{texts[step]}</{step}>"


def read_labels(text: str) -> set[str]:
    """Return the labels in a text such as `{'rotation90', 'dark'}`; a name that is no label counts as one, too."""
    names = (name.strip(" \t\r\n'\"`").casefold() for name in text.strip(" \t\r\n{}[]()").split(","))
    return {name for name in names if name}


def read_code(text: str) -> str:
    """Return the code in a text: that of its only fence, or the whole text."""
    blocks = FENCE.findall(text)
    return blocks[0] if len(blocks) == 1 else text


def read_row(stepwise: bool, cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (truth, columns) of a published row.

    Args:
        stepwise: whether rows ask for one step; else the rows that ask for the answer are questions of whole episodes.
    Raises: DataError for a row that cannot be used.
    """
    kind = cells.get("type")
    step = STEPS.get(str(kind)) if kind else ANSWER
    if step is None:
        raise DataError(f"the type is {show(kind, 40)}, not one of {', '.join(STEPS)}")
    if step != ANSWER and not stepwise:
        raise DataError(f"a row of the type {kind} asks for a step of a chain", hint="--stepwise keeps such rows")
    question = " ".join(cell_text(cells.get("question"), "the question").replace(IMAGE, " ").split())
    solution, truth = cell_text(cells.get("solution"), "the solution"), dict[str, Any]()
    if not 0 < len(question) <= MOST_CHARS or len(solution) > MOST_CHARS:
        raise DataError(f"the question is {show(question, 60)}, not a text of up to {MOST_CHARS:,} characters")
    pieces = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", solution, re.DOTALL) for tag in STEPS.values()}
    if step == ANSWER:
        truth["answer"] = read_answers(cells.get("answer")) or [text.strip() for text in pieces[ANSWER][:1]]
        if not truth["answer"] or not all(0 < len(text) <= MOST_CHARS for text in truth["answer"]):
            raise DataError(f"the answer is {show(cells.get('answer'), 60)}, not a text or a list of texts")
    elif not pieces[step]:
        raise DataError(f"the solution {show(solution, 60)} has no <{step}>")
    elif step == PROBLEM:
        truth["damage"] = sorted(read_labels(pieces[step][0]))
    else:
        truth["code"] = read_code(pieces[step][0])
    columns: dict[str, Any] = {"question": question}
    if stepwise:
        truth["step"] = step
        columns["context"] = cell_text(cells.get("context"), "the context").replace(IMAGE, " ").strip()
    if cells.get("level"):
        truth["level"] = str(cells["level"])
    return truth, columns


def read_answers(cell: Any) -> list[str]:
    """Return the accepted answers: a text, a list, TriviaQA's {value, aliases}, or one of these as JSON text.

    Raises: DataError for another value.
    """
    if isinstance(cell, str) and cell.strip().startswith(("[", "{")):
        with suppress(ValueError):
            value = parse_json(cell)
            cell = value if isinstance(value, list) or "value" in value else cell
    if isinstance(cell, dict) and "value" in cell:
        aliases = cell.get("aliases")
        cell = [cell["value"], *(aliases if isinstance(aliases, list) else [])]
    texts = (cell_text(value, "the answer").strip() for value in (cell if isinstance(cell, (list, tuple)) else [cell]))
    return [text for text in texts if text]


def row_form(stepwise: bool) -> RowForm:
    """Return the form of published rows."""
    return RowForm(
        {
            "images": (*IMAGES, "image_path", "processed_image_path", "ori_image_path"),
            "type": ("type",),
            "question": ("problem", "question", "query"),
            "context": ("context",),
            "solution": ("solution",),
            "answer": ("gt", "answers", "answer", "label"),
            "level": ("level", "difficulty"),
        },
        (("images",), ("question",), ("answer", "solution")),
        partial(read_row, stepwise),
        "rows have an image, a question (problem, question), and an answer (gt, answers, answer) or a solution with "
        "<problem>, <code> or <answer>; `type` says which step a row asks for, `context` has the steps before",
    )
