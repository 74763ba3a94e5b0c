"""SVG attacks that want memory or time: most are short, all are well formed."""

# ruff: noqa: E501
from __future__ import annotations

import math

from svg_attack_parts import (
    BOX,
    PAYLOAD,
    attacks,
    data_url,
    gzip_bomb,
    image,
    png_of,
    svg,
)

HUGE = 30_000
LINE = '<path d="M0 50 H100" stroke="red" fill="none" {}/>'
FILLED = f'<rect {BOX} fill="url(#a)"/>'


def tree_of_uses(levels: int, times: int, leaf: str) -> str:
    """Return definitions in which `l<levels>` uses `l0` `times` ** `levels` times."""
    texts = [f'<g id="l0">{leaf}</g>']
    for level in range(1, levels + 1):
        texts.append(f'<g id="l{level}">' + f'<use xlink:href="#l{level - 1}"/>' * times + "</g>")
    return "<defs>" + "".join(texts) + "</defs>"


def star(points: int, step: int = 0) -> str:
    """Return points of a star polygon whose every edge crosses nearly every other."""
    jump = step or points // 2 - 1
    angles = (2 * math.pi * jump * index / points for index in range(points))
    return " ".join(f"{50 + 49 * math.cos(angle):.3f},{50 + 49 * math.sin(angle):.3f}" for angle in angles)


def pattern_chain(levels: int, tile: str = 'width="1" height="1"') -> str:
    """Return patterns `p0`..`p<levels>`; each fills a large rectangle with the one below."""
    texts = [f'<pattern id="p0" patternUnits="userSpaceOnUse" {tile}><rect width="1" height="1" fill="red"/></pattern>']
    for level in range(1, levels + 1):
        fill = f'<rect width="{HUGE}" height="{HUGE}" fill="url(#p{level - 1})"/>'
        texts.append(f'<pattern id="p{level}" patternUnits="userSpaceOnUse" {tile}>{fill}</pattern>')
    return "<defs>" + "".join(texts) + "</defs>"


def pattern(size: str, inside: str = '<circle r="9"/>', more: str = "") -> str:
    return svg(f'<pattern id="a" patternUnits="userSpaceOnUse" {size} {more}>{inside}</pattern>{FILLED}')


def sized(width: object, height: object, attributes: str = "") -> str:
    return svg(f'<rect width="9" height="9" fill="{PAYLOAD}"/>', attributes, f'width="{width}" height="{height}"')


