"""Presentation properties of SVG: which are read, which are inherited, and the first values of those.

Source: SVG 1.1 (second edition), appendix N, and SVG 2, section 6.6.
"""

from __future__ import annotations

INHERITED = {
    "clip-rule": "nonzero",
    "color": "black",
    "fill": "black",
    "fill-opacity": "1",
    "fill-rule": "nonzero",
    "font-family": "",
    "font-size": "16",
    "font-style": "normal",
    "font-variant": "normal",
    "font-weight": "normal",
    "letter-spacing": "normal",
    "marker-end": "none",
    "marker-mid": "none",
    "marker-start": "none",
    "paint-order": "normal",
    "shape-rendering": "auto",
    "stroke": "none",
    "stroke-dasharray": "none",
    "stroke-dashoffset": "0",
    "stroke-linecap": "butt",
    "stroke-linejoin": "miter",
    "stroke-miterlimit": "4",
    "stroke-opacity": "1",
    "stroke-width": "1",
    "text-anchor": "start",
    "text-rendering": "auto",
    "visibility": "visible",
    "word-spacing": "normal",
}
"""Property that children take from their parent -> its first value."""
OWN = frozenset((
    "alignment-baseline", "background-color", "baseline-shift", "clip-path", "display", "dominant-baseline", "filter",
    "isolation", "mask", "mix-blend-mode", "opacity", "overflow", "stop-color", "stop-opacity", "text-decoration",
    "transform", "transform-origin",
))  # fmt: skip
"""Properties of one element alone."""
PROPERTIES = OWN | INHERITED.keys()
SHORTHANDS = {"marker": ("marker-start", "marker-mid", "marker-end"), "background": ("background-color",)}
"""Shorthand -> the properties that it sets to its value."""
BLENDS = {
    "multiply": "MULTIPLY", "screen": "SCREEN", "overlay": "OVERLAY", "darken": "DARKEN", "lighten": "LIGHTEN",
    "color-dodge": "COLOR_DODGE", "color-burn": "COLOR_BURN", "hard-light": "HARD_LIGHT", "soft-light": "SOFT_LIGHT",
    "difference": "DIFFERENCE", "exclusion": "EXCLUSION", "hue": "HSL_HUE", "saturation": "HSL_SATURATION",
    "color": "HSL_COLOR", "luminosity": "HSL_LUMINOSITY", "plus-lighter": "ADD",
}  # fmt: skip
"""Value of `mix-blend-mode` -> name of cairo's operator."""
