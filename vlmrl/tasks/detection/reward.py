"""Reward of the task detection: the stated boxes beside the true ones, and the quality of their confidences.

The confidences are scored by the Brier score, a proper scoring rule (Brier 1950): over the chance that a box is right,
the expected score is highest for the confidence that equals this chance. Which boxes are right does not depend on the
confidences. A box with confidence 0 earns as much as no box.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from vlmrl.metric import SHARE
from vlmrl.rewards.answer_form import REQUIRED
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.overlap import Match
from vlmrl.tasks.boxes.marks import with_picture
from vlmrl.tasks.boxes.settings import check_overlay
from vlmrl.tasks.detection.answer import RIGHT, Answer, Settings, read_answer
from vlmrl.types import RewardInput, RewardResult

NAME = "box_list"
RANGES = {"detection": SHARE, "confidence": SHARE, "format": SHARE, "accuracy": SHARE}
WEIGHTS = {"detection": 0.8, "confidence": 0.2}
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
    settings.check()
    check_overlay(overlay)
    score = partial(draw_score if overlay else score_boxes, settings=settings)
    return RewardSpec(NAME, score, RANGES, WEIGHTS, pure=True, needs_images=overlay, accuracy="accuracy")


def score_boxes(x: RewardInput, *, settings: Settings) -> dict[str, Any]:
    """Return the parts of a response; see `box_list`. Raises: RewardError for a row without true boxes."""
    return _parts(read_answer(x, settings), settings)


def draw_score(x: RewardInput, *, settings: Settings) -> RewardResult:
    """Return the parts of a response, and a picture of all boxes if the image is there; see `box_list`."""
    answer = read_answer(x, settings)
    return with_picture(_parts(answer, settings), x, answer)


def _parts(answer: Answer, settings: Settings) -> dict[str, Any]:
    matches = answer.matches(settings.least)
    has_form = not answer.problem
    return {
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
