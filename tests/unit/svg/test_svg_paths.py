"""Data of paths: hand-worked commands, arcs beside the equation of their ellipse, and any text is answered."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmrl.svg.geometry import path_text, read_path


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("M1 2L3,4", "M1 2 L3 4"),
        ("m1 2 3 4 1-1z", "M1 2 L4 6 L5 5 Z"),
        ("M0 0h5v-2H1V7", "M0 0 L5 0 L5 -2 L1 -2 L1 7"),
        ("M1,1 2,2 3,3", "M1 1 L2 2 L3 3"),
        ("M0 0C1 1 2 1 3 0S5-1 6 0", "M0 0 C1 1 2 1 3 0 C4 -1 5 -1 6 0"),
        ("M0 0q1 1 2 0t2 0", "M0 0 Q1 1 2 0 Q3 -1 4 0"),
        ("M5 5S1 1 2 2", "M5 5 C5 5 1 1 2 2"),
        ("M1 1l2 2zl1 0", "M1 1 L3 3 Z L2 1"),
        ("M0 0a0 5 0 1 1 3 4", "M0 0 L3 4"),
        ("M.5.5-1e1 2", "M0.5 0.5 L-10 2"),
        ("L1 1", ""),
        ("", ""),
        ("M1 1 L2 2 X 3 3 L4 4", "M1 1 L2 2"),
        ("M1 1 L2", "M1 1"),
        ("M1 1 L1e300 2 L3 3", "M1 1 L10000000 2 L3 3"),
        ("M1 1z1 1", "M1 1 Z"),
    ],
)
def test_commands(data: str, expected: str) -> None:
    assert path_text(read_path(data)) == expected


def test_flags_of_an_arc_need_no_separators() -> None:
    assert read_path("M0 0a1 1 0 01.5 1") == read_path("M0 0 a 1 1 0 0 1 0.5 1")
    assert len(read_path("M0 0A5 5 0 2 1 1 1")) == 1, "2 is no flag"


def test_a_half_circle() -> None:
    """From (0, 0) to (10, 0) about (5, 0); sweep 1 goes over negative y, as y points down."""
    first, second = read_path("M0 0A5 5 0 0 1 10 0")[1:]
    assert first.numbers[-2:] == pytest.approx((5, -5)) and second.numbers[-2:] == (10, 0)


number = st.floats(-100, 100).map(lambda value: round(value, 2))
radius = st.floats(0.5, 100).map(lambda value: round(value, 2))


@given(number, number, radius, radius, st.floats(0, 180), st.booleans(), st.booleans())
def test_arcs_lie_on_one_ellipse(x, y, rx, ry, angle, large, sweep) -> None:
    assume(math.hypot(x, y) > 0.1)
    commands = read_path(f"M0 0A{rx} {ry} {angle} {int(large)} {int(sweep)} {x} {y}")[1:]
    assert commands[-1].numbers[-2:] == (x, y)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    points, start = [], (0.0, 0.0)
    for _, n in commands:
        for t in (0.0, 0.25, 0.5, 0.75, 1.0):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            pairs = (start, n[0:2], n[2:4], n[4:6])
            points.append(tuple(sum(w * p[k] for w, p in zip(weights, pairs, strict=True)) for k in (0, 1)))
        start = n[4:6]
    # In the axes of the ellipse, scaled to a circle of radius 1 (or more, where the radii were too small).
    circle = [((cos * px + sin * py) / rx, (cos * py - sin * px) / ry) for px, py in points]
    grown = max(1.0, math.dist(circle[0], circle[-1]) / 2)
    near = [(u / grown, v / grown) for u, v in circle]
    middle = (near[0][0] + near[-1][0]) / 2, (near[0][1] + near[-1][1]) / 2
    half = math.dist(near[0], near[-1]) / 2
    height = math.sqrt(max(0.0, 1 - half * half))
    normal = (near[0][1] - near[-1][1]) / (2 * half), (near[-1][0] - near[0][0]) / (2 * half)
    side = 1 if large != sweep else -1
    centre = middle[0] + side * height * normal[0], middle[1] + side * height * normal[1]
    assert all(math.dist(point, centre) == pytest.approx(1, abs=2e-3) for point in near)


@given(st.text(alphabet="MmLlHhVvCcSsQqTtAaZz0123456789.-e, x", max_size=60))
def test_any_text_is_answered_and_its_commands_are_read_again(data: str) -> None:
    commands = read_path(data)
    again = read_path(path_text(commands))
    assert [c.letter for c in again] == [c.letter for c in commands]
    for a, b in zip(commands, again, strict=True):
        assert b.numbers == pytest.approx(a.numbers, rel=1e-8, abs=1e-8)
