"""Rows of the task we_math, from published tables or drawn.

Tables have sets of problems with options, and training rows with free answers. A drawn set has shapes to count
(sub-problems), and what their numbers give (composite problem).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmrl.data.images import encode_png, image_hash
from vlmrl.data.table_values import IMAGES, show, text_of
from vlmrl.errors import DataError
from vlmrl.rewards.text_parsing import tagged_text
from vlmrl.tasks.base import NewRow
from vlmrl.tasks.drawing import LOOKS, MOST_TRIES, Look, lay_out, paint, plural_of
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.tasks.we_math.truth import MULTI, truth_problems
from vlmrl.types import Size, hash64

SPELLINGS = {
    "images": IMAGES,
    "problem": ("question", "problem"),
    "options": ("option", "options"),
    "answer": ("answer", "ground_truth"),
    "set": ("ID",),
    "step": ("key",),
    "concept": ("knowledge concept",),
    "solution": ("solution", "golden_cot", "cot"),
}
FORM_HELP = (
    "rows have an image, a question (or problem) and an answer; those of sets also option, ID and key (2steps_1,"
    " 2steps_2, 2steps_multi)"
)
KEY = re.compile(r"([23])steps_([123]|multi)")
TAGS = re.compile(r"</?(?:think|answer)>")
MOST_CHARS = 20_000


def table_form() -> RowForm:
    """Return the form of rows in tables."""
    return RowForm(SPELLINGS, (("images",), ("problem",), ("answer",)), _read, FORM_HELP)


def _read(cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    problem = _text(cells, "problem")
    problem = problem.replace(IMAGE, " ").strip() if problem else None
    if not problem or len(problem) > MOST_CHARS:
        raise DataError(
            f"the question is {show(cells.get('problem'), 60)}, not a text of at most {MOST_CHARS:,} characters"
        )
    options = _text(cells, "options")
    answer = cells.get("answer")
    answer = (
        str(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else _text(cells, "answer")
    )
    truth = {
        "answer": _answer(answer),
        "options": options,
        **_place(cells),
        "concept": _text(cells, "concept"),
        "solution": _solution(_text(cells, "solution")),
    }
    if faults := truth_problems(truth) or _ungradable(truth):
        raise DataError("; ".join(faults))
    return truth, {"problem": problem, "options": options or ""}


def _ungradable(truth: Mapping[str, Any]) -> list[str]:
    """Return why the reward could never call a free answer right; [] if it can."""
    if truth["options"] is not None:
        return []
    from vlmrl.tasks.we_math.grader import answer_problem  # it loads SymPy

    problem = answer_problem(truth["answer"])
    return [f"`answer` is {show(truth['answer'], 60)}, which cannot be graded: {problem}"] if problem else []


def _text(cells: Mapping[str, Any], role: str) -> str | None:
    text = text_of(cells.get(role))
    return text.strip() or None if text else None


def _answer(text: str | None) -> str | None:
    """Return an answer without the tags around it."""
    inside = tagged_text(text, "answer")[0] if text else None
    return text if inside is None else inside.strip()


def _place(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set of a row, its step, and its number of steps; a row without a key belongs to no set."""
    key = cells.get("step")
    if key is None:
        return {"set": None, "step": None, "num_steps": None}
    match = KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None or (match[2] != MULTI and int(match[2]) > int(match[1])):
        raise DataError(f"`key` is {show(key, 60)}, not such as 2steps_1 or 3steps_multi")
    name = cells.get("set")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"`ID` is {show(name, 60)}, not the name of a set")
    return {"set": name.strip(), "step": match[2], "num_steps": int(match[1]) if match[2] == MULTI else 1}


def _solution(text: str | None) -> str | None:
    """Return the thought of a worked solution; None if it is too long, or has tags that are not those of a thought."""
    if text is None or len(text) > MOST_CHARS:
        return None
    thought = tagged_text(text, "think")[0]
    text = (thought if thought is not None else text).strip()
    return text if text and not TAGS.search(text) else None


