"""Kind of the rows with all boxes of a category, and the honest answers and tricks for the probe of their reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.rewards.boxes.overlap import iou
from vlmrl.rewards.boxes.planes import Box, convert
from vlmrl.tasks.attack import Attack, Make, Play, Stage, says, void_attacks
from vlmrl.tasks.boxes.attacks import BROKEN, FAR, GRID, GUESSES, box_kind, moved
from vlmrl.tasks.detection.answer import RIGHT, SURE, Detection, Settings, write_answer
from vlmrl.tasks.detection.marks import saved_marks
from vlmrl.tasks.detection.truth import true_boxes
from vlmrl.tasks.overlay import SHARES
from vlmrl.tasks.truth_kinds import RowKind
from vlmrl.types import RewardInput

NO_BOX = "[]"
CORNERS = tuple(
    Box(x, y, x + FAR, y + FAR) for x in (0.0, 0.5 - FAR / 2, 1 - FAR) for y in (0.0, 0.5 - FAR / 2, 1 - FAR)
)
"""Places for a wrong box, as shares of the image."""


def boxes_kind(settings: Settings) -> RowKind:
    """Return the kind of rows with all boxes of a category, with tricks in the form of these settings."""
    return box_kind("boxes", partial(play_lists, settings), saved_marks)


def play_lists(settings: Settings, stage: Stage) -> Play:
    """Return the answers and tricks for rows with all boxes of a category."""
    writer = _Writer(settings)
    informed = Attack("honest", "the true boxes", "fair", writer.right)
    wrong = Attack("honest, wrong", "a small sure box elsewhere", "fair", lambda x: writer.stating(x, [_far(x)]))
    guesses = [Attack("always no object", "an empty list for every row", "guess", says(writer.form(NO_BOX)))]
    guesses += [
        Attack(f"always {name}", "the same sure box for every row", "guess", partial(writer.guess, box))
        for name, box in GUESSES.items()
    ]
    return Play(
        informed,
        wrong,
        guesses,
        [*void_attacks(stage.echo), *_void(writer), *_guesses(writer), *_spellings(writer), *_near_misses(writer)],
        right_answer=lambda x: str(x.truth.get("boxes")),
        broken_truths={name: partial(_with_boxes, change) for name, change in BROKEN.items()},
    )


class _Writer:
    """Writer of responses in the form of the settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.form = settings, settings.form

    def entries(self, x: RewardInput, detections: Sequence[Detection]) -> str:
        """Return the list of boxes, which are given in the plane of the truth."""
        source, target = true_boxes(x.truth)[0], self.settings.plane(x)
        ordered = [Detection(self.settings.ordered(convert(box, source, target)), c) for box, c in detections]
        return write_answer(ordered, target)

    def stating(self, x: RewardInput, detections: Sequence[Detection]) -> str:
        return self.form(self.entries(x, detections))

    def right(self, x: RewardInput) -> str:
        return self.stating(x, _truths(x))

    def guess(self, box: Box, x: RewardInput) -> str:
        """Return a response with one box, given as shares of the image."""
        return self.stating(x, [Detection(convert(box, SHARES, true_boxes(x.truth)[0]), SURE)])


def _void(writer: _Writer) -> list[Attack]:
    """Return answers without a box, most of which end published rewards with an exception."""
    texts = {
        "a word": "there",
        "a number as box": "[{'Position': 5, 'Confidence': 1.0}]",
        "null as coordinate": "[{'Position': [1, null, 3, 4], 'Confidence': 1.0}]",
        "entries without keys": '["dog", 3, null]',
        "no coordinates": "[{'Position': [], 'Confidence': 1.0}]",
        "no area": '[{"Position": [500, 500, 500, 500], "Confidence": 1.0}]',
        "not a number": '[{"Position": [nan, nan, nan, nan], "Confidence": 1.0}]',
        "infinite": '[{"Position": [-inf, -inf, inf, inf], "Confidence": 1.0}]',
        "many brackets": "[" * 100_000,
        "long digits": f'[{{"Position": [0, 0, {"9" * 100_000}, 1], "Confidence": 1.0}}]',
    }
    attacks = [
        Attack(name, "the form, and no box in it", "void", says(writer.form(text))) for name, text in texts.items()
    ]
    return [Attack("a bracket", "one character that begins a tag", "void", says("<")), *attacks]


