"""The tasks grounding, detection and counting: prompts, truth, reward, measures.

The truth of a row of counting is its `answer`, a whole number; of drawn rows also `asks`, the words that the question
names (all, colour, kind, both). Rows of published tables have None there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vlmrl.metric import SHARE, Metric
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import Box, convert
from vlmrl.rewards.boxes.writing import FORMS, write_box
from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED
from vlmrl.tasks.attack import Attack, says
from vlmrl.tasks.base import AccumulatedMetrics, Measure, Outcome, Task, Verdict, require_prepared
from vlmrl.tasks.perception.answer import NAMES, SURE, Detection, Settings, positions_as, read_answer, write_answer
from vlmrl.tasks.perception.probe_responses import boxes_kind, grounding_kind
from vlmrl.tasks.perception.reward import (
    BOX_IOU,
    BOX_LIST,
    LARGEST_COUNT,
    RIGHT_IOU,
    GroundingSettings,
    is_exact,
    quality,
    read_count,
    read_grounding_answer,
)
from vlmrl.tasks.perception.truth import (
    VARIANTS,
    detection_truth_problems,
    grounding_truth_problems,
    notes_on_detection,
    notes_on_grounding,
    settings_as,
    true_box_of,
    true_boxes,
    variant_of,
)
from vlmrl.types import RewardInput, Row, Score, Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlmrl.tasks.perception.average_precision import Matched


GROUNDING = "grounding"
GROUNDING_SUMMARY = "the region that a text describes, as one box (made by `vlmrl prep grounding`)"
THRESHOLDS = (0.1, 0.3, 0.5, 0.75, 0.95)


def grounding_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(GROUNDING, info)
    chosen = variant_of(variant)
    settings = GroundingSettings(chosen.space, thought=chosen.thought)
    return Task(
        name=GROUNDING,
        summary=GROUNDING_SUMMARY,
        template=files("vlmrl.tasks.perception")
        .joinpath("grounding")
        .joinpath(chosen.template)
        .read_text(encoding="utf-8"),
        template_file=f"tasks/grounding/{chosen.template}",
        variables={"form": FORMS[chosen.space]},
        validate=grounding_truth_problems,
        notes=notes_on_grounding,
        profiles={
            "default": (BOX_IOU, chosen.args),
            "rllava": ("rllava_box", {}),
        },
        outcome=partial(measure_grounding, settings),
        outcome_as=partial(measure_grounding_as, settings),
        metrics={
            "iou": Metric("higher", SHARE),
            "centre_accuracy": Metric("higher", SHARE),
            **{f"acc@{threshold:g}": Metric("higher", SHARE) for threshold in THRESHOLDS},
        },
        by=("asks",),
        trace=partial(write_grounding_trace, settings),
        trace_sees=True,
        positions=partial(positions_as, settings, BOX_IOU, read_grounding_answer),
        kind=grounding_kind(settings),
        variant=chosen.name,
        variants=VARIANTS,
    )


def measure_grounding_as(settings: GroundingSettings, spec: RewardSpec | None) -> Measure:
    """Return `measure` for responses that a reward has scored: it reads the box where this reward reads it."""
    return partial(measure_grounding, settings_as(settings, BOX_IOU, spec))


def measure_grounding(settings: GroundingSettings, x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer.

    Returns: accuracy (IoU of at least 0.5), iou, acc@0.1 to acc@0.95 (IoU of at least that), centre_accuracy (the
        centre of the box is in the true box), parse_failure. An answer without a box has an IoU of 0.
    """
    if not x.truth:
        return dict.fromkeys(_NAMES)
    answer = read_grounding_answer(x, settings)
    return {
        "accuracy": float(answer.iou >= RIGHT_IOU),
        "iou": answer.iou,
        **{f"acc@{threshold:g}": float(answer.iou >= threshold) for threshold in THRESHOLDS},
        "centre_accuracy": float(answer.is_centred),
        "parse_failure": float(answer.box is None),
    }


