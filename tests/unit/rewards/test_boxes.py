"""Boxes in answers: 40 forms that models write, and what is refused, each with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import RewardError
from vlmrl.rewards.boxes.planes import Box, Plane, Space, answer_plane, check_space, convert, iou, plane_of
from vlmrl.rewards.boxes.reading import (
    CUT,
    MOST_CHARS,
    MOST_SHAPES,
    SWAPPED,
    check_order,
    only_box,
    read_boxes,
    tokens_of,
)
from vlmrl.rewards.boxes.writing import write_box
from vlmrl.types import Media, RewardInput

THOUSAND = plane_of("thousand", (640, 480))
LOC = plane_of("loc", (640, 480))
FENCE = "```"

BOX = (10.0, 20.0, 300.0, 400.0)
FORMS = [
    "[10, 20, 300, 400]",
    "[10,20,300,400]",
    "[ 10 , 20 , 300 , 400 ]",
    "[10 20 300 400]",
    "[10; 20; 300; 400]",
    "(10, 20, 300, 400)",
    "{10, 20, 300, 400}",
    "[10.0, 20.0, 300.0, 400.00]",
    "[1e1, 2.0e1, +300, 400.]",
    "[010, 020, 300, 400]",
    "[[10, 20, 300, 400]]",
    "[[10, 20], [300, 400]]",
    "(10,20),(300,400)",
    "(10, 20), (300, 400)",
    "(10,20) (300,400)",
    "((10, 20), (300, 400))",
    "[(10, 20), (300, 400)]",
    "from (10, 20) to (300, 400)",
    "10, 20, 300, 400",
    "10 20 300 400",
    "\n  [10,\n   20,\n   300,\n   400]\n",
    "The red square is at [10, 20, 300, 400].",
    "**[10, 20, 300, 400]**",
    "`[10, 20, 300, 400]`",
    "$\\boxed{[10, 20, 300, 400]}$",
    "bbox = [10, 20, 300, 400]",
    '{"bbox_2d": [10, 20, 300, 400]}',
    '[{"bbox_2d": [10, 20, 300, 400]}]',
    '{"bbox": [[10, 20], [300, 400]]}',
    '{"bbox": "[10, 20, 300, 400]"}',
    '{"bbox_2d": "10,20,300,400"}',
    "{'Position': '10 20 300 400'}",
    '{"bbox_xywh": "10, 20, 290, 380"}',
    "not [1, 2, 3, 4] but [10, 20, 300, 400]",
    "It isn't at (1,2),(3,4), it is at (10,20),(300,400)",
    "I am not sure: [10, 20, 300, 400]",
    '{"id": "1, 2, 3, 4", "bbox": [10, 20, 300, 400]}',
    f'{FENCE}json\n[\n\t{{"bbox_2d": [10, 20, 300, 400]}}\n]\n{FENCE}',
    f'Here it is:\n{FENCE}\n{{"bbox": [10, 20, 300, 400]}}\n{FENCE}\nI hope this helps.',
    "{'Position': [10, 20, 300, 400]}",
    '{"x1": 10, "y1": 20, "x2": 300, "y2": 400}',
    '{"xmin": 10, "ymin": 20, "xmax": 300, "ymax": 400}',
    '{"left": 10, "top": 20, "right": 300, "bottom": 400}',
    '{"x": 10, "y": 20, "width": 290, "height": 380}',
    '{"bbox_xywh": [10, 20, 290, 380]}',
    '{"box_xyxy": [10, 20, 300, 400]}',
    '{"BBOX_YXYX": [20, 10, 400, 300]}',
    '{"bbox_xywh": [[10, 20], [290, 380]]}',
    '{"boxes_xywh": [[10, 20, 290, 380]]}',
    '{"bbox_xywh": "[10, 20, 290, 380]"}',
    '{"box": {"ltwh": [10, 20, 290, 380]}}',
    '{"bbox_cxcywh": [155, 210, 290, 380]}',
    "bbox_xywh = [10, 20, 290, 380]",
    "x1=10, y1=20, x2=300, y2=400",
    "<box>10 20 300 400</box>",
    "<box>[[10, 20, 300, 400]]</box>",
    "<box>(10,20),(300,400)</box>",
    "<|box_start|>(10,20),(300,400)<|box_end|>",
    "<|box_start|>[10, 20, 300, 400]<|box_end|>",
    '["10", "20", "300", "400"]',
    "['10', 20, '300', 400]",
    '{"bbox_2d": ["10", "20", "300", "400"], "label": "7"}',
    '[["10", "20"], ["300", "400"]]',
    '{"bbox": [10, 20, 300, 400], "labels": ["1", "2", "3", "4"], "ids": ["5", "6", "70", "80"]}',
    "[10\uff0c20\uff0c300\uff0c400]",
    "(10\u300120)\uff0c(300\u3001400)",
    '{"bbox_2d"\uff1a[10, 20, 300, 400]}',
    "the cat's box is [10, 20, 300, 400], isn't it [1]?",
]


@pytest.mark.parametrize("text", FORMS)
def test_these_forms_are_the_same_box(text: str) -> None:
    reading = read_boxes(text, THOUSAND)
    assert [tuple(read.shape) for read in reading.shapes] == [BOX], reading
    assert reading.shapes[0].notes == ()
    assert only_box(reading) == (reading.shapes[0], "")


def test_there_are_forty_forms() -> None:
    assert len(set(FORMS)) >= 40


LABELLED = [
    ('{"bbox_2d": [10, 20, 300, 400], "label": "red square"}', "red square", None),
    ('{"label": "red square", "bbox_2d": [10, 20, 300, 400], "score": 0.75}', "red square", 0.75),
    ("[{'Position': [10, 20, 300, 400], 'Confidence': 0.9}]", "", 0.9),
    ('{"name": "bow (weapon)", "box": [10, 20, 300, 400], "confidence": "NaN"}', "bow (weapon)", None),
    ("<ref>red square</ref><box>(10,20),(300,400)</box>", "red square", None),
    (
        "<|object_ref_start|>red square<|object_ref_end|><|box_start|>(10,20),(300,400)<|box_end|>",
        "red square",
        None,
    ),
    ('{"label": "cat", "confidence": -50, "box": {"x1": 10, "y1": 20, "x2": 300, "y2": 400}}', "cat", -50.0),
    ('{"confidence": 1e999, "box": [10, 20, 300, 400]}', "", None),
]


@pytest.mark.parametrize(("text", "label", "confidence"), LABELLED)
def test_labels_and_confidences_belong_to_the_box_of_their_object(
    text: str, label: str, confidence: float | None
) -> None:
    (read,) = read_boxes(text, THOUSAND).shapes
    assert (tuple(read.shape), read.label, read.confidence) == (BOX, label, confidence)


IN_WORDS = [  # each has one box, and another within a text for people
    '{"label": "cat [1, 2, 3, 4]", "bbox_2d": [10, 20, 300, 400]}',
    '{"label": "[1, 2, 3, 4]", "bbox_2d": [10, 20, 300, 400]}',
    "{'bbox': '[10, 20, 300, 400]', 'class_name': '(1, 2), (3, 4)'}",
    '{"labels": ["cat [1, 2, 3, 4]", "[5, 6, 7, 8]"], "bboxes": [[10, 20, 300, 400]]}',
    f'{{"label": "{"long " * 40}[1, 2, 3, 4]", "bbox_2d": [10, 20, 300, 400]}}',
    '{"label": "the \\"cat\\" at [1, 2, 3, 4]", "bbox_2d": [10, 20, 300, 400]}',
    '{"description": "right of [1, 2, 3, 4]", "bbox_2d": [10, 20, 300, 400]}',
    f"<ref>{'long ' * 40}[1, 2, 3, 4]</ref><box>(10,20),(300,400)</box>",
    "<ref>cat [1, 2, 3, 4]</ref><box>(10,20),(300,400)</box>",
    "label: the cat's box is [10, 20, 300, 400], isn't it [1]?",  # an apostrophe is no quote
    '{"object": {"bbox": "[10, 20, 300, 400]"}}',
    '{"bbox_2d": [10, 20, 300, 400], "label": "cat at [1, 2, 3, 4',
]


@pytest.mark.parametrize("text", IN_WORDS)
def test_a_box_within_a_label_is_none(text: str) -> None:
    reading = read_boxes(text, THOUSAND)
    assert [tuple(read.shape) for read in reading.shapes] == [BOX] and reading.unusable == 0


def test_several_objects_keep_their_own_labels_and_a_cut_list_keeps_the_whole_ones() -> None:
    text = '[{"bbox_2d": [0, 0, 10, 10], "label": "a"}, {"bbox_2d": [5, 5, 20, 20], "label": "b"}, {"bbox_2d": [7, 7'
    reading = read_boxes(text, THOUSAND)
    assert [(tuple(read.shape), read.label) for read in reading.shapes] == [
        ((0, 0, 10, 10), "a"),
        ((5, 5, 20, 20), "b"),
    ]
    assert reading.refused == ("a bracket is not closed",)
    assert only_box(reading) == (None, "2 boxes, where one is expected")


@pytest.mark.parametrize("other", ["[0, 0, 0, 0]", "[5, 5, 5, 5]", "[2000, 0, 3000, 9]", "(nan, 1, 2, 3)"])
def test_a_box_that_is_none_beside_a_good_one_leaves_it_open_which_is_meant(other: str) -> None:
    reading = read_boxes(f"[10, 20, 300, 400] or {other}", THOUSAND)
    assert len(reading.shapes) == reading.unusable == 1
    assert only_box(reading) == (None, "2 boxes, where one is expected")
    again = read_boxes('{"bbox_2d": [10, 20, 300, 400], "point_2d": [155, 210]}', THOUSAND)
    assert again.unusable == 0 and only_box(again)[0] is not None, "its centre beside it is no second box"


REFUSED = [
    ("", "no box and no point"),
    ("[100..300,200..500]", "no box and no point"),
    ("[1.2.3, 4, 5]", "no box and no point"),
    ("there is no such object", "no box and no point"),
    ("[10, 20, 300]", "3 numbers, which are not a box"),
    ("[10, 20, 300, 400, 0.9]", "5 numbers, which are not a box"),
    ("[1, 2, 3, 4, 5, 6, 7, 8]", "8 numbers, which are not a box"),
    ("[[1, 2], [3, 4], [5, 6], [7, 8]]", "4 points, not a box"),
    ("(10, 20)", "a point, not a box"),
    ("the cat at (10, 20) and the dog at (30, 40)", "a point, not a box"),
    ("[10, 20, 300, 400", "a bracket is not closed"),
    ("<box>10 20 300 40", "a bracket is not closed"),
    ("[10, 20, 300, 400)", "a bracket `[` is closed by `)`"),
    ("[10, 20, 10, 400]", "a box without area"),
    ("[0, 0, 0, 0]", "a box without area"),
    ("[nan, 20, 300, 400]", "a coordinate is not a number"),
    ("[NaN, NaN, NaN, NaN]", "a coordinate is not a number"),
    ("[Infinity, 20, 300, 400]", "a coordinate is not a number"),
    ("[0, 0, 1e400, 1]", "a coordinate beyond 1,000,000"),
    ("[-1e308, -1e308, 1e308, 1e308]", "a coordinate beyond 1,000,000"),
    (f"[{'9' * 15_000}, 0, 1, 1]", "a coordinate beyond 1,000,000"),
    ("[1200, 0, 1300, 500]", "a box outside of the image (1000 x 1000 in the space `thousand`)"),
    ("[-20, -20, -10, -10]", "a box outside of the image (1000 x 1000 in the space `thousand`)"),
    ('{"x": 10, "y": 20, "width": -290, "height": 380}', "a negative width or height"),
    ("[10%, 20%, 30%, 40%]", "no box and no point"),
    ("not [10, 20, 300, 400]", "a box that is denied"),
    ("It is never in [[10, 20, 300, 400]].", "a box that is denied"),
    ('not {"bbox": [10, 20, 300, 400]}', "a box that is denied"),
    ("not <box>10 20 300 400</box>", "a box that is denied"),
    ("not (10, 20), (300, 400)", "a point, not a box"),
    ('{"bbox": "10, 20, 300"}', "3 numbers, which are not a box"),
    ("[ten, 20, 300, 400]", "no box and no point"),
    ("\uff3b10, 20, 300, 400\uff3d", "no box and no point"),
    ("[\u0661, \u0662, \u0663, \u0664]", "no box and no point"),
    ("10, 20, 300, 400 pixels", "no box and no point"),
    ("<loc0010><loc0020><loc0300><loc0400>", "<loc> tokens belong to the space `loc`, which is not the declared one"),
    ("[" * 15_000, "more than 32 brackets within each other"),
    ("[" * 1_000_000, "a text of more than 20,000 characters"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_what_is_no_box_is_refused_with_its_reason(text: str, reason: str) -> None:
    reading = read_boxes(text, THOUSAND)
    assert (reading.shapes, reading.problem) == ((), reason)
    assert only_box(reading) == (None, reason)


@pytest.mark.parametrize(
    ("text", "box", "notes"),
    [
        ("[300, 400, 10, 20]", BOX, (SWAPPED,)),
        ("(300, 20), (10, 400)", BOX, (SWAPPED,)),
        ("[-10, 20, 300, 4000]", (0, 20, 300, 1000), (CUT,)),
        ("[1e6, 1e6, -1e6, -1e6]", (0, 0, 1000, 1000), (SWAPPED, CUT)),
    ],
)
def test_what_is_mended_is_said(text: str, box: tuple[float, ...], notes: tuple[str, ...]) -> None:
    (read,) = read_boxes(text, THOUSAND).shapes
    assert (tuple(read.shape), read.notes) == (box, notes)


def test_the_same_box_twice_is_one_box_and_two_boxes_are_two() -> None:
    assert len(read_boxes("[1, 2, 3, 4], I repeat: (1, 2), (3, 4)", THOUSAND).shapes) == 1
    assert len(read_boxes("(1,2),(3,4)(5,6),(7,8)", THOUSAND).shapes) == 2
    assert len(read_boxes("[1, 2, 3, 4] or [1, 2, 3, 5]", THOUSAND).shapes) == 2
    assert (
        len(read_boxes("[1, 2, 3, 4] 5 6 7 8", THOUSAND).shapes) == 1
    )  # bare numbers count only without anything else


def test_a_box_means_what_its_space_says() -> None:
    text, stored, seen = "[100, 100, 200, 200]", (640, 480), (320, 240)
    pixels = plane_of("pixels", stored)
    spaces: dict[Space, Box] = {
        "pixels": Box(100, 100, 200, 200),
        "seen": Box(200, 200, 400, 400),
        "thousand": Box(64, 48, 128, 96),
    }
    for space, expected in spaces.items():
        plane = plane_of(space, stored, seen)
        (read,) = read_boxes(text, plane).shapes
        assert convert(read.shape, plane, pixels) == expected
    assert read_boxes(text, plane_of("unit", stored)).problem.startswith("a box outside of the image (1 x 1")
    (read,) = read_boxes("[0.25, 0.5, 0.75, 1]", plane_of("unit", stored)).shapes
    assert convert(read.shape, plane_of("unit", stored), pixels) == (160, 240, 480, 480)
    (read,) = read_boxes("[0.25, 0.5, 0.75, 1]", THOUSAND).shapes  # a tiny box: nothing is concluded from small numbers
    assert tuple(read.shape) == (0.25, 0.5, 0.75, 1.0)


def test_location_tokens_have_y_first_and_1024_bins() -> None:
    (read,) = read_boxes("<loc0256><loc0128><loc0512><loc1023> red square", LOC).shapes
    assert tuple(read.shape) == (128, 256, 1023, 512)
    assert convert(read.shape, LOC, plane_of("pixels", (1024, 512))) == (128, 128, 1023, 256)
    assert (
        read_boxes("<loc0256><loc0128><loc0512>", LOC).problem
        == "3 <loc> tokens in a row, which are not 4 for each box"
    )
    assert read_boxes("[10, 20, 300, 400]", LOC).problem == "numbers, but the declared space `loc` has <loc> tokens"
    two = "<loc0001><loc0002><loc0003><loc0004> a ; <loc0005><loc0006><loc0007><loc0008> b"
    assert [tuple(read.shape) for read in read_boxes(two, LOC).shapes] == [(2, 1, 4, 3), (6, 5, 8, 7)]


def test_the_order_of_the_numbers_is_declared() -> None:
    assert tuple(read_boxes("[20, 10, 400, 300]", THOUSAND, order="yxyx").shapes[0].shape) == BOX
    assert tuple(read_boxes("[10, 20, 290, 380]", THOUSAND, order="xywh").shapes[0].shape) == BOX
    named = '{"x1": 10, "y1": 20, "x2": 300, "y2": 400}'
    assert tuple(read_boxes(named, THOUSAND, order="xywh").shapes[0].shape) == BOX  # names say more than the order
    with pytest.raises(RewardError, match="xyyx"):
        check_order("xyyx")


HOSTILE = [
    "[",
    "]",
    '"',
    "'",
    '"\\',
    "1",
    "1,",
    "(1,2),",
    "<box>",
    "</box>",
    "[]",
    "-",
    "1e",
    "a",
    "{x:1,",
    "<ref>",
    'label:"',
    'label:"\\',
]


@pytest.mark.parametrize("piece", [*HOSTILE, "<loc0001>", "[1,2,3,4]", "{'label': 'x', 'b': [1,2,3,4]},", "\x00", "<"])
def test_hostile_texts_give_a_bounded_result(piece: str) -> None:
    text = piece * (MOST_CHARS // len(piece))
    for reading in (read_boxes(text, THOUSAND), read_boxes(text, LOC)):
        assert len(reading.shapes) <= MOST_SHAPES and len(reading.refused) <= 8
        assert all(len(reason) < 120 for reason in reading.refused)
    assert sum(1 for _ in tokens_of(text)) <= len(text)  # no part of the text is a token twice


def test_many_different_boxes_are_bounded_too() -> None:
    reading = read_boxes(" ".join(f"[{i},0,{i + 1},9]" for i in range(900)), THOUSAND)
    assert len(reading.shapes) == MOST_SHAPES
    assert reading.refused == ("more than 300 boxes or points",)


@given(st.text(alphabet="[](){}<>|/\"'\\,;:=. \n-+019exyab_", max_size=200))
def test_every_text_is_read_to_boxes_within_the_image(text: str) -> None:
    for read in read_boxes(text, THOUSAND).shapes:
        x1, y1, x2, y2 = read.shape
        assert 0 <= x1 < x2 <= 1000 and 0 <= y1 < y2 <= 1000


PLANES = st.builds(
    plane_of,
    st.sampled_from(["pixels", "seen", "thousand", "loc"]),
    st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    st.tuples(st.integers(28, 2000), st.integers(28, 2000)),
)


@given(PLANES, st.data())
def test_a_written_box_is_read_again(plane: Plane, data: st.DataObject) -> None:
    limit_x, limit_y = int(plane.width), int(plane.height)
    if plane.space == "loc":
        limit_x, limit_y = 1023, 1023
    x = sorted(data.draw(st.lists(st.integers(0, limit_x), min_size=2, max_size=2, unique=True)))
    y = sorted(data.draw(st.lists(st.integers(0, limit_y), min_size=2, max_size=2, unique=True)))
    box = Box(x[0], y[0], x[1], y[1])
    (read,) = read_boxes(write_box(box, plane), plane).shapes
    assert read.shape == box


@pytest.mark.parametrize("space", ["pixels", "seen", "thousand", "unit", "loc"])
@given(st.data())
def test_the_answer_to_a_small_box_is_right(space: Space, data: st.DataObject) -> None:
    truth = plane_of("pixels", (4000, 3000))
    x, y = data.draw(st.integers(0, 3998)), data.draw(st.integers(0, 2998))
    box = Box(x, y, x + data.draw(st.integers(1, 2)), y + data.draw(st.integers(1, 2)))
    plane = plane_of(space, (4000, 3000), (1008, 756))
    (read,) = read_boxes(write_box(convert(box, truth, plane), plane), plane).shapes
    written = convert(read.shape, plane, truth)
    assert written.x1 < written.x2 and written.y1 < written.y2
    # one bin of `loc` is 3.9 x 2.9 pixels, and it has no decimals
    assert space == "loc" or iou(written, box) >= 0.75 - 1e-9  # rounding of the conversion


@given(PLANES, PLANES, st.tuples(*[st.floats(0, 1e4)] * 4))
def test_conversion_there_and_back_is_the_same_box(one: Plane, other: Plane, numbers: tuple[float, ...]) -> None:
    box = Box(*numbers)
    assert convert(convert(box, one, other), other, one) == pytest.approx(box, rel=1e-12)
    assert convert(one.whole, one, other) == other.whole


def test_exact_conversions_between_all_spaces() -> None:
    stored, seen = (640, 480), (308, 224)
    same = {
        "pixels": Box(0, 120, 320, 480),
        "seen": Box(0, 56, 154, 224),
        "thousand": Box(0, 250, 500, 1000),
        "unit": Box(0, 0.25, 0.5, 1),
        "loc": Box(0, 256, 512, 1024),
    }
    for one, box in same.items():
        for other, expected in same.items():
            planes = (plane_of(check_space(name), stored, seen) for name in (one, other))
            assert convert(box, *planes) == expected


def test_the_plane_of_a_response_is_that_of_its_image() -> None:
    x = RewardInput("", media=(Media("a", 640, 480), Media("b", 100, 50)), seen_sizes=((308, 224), (56, 28)))
    assert answer_plane(x, "pixels", (1, 1)) == Plane("pixels", 640, 480)
    assert answer_plane(x, "seen", (1, 1), image=1) == Plane("seen", 56, 28)
    assert answer_plane(RewardInput(""), "pixels", (7, 5)) == Plane("pixels", 7, 5)
    with pytest.raises(RewardError, match="the space `seen` needs it"):
        answer_plane(RewardInput(""), "seen", (7, 5))
    with pytest.raises(RewardError, match="thousands"):
        check_space("thousands")
    with pytest.raises(RewardError, match="0 x 5"):
        plane_of("pixels", (0, 5))
