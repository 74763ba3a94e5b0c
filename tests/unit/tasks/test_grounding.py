"""The task grounding: its reward by hand in each space, its measures, drawn rows, rows of published tables."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shape_regions import extent_of, regions
from task_tables import picture_table, prepare, rows_of, sizes_of

from vlmrl.errors import DataError, RewardError, VlmrlError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import UNSCORED, combine
from vlmrl.rewards.boxes.planes import SPACES
from vlmrl.tasks import kind_of
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.perception.reward import box_iou
from vlmrl.tasks.perception.rows import FRAME, SINGLE, USUAL, Drawing, drawn_rows
from vlmrl.tasks.perception.task import grounding_task
from vlmrl.tasks.perception.truth import VARIANTS
from vlmrl.tasks.source import open_source
from vlmrl.types import Media, RewardInput

TRUTH = {"box": [64.0, 48.0, 192.0, 144.0], "space": "pixels", "width": 640, "height": 480}
"""In 0 to 1000: [100, 100, 300, 300]."""
GOOD = "<think>I see it.</think><answer>{}</answer>"


def scored(response: str, truth: Any = None, finish: Any = "stop", seen: Any = (), **args: Any) -> dict[str, Any]:
    spec = box_iou(**{"space": "thousand", **args})
    x = RewardInput(response, truth or TRUTH, finish=finish, seen_sizes=seen)
    return dict(spec.fn(x))  # type: ignore[arg-type]


# (answer, IoU, format, accuracy, centre, words of the note)
SCORED = [
    ("[100, 100, 300, 300]", 1, 1, 1, 1, ""),
    ("(100,100),(300,300)", 1, 1, 1, 1, ""),
    ('```json\n{"bbox_2d": [100, 100, 300, 300], "label": "cat"}\n```', 1, 1, 1, 1, ""),
    ("[300, 300, 100, 100]", 1, 1, 1, 1, "reverse order"),
    ("[100, 100, 200, 300]", 0.5, 1, 1, 1, ""),  # half of it
    ("[200, 100, 400, 300]", 1 / 3, 1, 0, 1, ""),  # shared 1, union 3; the centre (300, 200) is on the edge
    ("[201, 100, 401, 300]", 99 / 301, 1, 0, 0, ""),
    ("[0, 0, 1000, 1000]", 0.04, 1, 0, 0, ""),  # the whole image: 200 x 200 of 1000 x 1000
    ("[-500, -500, 9000, 9000]", 0.04, 1, 0, 0, "cut at the edge"),
    ("[600, 600, 700, 700]", 0, 1, 0, 0, ""),
    ("[0.1, 0.1, 0.3, 0.3]", 0, 1, 0, 0, ""),  # shares, in the wrong space
    ("[64, 48, 192, 144]", 4048 / 48240, 1, 0, 0, ""),  # pixels in the wrong space: 92 x 44 of 128 x 96 + 40,000 shared
    ("[2000, 2000, 2100, 2100]", 0, 0, 0, 0, "outside of the image"),
    ("[100, 100, 100, 300]", 0, 0, 0, 0, "without area"),
    ("[100, 100, 300, 300] or [1, 1, 2, 2]", 0, 0, 0, 0, "2 boxes"),
    ("[nan, 100, 300, 300]", 0, 0, 0, 0, "not a number"),
    ("there", 0, 0, 0, 0, "no box"),
    ("", 0, 0, 0, 0, "no box"),
]


@pytest.mark.parametrize(("answer", "overlap", "form", "accuracy", "centre", "note"), SCORED)
def test_the_reward_by_hand(
    answer: str, overlap: float, form: float, accuracy: float, centre: float, note: str
) -> None:
    parts = scored(GOOD.format(answer))
    assert parts["iou"] == pytest.approx(overlap, abs=1e-12)
    assert (parts["format"], parts["accuracy"], parts["centre"]) == (form, accuracy, centre)
    assert note in parts["note"] and bool(note) == bool(parts["note"])


@pytest.mark.parametrize(
    ("response", "overlap", "form"),
    [
        ("[100, 100, 300, 300]", 0, 0),
        ("<", 0, 0),
        ("<|object_ref_start|>a<|object_ref_end|><|box_start|>(100,100),(300,300)<|box_end|>", 0, 0),
        ("<think>[100, 100, 300, 300]</think><answer>[1, 1, 2, 2]</answer>", 0, 1),
        ("<think>[100, 100, 300, 300]</think>", 0, 0),
        (GOOD.format("[100, 100, 300, 300]") + GOOD.format("[1, 1, 2, 2]"), 0, 0),
        ("<answer>[100, 100, 300, 300]</answer>", 1, 0),
        ("<think><answer>[100, 100, 300, 300]</answer></think>", 0, 0),
        (GOOD.format("[100, 100, 300, 300] or [0, 0, 0, 0]"), 0, 0),
        ("<think> </think><answer>[100, 100, 300, 300]</answer>", 1, 0),
        ("so " + GOOD.format("[100, 100, 300, 300]"), 1, 0),
        (GOOD.format("[100, 100, 300, 300]") + "!", 1, 0),
    ],
)
def test_only_the_answer_counts_and_only_the_whole_form_is_the_form(response: str, overlap: float, form: float) -> None:
    parts = scored(response)
    assert (parts["iou"], parts["format"]) == (overlap, form)


def test_settings_of_the_reward() -> None:
    half = GOOD.format("[100, 100, 200, 300]")
    assert scored(half, power=2.0)["iou"] == 0.25
    assert scored(half, least=0.6)["iou"] == 0.0
    assert scored(half, finish="length")["format"] == 0.0
    assert scored("<answer>[100, 100, 300, 300]</answer>", thought="optional")["format"] == 1.0
    assert scored("It is at [100, 100, 300, 300].", thought="optional", place="response")["format"] == 1.0
    assert scored("<think>a</think>[100, 100, 300, 300]", place="response")["format"] == 1.0
    assert scored("so <think>a</think>[100, 100, 300, 300]", place="response")["format"] == 0.0
    assert scored("It is at [100, 100, 300, 300].", place="response") | {"note": ""} == {
        "iou": 1.0, "format": 0.0, "accuracy": 1.0, "centre": 1.0, "note": "",
        "detail": {"box": [64.0, 48.0, 192.0, 144.0], "iou": 1.0},
    }  # fmt: skip
    assert scored(GOOD.format("[100, 100, 200, 200]"), order="xywh")["iou"] == 1.0
    for wrong in ({"space": "px"}, {"order": "xxyy"}, {"place": "end"}, {"thought": "no"}, {"least": 2}, {"power": 0}):
        with pytest.raises(RewardError):
            box_iou(**{"space": "thousand", **wrong})


@pytest.mark.parametrize(
    ("space", "answer"),
    [
        ("pixels", "[64, 48, 192, 144]"),
        ("seen", "[32, 24, 96, 72]"),
        ("thousand", "[100, 100, 300, 300]"),
        ("unit", "[0.1, 0.1, 0.3, 0.3]"),
    ],
)
def test_the_same_box_in_each_space_and_in_no_other(space: str, answer: str) -> None:
    for other in ("pixels", "seen", "thousand", "unit"):
        overlap = scored(GOOD.format(answer), space=other, seen=((320, 240),))["iou"]
        assert overlap == pytest.approx(1.0) if other == space else overlap < 0.6


def test_an_unknown_seen_size_is_an_error_and_no_score_of_0() -> None:
    with pytest.raises(RewardError, match="space `seen` needs it"):
        scored(GOOD.format("[1, 1, 9, 9]"), space="seen")
    assert scored("no answer", space="seen")["iou"] == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"box": None},
        {"box": "__import__('os').system('true')"},
        {"box": [1, 2, 3]},
        {"box": [5, 5, 5, 5]},
        {"box": [1, 2, float("nan"), 4]},
        {"box": [1, 2, True, 4]},
        {"space": "seen"},
        {"space": None},
        {"width": 0},
        {"height": None},
    ],
)
def test_a_row_without_a_true_box_is_an_error_and_no_score_of_0(change: dict[str, Any]) -> None:
    assert grounding_task({}).validate({**TRUTH, **change})
    with pytest.raises(RewardError):
        scored(GOOD.format("[1, 2, 3, 4]"), {**TRUTH, **change})


@given(st.text(alphabet="[](){}<>/,;: .-0123456789aenwsrthik", max_size=80))
def test_the_reward_is_bounded(text: str) -> None:
    for response in (text, GOOD.format(text), f"<answer>[{text}]</answer>"):
        parts = scored(response)
        value, _ = combine(
            {k: v for k, v in parts.items() if k not in ("note", "detail")}, box_iou(space="unit").weights
        )
        assert 0 <= value <= 1


def test_measures_by_hand() -> None:
    task = grounding_task({})

    def measures(answer: str, **more: Any) -> dict[str, Any]:
        return dict(task.outcome(RewardInput(GOOD.format(answer), TRUTH, **more), UNSCORED))

    assert measures("[200, 100, 400, 300]") == {
        "accuracy": 0.0, "iou": pytest.approx(1 / 3), "acc@0.1": 1.0, "acc@0.3": 1.0, "acc@0.5": 0.0, "acc@0.75": 0.0,
        "acc@0.95": 0.0, "centre_accuracy": 1.0, "parse_failure": 0.0,
    }  # fmt: skip
    assert measures("[100, 100, 200, 300]")["acc@0.5"] == measures("[100, 100, 200, 300]")["accuracy"] == 1.0
    nothing = measures("there")
    assert nothing["parse_failure"] == 1.0 and sum(nothing.values()) == 1.0
    assert set(task.measured({})) == set(nothing)
    of_response = task.outcome_as and task.outcome_as(
        load_reward("box_iou", args={"space": "unit", "place": "response"})
    )
    assert of_response is not None
    assert of_response(RewardInput("[0.1, 0.1, 0.3, 0.3]", TRUTH), UNSCORED)["iou"] == pytest.approx(1.0)


@pytest.mark.parametrize("space", [space for space in SPACES if space != "seen"])
def test_no_trick_earns_more_than_a_guess(space: str) -> None:
    task = grounding_task({}, f"{space}_direct")
    name, args = task.profile("default")
    spec = load_reward(str(name), args=dict(args))
    truths = [{**TRUTH, "box": [40.0 * i, 30.0 * i, 40.0 * i + 90, 30.0 * i + 120]} for i in range(6)]
    assert task.kind is not None and task.kind.probe is not None
    found = probe_reward(spec, spec.weights, [RewardInput("", truth) for truth in truths], probe=task.kind.probe)
    assert found["honest"]["informed"] > 0.9
    assert [p["name"] for p in found["probes"] if p["flagged"]] == [] and found["flagged"] == 0


def described(expression: str, shapes: list[tuple[str, str, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Boxes of the shapes that an expression describes, by its words alone."""
    words = expression.split()
    superlatives: dict[str, Any] = {
        "largest": lambda b: b[0] - b[2], "smallest": lambda b: b[2] - b[0], "leftmost": lambda b: b[0] + b[2],
        "rightmost": lambda b: -b[0] - b[2], "topmost": lambda b: b[1] + b[3], "bottommost": lambda b: -b[1] - b[3],
    }  # fmt: skip

    def named(colour: str, kind: str) -> list[tuple[int, ...]]:
        return [box for c, k, box in shapes if (c, k) == (colour, kind)]

    if words[1] in superlatives:
        boxes = sorted(named(words[2], words[3]), key=superlatives[words[1]])
        return boxes[:1] if len(boxes) > 1 else []
    boxes = named(words[1], words[2])
    if len(words) == 3:
        return boxes
    (anchor,) = named(words[-2], words[-1])
    beside: dict[str, Any] = {
        "left": lambda b: b[0] + b[2] < anchor[0] + anchor[2], "right": lambda b: b[0] + b[2] > anchor[0] + anchor[2],
        "above": lambda b: b[1] + b[3] < anchor[1] + anchor[3], "below": lambda b: b[1] + b[3] > anchor[1] + anchor[3],
    }  # fmt: skip
    return [box for box in boxes if beside[next(word for word in words if word in beside)](box)]


