"""True boxes of a row: the declared coordinate plane of their numbers, the size of the image, and doubts about them.

The variant of a task is the coordinate space of its answers. The prompt asks for it, the reward reads it, and nothing
is concluded from the size of the numbers. Boxes that fit the declared space may still look as if they were in another
one: [0.1, 0.2, 0.5, 0.6] is a box in pixels, too. Each row alone is possible; all rows together are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import SPACES, Box, Plane, Space, answer_plane, check_space, plane_of
from vlmrl.rewards.boxes.reading import check_order
from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED, check_thought
from vlmrl.types import RewardInput, Row, Size

TRUTH_SPACES: tuple[Space, ...] = ("pixels", "thousand", "unit")
"""Spaces in which a true box may be given; the others depend on a model."""
MOST_PIXELS = 1_000_000


def size_of(truth: Mapping[str, Any]) -> Size:
    """Return the size of a row's image in pixels. Raises: RewardError for a row without it."""
    width, height = truth.get("width"), truth.get("height")
    if type(width) is not int or type(height) is not int or not (0 < width < MOST_PIXELS and 0 < height < MOST_PIXELS):
        raise RewardError(f"the row's `width` and `height` are {quoted(width)} and {quoted(height)}, not pixels")
    return width, height


def true_box(numbers: Any) -> Box:
    """Return a box of a truth. Raises: RewardError unless it is four numbers, with an area."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 4 or not all(map(_is_number, numbers)):
        raise RewardError(f"the row's `box` is {quoted(numbers, 60)}, not four numbers")
    box = Box(*(float(number) for number in numbers))
    if not (box.x1 < box.x2 and box.y1 < box.y2):
        raise RewardError(f"the row's `box` is {list(numbers)}, which has no area")
    return box


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST_PIXELS


DIRECT = "_direct"
"""End of the names of variants that ask for boxes without a thought."""
VARIANTS: tuple[str, ...] = (*SPACES, *(f"{space}{DIRECT}" for space in SPACES))
MAIN: Space = "thousand"


class Variant(NamedTuple):
    """Variant of a task.

    Args:
        name: one of VARIANTS.
        space: coordinate space of its answers.
        thought: whether the form needs a `<think>` thought: "required" or "optional".
        template: file name of the prompt.
    """

    name: str
    space: Space
    thought: str
    template: str

    @property
    def args(self) -> dict[str, str]:
        """Arguments of the task's reward."""
        return {"space": self.space, "thought": self.thought}


def variant_of(name: str | None) -> Variant:
    """Return the variant of that name; None = the main one."""
    name = name or MAIN
    is_direct = name.endswith(DIRECT)
    space = check_space(name.removesuffix(DIRECT))
    return Variant(name, space, OPTIONAL if is_direct else REQUIRED, "direct.jinja" if is_direct else "think.jinja")


@dataclass(frozen=True)
class BoxSettings:
    """Declarations on how boxes are read.

    Args:
        space, order: see `vlmrl.rewards.boxes`.
        thought: whether the form needs a `<think>` thought: "required" or "optional".
    """

    space: str
    order: str = "xyxy"
    thought: str = REQUIRED

    @property
    def tagged(self) -> bool:
        """Return whether the boxes stand in an `<answer>`."""
        return True

    def check(self) -> None:
        """Raise a RewardError for a value that is not allowed."""
        check_space(self.space)
        check_order(self.order)
        check_thought(self.thought)

    def form(self, answer: str, thought: str = "I look.") -> str:
        """Return a whole response with this answer, in the form that the settings ask for."""
        text = f"<answer>{answer}</answer>" if self.tagged else answer
        return text if self.thought == OPTIONAL else f"<think>{thought}</think>{text}"

    def plane(self, x: RewardInput) -> Plane:
        """Return the plane of answers to a row; an image whose seen size is unknown counts as not resized."""
        space, size = check_space(self.space), size_of(x.truth)
        return answer_plane(x, space, size) if x.seen_sizes or space != "seen" else plane_of(space, size, size)

    def plane_of_trace(self, row: Row, seen_sizes: tuple[Size, ...]) -> Plane:
        """Return the plane of a response to a row. `seen_sizes`: of its images, as the model sees them."""
        x = RewardInput("", media=row.media, seen_sizes=seen_sizes)
        return answer_plane(x, check_space(self.space), size_of(row.truth))

    def ordered(self, box: Box) -> Box:
        """Return a box whose four numbers stand in the declared order."""
        if self.order == "yxyx":
            return Box(box.y1, box.x1, box.y2, box.x2)
        if self.order == "xywh":
            return Box(box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1)
        return box


S = TypeVar("S", bound=BoxSettings)


def settings_as(settings: S, reward: str, spec: RewardSpec | None) -> S:
    """Return the settings by which a reward reads boxes: its own if it is the task's reward, else those of the task.

    Args:
        settings: of the task.
        reward: name of the task's reward, whose arguments have the names of the settings.
        spec: reward that scores the rows; None = not known.
    """
    args = spec.args if spec is not None and spec.name == reward else {}
    return replace(settings, **{one.name: args[one.name] for one in fields(settings) if one.name in args})


