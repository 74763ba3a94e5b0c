"""Kind of the rows with one true box, and the honest answers and tricks for the probe of their reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.rewards.boxes.planes import Box, Plane, convert
from vlmrl.rewards.boxes.writing import write_box
from vlmrl.tasks.attack import Attack, Make, Play, Stage, says, void_attacks
from vlmrl.tasks.boxes.attacks import BROKEN, FAR, GRID, GUESSES, box_kind, moved
from vlmrl.tasks.grounding.marks import saved_marks
from vlmrl.tasks.grounding.reward import Settings
from vlmrl.tasks.grounding.truth import true_box
from vlmrl.tasks.overlay import SHARES
from vlmrl.tasks.truth_kinds import RowKind
from vlmrl.types import RewardInput


def grounding_kind(settings: Settings) -> RowKind:
    """Return the kind of rows with one true box, with tricks in the form of these settings."""
    return box_kind("box", partial(play_boxes, settings), saved_marks)


def play_boxes(settings: Settings, stage: Stage) -> Play:
    """Return the answers and tricks for rows with one true box."""
    informed = Attack("honest", "the true box", "fair", lambda x: settings.form(_right(settings, x)))
    wrong = Attack("honest, wrong", "a small box elsewhere", "fair", lambda x: settings.form(_wrong(settings, x)))
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
        broken_truths={name: partial(_with_box, change) for name, change in BROKEN.items()},
    )


def _attacks(settings: Settings) -> list[Attack]:
    form = settings.form
    right, wrong = partial(_right, settings), partial(_wrong, settings)

    def trick(name: str, idea: str, kind: Any, make: Make) -> Attack:
        return Attack(name, idea, kind, make)

    def grid(x: RewardInput) -> str:
        return form(" ".join(_written(settings, box, SHARES, x) for box in GRID))

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
    if settings.tagged:
        attacks.append(
            trick(
                "two answers", "the true box, then another answer", "broken", lambda x: f"{form(right(x))}{form('no')}"
            )
        )
    return attacks


def _written(settings: Settings, box: Box, source: Plane, x: RewardInput) -> str:
    """Return a box as the text of an answer to a row. `source`: plane of the box."""
    plane = settings.plane(x)
    return write_box(settings.ordered(convert(box, source, plane)), plane)


def _right(settings: Settings, x: RewardInput, shift: float = 0.0) -> str:
    """Return the true box as text; `shift`: by this share of its width, to the side where there is more room."""
    source, box = true_box(x.truth)
    return _written(settings, moved(box, source.width, shift), source, x)


def _wrong(settings: Settings, x: RewardInput) -> str:
    """Return a small box in the corner that is farthest from the centre of the true box."""
    source, box = true_box(x.truth)
    x1 = 0.0 if box.x1 + box.x2 > source.width else 1 - FAR
    y1 = 0.0 if box.y1 + box.y2 > source.height else 1 - FAR
    return _written(settings, Box(x1, y1, x1 + FAR, y1 + FAR), SHARES, x)


def _guess(settings: Settings, box: Box, x: RewardInput) -> str:
    return settings.form(_written(settings, box, SHARES, x))


def _with_box(change: Callable[[Sequence[float]], Any], x: RewardInput) -> Mapping[str, Any]:
    return {**x.truth, "box": change(x.truth["box"])}