def test_an_expression_describes_exactly_the_shape_in_the_true_box() -> None:
    rows = drawn_rows("grounding", Drawing(224, 3, USUAL), 5, {"train": 80})["train"]
    assert [row.truth["asks"] for row in rows[:4]] == list(USUAL)
    for row in rows:
        shapes = regions(Image.open(io.BytesIO(row.images[0])))
        assert described(row.columns["expression"], shapes) == [tuple(row.truth["box"])], row.columns
    again = drawn_rows("grounding", Drawing(224, 3, USUAL), 5, {"train": 80})["train"]
    assert [row.images for row in rows] == [row.images for row in again]
    assert len({row.images[0] for row in rows}) == 80


def test_a_single_shape_lies_alone_within_a_frame_that_it_does_not_touch() -> None:
    rows = drawn_rows("grounding", Drawing(84, 3, (SINGLE,)), 5, {"train": 40, "test": 20})
    for row in (row for split in rows.values() for row in split):
        image = Image.open(io.BytesIO(row.images[0]))
        (shape,) = regions(image)
        x1, y1, x2, y2 = row.truth["box"]
        assert shape[2] == (x1, y1, x2, y2) and row.columns["expression"] == f"the {shape[0]} {shape[1]}"
        assert 16 <= x2 - x1 == y2 - y1 <= 39  # 0.2 and 0.45 of 84 are 16.8 and 37.8; widths are odd
        assert min(x1, y1) >= 2 and max(x2, y2) <= 82
        framed = (np.asarray(image) == FRAME).all(axis=2)
        assert framed.sum() == 84**2 - 80**2 and not framed[2:82, 2:82].any()
    assert len({row.images[0] for split in rows.values() for row in split}) == 60