_NAMES = ("accuracy", "iou", *(f"acc@{threshold:g}" for threshold in THRESHOLDS), "centre_accuracy", "parse_failure")


def write_grounding_trace(
    settings: GroundingSettings, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]
) -> str:
    """Return a right response in the form of the variant. `seen_sizes`: of the row's images, as the model sees them."""
    plane, box = true_box_of(row.truth)
    target = settings.plane_of_trace(row, seen_sizes)
    return settings.form(write_box(convert(box, plane, target), target), thought="I see it.")


DETECTION = "detection"
DETECTION_SUMMARY = "all objects of a category, as boxes with confidences (made by `vlmrl prep detection`)"
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
    require_prepared(DETECTION, info)
    chosen = variant_of(variant)
    settings = Settings(chosen.space, thought=chosen.thought)
    return Task(
        name=DETECTION,
        summary=DETECTION_SUMMARY,
        template=files("vlmrl.tasks.perception")
        .joinpath("detection")
        .joinpath(chosen.template)
        .read_text(encoding="utf-8"),
        template_file=f"tasks/detection/{chosen.template}",
        variables={"form": FORMS[chosen.space]},
        validate=detection_truth_problems,
        notes=notes_on_detection,
        profiles={
            "default": (BOX_LIST, chosen.args),
            "rllava": ("rllava_boxes", {}),
        },
        outcome=partial(measure_detection, settings),
        outcome_as=partial(measure_detection_as, settings),
        set_metrics=AccumulatedMetrics(partial(examine, settings), accumulate_all, reflected=SHARE),
        metrics={**MEASURES, **{name: Metric("higher", SHARE) for name in NAMES}},
        by=("category", "count"),
        trace=partial(write_detection_trace, settings),
        trace_sees=True,
        positions=partial(positions_as, settings, BOX_LIST, read_answer),
        kind=boxes_kind(settings),
        variant=chosen.name,
        variants=VARIANTS,
    )


def measure_detection_as(settings: Settings, spec: RewardSpec | None) -> Measure:
    """Return `measure` for responses that a reward has scored: it reads the boxes in the space of this reward."""
    return partial(measure_detection, settings_as(settings, BOX_LIST, spec))


def measure_detection(settings: Settings, x: RewardInput, score: Score) -> Outcome:
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
    from vlmrl.tasks.perception.average_precision import match

    x, score, _ = verdict
    if not x.truth:
        return None
    category = str(x.truth.get("category"))
    detail = score.detail.get(BOX_LIST) if score.detail else None
    if isinstance(detail, Mapping) and "confidences" in detail:
        _, truths = true_boxes(x.truth)
        pairs = zip(detail["boxes"], detail["confidences"], strict=True)
        return match(category, [Detection(Box(*box), confidence) for box, confidence in pairs], truths)
    answer = read_answer(x, settings)
    return match(category, answer.detections, answer.truths)


def accumulate_all(results: Sequence[Matched | None]) -> Callable[[NDArray[np.int64]], Mapping[str, float | None]]:
    """Return `average_precision.accumulate`; numpy is loaded here."""
    from vlmrl.tasks.perception.average_precision import accumulate

    return accumulate(results)


def write_detection_trace(settings: Settings, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]) -> str:
    """Return a right response in the form of the variant. `seen_sizes`: of the row's images, as the model sees them."""
    plane, boxes = true_boxes(row.truth)
    target = settings.plane_of_trace(row, seen_sizes)
    text = write_answer([Detection(convert(box, plane, target), SURE) for box in boxes], target)
    return settings.form(text, thought=f"I count {len(boxes)}.")


