"""Reward of the task grounding: the overlap of the only box of the answer with the true box."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.metric import SHARE
from vlmrl.rewards.answer_form import REQUIRED, final_answer, form_problem
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.overlap import centre, iou, is_inside
from vlmrl.rewards.boxes.planes import Box, Plane, answer_plane, check_space, convert, plane_of
from vlmrl.rewards.boxes.reading import check_order, only_box, read_boxes
from vlmrl.rewards.text_parsing import find_tags
from vlmrl.tasks.boxes.marks import with_picture
from vlmrl.tasks.boxes.settings import BoxSettings, check_overlay
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.grounding.truth import true_box
from vlmrl.types import RewardInput, RewardResult

RANGES = {"iou": SHARE, "format": SHARE, "accuracy": SHARE, "centre": SHARE}
WEIGHTS = {"iou": 0.9, "format": 0.1}
RIGHT = 0.5
"""Least IoU of a right answer."""
NAME = "box_iou"
PLACES = ("answer", "response")


@dataclass(frozen=True)
class Settings(BoxSettings):
    """Declarations on how a box is read and what it earns.

    Args:
        place: "answer": the only `<answer>`; "response": everything after the thought, for models that write no tags.
        least: IoU below which the part `iou` is 0, in [0, 1].
        power: exponent of the IoU, in (0, 10]; above 1, good boxes earn more and a box of the whole image less.
    """

    place: str = "answer"
    least: float = 0.0
    power: float = 1.0

    @property
    def tagged(self) -> bool:
        """Whether the box stands in an `<answer>`."""
        return self.place == "answer"

    def check(self) -> None:
        """Raise a RewardError for a value that is not allowed."""
        super().check()
        if self.place not in PLACES:
            raise RewardError(f"place = {self.place!r} is unknown", hint=f"one of: {', '.join(PLACES)}")
        if not (isinstance(self.least, (int, float)) and 0 <= self.least <= 1):
            raise RewardError(f"least = {self.least!r} is not a number from 0 to 1")
        if not (isinstance(self.power, (int, float)) and 0 < self.power <= 10):
            raise RewardError(f"power = {self.power!r} is not a number above 0, up to 10")


@dataclass(frozen=True)
class Answer:
    """Box of a response, beside the true one.

    Args:
        box, truth: in pixels of the image for which the truth was made, `plane`; no box was read if it is None.
        note: reason why no box was read, or what was mended.
    """

    plane: Plane
    truth: Box
    box: Box | None
    note: str = ""

    @property
    def truths(self) -> tuple[Box]:
        """The true box."""
        return (self.truth,)

    @property
    def stated(self) -> tuple[tuple[Box, str], ...]:
        """The box of the response, if one was read, with no label."""
        return () if self.box is None else ((self.box, ""),)

    @property
    def iou(self) -> float:
        return iou(self.box, self.truth) if self.box is not None else 0.0

    @property
    def is_centred(self) -> bool:
        """Whether the box of the response has its centre in the true box."""
        return self.box is not None and is_inside(centre(self.box), self.truth)


def box_iou(
    *,
    space: str,
    order: str = "xyxy",
    place: str = "answer",
    thought: str = REQUIRED,
    least: float = 0.0,
    power: float = 1.0,
    overlay: bool = False,
) -> RewardSpec:
    """Return a reward. Part `iou`: intersection over union of the only box with the true box, to a power.

    `format`: 1 for a whole response in the form that the prompt asks for, with one box within the image, right or
    wrong. Reported: `accuracy`, 1 for an IoU of at least 0.5; `centre`, 1 if the box's centre is in the true box.

    Args:
        space: coordinate space of the answer: pixels, seen, thousand, unit or loc. It is never found out from numbers.
        order: order of four numbers: xyxy, yxyx or xywh.
        place: where the box is: "answer" (the only `<answer>`) or "response" (after the thought).
        thought: whether the form needs a thought: "required" or "optional".
        least: IoU below which `iou` is 0.
        power: exponent of the IoU.
        overlay: whether the score has the artifact `boxes`: the image with the true and the answered box.
    Raises: RewardError for an unknown value.
    """
    settings = Settings(space, order, thought, place, least, power)
    settings.check()
    check_overlay(overlay)
    score = partial(draw_score if overlay else score_box, settings=settings)
    return RewardSpec(NAME, score, RANGES, WEIGHTS, pure=True, needs_images=overlay, accuracy="accuracy")


def score_box(x: RewardInput, *, settings: Settings) -> dict[str, Any]:
    """Return the parts of a response; see `box_iou`. Raises: RewardError for a row without a true box."""
    answer = read_answer(x, settings)
    overlap = answer.iou
    problem = answer.note if answer.box is None else form_problem(x, settings.thought, tagged=settings.tagged)
    return {
        "iou": overlap**settings.power if overlap >= settings.least else 0.0,
        "format": float(not problem),
        "accuracy": float(overlap >= RIGHT),
        "centre": float(answer.is_centred),
        "note": problem or answer.note,
        "detail": {"box": None if answer.box is None else [round(n, 3) for n in answer.box], "iou": round(overlap, 6)},
    }


def draw_score(x: RewardInput, *, settings: Settings) -> RewardResult:
    """Return the parts of a response, and a picture of both boxes if the image is there; see `box_iou`."""
    return with_picture(score_box(x, settings=settings), x, read_answer(x, settings))


def read_answer(x: RewardInput, settings: Settings) -> Answer:
    """Return the answer of a response. Raises: RewardError for a row without a true box, or an unknown seen size."""
    plane, truth = true_box(x.truth)
    pixels = plane_of("pixels", size_of(x.truth))
    truth = convert(truth, plane, pixels)
    text, problem = _place_of_box(x.response, settings)
    if text is None:
        return Answer(pixels, truth, None, problem)
    plane = answer_plane(x, check_space(settings.space), size_of(x.truth))
    read, problem = only_box(read_boxes(text, plane, order=check_order(settings.order)))
    if read is None:
        return Answer(pixels, truth, None, problem)
    return Answer(pixels, truth, convert(read.shape, plane, pixels), ", ".join(read.notes))


def _place_of_box(response: str, settings: Settings) -> tuple[str | None, str]:
    if settings.tagged:
        return final_answer(response)
    tags = find_tags(response, ("think",))
    if not tags:
        return response, ""
    if [tag.closes for tag in tags] != [False, True]:
        return None, "not exactly one closed <think> tag"
    return response[tags[1].end :], ""
