"""Colours of CSS in sRGB, beside the values that the specification gives."""

from __future__ import annotations

import pytest

from vlmrl.svg.values import read_colour, read_paint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # CSS Color 4 gives these as equal to green (#008000), and color(display-p3 1 1 1) is white.
        ("lab(46.2775% -47.5621 48.5837)", (0, 128, 0)),
        ("lch(46.2775% 67.9892 134.3912)", (0, 128, 0)),
        ("oklab(51.975% -0.1403 0.10768)", (0, 128, 0)),
        ("oklch(51.975% 0.17686 142.495)", (0, 128, 0)),
        ("color(display-p3 0.21604 0.49418 0.13151)", (0, 128, 0)),
        ("color(srgb-linear 0 0.21586 0)", (0, 128, 0)),
        ("color(xyz 0.07719 0.15438 0.02573)", (0, 128, 0)),
        ("color(display-p3 1 1 1)", (255, 255, 255)),
        ("hsl(120 100% 25%)", (0, 128, 0)),
        ("hwb(120 0% 49.8%)", (0, 128, 0)),
    ],
)
def test_colours_of_all_spaces(text: str, expected: tuple[int, int, int]) -> None:
    colour = read_colour(text)
    assert colour is not None and colour[3] == 1
    assert [round(255 * channel) for channel in colour[:3]] == pytest.approx(expected, abs=1)


def test_a_colour_beyond_all_numbers_is_none_or_within_range() -> None:
    for text in ("lab(1e999% 0 0)", "oklch(50% 1e308 1e308)", "color(xyz 1e308 1e308 1e308)", "color(rec2020 1 0 0)"):
        colour = read_colour(text)
        assert colour is None or all(0 <= channel <= 1 for channel in colour)


def test_the_fallback_of_a_paint_is_a_colour() -> None:
    paint = read_paint("url(#a) red")
    assert paint is not None and paint.colour == (1, 0, 0, 1)
    chained = read_paint("url(#a) url(#b) red")
    assert chained is None or chained.colour is None
