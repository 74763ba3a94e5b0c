"""Variants of tasks that answer with boxes, and the declarations by which their rewards read an answer.

The variant of such a task is the coordinate space of its answers. The prompt asks for it, the reward reads it, and
nothing is concluded from the size of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from vlmrl.errors import RewardError
from vlmrl.rewards.answer_form import OPTIONAL, REQUIRED, check_thought
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import SPACES, Box, Plane, Space, answer_plane, check_space, plane_of
from vlmrl.rewards.boxes.reading import check_order
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.types import RewardInput, Row, Size

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
        """Whether the boxes stand in an `<answer>`."""
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


def check_overlay(overlay: Any) -> None:
    """Raise a RewardError unless the argument `overlay` of a reward is true or false."""
    if type(overlay) is not bool:
        raise RewardError(f"overlay = {overlay!r} is neither true nor false")
