"""The tasks grounding, detection and counting: prompts, truth, reward, measures.

The truth of a row of counting is its `answer`, a whole number; of drawn rows also `asks`, the words that the question
names (all, colour, kind, both). Rows of published tables have None there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vlmrl.metric import SHARE, Metric
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.boxes.planes import Box
from vlmrl.rewards.boxes.writing import FORMS
from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED
from vlmrl.tasks.attack import Attack, Kind, attacks_of
from vlmrl.tasks.base import AccumulatedMetrics, GradedResponse, Outcome, Task, prepared_task
from vlmrl.tasks.perception.answer import NAMES, RIGHT, SURE, Detection, Read, Settings, positions_as, read_answer
from vlmrl.tasks.perception.probe_responses import box_kind, write_boxes
from vlmrl.tasks.perception.reward import (
    BOX_IOU,
    BOX_LIST,
    LARGEST_COUNT,
    GroundingSettings,
    is_exact,
    quality,
    read_count,
    read_grounding_answer,
)
from vlmrl.tasks.perception.truth import (
    BOX,
    BOXES,
    VARIANTS,
    BoxSettings,
    S,
    Variant,
    notes_on_boxes,
    settings_as,
    true_boxes,
    truth_problems,
    variant_of,
)
from vlmrl.types import RewardInput, Row, Score, Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlmrl.tasks.perception.average_precision import Matched


GROUNDING, DETECTION, COUNTING = "grounding", "detection", "counting"
SUMMARIES: Mapping[str, str] = {
    GROUNDING: "the region that a text describes, as one box (made by `vlmrl prep grounding`)",
    DETECTION: "all objects of a category, as boxes with confidences (made by `vlmrl prep detection`)",
    COUNTING: "how many objects of a kind an image shows, as a whole number (made by `vlmrl prep counting`)",
}


def _task(name: str, info: Mapping[str, Any], template: str, **fields: Any) -> Task:
    """Return a task whose prompt is the file `template`; `fields`: its other fields."""
    shown = f"tasks/{name}/{template}"
    return prepared_task(name, SUMMARIES[name], info, f"perception/{name}/{template}", template_file=shown, **fields)


def _box_task(
    name: str,
    info: Mapping[str, Any],
    chosen: Variant,
    settings: S,
    *,
    field: str,
    rewards: tuple[str, str],
    measure: Callable[[S, RewardInput, Score], Outcome],
    read: Read[S],
    thought: str,
    **facts: Any,
) -> Task:
    """Return a task whose answers are boxes.

    Args:
        chosen, settings: the variant, and how its answers are read.
        field: field of the truth with the boxes.
        rewards: the task's own reward, and RLLaVA's.
        measure, read: measures of one answer, and its boxes.
        thought: thought of a right response; `{}` = number of true boxes.
    """
    return _task(
        name,
        info,
        chosen.template,
        variables={"form": FORMS[chosen.space]},
        validate=partial(truth_problems, field),
        notes=partial(notes_on_boxes, field),
        profiles={"default": (rewards[0], chosen.args), "rllava": (rewards[1], {})},
        outcome=partial(measure, settings),
        outcome_as=lambda spec: partial(measure, settings_as(settings, rewards[0], spec)),
        trace=partial(_write_boxes, field, settings, thought),
        trace_sees=True,
        positions=partial(positions_as, settings, rewards[0], read),
        kind=box_kind(field, settings),
        variant=chosen.name,
        variants=VARIANTS,
        **facts,
    )


def _write_boxes(
    field: str, settings: BoxSettings, thought: str, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]
) -> str:
    """Return a right response in the form of the variant. `seen_sizes`: of the row's images, as the model sees them."""
    plane, boxes = true_boxes(row.truth, field)
    detections = [Detection(box, SURE) for box in boxes]
    answer = write_boxes(field, settings, detections, plane, settings.plane_of_trace(row, seen_sizes))
    return settings.form(answer, thought.format(len(boxes)))


THRESHOLDS = (0.1, 0.3, 0.5, 0.75, 0.95)


