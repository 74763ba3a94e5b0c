"""Reading of boxes from the text of a model, in a declared coordinate space.

Every text gives a result, in linear time and of bounded size. What looks like a box and is none is refused, with the
reason. The forms that are read:

- four numbers in brackets, `[x1, y1, x2, y2]` or `(...)`, or two pairs, `(x1, y1), (x2, y2)`, `[[x1, y1], [x2, y2]]`;
- JSON or Python, in a fence or not, with a list under any key (`bbox_2d`, `box`, `Position`), or with named
  coordinates (`x1`, `xmin`, `left`, `x` and `width`); a key that ends with the order of the numbers (`bbox_xywh`) says
  it; `label` and `confidence` of the same object belong to the box, and a box within a label or a text is none;
- `<box>...</box>` and `<|box_start|>...<|box_end|>` around any of these, or around four bare numbers; `<ref>...</ref>`
  and `<|object_ref_start|>...<|object_ref_end|>` before it hold its label;
- four `<loc0123>` tokens, only in the space `loc`;
- a text that is nothing but four numbers, also as the value of a key that names a box: `{"bbox": "10, 20, 300, 400"}`.

A box behind `not` (`not [x1, y1, x2, y2]`) is denied: it is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from vlmrl.errors import RewardError, unknown
from vlmrl.rewards.boxes.planes import MEANINGS, SPACES, Box, Plane, Space
from vlmrl.rewards.boxes.scan import MOST_CHARS, MOST_SHAPES, Candidate, Order, Scan

ORDERS: tuple[Order, ...] = get_args(Order)
"""Orders of a box's four numbers: corners with x first or y first, or the upper left corner with width and height."""


class Coordinates(NamedTuple):
    """Space and order in which a box is stated: what its four numbers mean."""

    space: Space
    order: Order = "xyxy"

    @property
    def name(self) -> str:
        """The space, and the order unless it is the usual one. Example: `thousand yxyx`."""
        return self.space if self.order == "xyxy" else f"{self.space} {self.order}"

    @property
    def words(self) -> str:
        """Example: the space `pixels` (pixels of the image as it is stored), in the order yxyx."""
        order = "" if self.order == "xyxy" else f", in the order {self.order}"
        return f"the space `{self.space}` ({MEANINGS[self.space]}){order}"


COORDINATES: tuple[Coordinates, ...] = tuple(
    Coordinates(space, order) for space in SPACES for order in (ORDERS if space != "loc" else ORDERS[:1])
)
"""All meanings that four numbers can have. The tokens of `loc` have an order of their own."""
MOST_REASONS = 8
LARGEST = 1e6
"""Largest size of a coordinate; a larger one is refused."""
SWAPPED, CUT = "corners in reverse order", "cut at the edge of the image"
"""Notes on a box that was mended: its corners were exchanged, or the part beyond the image was cut off."""


@dataclass(frozen=True, slots=True)
class Read:
    """Box of an answer, in the numbers of the plane: x1 < x2 and y1 < y2, within the image.

    Args:
        label: the label beside it, at most 100 characters; "" = none.
        confidence: the confidence beside it, as it is written; None = none, or no finite number.
        notes: what was mended; see `SWAPPED` and `CUT`.
    """

    shape: Box
    label: str = ""
    confidence: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of reading a text.

    Args:
        shapes: boxes in the order of the text, each once (see `read_boxes`).
        refused: reasons, for what looks like a box or a point and is none; at most 8, the first ones.
        unusable: how many of these have as many numbers as a box, such as a box outside of the image.
    """

    shapes: tuple[Read, ...]
    refused: tuple[str, ...] = ()
    unusable: int = 0

    @property
    def problem(self) -> str:
        """Reason why nothing was read; "" if something was read."""
        if self.shapes:
            return ""
        return self.refused[0] if self.refused else "no box and no point"


def check_order(order: str) -> Order:
    """Return the order. Raises: RewardError with the nearest name for an unknown one."""
    if order not in ORDERS:
        raise unknown("order of a box's numbers", str(order), ORDERS, error=RewardError)
    return order


def read_boxes(text: str, plane: Plane, *, order: Order = "xyxy", repeated: bool = False) -> Reading:
    """Return the boxes of a text.

    Args:
        plane: the declared plane of the numbers. Nothing is concluded from their size.
        order: order of four numbers without names. Two pairs are always two opposite corners.
        repeated: whether a box that the text states several times is in the result as often; else it is there once.
    """
    if len(text) > MOST_CHARS:
        return Reading((), (f"a text of more than {MOST_CHARS:,} characters",))
    scan = Scan(locs=plane.space == "loc")
    scan.run(text)
    candidates, reasons = [_box(one, plane, order) for one in scan.candidates], scan.reasons
    boxes: list[Read] = []
    for one in candidates:
        if isinstance(one, str):
            reasons.append(one)
        elif len(boxes) >= MOST_SHAPES:
            reasons.append(f"more than {MOST_SHAPES} boxes or points")
        elif repeated or all(one.shape != other.shape or one.label != other.label for other in boxes):
            boxes.append(one)
    unusable = sum(isinstance(one, str) for one in candidates)
    return Reading(tuple(boxes), tuple(dict.fromkeys(reasons))[:MOST_REASONS], unusable)


def only_box(reading: Reading) -> tuple[Read | None, str]:
    """Return (the only box, ""), or (None, the reason): a text with several boxes commits itself to none of them."""
    count = len(reading.shapes) + reading.unusable
    if len(reading.shapes) == count == 1:
        return reading.shapes[0], ""
    return None, reading.problem or f"{count} boxes, where one is expected"


def _box(candidate: Candidate, plane: Plane, order: Order) -> Read | str:
    """Return a box within the image, or the reason why the numbers are none."""
    if reason := _unusable(candidate.numbers):
        return reason
    a, b, c, d = candidate.numbers
    stated = candidate.order or order
    if stated == "yxyx":
        a, b, c, d = b, a, d, c
    elif stated in ("xywh", "cxcywh"):
        if c < 0 or d < 0:
            return "a negative width or height"
        if stated == "cxcywh":
            a, b = a - c / 2, b - d / 2
        c, d = a + c, b + d
    x1, x2, y1, y2 = min(a, c), max(a, c), min(b, d), max(b, d)
    if x1 == x2 or y1 == y2:
        return "a box without area"
    notes = (SWAPPED,) if (x1, y1) != (a, b) else ()
    box = Box(max(x1, 0.0), max(y1, 0.0), min(x2, plane.width), min(y2, plane.height))
    if box.x1 >= box.x2 or box.y1 >= box.y2:
        return f"a box outside of the image ({plane.width:g} x {plane.height:g} in the space `{plane.space}`)"
    notes += (CUT,) if box != (x1, y1, x2, y2) else ()
    return Read(box, candidate.label, candidate.confidence, notes)


def _unusable(numbers: Sequence[float]) -> str:
    if any(math.isnan(number) for number in numbers):
        return "a coordinate is not a number"
    if any(abs(number) > LARGEST for number in numbers):
        return f"a coordinate beyond {LARGEST:,.0f}"
    return ""
