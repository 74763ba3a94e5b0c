"""Rewards: overlap of the only box with the true one, boxes with the quality of their confidences, the right count.

Confidences are scored by the Brier score, a proper scoring rule (Brier 1950): over the chance that a box is right, the
expected score is highest for the confidence that equals this chance. Which boxes are right does not depend on the
confidences. A box with confidence 0 earns as much as no box.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.metric import SHARE
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import (
    Box,
    Match,
    Plane,
    answer_plane,
    centre,
    check_space,
    convert,
    iou,
    is_inside,
    plane_of,
)
from vlmrl.rewards.boxes.reading import check_order, only_box, read_boxes
from vlmrl.rewards.text_parsing import REQUIRED, check_thought, final_answer, find_tags, form_problem
from vlmrl.tasks.perception.answer import RIGHT, Answer, BoxAnswer, Settings, read_answer, stated_number, with_picture
from vlmrl.tasks.perception.truth import BOX, BoxSettings, S, size_of, true_boxes
from vlmrl.types import RewardInput, RewardResult

BOX_IOU = "box_iou"
PLACES = ("answer", "response")


@dataclass(frozen=True)
class GroundingSettings(BoxSettings):
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
        """Return whether the box stands in an `<answer>`."""
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
class GroundingAnswer:
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
        """Return whether the box of the response has its centre in the true box."""
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
    settings = GroundingSettings(space, order, thought, place, least, power)
    parts = "iou", "format", "accuracy", "centre"
    return _box_reward(BOX_IOU, settings, score_box, parts, {"iou": 0.9, "format": 0.1}, overlay)


def _box_reward(
    name: str,
    settings: S,
    score: Callable[[RewardInput, S], tuple[BoxAnswer, dict[str, Any]]],
    parts: Sequence[str],
    weights: Mapping[str, float],
    overlay: bool,
) -> RewardSpec:
    """Return a reward of boxes. Raises: RewardError for settings that are not allowed.

    Args:
        score: (input, settings) -> the answer that was read, and the parts of its score.
    """
    settings.check()
    if type(overlay) is not bool:
        raise RewardError(f"overlay = {overlay!r} is neither true nor false")
    fn = partial(_score_boxes, score=score, settings=settings, overlay=overlay)
    ranges = dict.fromkeys(parts, SHARE)
    return RewardSpec(name, fn, ranges, weights, pure=True, needs_images=overlay, accuracy="accuracy")


def _score_boxes(
    x: RewardInput, *, score: Callable[..., tuple[BoxAnswer, dict[str, Any]]], settings: BoxSettings, overlay: bool
) -> dict[str, Any] | RewardResult:
    """Return the parts of a response; with `overlay`, also a picture of all boxes if the image is there.

    Raises: RewardError for a row without true boxes.
    """
    answer, parts = score(x, settings)
    return with_picture(parts, x, answer) if overlay else parts


def score_box(x: RewardInput, settings: GroundingSettings) -> tuple[BoxAnswer, dict[str, Any]]:
    """Return the answer of a response, and its parts; see `box_iou`."""
    answer = read_grounding_answer(x, settings)
    overlap = answer.iou
    problem = answer.note if answer.box is None else form_problem(x, settings.thought, tagged=settings.tagged)
    return answer, {
        "iou": overlap**settings.power if overlap >= settings.least else 0.0,
        "format": float(not problem),
        "accuracy": float(overlap >= RIGHT),
        "centre": float(answer.is_centred),
        "note": problem or answer.note,
        "detail": {"box": None if answer.box is None else [round(n, 3) for n in answer.box], "iou": round(overlap, 6)},
    }


def read_grounding_answer(x: RewardInput, settings: GroundingSettings) -> GroundingAnswer:
    """Return the answer of a response. Raises: RewardError for a row without a true box, or an unknown seen size."""
    plane, (truth,) = true_boxes(x.truth, BOX)
    pixels = plane_of("pixels", size_of(x.truth))
    truth = convert(truth, plane, pixels)
    text, problem = _place_of_box(x.response, settings)
    if text is None:
        return GroundingAnswer(pixels, truth, None, problem)
    plane = answer_plane(x, check_space(settings.space), size_of(x.truth))
    read, problem = only_box(read_boxes(text, plane, order=check_order(settings.order)))
    if read is None:
        return GroundingAnswer(pixels, truth, None, problem)
    return GroundingAnswer(pixels, truth, convert(read.shape, plane, pixels), ", ".join(read.notes))


def _place_of_box(response: str, settings: GroundingSettings) -> tuple[str | None, str]:
    if settings.tagged:
        return final_answer(response)
    tags = find_tags(response, ("think",))
    if not tags:
        return response, ""
    if [tag.closes for tag in tags] != [False, True]:
        return None, "not exactly one closed <think> tag"
    return response[tags[1].end :], ""


BOX_LIST = "box_list"
DECIMALS = 6
"""Decimals of the boxes in the detail of a score, in the plane of the truth."""


def box_list(
    *, space: str, order: str = "xyxy", thought: str = REQUIRED, least: float = RIGHT, overlay: bool = False
) -> RewardSpec:
    """Return a reward. Part `detection`: the panoptic quality of the boxes, see `quality`. Weight 0.8.

    `confidence`, weight 0.2: see `calibration`; 0 unless the response has the form. Reported: `format`, 1 for a whole
    response in the form that the prompt asks for, right or wrong; `accuracy`, 1 if every object has a right box and no
    other box is stated. If there is no object, only an explicit empty list has the parts `detection` and `accuracy`.

    Args:
        space: coordinate space of the answer: pixels, seen, thousand, unit or loc. It is never found out from numbers.
        order: order of four numbers: xyxy, yxyx or xywh.
        thought: whether the form needs a thought: "required" or "optional".
        least: least IoU of a right box.
        overlay: whether the score has the artifact `boxes`: the image with the true and the answered boxes.
    Raises: RewardError for an unknown value.
    """
    settings = Settings(space, order, thought, least)
    parts = "detection", "confidence", "format", "accuracy"
    return _box_reward(BOX_LIST, settings, score_boxes, parts, {"detection": 0.8, "confidence": 0.2}, overlay)


def score_boxes(x: RewardInput, settings: Settings) -> tuple[BoxAnswer, dict[str, Any]]:
    """Return the answer of a response, and its parts; see `box_list`."""
    answer = read_answer(x, settings)
    matches = answer.matches(settings.least)
    has_form = not answer.problem
    return answer, {
        "detection": quality(answer, matches),
        "confidence": calibration(answer, matches) if has_form else 0.0,
        "format": float(has_form),
        "accuracy": float(is_exact(answer, matches)),
        "note": answer.note,
        "detail": {
            "boxes": [[round(number, DECIMALS) for number in one.box] for one in answer.detections],
            "confidences": [one.confidence for one in answer.detections],
            "matched": [match.answer for match in matches],
        },
    }


def quality(answer: Answer, matches: Sequence[Match]) -> float:
    """Return the panoptic quality: twice the summed IoU of the right boxes / (stated boxes + true boxes), in [0, 1].

    If there is no object, it is 1 for the statement that there is none, and 0 for anything else.

    Source: Kirillov et al. (2019), Panoptic Segmentation, equation 1, for boxes of one class.
    Example: two objects, one found with an IoU of 0.8, and a wrong box: 2 * 0.8 / (2 + 2) = 0.4.
    """
    if not answer.truths:
        return float(answer.is_none)
    return min(1.0, 2 * sum(match.iou for match in matches) / (len(answer.detections) + len(answer.truths)))


def calibration(answer: Answer, matches: Sequence[Match]) -> float:
    """Return how well the confidences say which boxes are right, in [0, 1].

    It is the mean over the stated boxes of (y + 1 - (c - y)^2) / 2, where y is 1 for a right box, else 0: half of it is
    for the hit, half is the Brier score. So a sure right box has 1, a sure wrong one 0, and a wrong box of confidence 0
    has 0.5. Without boxes: 0.5, and 1 where there is no object and the answer says so.
    """
    if not answer.detections:
        return 1.0 if answer.is_none and not answer.truths else 0.5
    right = {match.answer for match in matches}
    hits = [float(i in right) for i in range(len(answer.detections))]
    return fmean((hit + 1 - (one.confidence - hit) ** 2) / 2 for hit, one in zip(hits, answer.detections, strict=True))


def is_exact(answer: Answer, matches: Sequence[Match]) -> bool:
    """Return whether every object has a right box, and nothing else is stated."""
    if not answer.truths:
        return answer.is_none
    return len(matches) == len(answer.truths) == len(answer.detections)


LARGEST_COUNT = 1_000_000
COUNTING_RANGES = {"accuracy": SHARE, "format": SHARE, "nearness": SHARE}
COUNTING_WEIGHTS = {"accuracy": 0.9, "format": 0.1}
"""Weights of the parts. `nearness` counts only where the recipe gives it a weight: a middle number earns some of it."""


def count(*, thought: str = REQUIRED) -> RewardSpec:
    """Return a reward with three parts. `accuracy`: 1 if the only `<answer>` states the right number (reading.py).

    Text behind the tag costs the `format` alone, even if it takes the answer back.

    `format`: 1 for a whole response in the form that the prompt asks for, with a number as its answer, right or wrong.
    `nearness`: 1 for the right number, falling linearly to 0 at a distance of the number itself (at least 1); it has no
    weight by default.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: "required" or "optional".
    """
    check_thought(thought)
    score = partial(score_count, thought=thought)
    return RewardSpec("count", score, COUNTING_RANGES, COUNTING_WEIGHTS, pure=True, accuracy="accuracy")


def read_count(response: str) -> tuple[int | None, str]:
    """Return (the number in the only `<answer>` of a response, ""), or (None, the reason)."""
    answer, problem = final_answer(response)
    if answer is None:
        return None, problem
    number = stated_number(answer)
    if number is None:
        return None, "the answer is not one number"
    if number != int(number) or not 0 <= number <= LARGEST_COUNT:
        return None, f"the answer is not a whole number from 0 to {LARGEST_COUNT:,}"
    return int(number), ""


def true_count(x: RewardInput) -> int:
    """Return the right number of a row. Raises: RewardError for a row without one."""
    value = x.truth.get("answer")
    if type(value) is not int or value < 0:
        raise RewardError(f"the row's `answer` is {quoted(value, 60)}, not a whole number >= 0")
    return value


def score_count(x: RewardInput, *, thought: str = REQUIRED) -> dict[str, Any]:
    """Return the parts of a response; see `count`."""
    truth = true_count(x)
    answer, problem = read_count(x.response)
    problem = problem or form_problem(x, thought)
    distance = abs(answer - truth) if answer is not None else None
    return {
        "accuracy": float(distance == 0),
        "format": float(not problem),
        "nearness": max(0.0, 1 - distance / max(1, truth)) if distance is not None else 0.0,
        "note": problem,
        "detail": {"answer": answer},
    }