def grounding_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    chosen = variant_of(variant)
    names = ("iou", "centre_accuracy", *(f"acc@{threshold:g}" for threshold in THRESHOLDS))
    return _box_task(
        GROUNDING,
        info,
        chosen,
        GroundingSettings(chosen.space, thought=chosen.thought),
        field=BOX,
        rewards=(BOX_IOU, "rllava_box"),
        measure=measure_grounding,
        read=read_grounding_answer,
        thought="I see it.",
        metrics=dict.fromkeys(names, Metric("higher", SHARE)),
        by=("asks",),
    )


def measure_grounding(settings: GroundingSettings, x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer.

    Returns: accuracy (IoU of at least 0.5), iou, acc@0.1 to acc@0.95 (IoU of at least that), centre_accuracy (the
        centre of the box is in the true box), parse_failure. An answer without a box has an IoU of 0.
    """
    if not x.truth:
        return dict.fromkeys(_NAMES)
    answer = read_grounding_answer(x, settings)
    return {
        "accuracy": float(answer.iou >= RIGHT),
        "iou": answer.iou,
        **{f"acc@{threshold:g}": float(answer.iou >= threshold) for threshold in THRESHOLDS},
        "centre_accuracy": float(answer.is_centred),
        "parse_failure": float(answer.box is None),
    }


_NAMES = ("accuracy", "iou", *(f"acc@{threshold:g}" for threshold in THRESHOLDS), "centre_accuracy", "parse_failure")


MEASURES: Mapping[str, Metric] = {
    "quality": Metric("higher", SHARE),
    "box_f1": Metric("higher", SHARE),
    "box_brier": Metric("lower", SHARE),
    "absent_accuracy": Metric("higher", SHARE),
    "parse_failure": Metric("lower", SHARE),
}


def detection_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    chosen = variant_of(variant)
    settings = Settings(chosen.space, thought=chosen.thought)
    return _box_task(
        DETECTION,
        info,
        chosen,
        settings,
        field=BOXES,
        rewards=(BOX_LIST, "rllava_boxes"),
        measure=measure_detection,
        read=read_answer,
        thought="I count {}.",
        metrics={**MEASURES, **dict.fromkeys(NAMES, Metric("higher", SHARE))},
        set_metrics=AccumulatedMetrics(partial(examine, settings), accumulate_all, reflected=SHARE),
        by=("category", "count"),
    )


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
        "parse_failure": float(not (answer.is_none or answer.detections)),
    }


def examine(settings: Settings, graded: GradedResponse) -> Matched | None:
    """Return the boxes of a response, matched for the average precision; None for a row without a truth.

    Boxes that the reward has read are not read again: the recipe may have changed the space in which it reads.
    """
    from vlmrl.tasks.perception.average_precision import match

    x, score, _ = graded
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


THINK, DIRECT = "think", "direct"
COUNTING_VARIANTS: Mapping[str, str] = {THINK: REQUIRED, DIRECT: OPTIONAL}
"""Prompt -> whether its reward requires a thought. "direct" asks for the number alone, for small models."""
MOST_ERROR = 100
"""Largest absolute error of one answer that is counted: one absurd number must not decide the mean over all rows."""


def counting_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    chosen = variant or THINK
    return _task(
        COUNTING,
        info,
        f"{chosen}.jinja",
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


TRICKS: Sequence[tuple[str, str, Kind, str]] = (
    ("form without a number", "the whole form, and a word as its answer", "void", "{guess}<answer>many</answer>"),
    ("numbers up to 29", "all numbers from 0 to 29 in the answer", "void", "{guess}<answer>{every}</answer>"),
    ("a range", "an interval as the answer", "void", "{guess}<answer>0-30</answer>"),
    ("right, then wrong", "two answers, the right one first", "broken", "{guess}{right}{other}"),
    ("wrong, then right", "two answers, the right one last", "broken", "{guess}{other}{right}"),
    ("the answer in the thought", "the right number only within the thought", "broken", "<think>It is {n}.</think>"),
    ("one too many", "the right number plus one", "miss", "{guess}{other}"),
)
"""Tricks that earned something from published rewards for counts; see `attacks_of`."""


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks with counts."""

    def pieces(x: RewardInput) -> dict[str, Any]:
        truth = x.truth.get("answer", 0)
        texts = {"n": truth, "right": f"<answer>{truth}</answer>", "other": f"<answer>{int(truth) + 1}</answer>"}
        return {**texts, "guess": "<think>I guess.</think>", "every": " ".join(map(str, range(30)))}

    return attacks_of(TRICKS, pieces)
