"""The task detection: its reward by hand, the exploits of published rewards, its measures, the probe."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shape_regions import extent_of

from vlmrl.errors import RewardError
from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import UNSCORED, combine
from vlmrl.rewards.boxes.planes import SPACES, Box, Plane
from vlmrl.rewards.boxes.reading import Coordinates
from vlmrl.tasks import kind_of
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.perception.answer import Detection, Settings, read_answer, write_answer
from vlmrl.tasks.perception.probe_responses import saved_marks
from vlmrl.tasks.perception.reward import box_list
from vlmrl.tasks.perception.task import detection_task
from vlmrl.tasks.perception.truth import VARIANTS, make_detection_truth
from vlmrl.tasks.positions import Mark
from vlmrl.types import Media, RewardInput, Row, Score

CATS = make_detection_truth([[64.0, 48.0, 192.0, 144.0], [320.0, 240.0, 448.0, 432.0]], "pixels", 640, 480, "cat")
"""In 0 to 1000: [100, 100, 300, 300] and [500, 500, 700, 900]."""
NO_CATS = make_detection_truth([], "pixels", 640, 480, "cat")
GOOD = "<think>I see it.</think><answer>{}</answer>"
FIRST, SECOND, ELSEWHERE = [100, 100, 300, 300], [500, 500, 700, 900], [900, 900, 950, 950]


def entry(box: Any, confidence: Any = 1.0) -> str:
    return f'{{"bbox_2d": {box}, "confidence": {confidence}}}'


def scored(response: str, truth: Any = None, finish: Any = "stop", seen: Any = (), **args: Any) -> dict[str, Any]:
    spec = box_list(**{"space": "thousand", **args})
    x = RewardInput(response, CATS if truth is None else truth, finish=finish, seen_sizes=seen)
    return dict(spec.fn(x))  # type: ignore[arg-type]


def value(parts: Any) -> float:
    spec = box_list(space="thousand")
    return combine({name: parts[name] for name in spec.ranges}, spec.weights)[0]


BOTH = f"[{entry(FIRST)}, {entry(SECOND)}]"
# (answer, detection, confidence, format, accuracy, words of the note); two objects
SCORED = [
    (BOTH, 1, 1, 1, 1, ""),
    (f"[{entry(SECOND)},\n{entry(FIRST)}]", 1, 1, 1, 1, ""),
    (f"```json\n{BOTH}\n```", 1, 1, 1, 1, ""),
    ("[{'Position': [100, 100, 300, 300], 'Confidence': 1}, {'Position': [500, 500, 700, 900], 'Confidence': 1}]",
     1, 1, 1, 1, ""),
    (BOTH.replace('"bbox_2d"', '"label": "cat", "bbox_2d"'), 1, 1, 1, 1, ""),
    ('[{"score": 1, "box": [100, 100, 300, 300]}, {"box": [500, 500, 700, 900], "label": "a", "score": 1}]',
     1, 1, 1, 1, ""),
    (f'[{entry(FIRST)}, {{"label": "cat", "confidence": 1}}]', 2 / 3, 0, 0, 0, "not only a list"),
    (BOTH.replace("}", ', "colour": "red"}'), 1, 0, 0, 1, "not only a list"),
    (BOTH.replace("}", ', "label": "cat"}'), 1, 1, 1, 1, ""),
    # 0.9: 1 - 0.1^2 / 2 = 0.995
    (f"[{entry(FIRST, 0.9)}, {entry(SECOND, 0.9)}]", 1, 0.995, 1, 1, ""),
    # one of two: 2 * 1 / (1 + 2)
    (f"[{entry(FIRST)}]", 2 / 3, 1, 1, 0, ""),
    # one right and one wrong: 2 * 1 / (2 + 2); (1 + 0) / 2
    (f"[{entry(FIRST)}, {entry(ELSEWHERE)}]", 0.5, 0.5, 1, 0, ""),
    # the wrong one with confidence 0.4: (1 + (1 - 0.16) / 2) / 2
    (f"[{entry(FIRST)}, {entry(ELSEWHERE, 0.4)}]", 0.5, 0.71, 1, 0, ""),
    # half of the first object's box: IoU 0.5 counts; 2 * 1.5 / 4
    (f"[{entry([100, 100, 200, 300])}, {entry(SECOND)}]", 0.75, 1, 1, 1, ""),
    # a little less: it is wrong; 2 * 1 / 4, and (0 + 1) / 2
    (f"[{entry([100, 100, 199, 300])}, {entry(SECOND)}]", 0.5, 0.5, 1, 0, ""),
    # every box twice: 2 * 2 / (4 + 2), and half of the boxes are wrong
    (f"[{entry(FIRST)}, {entry(FIRST)}, {entry(SECOND)}, {entry(SECOND)}]", 2 / 3, 0.5, 1, 0, ""),
    ("[]", 0, 0.5, 1, 0, ""),
    ("No Objects", 0, 0.5, 1, 0, ""),
    (f"[{entry(ELSEWHERE, 0)}]", 0, 0.5, 1, 0, ""),
    (f"[{entry(ELSEWHERE, 0.5)}]", 0, 0.375, 1, 0, ""),
    (f"[{entry(ELSEWHERE)}]", 0, 0, 1, 0, ""),
    (f"[{entry(ELSEWHERE, -50)}]", 0, 0, 0, 0, "without a confidence"),
    (f"[{entry(FIRST, 7)}, {entry(SECOND)}]", 1, 0, 0, 1, "without a confidence"),
    ("[[100, 100, 300, 300], [500, 500, 700, 900]]", 1, 0, 0, 1, "2 boxes without a confidence"),
    (f"There: {BOTH}", 1, 0, 0, 1, "not only a list"),
    (f"{BOTH} No Objects", 1, 0, 0, 1, "not only a list"),
    ("[{'Position': 5, 'Confidence': 1}]", 0, 0, 0, 0, "no box"),
    ("[{'Position': [1, null, 3, 4], 'Confidence': 1}]", 0, 0, 0, 0, "no box"),
    ('["cat", 3, null]', 0, 0, 0, 0, "no box"),
    (f'[{entry(FIRST)}, "cat"]', 2 / 3, 0, 0, 0, "not only a list"),
    (f"[{entry([5, 5, 5, 5])}, {entry(FIRST)}]", 2 / 3, 0, 0, 0, "without area"),
    ("there", 0, 0, 0, 0, "no box"),
    ("", 0, 0, 0, 0, "no box"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "detection", "confidence", "form", "accuracy", "note"), SCORED)
def test_the_reward_by_hand(
    answer: str, detection: float, confidence: float, form: float, accuracy: float, note: str
) -> None:
    parts = scored(GOOD.format(answer))
    assert parts["detection"] == pytest.approx(detection)
    assert parts["confidence"] == pytest.approx(confidence)
    assert (parts["format"], parts["accuracy"]) == (form, accuracy)
    assert note in parts["note"] and bool(note) == bool(parts["note"])


@pytest.mark.parametrize(
    ("answer", "earned"),
    [
        ("[]", 1.0),
        ("[ ]", 1.0),
        ("No Objects", 1.0),
        ("'no objects'", 1.0),
        ("None", 1.0),
        ("There are none.", 1.0),
        ("There is none but this", 0.0),
        ("```json\n[]\n```", 1.0),
        (f"[{entry(ELSEWHERE)}]", 0.0),
        (f"[{entry(ELSEWHERE, 0)}]", 0.1),  # as much as a list that misses everything
        ("[{}]", 0.0),
        ("[[]]", 0.0),
        ("{}", 0.0),
        ("none that I see", 0.0),
        ("", 0.0),
    ],
)
def test_a_row_without_an_object_pays_for_the_empty_list_alone(answer: str, earned: float) -> None:
    assert value(scored(GOOD.format(answer), NO_CATS)) == pytest.approx(earned)


def test_the_order_of_boxes_that_fit_equally_well_has_no_effect() -> None:
    left, right = [100, 100, 280, 300], [120, 100, 300, 300]  # each covers 0.9 of the true box
    for one, other in ((FIRST, FIRST), (left, right)):
        lists = ([entry(one, 1), entry(other, 0)], [entry(other, 0), entry(one, 1)])
        parts = [scored(GOOD.format(f"[{', '.join(entries)}]")) for entries in lists]
        # by hand: the less sure one is right, the loss of both is 1, so ((1 + 1 - 1) + (0 + 1 - 1)) / 2 / 2
        assert [part["confidence"] for part in parts] == [0.25, 0.25]
        assert value(parts[0]) == value(parts[1])


def test_the_truth_earns_everything_however_many_objects_there_are() -> None:
    boxes = [[4.0 * i, 0.0, 4.0 * i + 3.2, 480.0] for i in range(150)]
    truth = make_detection_truth(boxes, "pixels", 640, 480, "cat")
    entries = [entry([6.25 * i, 0, 6.25 * i + 5, 1000]) for i in range(150)]
    assert value(scored(GOOD.format(f"[{', '.join(entries)}]"), truth)) == pytest.approx(1)
    assert value(scored(GOOD.format(f"[{', '.join(entries[:100])}]"), truth)) < 0.9
    one_more = scored(GOOD.format(f"[{', '.join([*entries, entry(ELSEWHERE)])}]"), truth)
    assert one_more["format"] == 0 and "at most 150" in one_more["note"]


def test_many_boxes_are_no_way_to_earn() -> None:
    side = 1000 // 12
    grid = [[x, y, x + side, y + side] for x in range(0, 960, side) for y in range(0, 960, side)]
    flood = scored(GOOD.format(f"[{', '.join(entry(box, 0) for box in grid)}]"))
    assert flood["note"] == "144 boxes; the form has at most 100" and value(flood) < 0.02
    some = scored(GOOD.format(f"[{', '.join(entry(box, 0) for box in grid[:90])}]"))
    assert value(some) == pytest.approx(0.1)  # as much as no box
    hidden = [FIRST, *grid[:90], SECOND]  # 0.8 * 2 * 2 / (92 + 2), 0.2 * (2 * 1 + 0) / (2 * 92)
    found = scored(GOOD.format(f"[{', '.join(entry(box) for box in hidden)}]"))
    assert value(found) < 0.06


@pytest.mark.parametrize(
    ("response", "detection", "form"),
    [
        (BOTH, 0, 0),
        (f"<think>{BOTH}</think><answer>[]</answer>", 0, 1),
        (f"<think>{BOTH}</think>", 0, 0),
        (GOOD.format(BOTH) + GOOD.format("[]"), 0, 0),
        (f"<answer>{BOTH}</answer>", 1, 0),
        (f"<think> </think><answer>{BOTH}</answer>", 1, 0),
        (GOOD.format(BOTH) + "!", 1, 0),
    ],
)
def test_only_the_answer_counts_and_only_the_whole_form_is_the_form(
    response: str, detection: float, form: float
) -> None:
    parts = scored(response)
    assert (parts["detection"], parts["format"]) == (detection, form)


def test_settings_of_the_reward() -> None:
    assert scored(GOOD.format(BOTH), finish="length")["confidence"] == 0.0
    assert scored(f"<answer>{BOTH}</answer>", thought="optional")["format"] == 1.0
    half = GOOD.format(f"[{entry([100, 100, 200, 300])}]")
    assert scored(half)["detection"] == pytest.approx(2 * 0.5 / 3)
    assert scored(half, least=0.6)["detection"] == 0.0
    assert scored(half, least=0.6)["confidence"] == 0.0
    widths = GOOD.format(f"[{entry([100, 100, 200, 200])}, {entry([500, 500, 200, 400])}]")
    assert scored(widths, order="xywh")["accuracy"] == 1.0
    for wrong in ({"space": "px"}, {"order": "xxyy"}, {"thought": "no"}, {"least": 0}, {"overlay": 1}):
        with pytest.raises(RewardError):
            box_list(**{"space": "thousand", **wrong})


@given(st.floats(0, 1), st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=3))
@settings(max_examples=60, deadline=None)
def test_the_confidence_that_earns_most_is_the_chance_that_the_box_is_right(chance: float, more: Any) -> None:
    places = [[100, 100, 200, 200], [300, 100, 400, 200], [500, 100, 600, 200], [700, 100, 800, 200]]

    def expected(confidence: float) -> float:
        """Return the mean value over the chance that the first place has an object; the others are as drawn."""
        others = [place for place, (is_there, _) in zip(places[1:], more, strict=False) if is_there]
        entries = [entry(places[0], f"{confidence:.6f}")]
        entries += [entry(place, f"{sure:.6f}") for place, (_, sure) in zip(places[1:], more, strict=False)]
        response = GOOD.format(f"[{', '.join(entries)}]")
        right, wrong = (
            value(scored(response, make_detection_truth(boxes, "thousand", 640, 480, "cat")))
            for boxes in ([*others, places[0]], [*others, ELSEWHERE])
        )
        return chance * right + (1 - chance) * wrong

    best = expected(chance)
    assert all(expected(other) <= best + 1e-9 for other in (0.0, 0.25, 0.5, 0.75, 1.0))
    if 0.05 < chance < 0.95:
        assert best > max(expected(0.0), expected(1.0))  # strictly: neither extreme is as good


@pytest.mark.parametrize(
    ("space", "answer"),
    [
        ("pixels", "[64, 48, 192, 144]"),
        ("seen", "[32, 24, 96, 72]"),
        ("thousand", "[100, 100, 300, 300]"),
        ("unit", "[0.1, 0.1, 0.3, 0.3]"),
        ("loc", "<loc0102><loc0102><loc0307><loc0307>"),
    ],
)
def test_the_same_box_in_each_space_and_in_no_other(space: str, answer: str) -> None:
    truth = make_detection_truth([[64.0, 48.0, 192.0, 144.0]], "pixels", 640, 480, "cat")
    for other in SPACES:
        parts = scored(GOOD.format(f"[{entry(answer)}]"), truth, space=other, seen=((320, 240),))
        assert parts["accuracy"] == float(other == space), other
        assert parts["format"] == 1.0 or other != space


def test_an_unknown_seen_size_is_an_error_and_no_score_of_0() -> None:
    with pytest.raises(RewardError, match="space `seen` needs it"):
        scored(GOOD.format(BOTH), space="seen")
    assert scored("no answer", space="seen")["detection"] == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"boxes": None},
        {"boxes": "__import__('os').system('true')"},
        {"boxes": [[1, 2, 3]]},
        {"boxes": [[5, 5, 5, 5]]},
        {"boxes": [[1, 2, float("nan"), 4]]},
        {"boxes": [[1, 2, 3, 4]] * 301},
        {"boxes": [5]},
        {"space": "seen"},
        {"space": None},
        {"width": 0},
    ],
)
def test_a_row_without_true_boxes_is_an_error_and_no_score_of_0(change: dict[str, Any]) -> None:
    assert detection_task({}).validate({**CATS, **change})
    with pytest.raises(RewardError):
        scored(GOOD.format(BOTH), {**CATS, **change})


def test_other_mistakes_of_a_truth() -> None:
    validate = detection_task({}).validate
    assert validate(CATS) == validate(NO_CATS) == []
    assert "no box within 640 x 480" in validate({**CATS, "boxes": [[0, 0, 641, 5]]})[0]
    assert "`category` is ''" in validate({**CATS, "category": ""})[0]


@given(st.text(alphabet="[](){}<>/,;:'\"\n .-0123456789aenwsrthikPoCf", max_size=80), st.sampled_from([CATS, NO_CATS]))
def test_the_reward_is_bounded(text: str, truth: Any) -> None:
    for response in (text, GOOD.format(text), GOOD.format(f"[{text}]"), GOOD.format(f"[{entry(f'[{text}]', text)}]")):
        parts = scored(response, truth)
        assert 0 <= value(parts) <= 1
        assert all(0 <= parts[name] <= 1 for name in ("detection", "confidence", "format", "accuracy"))


def test_long_hostile_answers_are_read_at_once() -> None:
    pieces = ("[", "{'bbox_2d':[", "[1,2,3,4],", "}, {", " ", "'", '"', "```", "{'label':'", entry(FIRST) + ",")
    for piece in pieces:
        assert 0 <= value(scored(GOOD.format(piece * (300_000 // len(piece))))) <= 1
        assert 0 <= value(scored(GOOD.format(f"[{piece * (15_000 // len(piece))}]"))) <= 1


def test_measures_by_hand() -> None:
    task = detection_task({})

    def measures(answer: str, truth: Any = CATS) -> dict[str, Any]:
        return dict(task.outcome(RewardInput(GOOD.format(answer), truth), UNSCORED))

    # one right (0.8), one wrong (0.4): ((0.2)^2 + (0.4)^2) / 2 = 0.1
    assert measures(f"[{entry(FIRST, 0.8)}, {entry(ELSEWHERE, 0.4)}]") == {
        "accuracy": 0.0, "quality": 0.5, "box_f1": 0.5, "box_brier": pytest.approx(0.1), "absent_accuracy": None,
        "parse_failure": 0.0,
    }  # fmt: skip
    assert measures(BOTH)["accuracy"] == 1.0
    assert measures("[]", NO_CATS) == {
        "accuracy": 1.0, "quality": 1.0, "box_f1": 1.0, "box_brier": None, "absent_accuracy": 1.0, "parse_failure": 0.0,
    }  # fmt: skip
    assert measures(BOTH, NO_CATS)["absent_accuracy"] == 0.0 and measures(BOTH, NO_CATS)["box_brier"] == 1.0
    assert measures(f"[{FIRST}]")["box_brier"] == 0.0  # a box without a confidence counts as sure
    nothing = measures("there")
    assert nothing["parse_failure"] == 1.0 and nothing["accuracy"] == nothing["quality"] == 0.0
    assert set(task.measured({})) == set(nothing)
    assert task.measured_of_sets(CATS) == task.measured_of_sets({}) == ("map", "ap50", "ap75")
    in_unit = task.outcome_as and task.outcome_as(load_reward("box_list", args={"space": "unit"}))
    assert in_unit is not None
    answer = f"[{entry([0.1, 0.1, 0.3, 0.3])}, {entry([0.5, 0.5, 0.7, 0.9])}]"
    assert in_unit(RewardInput(GOOD.format(answer), CATS), UNSCORED)["accuracy"] == 1.0


def test_the_average_precision_is_of_the_boxes_that_the_reward_has_read() -> None:
    task = detection_task({})
    answer = f"[{entry([0.1, 0.1, 0.3, 0.3])}, {entry([0.5, 0.5, 0.7, 0.9])}]"
    x = RewardInput(GOOD.format(answer), CATS)
    detail = dict(box_list(space="unit").fn(x))["detail"]  # type: ignore[arg-type]
    assert task.set_metrics is not None
    assert task.set_metrics([(x, Score(1.0, {}, detail={"box_list": detail}), {})])["map"] == pytest.approx(1.0)
    assert task.set_metrics([(x, UNSCORED, {})])["map"] == 0.0  # in 0 to 1000, as the task asks for


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trace_earns_everything(variant: str) -> None:
    task = detection_task({}, variant)
    name, args = task.profile("default")
    seen = ((320, 240),)  # half of the image's size
    for truth in (CATS, NO_CATS):
        row = Row("1", "s", "detection", truth, (Media("a", 640, 480),), {"category": "cat"})
        response = task.correct_response(row, random.Random(0), seen)
        x = RewardInput(response, truth, seen_sizes=seen)
        parts = dict(load_reward(str(name), args=dict(args)).fn(x))  # type: ignore[arg-type]
        assert value(parts) > 0.95 and parts["format"] == parts["accuracy"] == 1.0


def test_marks_are_the_true_boxes_and_those_of_the_answer_in_the_space_that_is_asked_for() -> None:
    task = detection_task({}, "thousand")
    spec = load_reward("box_list", args={"space": "thousand"})
    assert task.positions is not None
    x = RewardInput(GOOD.format(f"[{entry(SECOND, 0.25)}]"), CATS)
    truths = [Mark("truth", Box(0.1, 0.1, 0.3, 0.3)), Mark("truth", Box(0.5, 0.5, 0.7, 0.9))]
    read = task.positions(spec)
    thousand, pixels = Coordinates("thousand"), Coordinates("pixels")
    assert read.declared == thousand and {one.space for one in read.others} == set(SPACES)
    stated = Mark("answer", Box(0.5, 0.5, 0.7, 0.9), "0.25")
    assert read.marks(x, thousand) == [*truths, stated]
    assert read.marks(x, pixels) != read.marks(x, thousand)
    assert task.positions(load_reward("box_list", args={"space": "unit"})).declared == Coordinates("unit")
    detail = dict(spec.fn(x))["detail"]  # type: ignore[arg-type]
    assert saved_marks("boxes", CATS, {"box_list": detail}) == [*truths, stated]
    right, none = RewardInput(GOOD.format(BOTH), CATS), RewardInput(GOOD.format("[]"), NO_CATS)
    assert read.fit([right, none]).overlaps[thousand] == 1.0  # a row without objects says nothing of spaces
    assert read.fit([right, RewardInput(GOOD.format(BOTH), NO_CATS)]).overlaps[thousand] == 0.5
    assert read.fit([none]).answers == 0


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        {"box_list": None},
        {"box_list": {"boxes": 5, "confidences": []}},
        {"box_list": {"boxes": [[1]]}},
        {"box_list": {"boxes": [["a", 0, 1, None], [1, 2]], "confidences": [1, 1]}},
    ],
)
def test_a_damaged_detail_has_no_boxes(saved: Any) -> None:
    assert {mark.role for mark in saved_marks("boxes", CATS, saved)} == {"truth"}
    assert saved_marks("boxes", {**CATS, "boxes": 5}, saved) == ()


def test_what_is_written_is_read_again() -> None:
    detections = (Detection(Box(100, 100, 300, 300), 0.25), Detection(Box(500, 500, 700, 900), 1.0))
    text = write_answer(detections, Plane("thousand", 1000, 1000))
    assert text == (
        '[{"Position": [100, 100, 300, 300], "Confidence": 0.25}, '
        '{"Position": [500, 500, 700, 900], "Confidence": 1.00}]'
    )
    truth = {**CATS, "space": "thousand", "boxes": [FIRST]}
    answer = read_answer(RewardInput(GOOD.format(text), truth), Settings("thousand"))
    assert answer.detections == detections and answer.problem == ""
    assert write_answer((), Plane("unit", 1, 1)) == "[]"


@pytest.mark.parametrize("space", [space for space in SPACES if space != "seen"])
def test_no_trick_earns_more_than_a_guess(space: str) -> None:
    task = detection_task({}, f"{space}_direct")
    name, args = task.profile("default")
    spec = load_reward(str(name), args=dict(args))
    truths = [
        make_detection_truth(
            [[40.0 * i, 30.0 * i, 40.0 * i + 90, 30.0 * i + 120], [300, 9, 500, 99]], "pixels", 640, 480, "cat"
        )
        for i in range(6)
    ]
    assert task.kind is not None and task.kind.probe is not None
    inputs = [RewardInput("", truth) for truth in (*truths, NO_CATS)]
    found = probe_reward(spec, spec.weights, inputs, probe=task.kind.probe)
    assert found["honest"]["informed"] > 0.9
    assert [p["name"] for p in found["probes"] if p["flagged"]] == [] and found["flagged"] == 0
    assert {"a box without confidence", "confidence below 0", "each twice", "line breaks"} <= {
        probe["name"] for probe in found["probes"]
    }


def test_the_probe_finds_the_holes_of_the_published_reward() -> None:
    task = detection_task({}, "thousand")
    spec = load_reward("rllava_boxes")
    assert task.kind is not None and task.kind.probe is not None
    inputs = [RewardInput("", {**CATS, "boxes": [[40.0 * i, 30, 40.0 * i + 90, 120]]}) for i in range(6)]
    found = probe_reward(spec, spec.weights, inputs, probe=task.kind.probe)
    verdicts = {probe["name"]: probe["verdict"] for probe in found["probes"]}
    assert verdicts["a box without confidence"] == verdicts["confidence below 0"] == "hole"
    assert verdicts["line breaks"] == "unfair" and verdicts["single quotes"] == ""


def test_the_picture_of_a_score_has_all_boxes() -> None:
    spec = load_reward("box_list", args={"space": "thousand", "overlay": True})
    image = Image.new("RGB", (640, 480), "white")  # drawn at 512 x 384
    x = RewardInput(GOOD.format(f"[{entry(ELSEWHERE)}]"), CATS, images=[image])
    result: Any = spec.fn(x)
    pixels = np.asarray(result.artifacts["boxes"])
    for colour, box in (((0, 170, 60), (51, 38, 358, 346)), ((230, 0, 200), (461, 346, 486, 365))):
        assert extent_of(pixels, colour) == pytest.approx(box, abs=1)
    assert dict(spec.fn(RewardInput("", CATS)).parts)["detection"] == 0.0  # type: ignore[union-attr]


def test_a_truth_has_a_kind_with_or_without_objects() -> None:
    assert kind_of(CATS).probe is not None and kind_of(NO_CATS).probe is not None
