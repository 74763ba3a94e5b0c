"""Charts: round ticks, right places, escaped text, gaps where numbers are missing."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import HOSTILE

from vlmrl.report.plots import (
    MAX_POINTS,
    Mark,
    PlotFrame,
    Series,
    interval_bar,
    line_chart,
    moving_mean,
    nice_ticks,
    short,
)

NAN = math.nan


def tree(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def titles(svg: str) -> list[str]:
    return [str(t.text) for t in tree(svg).iter("title")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 0.93, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 100, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
        (-3e-5, 7e-5, [-4e-5, -2e-5, 0.0, 2e-5, 4e-5, 6e-5, 8e-5]),
        (0.1, 0.3, [0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]):
    assert nice_ticks(low, high) == expected


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_cover_the_range_in_equal_steps(low: float, width: float):
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    ticks = nice_ticks(low, high)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert 3 <= len(ticks) <= 9
    assert all(b - a == pytest.approx(step, rel=1e-6) for a, b in pairwise(ticks))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1000, "1000"), (12_345, "12.3k"), (4.1e6, "4.1M"), (3e-5, "3e-05"), (NAN, "-")],
)
def test_numbers_on_axes_are_short(value: float, text: str):
    assert short(value) == text


def test_a_point_is_drawn_where_its_value_is():
    frame = PlotFrame((0, 10), (0, 1), 100 + 52 + 14, 200 + 12 + 34)
    assert frame.at(0, 0) == (52.0, 212.0)
    assert frame.at(10, 1) == (152.0, 12.0)
    assert frame.at(5, 0.25) == (102.0, 162.0)


def test_a_chart_shows_each_value_on_hover_with_its_interval():
    svg = line_chart("reward", [Series("run", [0, 5], [0.25, 0.5], [0.2, 0.4], [0.3, 0.6], dots=True)])
    assert titles(svg) == ["run\nstep 0: 0.25  [0.2, 0.3]", "run\nstep 5: 0.5  [0.4, 0.6]"]
    assert len([e for e in tree(svg).iter("line") if "whisker" in e.get("class", "")]) == 2


def test_higher_values_are_drawn_higher():
    svg = line_chart("x", [Series("run", [0, 1], [0.1, 0.9])])
    low, high = (float(c.get("cy", 0)) for c in tree(svg).iter("circle"))
    assert high < low


def test_a_value_that_is_missing_breaks_the_line():
    svg = line_chart("x", [Series("run", [0, 1, 2, 3, 4], [1, 2, NAN, 2, 1])])
    (path,) = [e.get("d", "") for e in tree(svg).iter("path")]
    assert path.count("M") == 2 and path.count("L") == 2


def test_a_band_with_a_gap_is_two_areas():
    low, high = [0, 0, NAN, 0, 0], [1, 1, NAN, 1, 1]
    svg = line_chart("x", [Series("run", [0, 1, 2, 3, 4], [0.5] * 5, low, high)])
    assert len([e for e in tree(svg).iter("path") if "band" in e.get("class", "")]) == 2


def test_nothing_finite_gives_a_note():
    assert "no numbers" in line_chart("x", [Series("run", [0, 1], [NAN, math.inf])])
    assert "no numbers" in line_chart("x", [])


def test_a_flat_line_and_a_single_point_can_be_drawn():
    for series in (Series("a", [3], [0.0]), Series("a", [0, 1, 2], [0.0] * 3), Series("a", [0, 1], [-2.0, -2.0])):
        assert "NaN" not in line_chart("x", [series]) and "nan" not in line_chart("x", [series])
    ticks = [
        float(str(t.text))
        for t in tree(line_chart("x", [Series("a", [0, 1], [0.0, 0.0])])).iter("text")
        if t.get("text-anchor") == "end"
    ]
    assert min(ticks) == 0.0


@pytest.mark.parametrize("values", [[0.80, 0.81], [5.0, 5.0], [-3.0, -2.9], [-1e-7, 2e-7]])
def test_every_vertical_axis_contains_zero(values: list[float]):
    svg = line_chart("x", [Series("a", [0, 1], values)])
    assert "0" in [t.text for t in tree(svg).iter("text") if t.get("text-anchor") == "end"]


def test_long_series_are_thinned_but_keep_their_extremes():
    values = [math.sin(i / 300) for i in range(20_000)]
    values[7_777] = 9.0
    svg = line_chart("x", [Series("run", list(range(20_000)), values)])
    (path,) = [e.get("d", "") for e in tree(svg).iter("path")]
    assert len(re.findall("[ML]", path)) <= MAX_POINTS + 2
    tops = [float(p.split()[1]) for p in re.split("[ML]", path) if p]
    assert min(tops) < min(sorted(tops)[2:]) - 50


def test_text_in_charts_is_escaped():
    svg = line_chart(
        HOSTILE,
        [Series(HOSTILE, [0, 1], [0.1, 0.2], dots=True)],
        marks=[Mark(0.5, HOSTILE)],
        line=0.1,
        line_text=HOSTILE,
    )
    root = tree(svg)
    assert {e.tag for e in root.iter()} == {"svg", "g", "line", "rect", "path", "circle", "text", "title"}
    assert HOSTILE in titles(svg)[0]
    assert root.get("aria-label") == f"{HOSTILE}: {HOSTILE}" and root.get("onload") is None


def test_marks_outside_of_the_range_are_left_out():
    svg = line_chart("x", [Series("run", [0, 1], [0, 1])], marks=[Mark(7, "later"), Mark(1, "here")])
    assert "here" in svg and "later" not in svg


def test_the_moving_mean_is_centred_and_skips_what_is_missing():
    assert moving_mean([1, 2, 6, NAN, 3], 3)[1:4] == [3.0, 4.0, 4.5]
    assert math.isnan(moving_mean([NAN], 3)[0])


def test_an_interval_bar_puts_the_dot_within_its_scale():
    svg = interval_bar(0.5, 0.25, 0.75, (0.0, 1.0), 7)
    (dot,) = tree(svg).iter("circle")
    assert float(dot.get("cx", 0)) == 60.0 and dot.get("class") == "f1"
    assert interval_bar(1.0, None, None, (1.0, 1.0), 0).count("whisker") == 0
