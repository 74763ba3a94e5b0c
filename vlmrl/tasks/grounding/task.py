"""The task grounding: prompts, truth, reward, measures."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from vlmrl.metric import SHARE, Metric
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import convert
from vlmrl.rewards.boxes.writing import FORMS, write_box
from vlmrl.tasks.base import Measure, Outcome, Task, require_prepared
from vlmrl.tasks.boxes.marks import positions_as
from vlmrl.tasks.boxes.settings import VARIANTS, settings_as, variant_of
from vlmrl.tasks.grounding.play import grounding_kind
from vlmrl.tasks.grounding.reward import NAME as REWARD
from vlmrl.tasks.grounding.reward import RIGHT, Settings, read_answer
from vlmrl.tasks.grounding.truth import notes_on, true_box, truth_problems
from vlmrl.types import RewardInput, Row, Score, Size

NAME = "grounding"
SUMMARY = "the region that a text describes, as one box (made by `vlmrl prep grounding`)"
THRESHOLDS = (0.1, 0.3, 0.5, 0.75, 0.95)


def grounding_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(NAME, info)
    chosen = variant_of(variant)
    settings = Settings(chosen.space, thought=chosen.thought)
    return Task(
        name=NAME,
        summary=SUMMARY,
        template=files("vlmrl.tasks.grounding").joinpath(chosen.template).read_text(encoding="utf-8"),
        template_file=f"tasks/grounding/{chosen.template}",
        variables={"form": FORMS[chosen.space]},
        validate=truth_problems,
        notes=notes_on,
        profiles={
            "default": (REWARD, chosen.args),
            "rllava": ("rllava_box", {}),
        },
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
        positions=partial(positions_as, settings, REWARD, read_answer),
        kind=grounding_kind(settings),
        variant=chosen.name,
        variants=VARIANTS,
    )


def measure_as(settings: Settings, spec: RewardSpec | None) -> Measure:
    """Return `measure` for responses that a reward has scored: it reads the box where this reward reads it."""
    return partial(measure, settings_as(settings, REWARD, spec))


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
    target = settings.plane_of_trace(row, seen_sizes)
    return settings.form(write_box(convert(box, plane, target), target), thought="I see it.")
