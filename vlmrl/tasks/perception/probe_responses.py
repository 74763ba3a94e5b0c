"""Kinds of the rows with true boxes, and the honest answers and tricks for the probe of their rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.data.doctor import RowLabels
from vlmrl.rewards.boxes.planes import Box, Plane, convert, iou, plane_of
from vlmrl.rewards.boxes.writing import write_box
from vlmrl.tasks.attack import Attack, Make, Probe, ProbeRows, says, void_attacks
from vlmrl.tasks.perception.answer import RIGHT, SURE, Detection, true_marks, write_answer
from vlmrl.tasks.perception.reward import BOX_LIST
from vlmrl.tasks.perception.rewards import RLLAVA_BOX
from vlmrl.tasks.perception.truth import BOX, BOXES, BoxSettings, size_of, true_boxes, truth_problems
from vlmrl.tasks.positions import SHARES, Mark, shares_of
from vlmrl.tasks.truth_kinds import RowKind, Truth
from vlmrl.types import RewardInput


def box_kind(field: str, settings: BoxSettings) -> RowKind:
    """Return the kind of the rows whose truth has true boxes in this field, with tricks in the form of the settings."""
    return RowKind(
        lambda truth: field in truth and "space" in truth,
        probe=partial(box_probe, field, settings),
        labels=lambda row: RowLabels(None),  # boxes belong to no class
        specificity=1,
        marks=partial(saved_marks, field),
    )


def saved_marks(field: str, truth: Truth, detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true boxes of a row, and those that rewards read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`.
    """
    if truth_problems(field, truth):
        return ()
    plane, boxes = true_boxes(truth, field)
    marks = true_marks(boxes, plane)
    for numbers, confidence, answer_plane in _saved_boxes(field, truth, plane, detail or {}):
        box = shares_of(numbers, answer_plane)
        label = f"{confidence:.2f}" if isinstance(confidence, (int, float)) else ""
        marks += [Mark("answer", box, label)] if box is not None else []
    return marks


def _saved_boxes(field: str, truth: Truth, plane: Plane, detail: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Plane]]:
    """Yield the numbers, the confidence and the plane of each box in the detail of a score.

    The published reward of one box states it in 0 to 1000, `box_iou` in pixels, `box_list` in the plane of the truth.
    """
    if field == BOXES:
        saved = detail.get(BOX_LIST)
        lists = [saved.get(name) for name in ("boxes", "confidences")] if isinstance(saved, Mapping) else [None, None]
        if all(isinstance(one, (list, tuple)) for one in lists):
            yield from ((*both, plane) for both in zip(*lists, strict=False))
        return
    for name, value in detail.items():
        numbers = value.get("box") if isinstance(value, Mapping) else None
        yield numbers, None, plane_of("thousand" if name == RLLAVA_BOX else "pixels", size_of(truth))


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
_EDGES = (0.0, 0.5 - FAR / 2, 1 - FAR)
PLACES = tuple(Box(x, y, x + FAR, y + FAR) for x in _EDGES for y in _EDGES)
"""Places for a wrong box, as shares of the image."""
BROKEN: Mapping[str, Callable[[Sequence[float]], Any]] = {
    "no area": lambda box: [box[0], box[1], box[0], box[3]],
    "a text": str,
    "three numbers": lambda box: box[:3],
}
"""Name -> function that changes a true box into one that no reward should score."""


def moved(box: Box, width: float, share: float) -> Box:
    """Return a box, shifted by a share of its width to the side where an image of this width has more room."""
    move = share * (box.x2 - box.x1) * (1 if box.x1 + box.x2 < width else -1)
    return Box(box.x1 + move, box.y1, box.x2 + move, box.y2)


def write_boxes(
    field: str, settings: BoxSettings, detections: Sequence[Detection], source: Plane, target: Plane
) -> str:
    """Return the text of an answer with these boxes: a list with their confidences, or one box after the other.

    Args:
        source, target: plane of the boxes, and that of the answer.
    """
    ordered = [Detection(settings.ordered(convert(box, source, target)), sure) for box, sure in detections]
    return write_answer(ordered, target) if field == BOXES else " ".join(write_box(box, target) for box, _ in ordered)


