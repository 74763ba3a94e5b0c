"""Detection reward that RLLaVA published, with its flaws. Use it only to reproduce its runs.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/ovd.py`, written from a description of it.
    tests/golden/rllava/detection.json has the scores of a second implementation of this description, not those of the
    original program.

The flaws that are kept: one wrong box with confidence 0, or far below it, has the full part `confidence`; the first
answer without a line break counts, and one with a line break has no boxes; the form is only the beginning of the
response; an answer without boxes has the format.

Differences to the published code: where it raises an exception, `iou` and `confidence` are 0. These inputs are an entry
that is no mapping or lacks a key, a `Position` that is not four numbers, and a `Confidence` that is no number. The same
holds for NaN, for numbers of 1e150 and more, and for an answer of more than 100,000 characters. The published code has
no rows without objects: there, both parts are 0. The true boxes are in 0 to 1000, rounded if the dataset has other
numbers; a truth needs no tags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlmrl.json_text import parse_json
from vlmrl.metric import SHARE
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.overlap import iou
from vlmrl.rewards.boxes.planes import Box, convert, plane_of
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.detection.truth import true_boxes
from vlmrl.types import RewardInput

WEIGHTS = {"iou": 0.33, "confidence": 0.33, "format": 0.34}
OPEN, CLOSE, BEGIN = "<answer>", "</answer>", "<think>"
BETWEEN = re.compile(r"</think>\s*<answer>")
POSITION, CONFIDENCE = "Position", "Confidence"
MOST_CHARS = 100_000
LARGEST = 1e150
"""Largest size of a coordinate: products of two are finite."""
RIGHT = 0.5


def rllava_boxes() -> RewardSpec:
    """Return the published reward: overlap, confidence and format."""
    return RewardSpec("rllava_boxes", score, dict.fromkeys(WEIGHTS, SHARE), WEIGHTS, pure=True)


def score(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    plane, truths = true_boxes(x.truth)
    target = plane_of("thousand", size_of(x.truth))
    if plane.space != "thousand":
        truths = tuple(Box(*map(round, convert(box, plane, target))) for box in truths)
    overlap, sure = overlap_and_confidence(first_boxes(x.response), truths)
    return {"iou": overlap, "confidence": sure, "format": float(has_form(x.response))}


def first_boxes(response: str) -> list[tuple[tuple[float, ...], float]] | None:
    """Return the (position, confidence) of each box, each position once; None if the published code reads none."""
    text = _first_answer(response)
    if text is None or POSITION not in text or CONFIDENCE not in text or len(text) > MOST_CHARS:
        return None
    text = text.replace("[[", "[").replace("]]", "]")
    if not text.endswith("]"):
        text = text.rsplit("},", 1)[0] + "}]"
    try:
        entries = parse_json(text.replace("'", '"'))
    except ValueError:
        return None
    boxes: dict[tuple[float, ...], float] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict):
            return None
        position: Any = entry.get(POSITION)
        confidence: Any = entry.get(CONFIDENCE)
        if not isinstance(position, list) or len(position) != 4 or not all(map(_is_number, position)):
            return None
        if not _is_number(confidence):
            return None
        boxes.setdefault(tuple(float(number) for number in position), float(confidence))
    return list(boxes.items())


def overlap_and_confidence(
    boxes: Sequence[tuple[tuple[float, ...], float]] | None, truths: Sequence[Box]
) -> tuple[float, float]:
    """Return the published parts: the surest box first, each takes the true box that it covers best."""
    if not boxes or not truths:
        return 0.0, 0.0
    left = list(truths)
    overlaps, sure = list[float](), list[float]()
    for position, confidence in sorted(boxes, key=lambda one: one[1], reverse=True):
        box = Box(*position)
        ious = [iou(box, truth) if box.x1 < box.x2 and box.y1 < box.y2 else 0.0 for truth in left]
        best = max(ious, default=0.0)
        if best > RIGHT:
            left.pop(ious.index(best))
        overlaps.append(best if best > RIGHT else 0.0)
        sure.append(confidence if best > RIGHT else 1 - confidence)
    mean = sum(sure) / len(sure)
    return min(1.0, sum(overlaps) / max(len(truths), len(boxes))), max(0.0, min(1.0, mean))


def has_form(response: str) -> bool:
    """Return whether a response begins with a thought and an answer. The time is linear in its length."""
    if not response.startswith(BEGIN):
        return False
    match = BETWEEN.search(response, len(BEGIN))
    return match is not None and response.find(CLOSE, match.end()) >= 0


def _first_answer(response: str) -> str | None:
    """Return the first answer that has no line break."""
    for line in response.split("\n"):
        start = line.find(OPEN)
        if start >= 0 and (end := line.find(CLOSE, start + len(OPEN))) >= 0:
            return line[start + len(OPEN) : end]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < LARGEST
