"""The task detection: prompts, truth, reward, measures."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vlmrl.metric import SHARE, Metric
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import Box, convert
from vlmrl.rewards.boxes.writing import FORMS
from vlmrl.tasks.accumulated import AccumulatedMetrics
from vlmrl.tasks.base import Measure, Outcome, Task, require_prepared
from vlmrl.tasks.boxes.marks import positions_as
from vlmrl.tasks.boxes.settings import VARIANTS, settings_as, variant_of
from vlmrl.tasks.detection.answer import SURE, Detection, Settings, read_answer, write_answer
from vlmrl.tasks.detection.metric_names import NAMES
from vlmrl.tasks.detection.play import boxes_kind
from vlmrl.tasks.detection.reward import NAME as REWARD
from vlmrl.tasks.detection.reward import is_exact, quality
from vlmrl.tasks.detection.truth import notes_on, true_boxes, truth_problems
from vlmrl.tasks.pooled import Verdict
from vlmrl.types import RewardInput, Row, Score, Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlmrl.tasks.detection.average_precision import Matched

NAME = "detection"
SUMMARY = "all objects of a category, as boxes with confidences (made by `vlmrl prep detection`)"
MEASURES: Mapping[str, Metric] = {
    "quality": Metric("higher", SHARE),
    "box_f1": Metric("higher", SHARE),
    "box_brier": Metric("lower", SHARE),
    "absent_accuracy": Metric("higher", SHARE),
    "parse_failure": Metric("lower", SHARE),
}


def detection_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(NAME, info)
    chosen = variant_of(variant)
    settings = Settings(chosen.space, thought=chosen.thought)
    return Task(
        name=NAME,
        summary=SUMMARY,
        template=files("vlmrl.tasks.detection").joinpath(chosen.template).read_text(encoding="utf-8"),
        template_file=f"tasks/detection/{chosen.template}",
        variables={"form": FORMS[chosen.space]},
        validate=truth_problems,
        notes=notes_on,
        profiles={
            "default": (REWARD, chosen.args),
            "rllava": ("rllava_boxes", {}),
        },
        outcome=partial(measure, settings),
        outcome_as=partial(measure_as, settings),
        set_metrics=AccumulatedMetrics(partial(examine, settings), accumulate_all, reflected=SHARE),
        metrics={**MEASURES, **{name: Metric("higher", SHARE) for name in NAMES}},
        by=("category", "count"),
        trace=partial(write_trace, settings),
        trace_sees=True,
        positions=partial(positions_as, settings, REWARD, read_answer),
        kind=boxes_kind(settings),
        variant=chosen.name,
        variants=VARIANTS,
    )


def measure_as(settings: Settings, spec: RewardSpec | None) -> Measure:
    """Return `measure` for responses that a reward has scored: it reads the boxes in the space of this reward."""
    return partial(measure, settings_as(settings, REWARD, spec))


def measure(settings: Settings, x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer; a box is right from an IoU of 0.5.

    Returns: accuracy (each object has a right box, and no other box is stated), quality (panoptic quality), box_f1;
        box_brier: mean over the stated boxes of (confidence - right)^2, None without boxes; absent_accuracy: the answer
        states that there is no object, None where there is one; parse_failure: neither boxes nor that statement.
    """
    if not x.truth:
        return dict.fromkeys(("accuracy", *MEASURES))
    answer = read_answer(x, settings)
    matches = answer.matches()
    right, stated, there = len(matches), len(answer.detections), len(answer.truths)
    taken = {one.answer for one in matches}
    losses = [(one.confidence - (i in taken)) ** 2 for i, one in enumerate(answer.detections)]
    return {
        "accuracy": float(is_exact(answer, matches)),
        "quality": quality(answer, matches),
        "box_f1": 2 * right / (stated + there) if there else float(answer.is_none),
        "box_brier": fmean(losses) if losses else None,
        "absent_accuracy": None if there else float(answer.is_none),
        "parse_failure": float(not answer.says_something),
    }


def examine(settings: Settings, verdict: Verdict) -> Matched | None:
    """Return the boxes of a response, matched for the average precision; None for a row without a truth.

    Boxes that the reward has read are not read again: the recipe may have changed the space in which it reads.
    """
    from vlmrl.tasks.detection.average_precision import match

    x, score, _ = verdict
    if not x.truth:
        return None
    category = str(x.truth.get("category"))
    detail = score.detail.get(REWARD) if score.detail else None
    if isinstance(detail, Mapping) and "confidences" in detail:
        _, truths = true_boxes(x.truth)
        pairs = zip(detail["boxes"], detail["confidences"], strict=True)
        return match(category, [Detection(Box(*box), confidence) for box, confidence in pairs], truths)
    answer = read_answer(x, settings)
    return match(category, answer.detections, answer.truths)


def accumulate_all(results: Sequence[Matched | None]) -> Callable[[NDArray[np.int64]], Mapping[str, float | None]]:
    """Return `average_precision.accumulate`; numpy is loaded here."""
    from vlmrl.tasks.detection.average_precision import accumulate

    return accumulate(results)


def write_trace(settings: Settings, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]) -> str:
    """Return a right response in the form of the variant. `seen_sizes`: of the row's images, as the model sees them."""
    plane, boxes = true_boxes(row.truth)
    target = settings.plane_of_trace(row, seen_sizes)
    text = write_answer([Detection(convert(box, plane, target), SURE) for box in boxes], target)
    return settings.form(text, thought=f"I count {len(boxes)}.")