LEAST_UNIT, LEAST_OTHER = 4, 20
"""Least number of boxes from which they are doubted: boxes in units are plain, the others may be chance."""
NEAR = 0.9
"""Share of the image, or of 0 to 1000, that the outermost box must reach: then this edge is what bounds the boxes."""
CLEARLY_LARGER = 1.25
"""Least ratio of an image's side to 1000 (or the reverse) at which the two can be told apart."""


def space_doubts(boxes: Sequence[tuple[Plane, Size, Box]]) -> dict[str, tuple[Any, str]]:
    """Return a note for the data doctor on boxes whose space is probably another one than declared; else {}.

    Args:
        boxes: plane of the truth, size of the image in pixels, box; of all rows.
    """
    numbers = [(size, box) for plane, size, box in boxes if plane.space != "unit"]
    if not numbers:
        return {}
    space = boxes[0][0].space
    if len(numbers) >= LEAST_UNIT and all(max(box.x2, box.y2) <= 1 for _, box in numbers):
        return _note(space, "unit", f"all {len(numbers):,} boxes lie within 1 x 1")
    if space == "thousand":
        small = [(size, box) for size, box in numbers if max(size) * CLEARLY_LARGER <= 1000]
        within = all(box.x2 <= size[0] and box.y2 <= size[1] for size, box in small)
        reach = max((max(box.x2 / size[0], box.y2 / size[1]) for size, box in small), default=0.0)
        if len(small) >= LEAST_OTHER and within and reach >= NEAR:
            return _note(space, "pixels", f"no box of {len(small):,} reaches beyond the width or height of its image")
    if space == "pixels":
        large = [(size, box) for size, box in numbers if min(size) >= 1000 * CLEARLY_LARGER]
        reach = max((max(box.x2, box.y2) for _, box in large), default=0.0)
        if len(large) >= LEAST_OTHER and 1000 * NEAR <= reach <= 1000:
            return _note(space, "thousand", f"no coordinate of {len(large):,} boxes in larger images is above 1000")
    return {}


def _note(declared: Space, probable: Space, finding: str) -> dict[str, tuple[Any, str]]:
    advice = f"declared: {declared}. Are they in the space {probable} (--truth-space {probable})?"
    return {"space of the boxes": ("bad", f"{finding}; {advice}")}


BOX, BOXES = "box", "boxes"
"""Field of a truth that has its only box (grounding), or all boxes of a category (detection)."""
MOST_TRUE_BOXES = 300
MOST_CATEGORY_CHARS = 100


def make_grounding_truth(box: list[float], space: str, size: Size, asks: str | None = None) -> dict[str, Any]:
    """Return the truth of a row. `asks`: kind of the expression of a drawn row."""
    return {BOX: box, "space": space, "width": size[0], "height": size[1], "asks": asks}


def make_detection_truth(
    boxes: list[list[float]], space: str, width: int, height: int, category: str
) -> dict[str, Any]:
    """Return the truth of a row. Evaluations also give the accuracy for each `category` and each `count` of objects."""
    size = {"width": width, "height": height}
    return {BOXES: boxes, "space": space, **size, "category": category, "count": len(boxes)}


def truth_problems(field: str, truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth whose boxes are in this field, in words."""
    try:
        plane, boxes = true_boxes(truth, field)
    except RewardError as error:
        return [error.message]
    problems = [
        f"`{field}` has {list(box)}, no box within {plane.width:g} x {plane.height:g}"
        for box in boxes
        if not (box.x1 >= 0 and box.y1 >= 0 and box.x2 <= plane.width and box.y2 <= plane.height)
    ]
    category = truth.get("category")
    if field == BOXES and (not isinstance(category, str) or not 0 < len(category) <= MOST_CATEGORY_CHARS):
        problems.append(f"`category` is {quoted(category, 60)}, not a text of 1 to {MOST_CATEGORY_CHARS} characters")
    return problems


def notes_on_boxes(field: str, truths: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return a note for the data doctor if the boxes look as if they were in another space; else {}."""
    read = [(true_boxes(truth, field), size_of(truth)) for truth in truths]
    return space_doubts([(plane, size, box) for (plane, boxes), size in read for box in boxes])


def true_boxes(truth: Mapping[str, Any], field: str = BOXES) -> tuple[Plane, tuple[Box, ...]]:
    """Return the plane of a row's truth, and its boxes in this plane; no box = the image shows no such object.

    Raises: RewardError for a row without them or without `space`, `width` and `height`, or a box that has no area.
    """
    size, space, boxes = size_of(truth), check_space(str(truth.get("space"))), truth.get(field)
    if space not in TRUTH_SPACES:
        raise RewardError(f"the row's boxes are in the space `{space}`", hint=f"one of: {', '.join(TRUTH_SPACES)}")
    plane = plane_of(space, size)
    if field == BOX:
        return plane, (true_box(boxes),)
    if not isinstance(boxes, (list, tuple)) or len(boxes) > MOST_TRUE_BOXES:
        raise RewardError(f"the row's `boxes` are {quoted(boxes, 60)}, not a list of at most {MOST_TRUE_BOXES} boxes")
    return plane, tuple(map(true_box, boxes))
