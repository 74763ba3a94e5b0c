"""Drawn sets of the task we_math: shapes to count (sub-problems), and what their numbers give (composite problem)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from vlmrl.data.images import encode_png, image_hash
from vlmrl.errors import DataError
from vlmrl.tasks.drawn_scene import LOOKS, MOST_TRIES, Look, lay_out, paint, plural_of
from vlmrl.tasks.own_prep import NewRow
from vlmrl.tasks.we_math.truth import MULTI
from vlmrl.types import hash64

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