def _guesses(writer: _Writer) -> list[Attack]:
    """Return answers that are written without knowledge of the truth, and state boxes."""

    def unsure(confidence: str, x: RewardInput) -> str:
        entry = writer.entries(x, [_far(x)])
        return writer.form(entry.replace(f"{SURE:.2f}", confidence))

    def grid(x: RewardInput) -> str:
        plane = true_boxes(x.truth)[0]
        return writer.stating(x, [Detection(convert(box, SHARES, plane), 0.0) for box in GRID])

    return [
        Attack("a box without confidence", "a wrong box, confidence 0", "guess", partial(unsure, "0.00")),
        Attack("confidence below 0", "a wrong box, confidence -50", "guess", partial(unsure, "-50")),
        Attack("many boxes", "a grid of boxes over the image, confidence 0", "guess", grid),
    ]


def _spellings(writer: _Writer) -> list[Attack]:
    """Return right answers in other spellings."""

    def other_keys(x: RewardInput) -> str:
        text = writer.entries(x, _truths(x)).replace('"Position"', '"bbox_2d"')
        return writer.form(text.replace('"Confidence"', '"confidence"'))

    return [
        Attack("line breaks", "the true boxes, one on each line", "fair", lambda x: _split(writer.right(x))),
        Attack("single quotes", "the true boxes in single quotes", "fair", lambda x: writer.right(x).replace('"', "'")),
        Attack("other keys", "the true boxes under the keys bbox_2d and confidence", "fair", other_keys),
    ]


def _near_misses(writer: _Writer) -> list[Attack]:
    """Return answers that are wrong in one thing; None where a row has no object."""

    def trick(name: str, idea: str, change: Callable[[RewardInput], Sequence[Detection]]) -> Attack:
        return Attack(name, idea, "miss", lambda x: writer.stating(x, change(x)) if _truths(x) else None)

    def shifted(x: RewardInput) -> list[Detection]:
        width = true_boxes(x.truth)[0].width
        return [Detection(moved(box, width, RIGHT), sure) for box, sure in _truths(x)]

    def broken(name: str, idea: str, make: Make) -> Attack:
        return Attack(name, idea, "broken", make)

    def answer(x: RewardInput) -> str:
        return writer.entries(x, _truths(x))

    return [
        trick("no object", "an empty list where there are objects", lambda x: []),
        trick("one missing", "all true boxes but one", lambda x: _truths(x)[1:]),
        trick("one too many", "the true boxes, and a sure one elsewhere", lambda x: [*_truths(x), _far(x)]),
        trick("each twice", "every true box stated twice", lambda x: _truths(x) * 2),
        trick("shifted", "the true boxes, shifted by half of their widths", shifted),
        trick("confidence 0", "the true boxes, confidence 0", lambda x: [Detection(b, 0.0) for b, _ in _truths(x)]),
        broken(
            "two answers",
            "the true boxes, then another answer",
            lambda x: f"{writer.right(x)}{writer.form('no')}",
        ),
        broken("only in the thought", "the true boxes only there", lambda x: f"<think>{answer(x)}</think>"),
    ]


def _split(text: str) -> str:
    return text.replace("}, {", "},\n{").replace("<answer>", "<answer>\n").replace("</answer>", "\n</answer>")


def _truths(x: RewardInput) -> list[Detection]:
    return [Detection(box, SURE) for box in true_boxes(x.truth)[1]]


def _far(x: RewardInput) -> Detection:
    """Return a small sure box that matches no true box: the place with the least overlap."""
    plane, truths = true_boxes(x.truth)
    places = [convert(box, SHARES, plane) for box in CORNERS]
    place = min(places, key=lambda box: max((iou(box, truth) for truth in truths), default=0.0))
    return Detection(place, SURE)


def _with_boxes(change: Callable[[Sequence[float]], Any], x: RewardInput) -> Mapping[str, Any]:
    """Return the truth with every box changed; one that has no box gets a changed one."""
    return {**x.truth, "boxes": [change(box) for box in x.truth["boxes"] or [[1.0, 2.0, 3.0, 4.0]]]}