@dataclass(frozen=True)
class _Writer:
    """Writer of responses in the form of the settings."""

    field: str
    settings: BoxSettings

    @property
    def form(self) -> Callable[[str], str]:
        """Answer -> whole response."""
        return self.settings.form

    def truths(self, x: RewardInput, shift: float = 0.0) -> list[Detection]:
        """Return the true boxes, each sure. `shift`: by this share of its width, to the side with more room."""
        plane, boxes = true_boxes(x.truth, self.field)
        return [Detection(moved(box, plane.width, shift) if shift else box, SURE) for box in boxes]

    def answer(self, x: RewardInput, detections: Sequence[Detection], source: Plane | None = None) -> str:
        """Return the text of an answer. `source`: plane of the boxes; None = that of the truth."""
        plane = source or true_boxes(x.truth, self.field)[0]
        return write_boxes(self.field, self.settings, detections, plane, self.settings.plane(x))

    def stating(self, x: RewardInput, detections: Sequence[Detection], source: Plane | None = None) -> str:
        return self.form(self.answer(x, detections, source))

    def right(self, x: RewardInput) -> str:
        return self.stating(x, self.truths(x))

    def guess(self, boxes: Sequence[Box], confidence: float, x: RewardInput) -> str:
        """Return a response with boxes that are given as shares of the image."""
        return self.stating(x, [Detection(box, confidence) for box in boxes], SHARES)

    def far(self, x: RewardInput) -> Detection:
        """Return a small sure box that matches no true box: the place with the least overlap.

        Beside a single box it is the corner that is farthest from the centre of this box.
        """
        plane, truths = true_boxes(x.truth, self.field)
        places = [convert(box, SHARES, plane) for box in PLACES]
        if self.field == BOX:
            ((x1, y1, x2, y2),) = truths
            return Detection(places[(0 if x1 + x2 > plane.width else 6) + (0 if y1 + y2 > plane.height else 2)], SURE)
        place = min(places, key=lambda box: max((iou(box, truth) for truth in truths), default=0.0))
        return Detection(place, SURE)

    def broken(self, change: Callable[[Sequence[float]], Any], x: RewardInput) -> Mapping[str, Any]:
        """Return the truth with every box changed; one that has no box gets a changed one."""
        boxes = x.truth[self.field]
        changed = change(boxes) if self.field == BOX else [change(box) for box in boxes or [[1.0, 2.0, 3.0, 4.0]]]
        return {**x.truth, self.field: changed}


def box_probe(field: str, settings: BoxSettings, tried: ProbeRows) -> Probe:
    """Return the answers and tricks for rows with one true box, or with all boxes of a category."""
    writer = _Writer(field, settings)
    is_list = field == BOXES
    boxes, sure = ("boxes", "sure ") if is_list else ("box", "")
    guesses = [
        Attack(f"always {name}", f"the same {sure}box for every row", "guess", partial(writer.guess, [box], SURE))
        for name, box in GUESSES.items()
    ]
    if is_list:
        none = Attack("always no object", "an empty list for every row", "guess", says(writer.form("[]")))
        guesses = [none, *guesses]
    tricks = [*_void_lists(writer), *_lists(writer)] if is_list else _single_boxes(writer)
    return Probe(
        Attack("honest", f"the true {boxes}", "fair", writer.right),
        Attack("honest, wrong", f"a small {sure}box elsewhere", "fair", lambda x: writer.stating(x, [writer.far(x)])),
        guesses,
        [*void_attacks(tried.echo), Attack("a bracket", "one character that begins a tag", "void", says("<")), *tricks],
        right_answer=lambda x: str(x.truth.get(field)),
        broken_truths={name: partial(writer.broken, change) for name, change in BROKEN.items()},
    )