def test_single_shapes_are_drawn_only_where_they_are_asked_for(tmp_path: Path) -> None:
    drawn = prepare("grounding", tmp_path, synthetic=20, side=168, asks="single, look").info
    assert drawn["args"]["asks"] == ["single", "look"]
    assert SINGLE not in USUAL
    with pytest.raises(DataError, match="--asks names `alone`"):
        prepare("grounding", tmp_path, synthetic=20, asks="alone")


def test_a_drawn_dataset_is_sound_and_its_traces_earn_nearly_everything(tmp_path: Path) -> None:
    made = prepare("grounding", tmp_path, synthetic=20, side=168)
    assert sizes_of(made.info) == {"train": 20, "validation": 20, "test": 40}
    for variant in VARIANTS:
        source = open_source(Data(path=str(made.path), variant=variant), Reward())
        row = source.rows[0]
        (message,) = source.messages(row)
        assert str(row.columns["expression"]) in message.content and message.content.count("<image>") == 1
        seen = ((84, 84),)  # half of the stored 168: in `seen`, a coordinate is rounded to 1 / 84 of the image
        least = 0.85 if variant.startswith("seen") else 0.93  # the others: to 1 / 168 or less
        for row in [source.rows[i] for i in range(8)]:
            text = source.task.correct_response(row, random.Random(0), seen)
            parts = source.reward(RewardInput(text, row.truth, media=row.media, seen_sizes=seen))
            assert parts["format"] == 1.0 and (parts["iou"] or 0) > least
    assert kind_of(row.truth).probe is not None


