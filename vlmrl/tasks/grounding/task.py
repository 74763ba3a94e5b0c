"""The task grounding: prompts, truth, reward, measures.

The variant of the task is the coordinate space of its answers. The prompt asks for it, the reward reads it, and nothing
is concluded from the size of the numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from vlmrl.metric import SHARE, Metric
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import SPACES, Space, answer_plane, check_space, convert
from vlmrl.rewards.boxes.writing import FORMS, write_box
from vlmrl.tasks.base import Measure, Outcome, Task, require_prepared
from vlmrl.tasks.grounding.marks import positions_as, settings_as
from vlmrl.tasks.grounding.play import box_kind
from vlmrl.tasks.grounding.reward import OPTIONAL, REQUIRED, RIGHT, Settings, read_answer
from vlmrl.tasks.grounding.truth import size_of, true_box, truth_problems
from vlmrl.types import RewardInput, Row, Score, Size

NAME = "grounding"
SUMMARY = "the region that a text describes, as one box (made by `vlmrl prep grounding`)"
DIRECT = "_direct"
"""End of the names of variants that ask for a box without a thought."""
VARIANTS: tuple[str, ...] = (*SPACES, *(f"{space}{DIRECT}" for space in SPACES))
MAIN = "thousand"
THRESHOLDS = (0.1, 0.3, 0.5, 0.75, 0.95)


def space_of(variant: str) -> Space:
    """Return the coordinate space of a variant."""
    return check_space(variant.removesuffix(DIRECT))


def grounding_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(NAME, info)
    chosen = variant or MAIN
    space = space_of(chosen)
    thought = OPTIONAL if chosen.endswith(DIRECT) else REQUIRED
    settings = Settings(space, thought=thought)
    template = "direct.jinja" if chosen.endswith(DIRECT) else "think.jinja"
    return Task(
        name=NAME,
        summary=SUMMARY,
        template=files("vlmrl.tasks.grounding").joinpath(template).read_text(encoding="utf-8"),
        template_file=f"tasks/grounding/{template}",
        variables={"form": FORMS[space]},
        validate=truth_problems,
        profiles={"default": ("box_iou", {"space": space, "thought": thought}), "rllava": ("rllava_box", {})},
        outcome=partial(measure, settings),
        outcome_as=partial(measure_as, settings),
        metrics={
            "iou": Metric("higher", SHARE),
            "centre_accuracy": Metric("higher", SHARE),
            **{f"acc@{threshold:g}": Metric("higher", SHARE) for threshold in THRESHOLDS},
        },
        by=("asks",),
        trace=partial(write_trace, settings),
        trace_sees=True,
        positions=partial(positions_as, settings),
        kind=box_kind(settings),
        variant=chosen,
        variants=VARIANTS,
    )


def measure_as(settings: Settings, spec: RewardSpec | None) -> Measure:
    """Return `measure` for responses that a reward has scored: it reads the box where this reward reads it."""
    return partial(measure, settings_as(settings, spec))


def measure(settings: Settings, x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer.

    Returns: accuracy (IoU of at least 0.5), iou, acc@0.1 to acc@0.95 (IoU of at least that), centre_accuracy (the
        centre of the box is in the true box), parse_failure. An answer without a box has an IoU of 0.
    """
    if not x.truth:
        return dict.fromkeys(_NAMES)
    answer = read_answer(x, settings)
    return {
        "accuracy": float(answer.iou >= RIGHT),
        "iou": answer.iou,
        **{f"acc@{threshold:g}": float(answer.iou >= threshold) for threshold in THRESHOLDS},
        "centre_accuracy": float(answer.is_centred),
        "parse_failure": float(answer.box is None),
    }


_NAMES = ("accuracy", "iou", *(f"acc@{threshold:g}" for threshold in THRESHOLDS), "centre_accuracy", "parse_failure")


def write_trace(settings: Settings, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]) -> str:
    """Return a right response in the form of the variant. `seen_sizes`: of the row's images, as the model sees them."""
    plane, box = true_box(row.truth)
    x = RewardInput("", media=row.media, seen_sizes=seen_sizes)
    target = answer_plane(x, check_space(settings.space), size_of(row.truth))
    answer = f"<answer>{write_box(convert(box, plane, target), target)}</answer>"
    return answer if settings.thought == OPTIONAL else f"<think>I see it.</think>{answer}"