SURFACES = attacks(
    "memory",
    "either",
    ("pattern 30000", "a tile of 3.6 GB in under 300 characters", pattern(f'width="{HUGE}" height="{HUGE}"')),
    ("pattern 1e9", "a tile larger than cairo takes", pattern('width="1e9" height="1e9"')),
    ("pattern by style", "sizes in CSS pass a check of attributes", pattern(f'style="width:{HUGE};height:{HUGE}"')),
    (
        "pattern scaled",
        "a small tile made large by its transform",
        pattern('width="30" height="30"', more='patternTransform="scale(1000)"'),
    ),
    (
        "pattern percent",
        "a tile in parts of a huge shape",
        svg(f'<pattern id="a" width="1" height="1"><circle r="9"/></pattern><rect width="{HUGE}" height="{HUGE}" '
            'fill="url(#a)"/>'),
    ),
    ("pattern thin", "a tile of 1 by 10^8", pattern('width="1" height="1e8"')),
    ("pattern tiny", "a tile of 10^-6 pixels, 10^16 of them", pattern('width="1e-6" height="1e-6"')),
    ("pattern viewBox", "the viewBox scales the tile", pattern('width="9e4" height="9e4" viewBox="0 0 1 1"')),
    ("pattern in user units", "units of inches", pattern('width="900in" height="900in"')),
    ("patterns in patterns", "every level repeats the one below", svg(
        pattern_chain(8) + f'<rect {BOX} fill="url(#p8)"/>')),
    ("patterns in large patterns", "several large tiles at once", svg(
        pattern_chain(8, 'width="4000" height="4000"') + f'<rect {BOX} fill="url(#p8)"/>')),
    ("width and height 30000", "a canvas of 3.6 GB", sized(HUGE, HUGE)),
    ("width 1e9", "a canvas that cairo refuses", sized("1e9", "1e9")),
    ("width by height", "a canvas of 32767 by 32767, cairo's most", sized(32767, 32767)),
    ("width in inches", "300 in at 96 dpi", sized("300in", "300in")),
    ("width 1e308", "a size near the end of floats", sized("1e308", "1e308")),
    ("width 1e999", "a size past the end of floats", sized("1e999", "1e999")),
    ("ratio", "1 by 10^8", sized(1, "1e8")),
    ("size in style", "sizes in CSS", svg('<rect width="9" height="9"/>', f'style="width:{HUGE}px;height:{HUGE}px"', "")),
    ("viewBox alone", "the viewBox gives the size", svg('<rect width="9" height="9"/>', f'viewBox="0 0 {HUGE} {HUGE}"', "")),
    ("viewBox 1e300", "a viewBox past fixed point", svg('<rect width="1e300" height="1e300"/>', 'viewBox="0 0 1e300 1e300"')),
    ("viewBox 1e-300", "a scale of 10^302", svg("<rect width='1' height='1'/>", 'viewBox="0 0 1e-300 1e-300"')),
    ("em sizes", "lengths in em of a huge font", svg("<rect width='9em' height='9em'/>", 'font-size="1e9"', 'width="9em" height="9em"')),
    ("mask", "a mask of 3.6 GB", svg(
        f'<mask id="m" maskUnits="userSpaceOnUse" width="{HUGE}" height="{HUGE}"><rect width="{HUGE}" height="{HUGE}" '
        f'fill="white"/></mask><rect {BOX} mask="url(#m)"/>')),
    ("mask percent", "a mask of 10^9 %", svg(
        f'<mask id="m" width="1e9%" height="1e9%"><rect width="1e9" height="1e9"/></mask><rect {BOX} mask="url(#m)"/>')),
    ("filter region", "a filter region of 3.6 GB", svg(
        f'<filter id="f" filterUnits="userSpaceOnUse" width="{HUGE}" height="{HUGE}"><feGaussianBlur stdDeviation="9000"/>'
        f'</filter><rect {BOX} filter="url(#f)"/>')),
    ("filter flood", "a flood of 10^18 units", svg(
        f'<filter id="f"><feFlood width="1e18" height="1e18" flood-color="red"/></filter><rect {BOX} filter="url(#f)"/>')),
    ("groups with opacity", "900 groups, each a canvas of its own", svg(
        '<g opacity=".9">' * 900 + '<rect width="9" height="9"/>' + "</g>" * 900, size='width="1000" height="1000"')),
    ("groups with masks", "900 groups with a mask each", svg(
        '<mask id="m"><rect width="9" height="9" fill="white"/></mask>' + '<g mask="url(#m)">' * 900 + "</g>" * 900,
        size='width="1000" height="1000"')),
    ("inherited attributes", "3,000 attributes copied into 50,000 children", svg(
        "<g " + " ".join(f'a{index}="1"' for index in range(3_000)) + ">" + "<g/>" * 50_000 + "</g>")),
    ("nested svg", "a nested svg of 10^9", svg('<svg width="1e9" height="1e9"><rect width="1e9" height="1e9"/></svg>')),
    ("marker size", "a marker of 30000 units", svg(
        f'<marker id="m" markerWidth="{HUGE}" markerHeight="{HUGE}" viewBox="0 0 1 1"><rect width="1" height="1"/></marker>'
        + LINE.format('stroke-width="9000" marker-end="url(#m)"'))),
    ("PNG bomb", "a PNG of 33 KB that unpacks to 1 GB", svg(
        image(data_url(png_of(16_000, 16_000, 1, 0, bytes(2_001 * 16_000)))))),
    ("PNG of promises", "a PNG of 70 bytes that says 2^31 - 1 by 2^31 - 1", svg(
        image(data_url(png_of(2**31 - 1, 2**31 - 1, 16, 6, b""))))),
    ("gzip bomb in use", "1 GB of svgz in a data URL", svg(
        f'<use xlink:href="{data_url(gzip_bomb(1024), "image/svg+xml")}#a"/>')),
    ("gzip bomb in image", "1 GB of svgz in a data URL", svg(image(data_url(gzip_bomb(1024), "image/svg+xml")))),
)  # fmt: skip