@pytest.mark.parametrize(
    ("fields", "options", "box", "space"),
    [
        ({"solution": [64, 48, 192, 144]}, {"truth_space": "pixels"}, [64, 48, 192, 144], "pixels"),
        ({"solution": [100, 100, 300, 300]}, {"truth_space": "thousand"}, [100, 100, 300, 300], "thousand"),
        (
            {"solution": [64, 48, 192, 144], "normalized_solution": [100, 100, 300, 300]},
            {},
            [100, 100, 300, 300],
            "thousand",
        ),
        ({"solution": "[64, 48, 192, 144]"}, {"truth_space": "pixels"}, [64, 48, 192, 144], "pixels"),
        (
            {"solution": "<answer>[[64, 48, 192, 144]]</answer>"},
            {"truth_space": "pixels"},
            [64, 48, 192, 144],
            "pixels",
        ),
        ({"bbox": [64, 48, 128, 96]}, {"truth_space": "pixels", "box_order": "xywh"}, [64, 48, 192, 144], "pixels"),
        ({"bbox": [0.1, 0.1, 0.3, 0.3]}, {"truth_space": "unit"}, [0.1, 0.1, 0.3, 0.3], "unit"),
        ({"bbox": [64, 48, 640.9, 144]}, {"truth_space": "pixels"}, [64, 48, 640, 144], "pixels"),
    ],
)
def test_rows_of_published_tables(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], box: list[float], space: str
) -> None:
    source = picture_table(tmp_path, [{"problem": "the cat", **fields}])
    (row,) = rows_of(prepare("grounding", tmp_path, source, validation_rows=0, **options))
    assert row.columns["expression"] == "the cat"
    assert row.truth == {"box": box, "space": space, "width": 640, "height": 480, "asks": None}


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"solution": [64, 48, 192, 144]}, {}, "give --truth-space"),
        ({"solution": [100, 100, 900, 900]}, {"truth_space": "pixels"}, "cut at the edge of the image"),
        ({"solution": [64, 48, 192, 144]}, {"truth_space": "unit"}, "a box outside of the image (1.01 x 1.01"),
        ({"solution": [192, 144, 64, 48]}, {"truth_space": "pixels"}, "corners in reverse order"),
        ({"solution": [64, 48, 64, 144]}, {"truth_space": "pixels"}, "without area"),
        ({"solution": [[1, 2, 3, 4], [5, 6, 7, 8]]}, {"truth_space": "pixels"}, "2 boxes"),
        ({"solution": None}, {"truth_space": "pixels"}, "no box"),
        ({"solution": "__import__('os').abort()"}, {"truth_space": "pixels"}, "no box"),
        ({"solution": [1, 2, 3, 4], "problem": " <image> "}, {"truth_space": "pixels"}, "not a text"),
    ],
)
def test_a_wrong_row_is_an_error_with_its_place(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    source = picture_table(tmp_path, [{"problem": "the cat", **fields}])
    with pytest.raises(DataError) as error:
        prepare("grounding", tmp_path, source, validation_rows=0, **options)
    assert reason in str(error.value) and "row 0" in error.value.message
    assert not (tmp_path / "out").exists()


def test_boxes_beyond_the_image_are_told_to_be_in_another_space_first(tmp_path: Path) -> None:
    good, bad = ({"problem": "the cat", "solution": box} for box in ([64, 48, 192, 144], [100, 100, 900, 900]))
    with pytest.raises(DataError) as some:
        prepare("grounding", tmp_path, picture_table(tmp_path, [good, bad]), validation_rows=0, truth_space="pixels")
    hint = str(some.value.hint)
    assert hint.startswith("are the boxes in another space (--truth-space) or order (--box-order)?")
    assert hint.endswith("--max-bad 0.5 leaves them out and lists them in dropped.jsonl")
    with pytest.raises(DataError) as every:  # leaving out every row is no way out
        prepare("grounding", tmp_path, picture_table(tmp_path, [bad]), validation_rows=0, truth_space="pixels")
    assert "--truth-space" in str(every.value.hint) and "--max-bad" not in str(every.value.hint)


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    for options in ({"truth_space": "seen"}, {"asks": "colour"}, {"box_order": "xxyy"}):
        with pytest.raises(VlmrlError, match=next(iter(options.values()))):
            prepare("grounding", tmp_path, synthetic=20, **options)


def test_a_stored_image_that_was_shrunk_keeps_its_truth() -> None:
    x = RewardInput(GOOD.format("[32, 24, 96, 72]"), TRUTH, media=(Media("a", 320, 240),))
    assert dict(box_iou(space="pixels").fn(x))["iou"] == pytest.approx(1.0)  # type: ignore[arg-type]


def test_the_picture_of_a_score_has_both_boxes_where_they_were_read() -> None:
    spec = load_reward("box_iou", args={"space": "thousand", "overlay": True})
    assert spec.needs_images
    image = Image.new("RGB", (1280, 960), "white")  # the truth is of 640 x 480; the picture has 512 x 384
    x = RewardInput(GOOD.format("[500, 500, 750, 750]"), TRUTH, images=[image], media=(Media("a", 1280, 960),))
    result: Any = spec.fn(x)
    pixels = np.asarray(result.artifacts["boxes"])
    assert pixels.shape == (384, 512, 3)
    for colour, box in (((0, 170, 60), (51, 38, 154, 115)), ((230, 0, 200), (256, 192, 384, 288))):
        assert extent_of(pixels, colour) == pytest.approx(box, abs=1)
    assert result.parts["iou"] == 0.0 and image.size == (1280, 960)
    nothing: Any = spec.fn(RewardInput("", TRUTH, images=[image]))
    assert (np.asarray(nothing.artifacts["boxes"]) != (230, 0, 200)).any(axis=2).all()
    assert dict(spec.fn(RewardInput("", TRUTH)).parts)["iou"] == 0.0  # type: ignore[union-attr]
    with pytest.raises(RewardError, match="overlay"):
        box_iou(space="unit", overlay=1)  # type: ignore[arg-type]
