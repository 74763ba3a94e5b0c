"""Kinds of the rows with true boxes, and the honest answers and tricks for the probe of their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.data.doctor import RowLabels
from vlmrl.rewards.boxes.planes import Box, Plane, convert, iou, plane_of
from vlmrl.rewards.boxes.writing import write_box
from vlmrl.tasks.attack import Attack, Make, Play, Stage, says, void_attacks
from vlmrl.tasks.perception.answer import RIGHT, SURE, Detection, Settings, true_marks, write_answer
from vlmrl.tasks.perception.reward import BOX_LIST as REWARD
from vlmrl.tasks.perception.reward import GroundingSettings
from vlmrl.tasks.perception.rewards import RLLAVA_BOX as PUBLISHED
from vlmrl.tasks.perception.truth import (
    detection_truth_problems,
    grounding_truth_problems,
    size_of,
    true_box_of,
    true_boxes,
)
from vlmrl.tasks.positions import SHARES, Mark, shares_of
from vlmrl.tasks.truth_kinds import RowKind, Truth
from vlmrl.types import RewardInput, Row


def saved_grounding_marks(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true box of a row, and the boxes that rewards read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`. The published reward states its box in 0 to 1000, `box_iou` in pixels.
    """
    if grounding_truth_problems(truth):
        return ()
    plane, box = true_box_of(truth)
    marks = true_marks([box], plane)
    for name, value in (detail or {}).items():
        answer_plane = plane_of("thousand" if name == PUBLISHED else "pixels", size_of(truth))
        numbers = value.get("box") if isinstance(value, Mapping) else None
        answer = shares_of(numbers, answer_plane)
        marks += [Mark("answer", answer)] if answer is not None else []
    return marks


def saved_detection_marks(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true boxes of a row, and those that `box_list` read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`; its boxes are in the plane of the truth.
    """
    if detection_truth_problems(truth):
        return ()
    plane, boxes = true_boxes(truth)
    marks = true_marks(boxes, plane)
    saved = (detail or {}).get(REWARD)
    lists = [saved.get(name) for name in ("boxes", "confidences")] if isinstance(saved, Mapping) else [None, None]
    if not all(isinstance(one, (list, tuple)) for one in lists):
        return marks
    for numbers, confidence in zip(*lists, strict=False):
        box = shares_of(numbers, plane)
        label = f"{confidence:.2f}" if isinstance(confidence, (int, float)) else ""
        marks += [Mark("answer", box, label)] if box is not None else []
    return marks


GUESSES: Mapping[str, Box] = {
    "the whole image": Box(0, 0, 1, 1),
    "the middle": Box(0.25, 0.25, 0.75, 0.75),
    "the left half": Box(0, 0, 0.5, 1),
    "the upper half": Box(0, 0, 1, 0.5),
}
"""Name -> box as shares of the image."""
_STEPS = [number / 12 for number in range(12)]
GRID = tuple(Box(left, top, left + 1 / 12, top + 1 / 12) for top in _STEPS for left in _STEPS)
"""Boxes that cover the image, as shares of it."""
FAR = 0.02
"""Width of a wrong box, as a share of the image: it lies where no true box is."""
BROKEN: Mapping[str, Callable[[Sequence[float]], Any]] = {
    "no area": lambda box: [box[0], box[1], box[0], box[3]],
    "a text": str,
    "three numbers": lambda box: box[:3],
}
"""Name -> function that changes a true box into one that no reward should score."""
Marks = Callable[[Truth, Mapping[str, Any] | None], Sequence[Mark]]


def box_kind(field: str, play: Callable[[Stage], Play], marks: Marks) -> RowKind:
    """Return the kind of the rows whose truth has true boxes in this field; see `RowKind` for the other arguments."""
    return RowKind(partial(_has_boxes, field), play=play, labels=_labels, specificity=1, marks=marks)


def _has_boxes(field: str, truth: Truth) -> bool:
    return field in truth and "space" in truth


def _labels(row: Row) -> RowLabels:
    return RowLabels(None, None, "", ())


def moved(box: Box, width: float, share: float) -> Box:
    """Return a box, shifted by a share of its width to the side where an image of this width has more room."""
    move = share * (box.x2 - box.x1) * (1 if box.x1 + box.x2 < width else -1)
    return Box(box.x1 + move, box.y1, box.x2 + move, box.y2)


def grounding_kind(settings: GroundingSettings) -> RowKind:
    """Return the kind of rows with one true box, with tricks in the form of these settings."""
    return box_kind("box", partial(play_boxes, settings), saved_grounding_marks)


def play_boxes(settings: GroundingSettings, stage: Stage) -> Play:
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


def _attacks(settings: GroundingSettings) -> list[Attack]:
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


def _written(settings: GroundingSettings, box: Box, source: Plane, x: RewardInput) -> str:
    """Return a box as the text of an answer to a row. `source`: plane of the box."""
    plane = settings.plane(x)
    return write_box(settings.ordered(convert(box, source, plane)), plane)


def _right(settings: GroundingSettings, x: RewardInput, shift: float = 0.0) -> str:
    """Return the true box as text; `shift`: by this share of its width, to the side where there is more room."""
    source, box = true_box_of(x.truth)
    return _written(settings, moved(box, source.width, shift), source, x)


def _wrong(settings: GroundingSettings, x: RewardInput) -> str:
    """Return a small box in the corner that is farthest from the centre of the true box."""
    source, box = true_box_of(x.truth)
    x1 = 0.0 if box.x1 + box.x2 > source.width else 1 - FAR
    y1 = 0.0 if box.y1 + box.y2 > source.height else 1 - FAR
    return _written(settings, Box(x1, y1, x1 + FAR, y1 + FAR), SHARES, x)


def _guess(settings: GroundingSettings, box: Box, x: RewardInput) -> str:
    return settings.form(_written(settings, box, SHARES, x))


def _with_box(change: Callable[[Sequence[float]], Any], x: RewardInput) -> Mapping[str, Any]:
    return {**x.truth, "box": change(x.truth["box"])}


NO_BOX = "[]"
CORNERS = tuple(
    Box(x, y, x + FAR, y + FAR) for x in (0.0, 0.5 - FAR / 2, 1 - FAR) for y in (0.0, 0.5 - FAR / 2, 1 - FAR)
)
"""Places for a wrong box, as shares of the image."""


def boxes_kind(settings: Settings) -> RowKind:
    """Return the kind of rows with all boxes of a category, with tricks in the form of these settings."""
    return box_kind("boxes", partial(play_lists, settings), saved_detection_marks)


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