STROKES = attacks(
    "memory",
    "either",
    ("dashes of 1e-7", "10^9 dashes on one line", svg(LINE.format('stroke-dasharray="1e-7"'))),
    ("dashes on a long line", "10^8 dashes, most of them off the canvas", svg(
        '<path d="M0 50 H1e7" stroke="red" stroke-dasharray=".05 .05"/>')),
    ("dashes on a circle", "dashes of 10^-6 around a circle", svg(
        '<circle cx="50" cy="50" r="40" fill="none" stroke="red" stroke-dasharray="1e-6 1e-6" stroke-linecap="round"/>')),
    ("dashes: 10^6 numbers", "a dash array of 10^6 numbers", svg(LINE.format('stroke-dasharray="' + "1 " * 10**6 + '"'))),
    ("dash offset", "an offset of 10^300", svg(LINE.format('stroke-dasharray="3 2" stroke-dashoffset="1e300"'))),
    ("dashes denormal", "the least float there is", svg(LINE.format('stroke-dasharray="5e-324"'))),
    ("radius 1e300", "a circle past fixed point", svg('<circle r="1e300"/>')),
    ("arc radius 1e300", "an arc past fixed point", svg('<path d="M0 0 A1e300 1e300 0 1 1 50 50" stroke="red"/>')),
    ("stroke-width 1e30", "a wide stroke", svg(LINE.format('stroke-width="1e30"'))),
    ("round joins", "20,000 round joins of a huge pen", svg(
        f'<polyline points="{star(20_000)}" stroke="red" stroke-width="1e6" stroke-linejoin="round" fill="none"/>')),
    ("miter", "a miter of 10^30", svg(
        '<path d="M0 0 L99 .001 L0 .002" stroke="red" stroke-width="9" stroke-miterlimit="1e30"/>')),
    ("font-size 1e9", "glyphs of 10^9 pixels", svg('<text x="0" y="50" font-size="1e9">AB</text>')),
    ("font-size 10000", "many different glyphs of 10^4 pixels", svg(
        '<text x="0" y="9000" font-size="10000">' + "".join(map(chr, range(33, 127))).replace("&", "").replace("<", "")
        + "</text>")),
    ("text of 8000", "8,000 characters of 5000 pixels", svg(
        '<text x="0" y="50" font-size="5000">' + "Wq" * 4_000 + "</text>")),
    ("text of 10^6", "10^6 characters", svg('<text x="0" y="50">' + "a" * 10**6 + "</text>")),
    ("text stroke", "a dashed outline of huge text", svg(
        '<text y="50" font-size="3000" stroke="red" stroke-dasharray=".001">' + "@" * 500 + "</text>")),
)  # fmt: skip

