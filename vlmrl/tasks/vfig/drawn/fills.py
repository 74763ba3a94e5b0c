"""Fill styles and border styles of drawn shapes, and the colours of a diagram."""

from __future__ import annotations

import colorsys
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmrl.tasks.vfig.drawn.code import reference, tag

DASHES: Mapping[str, tuple[float, ...]] = {
    "solid": (),
    "dashed": (4, 2.5),
    "dotted": (1, 1.5),
    "dash-dot": (5, 2, 1, 2),
}
"""Border style -> lengths of strokes and gaps by turns, in widths of the border."""
TILE = 8.0
"""Width and height of the tile that a pattern repeats, in pixels."""
LIGHT_INK, DARK_INK = "#ffffff", "#1f1f1f"


def mixed(colour: str, other: str, share: float) -> str:
    """Return a mixture of two colours `#rrggbb`; `share` in [0, 1] is that of the second."""
    pairs = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def lighter(colour: str, share: float) -> str:
    return mixed(colour, "#ffffff", share)


def darker(colour: str, share: float) -> str:
    return mixed(colour, "#000000", share)


def luma(colour: str) -> float:
    """Return the brightness of a colour `#rrggbb`, in [0, 1].

    Source: ITU-R BT.601.
    """
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * r + 0.587 * g + 0.114 * b


class Colours(NamedTuple):
    """Colours of a shape as `#rrggbb`: its fill, its second fill in gradients and patterns, its border, its label."""

    fill: str
    second: str
    stroke: str
    ink: str


def of_hue(hue: float, saturation: float, lightness: float) -> str:
    """Return a colour `#rrggbb` from hue, saturation and lightness in [0, 1]."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue % 1, lightness, saturation))


def colours_of(fill: str, stroke: str) -> Colours:
    """Return the colours of a shape with this fill and border, chosen so that the label is legible on the fill."""
    if luma(fill) > 0.55:
        return Colours(fill, darker(fill, 0.16), stroke, DARK_INK)
    return Colours(fill, lighter(fill, 0.16), stroke, LIGHT_INK)


def palette(rng: random.Random) -> list[Colours]:
    """Return 2 to 4 colour schemes of a diagram: pale, strong, or grey with dark borders."""
    first, count = rng.random(), rng.randint(2, 4)
    hues = [first + i / count + rng.uniform(-0.06, 0.06) for i in range(count)]
    kind = rng.choice(["pale", "pale", "strong", "grey"])
    schemes = []
    for i, hue in enumerate(hues):
        saturation = rng.uniform(0.5, 0.95)
        if kind == "pale":
            scheme = of_hue(hue, saturation, rng.uniform(0.82, 0.9)), of_hue(hue, saturation, 0.32)
        elif kind == "strong":
            scheme = of_hue(hue, 0.7 * saturation, rng.uniform(0.3, 0.62)), of_hue(hue, 0.6, 0.18)
        else:
            scheme = of_hue(hue, 0.1, 1 - 0.08 * i), "#222222"
        schemes.append(colours_of(*scheme))
    return schemes


@dataclass(frozen=True)
class Paint:
    """Looks of a shape.

    Args:
        colours: its colours.
        style: fill style, from `FILLS`.
        border: border style, from `DASHES`.
        width: width of the border in pixels.
        identity: id of its gradient or pattern.
    """

    colours: Colours
    style: str
    border: str
    width: float
    identity: str

    def attributes(self, fill: str = "") -> dict[str, str | float]:
        """Return the presentation attributes of an element of the shape; of its front unless it has another fill."""
        front = self.colours.fill if self.style == "solid" else reference(self.identity)
        dashes = " ".join(f"{length * self.width:g}" for length in DASHES[self.border])
        attributes: dict[str, str | float] = {
            "fill": fill or front,
            "stroke": self.colours.stroke,
            "stroke-width": self.width,
        }
        return {**attributes, "stroke-dasharray": dashes} if dashes else attributes

    def definition(self) -> str:
        """Return the code of the gradient or pattern; empty for a solid fill."""
        draw = FILLS[self.style]
        return draw(self) if draw else ""


def _stops(paint: Paint) -> Sequence[str]:
    first, second = paint.colours.fill, paint.colours.second
    return [tag("stop", {"offset": i, "stop-color": colour}) for i, colour in enumerate((first, second))]


def _linear(paint: Paint) -> str:
    across: dict[str, str | float] = {"id": paint.identity, "x1": 0, "y1": 0, "x2": 0, "y2": 1}
    return tag("linearGradient", across, *_stops(paint))


def _radial(paint: Paint) -> str:
    around: dict[str, str | float] = {"id": paint.identity, "cx": "0.5", "cy": "0.5", "r": "0.7"}
    return tag("radialGradient", around, *_stops(paint))


def _pattern(paint: Paint, *marks: str) -> str:
    size: dict[str, str | float] = {"width": TILE, "height": TILE}
    ground = tag("rect", {**size, "fill": paint.colours.fill})
    return tag("pattern", {"id": paint.identity, **size, "patternUnits": "userSpaceOnUse"}, ground, *marks)


def _stroke(paint: Paint, x1: float, y1: float, x2: float, y2: float) -> str:
    return tag("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": paint.colours.second})


def _dots(paint: Paint) -> str:
    middle = TILE / 2
    return _pattern(paint, tag("circle", {"cx": middle, "cy": middle, "r": 1.5, "fill": paint.colours.second}))


def _hatching(paint: Paint) -> str:
    return _pattern(paint, _stroke(paint, 0, TILE, TILE, 0))


def _crosshatch(paint: Paint) -> str:
    return _pattern(paint, _stroke(paint, 0, TILE, TILE, 0), _stroke(paint, 0, 0, TILE, TILE))


def _horizontal(paint: Paint) -> str:
    return _pattern(paint, _stroke(paint, 0, TILE / 2, TILE, TILE / 2))


FILLS: Mapping[str, Callable[[Paint], str] | None] = {
    "solid": None,
    "gradient-linear": _linear,
    "gradient-radial": _radial,
    "dots": _dots,
    "hatching": _hatching,
    "crosshatch": _crosshatch,
    "horizontal-lines": _horizontal,
}
"""Fill style -> code of its definition."""
