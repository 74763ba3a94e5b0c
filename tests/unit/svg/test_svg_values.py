"""Values of SVG attributes: hand-worked, and any text is answered."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.svg.values import (
    LARGEST,
    Matrix,
    Paint,
    number_text,
    read_colour,
    read_length,
    read_number,
    read_numbers,
    read_origin,
    read_paint,
    read_reference,
    read_share,
    read_transform,
    read_view_box,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3.0), (" -.5 ", -0.5), ("1.", 1.0), ("+1e2", 100.0), ("1e7", 1e7), ("1e8", 1e7), ("-1e999", -1e7),
        ("nan", None), ("inf", None), ("0x10", None), ("1_0", None), ("", None), ("1 2", None), ("\u0663", None),
        ("3px", None),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float | None) -> None:
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12.0), ("12px", 12.0), ("72pt", 96.0), ("1in", 96.0), ("2.54cm", 96.0), ("25.4MM", 96.0), ("1pc", 16.0),
        ("2em", 20.0), ("2ex", 10.0), ("50%", 100.0), ("2rem", 32.0), ("1e6in", 1e7), ("3 furlongs", None),
        ("auto", None),
    ],
)  # fmt: skip
def test_lengths(text: str, value: float | None) -> None:
    length = read_length(text, whole=200, em=10)
    assert length == (None if value is None else pytest.approx(value))


def test_shares_and_lists() -> None:
    assert [read_share(t) for t in ("0.25", "50%", "-1", "2", "300%", "abc", "")] == [0.25, 0.5, 0, 1, 1, None, None]
    assert read_numbers(" ,1,2 3-4.5.5e1x6") == [1, 2, 3, -4.5, 5]
    assert read_numbers("1 1e99 2") == [1, 1e7, 2] and read_numbers("1 2 3", 2) == [1, 2] and read_numbers("") == []
    assert read_view_box("0,0, 64 32") == (0, 0, 64, 32)
    assert read_view_box("0 0 1e9 1e9") == (0, 0, 1e7, 1e7)  # a canvas on which nothing can be seen, not a missing one
    assert [read_view_box(t) for t in ("0 0 64", "0 0 0 4", "0 0 4 -4", "0 0 4 4 4", "a")] == [None] * 5


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("", (1, 2)),
        ("none", (1, 2)),
        ("translate(10)", (11, 2)),
        ("translate(10,20) scale(2)", (12, 24)),
        ("scale(2 3)", (2, 6)),
        ("rotate(90)", (-2, 1)),
        ("rotate(90deg)", (-2, 1)),
        ("rotate(180 1 1)", (1, 0)),
        ("skewX(45)", (3, 2)),
        ("skewY(45), translate(1px -1)", (2, 3)),
        ("matrix(1 2 3 4 5 6)", (12, 16)),
    ],
)
def test_where_a_transform_takes_a_point(text: str, point: tuple[float, float]) -> None:
    matrix = read_transform(text)
    assert matrix is not None and matrix.apply(1, 2) == pytest.approx(point)


@pytest.mark.parametrize(
    "text", ["rotate(1 2)", "scale()", "turn(1)", "translate(1", "scale(a)", "scale(1e6) scale(1e6)", "scale(1) x"]
)
def test_wrong_transforms(text: str) -> None:
    assert read_transform(text) is None
    assert read_transform("scale(0 1)") == Matrix(a=0) and Matrix(a=0).determinant == 0


def test_colours_and_paints() -> None:
    red = (1, 0, 0, 1)
    for text in ("red", "#f00", "#FF0000", "rgb(255,0,0)", "rgb(255 0 0 / 100%)", "rgb(100%,0%,0%)", "hsl(0,100%,50%)"):
        assert read_colour(text) == pytest.approx(red), text
    assert read_colour("rgba(0,0,255,0.5)") == pytest.approx((0, 0, 1, 0.5))
    assert read_colour("lightcoral") == pytest.approx((240 / 255, 128 / 255, 128 / 255, 1))
    # Red in Lab and OKLCh as the tables of CSS Color 4 round it; the red of Display P3 is beyond sRGB, and clipped.
    for text in ("lab(54.29 80.81 69.89)", "oklch(62.8% 0.25768 29.234)", "color(display-p3 1 0 0)"):
        assert read_colour(text) == pytest.approx(red, abs=2e-3), text
    assert read_colour("lch(46.27 67.97 134.38 / 50%)") == pytest.approx((0, 128 / 255, 0, 0.5), abs=1e-3)  # green
    assert read_colour("oklab(51.975% -0.1403 0.10768)") == pytest.approx((0, 128 / 255, 0, 1), abs=1e-3)
    assert read_colour("color(srgb-linear 0.5 0.5 0.5)") == pytest.approx((0.7354, 0.7354, 0.7354, 1), abs=1e-4)
    assert read_colour("color(xyz 0.9505 1 1.089)") == pytest.approx((1, 1, 1, 1), abs=1e-3)  # the white of D65
    assert [read_colour(t) for t in ("color(rec2020 1 0 0)", "lab(1e300 1 1)")] == [None] * 2
    assert [read_colour(t) for t in ("currentColor", "reddish", "", "url(#a)", "#ggg")] == [None] * 5
    assert read_paint("none") == Paint(None) and read_paint("currentColor", "red") == Paint(red)
    assert read_paint("url(#a)") == Paint(None, "a") and read_paint("url('#a') red") == Paint(red, "a")
    assert read_paint("url(#a) currentColor", "red") == Paint(red, "a")
    assert read_paint("url(#a) " * 9000) == Paint(None, "a")  # a second reference is no fallback
    assert read_paint("url(http://localhost/#a)") is None and read_paint("context-fill") is None
    assert read_reference("url(file:///a#b)") is None and read_reference('url( "#a" )') == ("a", "")


@given(st.text(alphabet="0123456789.,-+e()% #urlscaetnoihp'\"", max_size=40))
def test_any_text_is_answered(text: str) -> None:
    for read in (read_number, read_share, read_length, read_view_box, read_transform, read_colour, read_paint):
        read(text)
    assert all(math.isfinite(n) and abs(n) <= LARGEST for n in read_numbers(text))


@given(st.floats(-LARGEST, LARGEST))
def test_a_number_survives_its_text(value: float) -> None:
    assert read_number(number_text(value)) == pytest.approx(value, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("", (0, 0)), ("center", (100, 50)), ("10px 20px", (10, 20)), ("50% 25%", (100, 25)),
        ("right bottom", (200, 100)),
        ("top", (100, 0)), ("top left", (0, 0)), ("bottom right", (200, 100)), ("30", (30, 50)), ("x y", (0, 0)),
    ],
)  # fmt: skip
def test_origins_of_transforms(text: str, point: tuple[float, float]) -> None:
    assert read_origin(text, 200, 100) == point
