"""IoU, GIoU, centres and matching of boxes, against hand-worked numbers and their laws."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.rewards.boxes.planes import Box, Point, area, centre, iou, is_inside, match_boxes

EDGES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2).map(sorted)
BOXES = st.builds(lambda x, y: Box(x[0], y[0], x[1], y[1]), EDGES, EDGES)
SMALL = st.builds(
    lambda x, y, w, h: Box(x, y, x + w, y + h),
    st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(1, 6),
)  # fmt: skip

# (one, other, IoU): intersection / union
WORKED = [
    (Box(0, 0, 2, 2), Box(0, 0, 2, 2), 1),
    (Box(0, 0, 2, 2), Box(1, 0, 3, 2), 2 / 6),
    (Box(0, 0, 2, 2), Box(1, 1, 3, 3), 1 / 7),
    (Box(0, 0, 1, 1), Box(2, 0, 3, 1), 0),
    (Box(0, 0, 1, 1), Box(1, 0, 2, 1), 0),
    (Box(0, 0, 4, 4), Box(1, 1, 3, 3), 4 / 16),  # one in the other
    (Box(0, 0, 1, 1), Box(9, 9, 10, 10), 0),
    (Box(5, 5, 5, 5), Box(5, 5, 5, 5), 0),  # no area
    (Box(0, 0, 0, 4), Box(0, 0, 0, 4), 0),
    (Box(0, 0, 2, 2), Box(1, 1, 1, 1), 0),
]


@pytest.mark.parametrize(("one", "other", "overlap"), WORKED)
def test_overlap_by_hand(one: Box, other: Box, overlap: float) -> None:
    assert iou(one, other) == pytest.approx(overlap, abs=1e-15)


@given(BOXES, BOXES)
def test_laws_of_overlap(one: Box, other: Box) -> None:
    assert iou(one, other) == iou(other, one)
    assert 0 <= iou(one, other) <= 1
    assert iou(one, one) == (1 if area(one) > 0 else 0)


@given(SMALL, SMALL)
def test_overlap_equals_a_count_of_cells(one: Box, other: Box) -> None:
    cells = [{(x, y) for x in range(int(b.x1), int(b.x2)) for y in range(int(b.y1), int(b.y2))} for b in (one, other)]
    assert iou(one, other) == len(cells[0] & cells[1]) / len(cells[0] | cells[1])


@given(SMALL, SMALL, st.floats(0.1, 10), st.floats(0.1, 10))
def test_overlap_does_not_depend_on_the_plane(one: Box, other: Box, width: float, height: float) -> None:
    scaled = [Box(b.x1 * width, b.y1 * height, b.x2 * width, b.y2 * height) for b in (one, other)]
    assert iou(*scaled) == pytest.approx(iou(one, other), abs=1e-9)


def test_centres() -> None:
    assert centre(Box(0, 2, 4, 4)) == (2, 3)
    assert is_inside(Point(0, 4), Box(0, 0, 4, 4))
    assert not is_inside(Point(0, 4.1), Box(0, 0, 4, 4))


def test_matching_by_hand() -> None:
    truths = [Box(0, 0, 10, 10), Box(8, 0, 18, 10)]
    # The first answer overlaps both, the second only the first truth. Greedy matching would leave the second without:
    # IoU (first, truth 0) = 70 / 130, (first, truth 1) = 50 / 150, (second, truth 0) = 90 / 110.
    answers = [Box(3, 0, 13, 10), Box(-1, 0, 9, 10)]
    pairs = match_boxes(answers, truths)
    assert [(pair.answer, pair.truth) for pair in pairs] == [(0, 1), (1, 0)]
    assert [pair.iou for pair in pairs] == pytest.approx([50 / 150, 90 / 110])
    assert [(pair.answer, pair.truth) for pair in match_boxes(answers, truths, least=0.5)] == [(1, 0)]
    assert match_boxes([], truths) == match_boxes(answers, []) == []
    assert match_boxes([Box(50, 50, 60, 60)], truths) == []


def test_a_pair_below_the_limit_takes_no_box_from_one_above_it() -> None:
    truths = [Box(0, 0, 10, 10), Box(10, 0, 20, 10)]
    # a: 0.6 with truth 0 and 0.25 with truth 1; b: 0.48 with truth 0 only. The sum is largest for a-1, b-0 (0.73), but
    # both are below 0.5; with that limit a-0 is the only pair that counts.
    a, b = Box(2.5, 0, 12.5, 10), Box(-3.5, 0, 6.5, 10)
    assert [(p.answer, p.truth) for p in match_boxes([a, b], truths, least=0.5)] == [(0, 0)]


@given(st.lists(SMALL, max_size=4), st.lists(SMALL, max_size=4))
def test_matching_is_the_best_of_all_assignments(answers: list[Box], truths: list[Box]) -> None:
    few, many = (answers, truths) if len(answers) <= len(truths) else (truths, answers)
    best = max(
        sum(iou(box, many[i]) for box, i in zip(few, order, strict=True))
        for order in permutations(range(len(many)), len(few))
    )
    pairs = match_boxes(answers, truths)
    assert sum(pair.iou for pair in pairs) == pytest.approx(best)
    assert len({pair.answer for pair in pairs}) == len({pair.truth for pair in pairs}) == len(pairs)
