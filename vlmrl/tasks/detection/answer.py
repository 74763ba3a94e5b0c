"""Answers of the task detection: a list of boxes with confidences, or the statement that there is no object."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmrl.errors import RewardError
from vlmrl.rewards.answer_form import final_answer, form_problem
from vlmrl.rewards.boxes.overlap import Match, match_boxes
from vlmrl.rewards.boxes.planes import Box, Plane, answer_plane, check_space, convert
from vlmrl.rewards.boxes.reading import check_order, read_boxes
from vlmrl.rewards.boxes.writing import write_box
from vlmrl.rewards.text_parsing import BLANKS
from vlmrl.tasks.boxes.settings import BoxSettings
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.detection.truth import true_boxes
from vlmrl.types import RewardInput

RIGHT = 0.5
"""Least IoU of a box with the true box that it is matched with."""
MOST_BOXES = 100
"""Largest number of boxes in an answer of the right form, for an image with no more objects than this."""
SURE = 1.0
"""Confidence of a box beside which no probability stands."""
_S = r"[ \t\r\n]*"
_N = r"[+-]?[0-9]{1,20}(?:\.[0-9]{0,20})?"
_BOX = rf"(?:\[{_S}{_N}(?:{_S},{_S}{_N}){{3}}{_S}\]|(?:<loc[0-9]{{4}}>){{4}})"
_FIELD = (
    rf"""(?:["'](?:bbox_2d|bbox|box|[Pp]osition)["']{_S}:{_S}{_BOX}"""
    rf"""|["'](?:[Cc]onfidence|score)["']{_S}:{_S}{_N}"""
    rf"""|["']label["']{_S}:{_S}["'][^"'\n{{}}]{{0,100}}["'])"""
)
_ENTRY = rf"\{{{_S}{_FIELD}(?:{_S},{_S}{_FIELD}){{1,2}}{_S}\}}"
_FENCE = re.compile(rf"```(?:json|python)?{_S}(?P<content>[^`]*)```")
LIST = re.compile(rf"\[{_S}(?:{_ENTRY}(?:{_S},{_S}{_ENTRY})*{_S})?\]")
"""Form of the list. An entry has two or three of these: a box, a confidence, a label."""
NONE = re.compile(rf"""\[{_S}\]|["']?no objects?["']?\.?""", re.IGNORECASE)
"""Statements that there is no object: an empty list, or the words of the published prompt."""


class Detection(NamedTuple):
    """Box of an answer, and the probability that it is right, in [0, 1]."""

    box: Box
    confidence: float


@dataclass(frozen=True)
class Settings(BoxSettings):
    """Declarations on how an answer is read, and when a box is right.

    Args:
        least: least IoU of a right box, in (0, 1].
    """

    least: float = RIGHT

    def check(self) -> None:
        """Raise a RewardError for a value that is not allowed."""
        super().check()
        if not (isinstance(self.least, (int, float)) and 0 < self.least <= 1):
            raise RewardError(f"least = {self.least!r} is not a number above 0, up to 1")


@dataclass(frozen=True)
class Answer:
    """Boxes of a response, beside the true ones.

    Args:
        plane, truths: plane of the row's truth, and its boxes.
        detections: boxes that were read, in the same plane and in the order of the text. A box that the response states
            several times is there as often.
        is_none: whether the answer states that there is no object.
        problem: what is wrong with the form of the response; "" = nothing.
        note: the problem, or what was mended.
    """

    plane: Plane
    truths: tuple[Box, ...]
    detections: tuple[Detection, ...]
    is_none: bool
    problem: str
    note: str

    @property
    def stated(self) -> tuple[tuple[Box, str], ...]:
        """The boxes that were read, each with its confidence as a label."""
        return tuple((one.box, f"{one.confidence:.2f}") for one in self.detections)

    @property
    def says_something(self) -> bool:
        return self.is_none or bool(self.detections)

    def matches(self, least: float = RIGHT) -> list[Match]:
        """Return the right boxes with their true ones: the largest sum of IoU, whatever the confidences are.

        Where several choices have this sum, the less confident boxes are taken. So the order of the list has no effect.
        """
        order = sorted(
            range(len(self.detections)), key=lambda i: (self.detections[i].confidence, self.detections[i].box)
        )
        matches = match_boxes([self.detections[i].box for i in order], self.truths, least)
        return sorted(match._replace(answer=order[match.answer]) for match in matches)


def read_answer(x: RewardInput, settings: Settings) -> Answer:
    """Return the answer of a response. Raises: RewardError for a row without true boxes, or an unknown seen size."""
    target, truths = true_boxes(x.truth)
    text, problem = final_answer(x.response)
    if text is None:
        return Answer(target, truths, (), False, problem, problem)
    text = _without_fence(text)
    if NONE.fullmatch(text):
        problem = form_problem(x, settings.thought)
        return Answer(target, truths, (), True, problem, problem)
    plane = answer_plane(x, check_space(settings.space), size_of(x.truth))
    reading = read_boxes(text, plane, order=check_order(settings.order), repeated=True)
    detections, unsure = list[Detection](), 0
    for read in reading.shapes:
        is_probability = read.confidence is not None and 0 <= read.confidence <= 1
        unsure += not is_probability
        confidence = read.confidence if is_probability and read.confidence is not None else SURE
        detections.append(Detection(convert(read.shape, plane, target), confidence))
    problem = reading.problem or (reading.refused[0] if reading.refused else "")
    if not problem and unsure:
        problem = f"{'a box' if unsure == 1 else f'{unsure} boxes'} without a confidence from 0 to 1"
    if not problem and len(detections) > (most := max(MOST_BOXES, len(truths))):
        problem = f"{len(detections)} boxes; the form has at most {most}"
    if not problem and (not LIST.fullmatch(text) or text.count("{") != len(detections)):
        problem = "not only a list of boxes with confidences"
    problem = problem or form_problem(x, settings.thought)
    mended = dict.fromkeys(note for read in reading.shapes for note in read.notes)
    return Answer(target, truths, tuple(detections), False, problem, problem or ", ".join(mended))


def write_answer(detections: Sequence[Detection], plane: Plane) -> str:
    """Return the list as the prompt asks for it; `plane`: that of the boxes."""
    entries = (f'{{"Position": {write_box(box, plane)}, "Confidence": {sure:.2f}}}' for box, sure in detections)
    return f"[{', '.join(entries)}]"


def is_none(text: str) -> bool:
    """Return whether a text states that there is no object."""
    return NONE.fullmatch(_without_fence(text)) is not None


def _without_fence(text: str) -> str:
    text = text.strip(BLANKS)
    match = _FENCE.fullmatch(text)
    return text if match is None else match["content"].strip(BLANKS)
