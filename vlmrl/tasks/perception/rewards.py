"""Built-in rewards of grounding, detection and counting by name, with those that RLLaVA published, flaws included.

Use the published ones only to reproduce RLLaVA's runs. Source: TinyLoopX/RLLaVA at 4753d4a,
`examples/reward_function/` grounding.py (with `rllava/model/modules/rm/grounding.py`), ovd.py and r1v.py, and the
grader that the last calls. True boxes are in 0 to 1000, rounded if the dataset has other numbers.

Grounding, flaws that are kept: almost any response that begins with `<` or `>` has the format; the first box anywhere
counts, also one within the thought; without the token `<|box_start|>` all numbers are multiplied by 1000. Engines keep
this token in the text of a response. Differences: a union of 0, and numbers too large for a float, give 0 where the
original raises an exception; a truth is a list of numbers, never code.

Detection is written from a description of the code. tests/golden/rllava/detection.json has the scores of a second
implementation of it; the original program was run on the same inputs once, and gave the same scores. Flaws that are
kept: one wrong box with confidence 0, or far below it, has the full part `confidence`; the first answer without a line
break counts, and one with a line break has no boxes; the form is only the beginning of the response; an answer without
boxes has the format. An answer must hold the words Position and Confidence, but an entry may use the other names in
POSITIONS and CONFIDENCES; without a position of four values its box is 0, 0, 0, 0, and without a number as its
confidence it has 0. A text as a coordinate has no overlap. Differences: where the code raises an exception, `iou` and
`confidence` are 0 (a position that is a number or holds a list, null as a coordinate while a true box is free, an entry
that is a number, null, or a text with the name of a confidence, an integer beyond every float beside a fraction). Where
a confidence of NaN makes the published part NaN, it is 0 here. An answer of more than 100,000 characters has no boxes.
A truth needs no tags.

Counting, flaws that are kept: a well-formed response without any answer earns half of the score; the first answer
counts, so that a second one does no harm; without a tag, the whole response is the answer; units, currencies and
percent signs are removed, so that "4 feet" is 4. tests/unit/tasks/test_counting_published.py names each, and
rewards/math/rllava.py lists how the grader differs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from vlmrl.metric import SHARE
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardFn, RewardSpec
from vlmrl.rewards.boxes.planes import Box, convert, plane_of
from vlmrl.rewards.text_parsing import format_weights
from vlmrl.tasks.perception.reward import BOX_IOU, BOX_LIST, box_iou, box_list, count, true_count
from vlmrl.tasks.perception.truth import BOX, BOXES, size_of, true_boxes
from vlmrl.types import RewardInput
from vlmrl.untrusted import parse_json

RLLAVA_BOX = "rllava_box"
BEGINNINGS = ("<", ">", "object_ref_start", "object_ref_end", "box_start", "box_end", "im_end")
"""Beginnings of a response that the published pattern accepts, because its `|` are not escaped."""
END_OF_TEXT, BOX_TOKEN = "<|endoftext|>", "<|box_start|>"
_N = r"(-?\d+(?:\.\d+)?)"
PATTERNS = (
    re.compile(rf"\[\s*{_N},\s*{_N},\s*{_N},\s*{_N}\s*\]"),
    re.compile(rf"\(\s*{_N},\s*{_N},\s*{_N},\s*{_N}\s*\)"),
    re.compile(rf"\(\s*{_N},\s*{_N}\),\s*\(\s*{_N},\s*{_N}\)"),
)


def rllava_box(*, format_weight: float = 0.5) -> RewardSpec:
    """Return the published reward: accuracy (the squared IoU) and format.

    Args:
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest.
    """
    return _two_parts(RLLAVA_BOX, score_grounding_as_published, format_weight)


def _two_parts(name: str, score: RewardFn, format_weight: float, accuracy: str | None = None) -> RewardSpec:
    """Return a published reward with the parts accuracy and format, each in [0, 1]; see `RewardSpec`."""
    ranges = {"accuracy": SHARE, "format": SHARE}
    return RewardSpec(name, score, ranges, format_weights(format_weight), pure=True, accuracy=accuracy)


def score_grounding_as_published(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    truth = _in_thousand(x.truth, BOX)[0]
    response = x.response.replace(END_OF_TEXT, "")
    box = first_box(response)
    return {
        "accuracy": overlap(box, truth) ** 2,
        "format": float(response.startswith(BEGINNINGS)),
        "detail": {"box": list(box)},
    }


def _in_thousand(truth: Mapping[str, Any], field: str = BOXES) -> Sequence[Box]:
    """Return the true boxes in 0 to 1000, rounded if the dataset has other numbers."""
    plane, boxes = true_boxes(truth, field)
    if plane.space == "thousand":
        return boxes
    target = plane_of("thousand", size_of(truth))
    return [Box(*map(round, convert(box, plane, target))) for box in boxes]


def first_box(response: str) -> tuple[float, ...]:
    """Return the first four numbers in a form that the published code knows; zeros if there are none."""
    for pattern in PATTERNS:
        match = pattern.search(response)
        if match is None:
            continue
        numbers = tuple(float(number) for number in match.groups())
        if any(abs(number) > 1e300 for number in numbers):
            return (0.0, 0.0, 0.0, 0.0)
        if BOX_TOKEN in response:
            return numbers
        return tuple(float(int(number * 1000)) for number in numbers)
    return (0.0, 0.0, 0.0, 0.0)


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the published IoU, in [0, 1]; corners in reverse order are not mended."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = areas[0] + areas[1] - shared
    return shared / union if shared > 0 and union > 0 else 0.0


OPEN, CLOSE = "<answer>", "</answer>"
BEGIN = "<think>"
BETWEEN = re.compile(r"</think>\s*<answer>")
MOST_DETAIL = 200


def rllava_count(*, format_weight: float = 0.5) -> RewardSpec:
    """Return the published reward: accuracy and format, each 0 or 1.

    Args:
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest.
    """
    return _two_parts("rllava_count", score_counting_as_published, format_weight, "accuracy")


def score_counting_as_published(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    from vlmrl.rewards.math.rllava import same_answer

    answer = first_answer(x.response)
    return {
        "accuracy": float(same_answer(answer, str(true_count(x)))),
        "format": float(has_counting_form(x.response)),
        "detail": {"answer": answer[:MOST_DETAIL]},
    }


def first_answer(response: str) -> str:
    """Return the text of the first answer; the whole response if there is none."""
    start = response.find(OPEN)
    end = response.find(CLOSE, start + len(OPEN)) if start >= 0 else -1
    return (response[start + len(OPEN) : end] if end >= 0 else response).strip()


def has_counting_form(response: str) -> bool:
    """Return whether the response is a thought, white space, and something between answer tags."""
    if not response.startswith(BEGIN) or not response.endswith(CLOSE):
        return False
    middle = BETWEEN.search(response, len(BEGIN))
    return middle is not None and middle.end() <= len(response) - len(CLOSE)


WEIGHTS = {"iou": 0.33, "confidence": 0.33, "format": 0.34}
POSITIONS = ("Position", "position", "bbox", "Bbox")
CONFIDENCES = ("Confidence", "confidence", "score", "Score", "prob", "Prob", "probability", "Probability")
NOWHERE = (0, 0, 0, 0)
MOST_CHARS = 100_000
RIGHT = 0.5


def rllava_boxes() -> RewardSpec:
    """Return the published reward: overlap, confidence and format."""
    return RewardSpec("rllava_boxes", score_detection_as_published, dict.fromkeys(WEIGHTS, SHARE), WEIGHTS, pure=True)


def score_detection_as_published(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    boxes = _in_thousand(x.truth)
    truths = [tuple(int(n) if n == int(n) else n for n in box) for box in boxes]  # integers of any size have an overlap
    try:
        overlap, sure = overlap_and_confidence(entries_of(x.response), truths)
    except (TypeError, KeyError, ValueError, OverflowError):  # the published code ends with this exception
        overlap = sure = 0.0
    return {"iou": overlap, "confidence": sure, "format": float(has_detection_form(x.response))}


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


def has_detection_form(response: str) -> bool:
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


_PUBLISHED = "the reward that RLLaVA published, to the digit, to reproduce its runs"
REWARDS: Mapping[str, Builtin] = {
    "count": Builtin(count, "counting: the right whole number in the only answer, and the form", version=4),
    "rllava_count": Builtin(rllava_count, f"counting: {_PUBLISHED}", version=2),
    BOX_LIST: Builtin(
        box_list,
        "detection: all boxes beside the true ones, with a proper score for their confidences",
        version=6,
        shown=("overlay",),
    ),
    "rllava_boxes": Builtin(rllava_boxes, f"detection: {_PUBLISHED}", version=2),
    BOX_IOU: Builtin(
        box_iou,
        "grounding: overlap of the only box with the true box, in a declared coordinate space",
        version=5,
        shown=("overlay",),
    ),
    RLLAVA_BOX: Builtin(rllava_box, f"grounding: {_PUBLISHED}", version=1),
}