REFERRERS = attacks(
    "time",
    "either",
    ("uses: 10^7", "10 uses of 10 uses, seven times", svg(
        tree_of_uses(7, 10, '<rect width="1" height="1"/>') + '<use xlink:href="#l7"/>')),
    ("uses: 2^30", "each uses the one before twice, thirty times", svg(
        tree_of_uses(30, 2, '<rect width="1" height="1"/>') + '<use xlink:href="#l30"/>')),
    ("uses of nothing", "10^7 uses of an empty group", svg(tree_of_uses(7, 10, "") + '<use href="#l7"/>')),
    ("uses in masks", "uses that a counter for each surface does not see", svg(
        tree_of_uses(4, 10, '<rect width="1" height="1"/>') + '<mask id="m"><use xlink:href="#l4"/></mask>'
        + f'<rect {BOX} mask="url(#m)"/>' * 500)),
    ("uses of something large", "900 uses of 5,000 elements", svg(
        '<g id="a">' + '<path d="M0 0L9 9" stroke="red"/>' * 5_000 + "</g>" + '<use xlink:href="#a"/>' * 900)),
    ("uses, each of another", "20,000 look-ups by id among 20,000 elements", svg(
        "<defs>" + "".join(f'<g id="i{index}"/>' for index in range(20_000)) + "</defs>"
        + "".join(f'<use xlink:href="#i{index}"/>' for index in range(20_000)))),
    ("use of itself", "a cycle of one", svg('<use id="a" xlink:href="#a"/>')),
    ("use of its parent", "a cycle through a group", svg('<g id="a"><use xlink:href="#a"/><use xlink:href="#a"/></g>')),
    ("use of the root", "a cycle through the document", svg(
        '<use href="#root"/><rect width="9" height="9"/>', 'id="root"')),
    ("use of two", "a cycle of two", svg('<g id="a"><use href="#b"/></g><g id="b"><use href="#a"/></g>')),
    ("pattern of itself", "a cycle through a fill", pattern('width="9" height="9"', f"<rect {BOX} fill='url(#a)'/>")),
    ("pattern inherits itself", "a cycle of references", svg(
        f'<pattern id="a" href="#b" width="9" height="9"/><pattern id="b" href="#a"/>{FILLED}')),
    ("gradient of itself", "a cycle of one", svg(f'<linearGradient id="a" xlink:href="#a"/>{FILLED}')),
    ("gradients of each other", "a cycle of three", svg(
        '<linearGradient id="a" href="#b"/><radialGradient id="b" href="#c"/><linearGradient id="c" href="#a"/>' + FILLED)),
    ("gradients in a chain", "10^4 gradients, each of the one before", svg(
        '<linearGradient id="a" href="#g9999"/><linearGradient id="g0"><stop/></linearGradient>'
        + "".join(f'<linearGradient id="g{i}" href="#g{i - 1}"/>' for i in range(1, 10_000)) + FILLED)),
    ("mask of itself", "a mask whose content has the mask", svg(
        f'<mask id="m"><rect {BOX} mask="url(#m)"/></mask><rect {BOX} mask="url(#m)"/>')),
    ("masks of each other", "a cycle of two", svg(
        f'<mask id="m" mask="url(#n)"><rect {BOX} mask="url(#n)"/></mask><mask id="n"><rect {BOX} mask="url(#m)"/></mask>'
        f'<rect {BOX} mask="url(#m)"/>')),
    ("marker of itself", "a marker whose path has the marker", svg(
        '<marker id="m" viewBox="0 0 9 9"><path d="M0 0L9 9L0 9" marker-mid="url(#m)" marker-end="url(#m)"/></marker>'
        + LINE.format('marker-end="url(#m)"'))),
    ("clip of itself", "a clip path clipped by itself", svg(
        f'<clipPath id="c" clip-path="url(#c)"><rect {BOX} clip-path="url(#c)"/></clipPath><rect {BOX} '
        'clip-path="url(#c)"/>')),
    ("filter of itself", "a filter with an image of what it filters", svg(
        f'<filter id="f"><feImage href="#r"/></filter><rect id="r" {BOX} filter="url(#f)"/>')),
    ("tref of itself", "text that refers to itself", svg('<text id="t" y="50">a<tref xlink:href="#t"/></text>')),
    ("textPath of itself", "a text path that is its own text", svg('<text y="50"><textPath id="t" href="#t">a</textPath></text>')),
    ("cycle through everything", "pattern, mask, marker, clip, use in one ring", svg(
        f'<pattern id="a" width="9" height="9"><rect {BOX} mask="url(#m)"/></pattern><mask id="m"><path d="M0 0L9 9" '
        f'marker-end="url(#k)"/></mask><marker id="k" viewBox="0 0 9 9"><g clip-path="url(#c)"><rect {BOX}/></g></marker>'
        f'<clipPath id="c"><use href="#u"/></clipPath><rect id="u" {BOX} fill="url(#a)"/>')),
)  # fmt: skip