def _single_boxes(writer: _Writer) -> list[Attack]:
    """Return tricks with one true box: answers without a box, two of them, a box elsewhere."""
    form = writer.form

    def right(x: RewardInput) -> str:
        return writer.answer(x, writer.truths(x))

    def wrong(x: RewardInput) -> str:
        return writer.answer(x, [writer.far(x)])

    attacks = [
        Attack("box tokens", "box tokens without a box", "void", says("<|box_start|><|box_end|>")),
        Attack("form without a box", "the whole form, and words as its answer", "void", says(form("there"))),
        Attack("no area", "a box that is a point", "void", says(form("[500, 500, 500, 500]"))),
        Attack("not a number", "NaN for every coordinate", "void", says(form("[nan, nan, nan, nan]"))),
        Attack("infinite", "infinite coordinates", "void", says(form("[-inf, -inf, inf, inf]"))),
        Attack("many boxes", "a grid of boxes that cover the image", "void", partial(writer.guess, GRID, SURE)),
        Attack("many brackets", "opening brackets", "void", says(form("[" * 100_000))),
        Attack("long digits", "a number of many digits", "void", says(form(f"[0, 0, {'9' * 100_000}, 1]"))),
        Attack("right and wrong", "two boxes, the true one first", "broken", lambda x: form(f"{right(x)} {wrong(x)}")),
        Attack("wrong and right", "two boxes, the true one last", "broken", lambda x: form(f"{wrong(x)} {right(x)}")),
        Attack("the box in the thought", "the true box only there", "broken", lambda x: f"<think>{right(x)}</think>"),
        Attack(
            "right in the thought",
            "the true box in the thought, another one in the answer",
            "miss",
            lambda x: f"<think>{right(x)}</think><answer>{wrong(x)}</answer>",
        ),
        Attack(
            "shifted",
            "the true box, shifted by half of its width",
            "miss",
            lambda x: writer.stating(x, writer.truths(x, 0.5)),
        ),
    ]
    if writer.settings.tagged:
        attacks.append(_two_answers(writer, "the true box, then another answer"))
    return attacks


def _two_answers(writer: _Writer, idea: str) -> Attack:
    return Attack("two answers", idea, "broken", lambda x: f"{writer.right(x)}{writer.form('no')}")


def _void_lists(writer: _Writer) -> list[Attack]:
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
    return [Attack(name, "the form, and no box in it", "void", says(writer.form(text))) for name, text in texts.items()]


def _lists(writer: _Writer) -> list[Attack]:
    """Return lists of boxes: guesses without knowledge of the truth, right ones in other spellings, near misses.

    A near miss is wrong in one thing; it is None where a row has no object.
    """
    right, truths, far = writer.right, writer.truths, writer.far

    def respelt(*changes: tuple[str, str]) -> Make:
        def make(x: RewardInput) -> str:
            text = right(x)
            for old, new in changes:
                text = text.replace(old, new)
            return text

        return make

    def unsure(confidence: str) -> Make:
        return lambda x: writer.stating(x, [far(x)]).replace(f"{SURE:.2f}", confidence)

    def miss(name: str, idea: str, change: Callable[[RewardInput], Sequence[Detection]]) -> Attack:
        return Attack(name, idea, "miss", lambda x: writer.stating(x, change(x)) if truths(x) else None)

    lines = (("}, {", "},\n{"), ("<answer>", "<answer>\n"), ("</answer>", "\n</answer>"))
    keys = (('"Position"', '"bbox_2d"'), ('"Confidence"', '"confidence"'))
    return [
        Attack("a box without confidence", "a wrong box, confidence 0", "guess", unsure("0.00")),
        Attack("confidence below 0", "a wrong box, confidence -50", "guess", unsure("-50")),
        Attack("many boxes", "a grid of boxes over the image, confidence 0", "guess", partial(writer.guess, GRID, 0.0)),
        Attack("line breaks", "the true boxes, one on each line", "fair", respelt(*lines)),
        Attack("single quotes", "the true boxes in single quotes", "fair", respelt(('"', "'"))),
        Attack("other keys", "the true boxes under the keys bbox_2d and confidence", "fair", respelt(*keys)),
        miss("no object", "an empty list where there are objects", lambda x: []),
        miss("one missing", "all true boxes but one", lambda x: truths(x)[1:]),
        miss("one too many", "the true boxes, and a sure one elsewhere", lambda x: [*truths(x), far(x)]),
        miss("each twice", "every true box stated twice", lambda x: truths(x) * 2),
        miss("shifted", "the true boxes, shifted by half of their widths", lambda x: truths(x, RIGHT)),
        miss("confidence 0", "the true boxes, confidence 0", lambda x: [Detection(b, 0.0) for b, _ in truths(x)]),
        _two_answers(writer, "the true boxes, then another answer"),
        Attack(
            "only in the thought",
            "the true boxes only there",
            "broken",
            lambda x: f"<think>{writer.answer(x, truths(x))}</think>",
        ),
    ]
