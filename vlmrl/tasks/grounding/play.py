"""Kind of the rows with one true box, and the honest answers and tricks for the probe of their reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.data.dataset_visit import RowLabels
from vlmrl.rewards.boxes.planes import Box, Plane, answer_plane, check_space, convert, plane_of
from vlmrl.rewards.boxes.writing import write_box
from vlmrl.tasks.attack import Attack, Make, Play, Stage, says, void_attacks
from vlmrl.tasks.grounding.marks import saved_marks
from vlmrl.tasks.grounding.reward import OPTIONAL, Settings
from vlmrl.tasks.grounding.truth import size_of, true_box
from vlmrl.tasks.truth_kinds import RowKind, Truth
from vlmrl.types import RewardInput, Row

GUESSES: Mapping[str, Box] = {
    "the whole image": Box(0, 0, 1, 1),
    "the middle": Box(0.25, 0.25, 0.75, 0.75),
    "the left half": Box(0, 0, 0.5, 1),
    "the upper half": Box(0, 0, 1, 0.5),
}
"""Name -> box as shares of the image."""
GRID = 12
FAR = 0.02
"""Width of a wrong box, as a share of the image: it lies in a corner that the true box does not cover."""


def is_box_row(truth: Truth) -> bool:
    return "box" in truth and "space" in truth


def box_kind(settings: Settings) -> RowKind:
    """Return the kind of rows with one true box, with tricks in the form of these settings."""
    return RowKind(is_box_row, play=partial(play_boxes, settings), labels=_labels, specificity=1, marks=saved_marks)


def _labels(row: Row) -> RowLabels:
    return RowLabels(None, None, "", ())


def play_boxes(settings: Settings, stage: Stage) -> Play:
    """Return the answers and tricks for rows with one true box."""
    informed = Attack("honest", "the true box", "fair", lambda x: _form(settings, _right(settings, x)))
    wrong = Attack("honest, wrong", "a small box elsewhere", "fair", lambda x: _form(settings, _wrong(settings, x)))
    guesses = [
        Attack(f"always {name}", "the same box for every row", "guess", partial(_guess, settings, box))
        for name, box in GUESSES.items()
    ]
    return Play(
        informed,
        wrong,
        guesses,
        [*void_attacks(stage.echo), *_attacks(settings)],
        right_answer=lambda x: str(x.truth.get("box")),
        broken_truths={
            "no area": partial(_with_box, lambda box: [box[0], box[1], box[0], box[3]]),
            "a text": partial(_with_box, lambda box: str(box)),
            "three numbers": partial(_with_box, lambda box: box[:3]),
        },
    )


def _attacks(settings: Settings) -> list[Attack]:
    form = partial(_form, settings)
    right, wrong = partial(_right, settings), partial(_wrong, settings)

    def trick(name: str, idea: str, kind: Any, make: Make) -> Attack:
        return Attack(name, idea, kind, make)

    def grid(x: RewardInput) -> str:
        plane = _plane(settings, x)
        steps = [number / GRID for number in range(GRID)]
        boxes = (Box(left, top, left + 1 / GRID, top + 1 / GRID) for top in steps for left in steps)
        return form(" ".join(_written(settings, _share(box, plane), plane) for box in boxes))

    attacks = [
        trick("a bracket", "one character that begins a tag", "void", says("<")),
        trick("box tokens", "box tokens without a box", "void", says("<|box_start|><|box_end|>")),
        trick("form without a box", "the whole form, and words as its answer", "void", says(form("there"))),
        trick("no area", "a box that is a point", "void", says(form("[500, 500, 500, 500]"))),
        trick("not a number", "NaN for every coordinate", "void", says(form("[nan, nan, nan, nan]"))),
        trick("infinite", "infinite coordinates", "void", says(form("[-inf, -inf, inf, inf]"))),
        trick("many boxes", "a grid of boxes that cover the image", "void", grid),
        trick("many brackets", "opening brackets", "void", says(form("[" * 100_000))),
        trick("long digits", "a number of many digits", "void", says(form(f"[0, 0, {'9' * 100_000}, 1]"))),
        trick("right and wrong", "two boxes, the true one first", "broken", lambda x: form(f"{right(x)} {wrong(x)}")),
        trick("wrong and right", "two boxes, the true one last", "broken", lambda x: form(f"{wrong(x)} {right(x)}")),
        trick("the box in the thought", "the true box only there", "broken", lambda x: f"<think>{right(x)}</think>"),
        trick(
            "right in the thought",
            "the true box in the thought, another one in the answer",
            "miss",
            lambda x: f"<think>{right(x)}</think><answer>{wrong(x)}</answer>",
        ),
        trick(
            "shifted", "the true box, shifted by half of its width", "miss", lambda x: form(_right(settings, x, 0.5))
        ),
    ]
    if settings.place == "answer":
        attacks.append(
            trick(
                "two answers", "the true box, then another answer", "broken", lambda x: f"{form(right(x))}{form('no')}"
            )
        )
    return attacks


def _form(settings: Settings, box: str) -> str:
    answer = f"<answer>{box}</answer>" if settings.place == "answer" else box
    return answer if settings.thought == OPTIONAL else f"<think>I look.</think>{answer}"


def _plane(settings: Settings, x: RewardInput) -> Plane:
    """Return the plane of answers to a row; an image whose seen size is unknown counts as not resized."""
    space, size = check_space(settings.space), size_of(x.truth)
    return answer_plane(x, space, size) if x.seen_sizes or space != "seen" else plane_of(space, size, size)


def _written(settings: Settings, box: Box, plane: Plane) -> str:
    if settings.order == "yxyx":
        box = Box(box.y1, box.x1, box.y2, box.x2)
    elif settings.order == "xywh":
        box = Box(box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1)
    return write_box(box, plane)


def _right(settings: Settings, x: RewardInput, shift: float = 0.0) -> str:
    """Return the true box as text; `shift`: by this share of its width, to the side where there is more room."""
    source, box = true_box(x.truth)
    move = shift * (box.x2 - box.x1) * (1 if box.x1 + box.x2 < source.width else -1)
    moved = Box(box.x1 + move, box.y1, box.x2 + move, box.y2)
    plane = _plane(settings, x)
    return _written(settings, convert(moved, source, plane), plane)


def _wrong(settings: Settings, x: RewardInput) -> str:
    """Return a small box in the corner that is farthest from the centre of the true box."""
    source, box = true_box(x.truth)
    plane = _plane(settings, x)
    x1 = 0.0 if box.x1 + box.x2 > source.width else 1 - FAR
    y1 = 0.0 if box.y1 + box.y2 > source.height else 1 - FAR
    return _written(settings, _share(Box(x1, y1, x1 + FAR, y1 + FAR), plane), plane)


def _guess(settings: Settings, box: Box, x: RewardInput) -> str:
    plane = _plane(settings, x)
    return _form(settings, _written(settings, _share(box, plane), plane))


def _share(box: Box, plane: Plane) -> Box:
    return convert(box, Plane("unit", 1.0, 1.0), plane)


def _with_box(change: Callable[[Sequence[float]], Any], x: RewardInput) -> Mapping[str, Any]:
    return {**x.truth, "box": change(x.truth["box"])}