NUM_OPTIONS = 4
NONE_OF_THEM = "E. No correct answer"
LETTERS = "ABCD"


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn sets.

    Args:
        side: width and height of the images in pixels.
        most: largest number of shapes of a kind.
        steps: numbers of steps, 2 and 3, which take turns.
    """

    side: int = 224
    most: int = 5
    steps: tuple[int, ...] = (2, 3)


def drawn_rows(counts: Mapping[str, int], drawing: Drawing, seed: int) -> dict[str, list[NewRow]]:
    """Return split -> rows of drawn sets; `counts` has the number of sets. No image is in two sets.

    Raises: DataError if the shapes do not fit into the images.
    """
    images: set[str] = set()
    return {
        split: [row for number in range(num_sets) for row in _set(split, number, drawing, seed, images)]
        for split, num_sets in counts.items()
    }


def _set(split: str, number: int, drawing: Drawing, seed: int, images: set[str]) -> list[NewRow]:
    num_steps = drawing.steps[number % len(drawing.steps)]
    rng = random.Random(hash64("we_math", str(seed), split, str(number)))
    looks = rng.sample(LOOKS, num_steps)
    counts = [rng.randint(1, drawing.most) for _ in looks]
    shapes = [look for look, count in zip(looks, counts, strict=True) for _ in range(count)]
    for _ in range(MOST_TRIES):
        rng.shuffle(shapes)
        scene = lay_out(rng, shapes, drawing.side)
        if scene is None:
            continue
        image = encode_png(paint(scene))
        if (sha256 := image_hash(image)) in images:
            continue
        images.add(sha256)
        return _rows(rng, f"{split}_{number}", looks, counts, image)
    raise DataError(
        f"{MOST_TRIES} drawings of {drawing.side} pixels had no room for {len(shapes)} shapes",
        hint="lower --most, or raise --side",
    )


def _rows(rng: random.Random, name: str, looks: list[Look], counts: list[int], image: bytes) -> list[NewRow]:
    names = [f"{look.colour} {plural_of(look.kind)}" for look in looks]
    problems = [(str(i + 1), f"How many {names[i]} are in the image?", count) for i, count in enumerate(counts)]
    problems.append((MULTI, *_composite(rng, names, counts)))
    rows = []
    for step, problem, answer in problems:
        options, letter = _options(rng, answer)
        truth = {
            "answer": letter,
            "options": options,
            "set": name,
            "step": step,
            "num_steps": len(looks) if step == MULTI else 1,
            "concept": "counting" if step != MULTI else "arithmetic",
            "solution": f"The number is {answer}, which is {letter}.",
        }
        rows.append(NewRow(truth, [image], {"problem": problem, "options": options}, origin=f"drawn {name} {step}"))
    return rows


def _composite(rng: random.Random, names: list[str], counts: list[int]) -> tuple[str, int]:
    """Return a problem that needs all counts, and its answer."""
    if len(names) == 3:
        first, second, third = names
        text = f"Count the {first}, multiply their number by the number of {second}, and add the number of {third}."
        return f"{text} What is the result?", counts[0] * counts[1] + counts[2]
    if counts[0] > counts[1] and rng.random() < 0.5:
        return f"How many more {names[0]} than {names[1]} are in the image?", counts[0] - counts[1]
    return f"What is the number of {names[0]} times the number of {names[1]}?", counts[0] * counts[1]


def _options(rng: random.Random, answer: int) -> tuple[str, str]:
    """Return the text of the options, and the letter of the right one, which is equally often each of A to D."""
    near = [number for number in range(max(0, answer - 4), answer + 5) if number != answer]
    wrong = rng.sample(near, NUM_OPTIONS - 1)
    place = rng.randrange(NUM_OPTIONS)
    numbers = [*wrong[:place], answer, *wrong[place:]]
    texts = [f"{letter}. {number}" for letter, number in zip(LETTERS, numbers, strict=True)]
    return "; ".join([*texts, NONE_OF_THEM]), LETTERS[place]
