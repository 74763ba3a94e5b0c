"""Drawn geometry: answers that the figure itself confirms, labels that touch nothing, the same figures for a seed."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from math_verify import parse
from PIL import Image
from sympy import N

from vlmrl.errors import DataError
from vlmrl.tasks.geometry.drawn import collection
from vlmrl.tasks.geometry.drawn.collection import TOPICS, USUAL_TOPICS, Maker, draw_problems
from vlmrl.tasks.geometry.drawn.page import NoRoomError, PageStyle, lay_out
from vlmrl.tasks.geometry.drawn.problem import LengthLabel, Point, Problem, Surd, distance, product

MAKERS = [make for makers in TOPICS.values() for make in makers]
of_every_kind = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def problems(make: Maker, count: int = 40) -> Iterator[Problem]:
    for seed in range(count):
        yield make(random.Random(seed), True)


def scale(problem: Problem) -> float:
    """Length of one unit of the problem in its sketch, from a label with a number."""
    label = next(label for label in problem.sketch.lengths if label.text != "x")
    return distance(label.a, label.b) / float(label.text)


def value_of(problem: Problem) -> float:
    """The answer as a number, read from its LaTeX."""
    (expression, *_) = parse(f"${problem.answer}$")
    return float(N(expression))


def shoelace(points: list[Point]) -> float:
    around = zip(points, [*points[1:], points[0]], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in around)) / 2


@of_every_kind
def test_every_number_in_a_figure_is_true_to_scale(make: Maker) -> None:
    for problem in problems(make):
        for angle in problem.sketch.angles:
            shown = value_of(problem) if angle.text.startswith("x") else float(angle.text.rstrip("\u00b0"))
            assert angle.size == pytest.approx(shown, abs=1e-6), problem
        if make.__name__ == "midsegment" or not problem.sketch.lengths:
            continue  # the length of a midsegment is drawn in any scale: see below
        unit = scale(problem)
        for label in problem.sketch.lengths:
            shown = value_of(problem) if label.text == "x" else float(label.text)
            assert distance(label.a, label.b) / unit == pytest.approx(shown), problem


def test_a_midsegment_is_half_of_its_side_in_the_figure_and_in_the_answer() -> None:
    for problem in problems(next(make for make in MAKERS if make.__name__ == "midsegment")):
        known, unknown = sorted(problem.sketch.lengths, key=lambda label: label.text == "x")
        ratio = distance(unknown.a, unknown.b) / distance(known.a, known.b)
        assert ratio == pytest.approx(value_of(problem) / float(known.text))
        assert ratio == pytest.approx(2.0) or ratio == pytest.approx(0.5)


@pytest.mark.parametrize("make", TOPICS["areas"][:4], ids=lambda make: make.__name__)
def test_an_area_is_that_of_the_outline_in_the_figure(make: Maker) -> None:
    corners = 3 if make.__name__ == "triangle_area" else 4
    for problem in problems(make):
        outline = [a for a, _ in problem.sketch.lines[:corners]]
        assert shoelace(outline) / scale(problem) ** 2 == pytest.approx(value_of(problem))


def test_the_square_with_a_hole_the_sector_and_the_chord_agree_with_their_figures() -> None:
    by_name = {make.__name__: make for make in MAKERS}
    for problem in problems(by_name["round_hole"]):
        ((_, radius),) = problem.sketch.holes
        area = shoelace(problem.sketch.filled[0]) - math.pi * radius**2
        assert area / scale(problem) ** 2 == pytest.approx(value_of(problem))
    for problem in problems(by_name["sector"]):
        # 60 chords for the arc: the outline is a little smaller than the sector
        assert shoelace(problem.sketch.filled[0]) / scale(problem) ** 2 == pytest.approx(value_of(problem), rel=2e-3)
    for problem in problems(by_name["chord"]):
        assert distance(*problem.sketch.lines[0]) / scale(problem) == pytest.approx(value_of(problem))


@of_every_kind
def test_the_answer_is_a_positive_number_and_the_solution_ends_with_it(make: Maker) -> None:
    for problem in problems(make, 12):
        assert problem.answer in problem.steps or (problem.kind, problem.steps) == ("shaded-squares", "")
        assert value_of(problem) > 0


@of_every_kind
def test_the_text_states_every_value_of_the_figure(make: Maker) -> None:
    for problem in problems(make, 12):
        labels = [*problem.sketch.angles, *problem.sketch.lengths]
        for label in (one for one in labels if not one.text.startswith("x")):
            shown = label.text.rstrip("\u00b0")
            assert shown in problem.full, problem
        plain = make(random.Random(3), False)
        assert not plain.sketch.lengths and not plain.sketch.angles


FIGURES = [(make, width) for make in MAKERS for width in (224, 448)]
FIGURES += [(make, 112) for make in MAKERS if make.__name__ in ("crossing_lines", "special_triangle", "midsegment")]


@pytest.mark.parametrize(("make", "width"), FIGURES, ids=lambda value: getattr(value, "__name__", value))
def test_no_label_touches_a_line_another_label_or_the_edge(make: Maker, width: int) -> None:
    style, drawn = PageStyle(width, width * 3 // 4), 0
    for problem in problems(make, 12):
        try:
            page = lay_out(problem.sketch, style)
        except NoRoomError:
            continue
        drawn += 1
        lines = np.asarray(page.draw(labels=False)) < 190  # darker than shaded areas
        labels = np.asarray(page.draw(lines=False)) < 190
        near = np.zeros_like(lines)  # lines, one pixel wider on every side
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                near |= np.roll(lines, (dy, dx), (0, 1))
        assert not (near & labels).any(), problem
        edge = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
        assert not edge.any(), problem
        one_by_one = [
            (label.left, label.top, label.left + label.width, label.top + label.height) for label in page.labels
        ]
        for i, a in enumerate(one_by_one):
            assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for b in one_by_one[:i])
    assert drawn >= 6


def test_a_label_without_room_is_an_error_and_not_printed_over_a_line() -> None:
    problem = MAKERS[0](random.Random(0), True)
    (a, b), *_ = problem.sketch.lines
    problem.sketch.lengths.append(LengthLabel(a, b, "1234567890123456789012345678901234567890"))
    with pytest.raises(NoRoomError, match="no free place"):
        lay_out(problem.sketch, PageStyle())


def test_a_seed_repeats_every_image_and_another_seed_none() -> None:
    first, again, other = (draw_problems({"train": 5, "test": 5}, seed=seed, values=True) for seed in (4, 4, 5))
    assert first["train"][3].image == again["train"][3].image
    assert [d.image for d in first["test"]] == [d.image for d in again["test"]]
    assert not {d.image for d in first["train"]} & {d.image for d in other["train"]}
    with Image.open(io.BytesIO(first["train"][0].image)) as image:
        assert (image.size, image.mode) == ((448, 336), "L")


def test_splits_share_no_problem_and_every_kind_is_equally_frequent() -> None:
    drawn = draw_problems({"train": 60, "validation": 20, "test": 40}, seed=1, values=False)
    numbers = {split: {(d.problem.kind, d.problem.numbers) for d in members} for split, members in drawn.items()}
    assert not numbers["train"] & numbers["test"]
    assert not numbers["train"] & numbers["validation"]
    assert not numbers["validation"] & numbers["test"]
    usual = [make for topic in USUAL_TOPICS for make in TOPICS[topic]]
    for split, members in drawn.items():
        counts = [sum(d.problem.kind == kind for d in members) for kind in {d.problem.kind for d in members}]
        assert counts == [len(drawn[split]) // len(usual)] * len(usual)
    images = [d.image for members in drawn.values() for d in members]
    assert len(set(images)) == 120


def test_the_area_on_squared_paper_is_the_number_of_dark_squares_in_the_image() -> None:
    drawn = draw_problems({"train": 60, "test": 12}, seed=2, values=True, topics=("squares",), width=112)
    problems = [one for members in drawn.values() for one in members]
    assert {one.problem.answer for one in problems} == set("3456789")
    for one in problems:
        with Image.open(io.BytesIO(one.image)) as image:
            dark = np.asarray(image) < 128
        assert dark.shape == (84, 112)
        # The paper is 6 x 4 squares, as large as the page less half an em (5.5 pixels) on each side allows:
        # min(101 / 6, 73 / 4) = 16.8 pixels a square, 101 x 67.3 in all, in the middle of the page.
        side = 101 / 6
        centres = [
            (84 / 2 + (row - 1.5) * side, 112 / 2 + (column - 2.5) * side) for row in range(4) for column in range(6)
        ]
        assert sum(dark[int(y), int(x)] for y, x in centres) == value_of(one.problem) == len(one.problem.numbers)
    plain = draw_problems({"train": 1}, seed=2, values=False, topics=("squares",))["train"][0]
    # the text names each shaded square, after "(column, row)"
    assert plain.text.count("(") - 1 == value_of(plain.problem)


def test_a_kind_without_a_problem_for_a_split_leaves_its_rows_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MAKERS[0](random.Random(0), False)
    monkeypatch.setattr(collection, "MOST_TRIES", 40)
    monkeypatch.setitem(TOPICS, "angles", (lambda rng, values: one, MAKERS[1]))  # type: ignore[arg-type]
    drawn = draw_problems({"train": 8, "validation": 4, "test": 4}, seed=0, values=False, topics=("angles",))
    assert {split: len(members) for split, members in drawn.items()} == {"train": 8, "validation": 4, "test": 4}
    assert sum(d.problem is one for members in drawn.values() for d in members) == 1


def test_topics_that_have_too_few_problems_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MAKERS[0](random.Random(0), False)
    monkeypatch.setattr(collection, "MOST_TRIES", 4)
    monkeypatch.setitem(TOPICS, "angles", (lambda rng, values: one,))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no new problem") as error:
        draw_problems({"train": 2}, seed=0, values=False, topics=("angles",))
    assert "more topics" in str(error.value.hint)


def test_exact_numbers_are_written_without_square_factors() -> None:
    # 48 = 16 * 3; 50 = 25 * 2; 49 = 7^2
    assert [Surd.of_square(n).latex for n in (48, 50, 49, 7)] == ["4\\sqrt{3}", "5\\sqrt{2}", "7", "\\sqrt{7}"]
    assert Surd(Fraction(3, 2), 3).latex == "\\frac{3\\sqrt{3}}{2}"
    assert [product(n, "\\pi") for n in (1, 3, Fraction(9, 2))] == ["\\pi", "3\\pi", "\\frac{9\\pi}{2}"]
    assert product(Fraction(7)) == "7"
