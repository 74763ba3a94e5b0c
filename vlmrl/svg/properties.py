"""Presentation properties of SVG: which are read, which are inherited, and their first values.

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
OWN = {
    "alignment-baseline": "auto",
    "background-color": "transparent",
    "baseline-shift": "baseline",
    "clip-path": "none",
    "display": "inline",
    "dominant-baseline": "auto",
    "filter": "none",
    "isolation": "auto",
    "mask": "none",
    "mix-blend-mode": "normal",
    "opacity": "1",
    "overflow": "visible",
    "stop-color": "black",
    "stop-opacity": "1",
    "text-decoration": "none",
    "transform": "none",
    "transform-origin": "0 0",
}
"""Property of one element alone -> its first value."""
PROPERTIES = frozenset(INHERITED | OWN)
SHORTHANDS = {"marker": ("marker-start", "marker-mid", "marker-end"), "background": ("background-color",)}
"""Shorthand -> the properties that it sets to its value."""
BLENDS = {
    "multiply": "MULTIPLY", "screen": "SCREEN", "overlay": "OVERLAY", "darken": "DARKEN", "lighten": "LIGHTEN",
    "color-dodge": "COLOR_DODGE", "color-burn": "COLOR_BURN", "hard-light": "HARD_LIGHT", "soft-light": "SOFT_LIGHT",
    "difference": "DIFFERENCE", "exclusion": "EXCLUSION", "hue": "HSL_HUE", "saturation": "HSL_SATURATION",
    "color": "HSL_COLOR", "luminosity": "HSL_LUMINOSITY", "plus-lighter": "ADD",
}  # fmt: skip
"""Value of `mix-blend-mode` -> name of cairo's operator."""