COUNTING = "counting"
COUNTING_SUMMARY = "how many objects of a kind an image shows, as a whole number (made by `vlmrl prep counting`)"
THINK, DIRECT = "think", "direct"
COUNTING_VARIANTS: Mapping[str, str] = {THINK: REQUIRED, DIRECT: OPTIONAL}
"""Prompt -> whether its reward requires a thought. "direct" asks for the number alone, for small models."""
MOST_ERROR = 100
"""Largest absolute error of one answer that is counted: one absurd number must not decide the mean over all rows."""


def counting_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(COUNTING, info)
    chosen = variant or THINK
    return Task(
        name=COUNTING,
        summary=COUNTING_SUMMARY,
        template=files("vlmrl.tasks.perception")
        .joinpath("counting")
        .joinpath(f"{chosen}.jinja")
        .read_text(encoding="utf-8"),
        template_file=f"tasks/counting/{chosen}.jinja",
        validate=counting_truth_problems,
        profiles={"default": ("count", {"thought": COUNTING_VARIANTS[chosen]}), "rllava": ("rllava_count", {})},
        outcome=measure_counting,
        metrics={
            "absolute_error": Metric("lower", (0.0, float(MOST_ERROR))),
            "bias": Metric("neither", (-float(MOST_ERROR), float(MOST_ERROR))),
            "parse_failure": Metric("lower", SHARE),
        },
        by=("answer", "asks"),
        trace=partial(write_counting_trace, chosen),
        attacks=attacks,
        variant=chosen,
        variants=tuple(COUNTING_VARIANTS),
    )


def counting_truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    answer = truth.get("answer")
    if type(answer) is int and 0 <= answer <= LARGEST_COUNT:
        return []
    return [f"`answer` is {quoted(answer, 60)}, not a whole number from 0 to {LARGEST_COUNT:,}"]


def measure_counting(x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer, the same with every reward.

    Returns: accuracy; absolute_error, at most 100, where an answer without a number counts like the answer 0 (at least
        1); bias: answer minus truth, None without a number; parse_failure.
    """
    truth = x.truth.get("answer", 0)
    answer, _ = read_count(x.response)
    if answer is None:
        lost = float(min(MOST_ERROR, max(1, truth)))
        return {"accuracy": 0.0, "absolute_error": lost, "bias": None, "parse_failure": 1.0}
    error = max(-MOST_ERROR, min(MOST_ERROR, answer - truth))
    return {
        "accuracy": float(answer == truth),
        "absolute_error": float(abs(error)),
        "bias": float(error),
        "parse_failure": 0.0,
    }


def write_counting_trace(variant: str, row: Row, rng: random.Random) -> str:
    """Return a right response in the form of the variant."""
    answer = f"<answer>{row.truth['answer']}</answer>"
    return answer if variant == DIRECT else f"<think>I count {row.truth['answer']}.</think>{answer}"


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks that earned something from published rewards for counts."""
    form = "<think>I guess.</think><answer>{}</answer>"
    every = " ".join(str(number) for number in range(30))

    def other(x: RewardInput) -> int:
        return int(x.truth.get("answer", 0)) + 1

    return [
        Attack("form without a number", "the whole form, and a word as its answer", "void", says(form.format("many"))),
        Attack("numbers up to 29", "all numbers from 0 to 29 in the answer", "void", says(form.format(every))),
        Attack("a range", "an interval as the answer", "void", says(form.format("0-30"))),
        Attack(
            "right, then wrong",
            "two answers, the right one first",
            "broken",
            lambda x: f"{form.format(x.truth.get('answer', 0))}<answer>{other(x)}</answer>",
        ),
        Attack(
            "wrong, then right",
            "two answers, the right one last",
            "broken",
            lambda x: f"{form.format(other(x))}<answer>{x.truth.get('answer', 0)}</answer>",
        ),
        Attack(
            "the answer in the thought",
            "the right number only within the thought",
            "broken",
            lambda x: f"<think>It is {x.truth.get('answer', 0)}.</think>",
        ),
        Attack("one too many", "the right number plus one", "miss", lambda x: form.format(other(x))),
    ]
