"""Detection reward that RLLaVA published, with its flaws. Use it only to reproduce its runs.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/ovd.py`, written from a description of it.
    tests/golden/rllava/detection.json has the scores of a second implementation of this description. The original
    program was run on the same inputs once, and gave the same scores.

The flaws that are kept: one wrong box with confidence 0, or far below it, has the full part `confidence`; the first
answer without a line break counts, and one with a line break has no boxes; the form is only the beginning of the
response; an answer without boxes has the format. An answer must hold the words Position and Confidence, but an entry
may use the other names in POSITIONS and CONFIDENCES; without a position of four values its box is 0, 0, 0, 0, and
without a number as its confidence it has 0. A text as a coordinate has no overlap.

Differences to the published code: where it raises an exception, `iou` and `confidence` are 0. Such inputs are a
position that is a number or holds a list, null as a coordinate while a true box is free, an entry that is a number,
null, or a text with the name of a confidence, and an integer beyond every float beside a fraction. Where a confidence
of NaN makes the published part NaN, it is 0 here. An answer of more than 100,000 characters has no boxes. The true
boxes are in 0 to 1000, rounded if the dataset has other numbers; a truth needs no tags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from vlmrl.metric import SHARE
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import Box, convert, plane_of
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.counting.published import BEGIN, BETWEEN, CLOSE, OPEN
from vlmrl.tasks.detection.truth import true_boxes
from vlmrl.types import RewardInput
from vlmrl.untrusted import parse_json

WEIGHTS = {"iou": 0.33, "confidence": 0.33, "format": 0.34}
POSITIONS = ("Position", "position", "bbox", "Bbox")
CONFIDENCES = ("Confidence", "confidence", "score", "Score", "prob", "Prob", "probability", "Probability")
NOWHERE = (0, 0, 0, 0)
MOST_CHARS = 100_000
RIGHT = 0.5


def rllava_boxes() -> RewardSpec:
    """Return the published reward: overlap, confidence and format."""
    return RewardSpec("rllava_boxes", score, dict.fromkeys(WEIGHTS, SHARE), WEIGHTS, pure=True)


def score(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    plane, boxes = true_boxes(x.truth)
    target = plane_of("thousand", size_of(x.truth))
    if plane.space != "thousand":
        boxes = tuple(Box(*map(round, convert(box, plane, target))) for box in boxes)
    truths = [tuple(int(n) if n == int(n) else n for n in box) for box in boxes]  # integers of any size have an overlap
    try:
        overlap, sure = overlap_and_confidence(entries_of(x.response), truths)
    except (TypeError, KeyError, ValueError, OverflowError):  # the published code ends with this exception
        overlap = sure = 0.0
    return {"iou": overlap, "confidence": sure, "format": float(has_form(x.response))}


def entries_of(response: str) -> list[Any]:
    """Return the entries of the answer's list, each position once; [] if the published code reads none.

    Raises: TypeError for a position that is no sequence or cannot be hashed; ValueError for JSON that cannot be read.
    """
    text = _first_answer(response)
    if text is None or POSITIONS[0] not in text or CONFIDENCES[0] not in text or len(text) > MOST_CHARS:
        return []
    text = text.replace("[[", "[").replace("]]", "]")
    if not text.endswith("]"):
        text = text.rsplit("},", 1)[0] + "}]"
    entries = parse_json(text.replace("'", '"'), most_levels=MOST_CHARS)
    if not entries or not isinstance(entries[0], dict):
        return []
    once: dict[tuple[Any, ...], Any] = {}
    for entry in entries:
        once.setdefault(tuple(_position(entry)), entry)
    return list(once.values())


def overlap_and_confidence(entries: Sequence[Any], truths: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """Return the published parts: the surest box first, each takes the true box that it covers best.

    Raises: TypeError, KeyError, OverflowError where the published code does.
    """
    if not entries:
        return 0.0, 0.0
    left, covered, sure = list(truths), 0.0, 0.0
    for confidence, entry in sorted(((_confidence(one), one) for one in entries), key=itemgetter(0), reverse=True):
        best, taken = 0.0, -1
        for i, truth in enumerate(left):
            if (overlap := _overlap(truth, _position(entry))) > best:
                best, taken = overlap, i
        if best > RIGHT:
            left.pop(taken)
        covered += best if best > RIGHT else 0.0
        sure += confidence if best > RIGHT else 1 - confidence
    mean = sure / len(entries)
    return min(1.0, covered / max(len(truths), len(entries))), max(0.0, min(1.0, mean)) if mean == mean else 0.0


def _position(entry: Any) -> Any:
    """Return the first position of an entry that is not null."""
    if not isinstance(entry, dict):
        return NOWHERE
    return next((entry[name] for name in POSITIONS if entry.get(name) is not None), NOWHERE)


def _confidence(entry: Any) -> float:
    """Return the first confidence of an entry that is a number, also as a text. Raises: TypeError for no mapping."""
    for name in CONFIDENCES:
        if name in entry and entry[name] is not None:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return float(entry[name])
    return 0.0


def _overlap(truth: tuple[float, ...], position: Any) -> float:
    """Return the intersection over union as the published code computes it: also of texts, NaN and huge integers."""
    if len(position) == 2 and isinstance(position, dict):
        raise KeyError(0)  # the published code looks for two points
    x1, y1, x2, y2 = position if len(position) == 4 else NOWHERE
    if any(isinstance(value, str) for value in (x1, y1, x2, y2)):
        return 0.0
    left, top = max(truth[0], x1), max(truth[1], y1)
    right, bottom = min(truth[2], x2), min(truth[3], y2)
    if right <= left or bottom <= top:
        return 0.0
    shared = (right - left) * (bottom - top)
    return shared / ((truth[2] - truth[0]) * (truth[3] - truth[1]) + (x2 - x1) * (y2 - y1) - shared)


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
