"""Pictures of SVG text: pixels worked out by hand, and cairosvg beside them. One case is one line."""

# ruff: noqa: E501

from __future__ import annotations

import io
import random

import cairosvg
import numpy as np
import pytest
from PIL import Image

from vlmrl.svg.build import build_scene
from vlmrl.svg.draw import DrawJob, draw_svg, paint
from vlmrl.svg.parse import SvgLimits, parse_svg
from vlmrl.svg.scene import Shape
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure
from vlmrl.untrusted import CodeRefused

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
WHITE, RED, GREEN, BLUE, BLACK = (255, 255, 255), (255, 0, 0), (0, 128, 0), (0, 0, 255), (0, 0, 0)


def svg(content: str, attributes: str = 'width="40" height="40"') -> str:
    return f"{HEAD}{attributes}>{content}</svg>"


def pixels(content: str, attributes: str = 'width="40" height="40"', size: tuple[int, int] | None = None) -> np.ndarray:
    return draw_svg(DrawJob(svg(content, attributes), size)).pixels


def at(picture: np.ndarray, x: int, y: int) -> tuple[int, ...]:
    return tuple(int(v) for v in picture[y, x])


RED_BOX = '<rect width="40" height="40" fill="red"/>'

CASES: list[tuple[str, str, dict[tuple[int, int], tuple[int, int, int]]]] = [
    ("rect", '<rect x="10" y="10" width="10" height="10" fill="red"/>', {(9, 15): WHITE, (10, 10): RED, (19, 19): RED, (20, 15): WHITE}),
    ("no fill", '<rect x="10" y="10" width="10" height="10" fill="none"/>', {(15, 15): WHITE}),
    ("default fill", '<rect x="10" y="10" width="10" height="10"/>', {(15, 15): BLACK}),
    ("circle", '<circle cx="20" cy="20" r="10" fill="red"/>', {(20, 20): RED, (20, 12): RED, (11, 11): WHITE, (28, 20): RED}),
    ("ellipse", '<ellipse cx="20" cy="20" rx="15" ry="5" fill="red"/>', {(8, 20): RED, (20, 28): WHITE, (20, 23): RED}),
    ("line", '<line x1="0" y1="20" x2="40" y2="20" stroke="red" stroke-width="4"/>', {(20, 18): RED, (20, 21): RED, (20, 23): WHITE}),
    ("polygon", '<polygon points="0,0 40,0 0,40" fill="red"/>', {(5, 5): RED, (35, 35): WHITE}),
    ("polyline is filled", '<polyline points="0,0 40,0 0,40" fill="red"/>', {(5, 5): RED}),
    ("path arc", '<path d="M 10 20 A 10 10 0 0 1 30 20 Z" fill="red"/>', {(20, 12): RED, (20, 25): WHITE}),
    ("even odd", '<path fill-rule="evenodd" fill="red" d="M0 0H40V40H0Z M10 10H30V30H10Z"/>', {(5, 5): RED, (20, 20): WHITE}),
    ("nonzero", '<path fill="red" d="M0 0H40V40H0Z M10 10H30V30H10Z"/>', {(20, 20): RED}),
    ("translate", '<rect width="10" height="10" fill="red" transform="translate(20 20)"/>', {(25, 25): RED, (5, 5): WHITE}),
    ("order of transforms", '<rect width="10" height="10" fill="red" transform="translate(20,0) scale(2)"/>', {(39, 19): RED, (19, 5): WHITE}),
    ("singular transform", '<rect width="40" height="40" fill="red" transform="scale(0 1)"/>', {(20, 20): WHITE}),
    ("group fill is inherited", '<g fill="red"><rect width="40" height="40"/></g>', {(20, 20): RED}),
    ("style has precedence", '<rect width="40" height="40" fill="blue" style="fill: red"/>', {(20, 20): RED}),
    ("style sheet", '<style>.a rect { fill: red }</style><g class="a"><rect width="40" height="40"/></g>', {(20, 20): RED}),
    ("currentColor", '<g color="red"><rect width="40" height="40" fill="currentColor"/></g>', {(20, 20): RED}),
    ("wrong colour is left out", '<g fill="red"><rect width="40" height="40" fill="nonsense"/></g>', {(20, 20): RED}),
    ("opacity in percent", '<rect width="40" height="40" fill="black" opacity="50%"/>', {(20, 20): (127, 127, 127)}),
    ("modern rgb", '<rect width="40" height="40" fill="rgb(255 0 0)"/>', {(20, 20): RED}),
    ("group opacity is one layer", '<g opacity="0.5"><rect width="30" height="40" fill="black"/><rect x="10" width="30" height="40" fill="black"/></g>', {(5, 20): (127, 127, 127), (20, 20): (127, 127, 127)}),
    ("opacity of fill and stroke is one layer", '<rect x="10" y="10" width="20" height="20" fill="black" stroke="black" stroke-width="10" opacity="0.5"/>', {(12, 20): (127, 127, 127), (20, 20): (127, 127, 127), (7, 20): (127, 127, 127)}),
    ("use", '<defs><rect id="r" width="10" height="10" fill="red"/></defs><use href="#r" x="20" y="20"/>', {(25, 25): RED, (5, 5): WHITE}),
    ("use with xlink", '<defs><rect id="r" width="10" height="10"/></defs><use xlink:href="#r" x="20" fill="red"/>', {(25, 5): RED}),
    ("symbol", '<symbol id="s" viewBox="0 0 10 10"><rect width="10" height="10" fill="red"/></symbol><use href="#s" x="20" y="20" width="20" height="20"/>', {(39, 39): RED, (10, 10): WHITE}),
    ("use of itself", '<g id="g"><use href="#g"/><rect width="40" height="40" fill="red"/></g>', {(20, 20): RED}),
    ("nested svg is cut", '<svg x="10" y="10" width="10" height="10"><rect width="40" height="40" fill="red"/></svg>', {(15, 15): RED, (25, 25): WHITE}),
    ("display none", f'<g display="none">{RED_BOX}</g>', {(20, 20): WHITE}),
    ("visibility of a child", f'<g visibility="hidden">{RED_BOX}<rect width="10" height="10" fill="blue" visibility="visible"/></g>', {(20, 20): WHITE, (5, 5): BLUE}),
    ("defs, metadata and titles are not drawn", f"<defs>{RED_BOX}</defs><metadata>{RED_BOX}</metadata><title>{RED_BOX}</title>", {(20, 20): WHITE}),
    ("other namespaces are not drawn", f'<x:g xmlns:x="urn:x">{RED_BOX}</x:g>', {(20, 20): WHITE}),
    ("clip path", f'<clipPath id="c"><rect width="20" height="40"/></clipPath><g clip-path="url(#c)">{RED_BOX}</g>', {(10, 20): RED, (30, 20): WHITE}),
    ("clip path relative to the shape", '<clipPath id="c" clipPathUnits="objectBoundingBox"><rect width="0.5" height="1"/></clipPath><rect x="20" width="20" height="40" fill="red" clip-path="url(#c)"/>', {(25, 20): RED, (35, 20): WHITE, (10, 20): WHITE}),
    ("empty clip path", f'<clipPath id="c"/><g clip-path="url(#c)">{RED_BOX}</g>', {(20, 20): WHITE}),
    ("mask by luminance", f'<mask id="m" maskUnits="userSpaceOnUse" x="0" y="0" width="40" height="40"><rect width="20" height="40" fill="white"/><rect x="20" width="20" height="40" fill="black"/></mask><g mask="url(#m)">{RED_BOX}</g>', {(10, 20): RED, (30, 20): WHITE}),
    ("gradient", '<linearGradient id="g"><stop offset="0" stop-color="black"/><stop offset="1" stop-color="white"/></linearGradient><rect width="40" height="40" fill="url(#g)"/>', {(0, 20): (3, 3, 3), (39, 20): (252, 252, 252)}),
    ("gradient by reference", '<linearGradient id="a"><stop stop-color="red"/><stop offset="1" stop-color="red"/></linearGradient><linearGradient id="g" href="#a"/><rect width="40" height="40" fill="url(#g)"/>', {(20, 20): RED}),
    ("gradients in a circle", '<linearGradient id="a" href="#b"/><linearGradient id="b" href="#a"/><rect width="40" height="40" fill="url(#a) red"/>', {(20, 20): RED}),
    ("missing gradient with a fallback", '<rect width="40" height="40" fill="url(#x) red"/>', {(20, 20): RED}),
    ("missing gradient without", '<rect width="40" height="40" fill="url(#x)"/>', {(20, 20): WHITE}),
    ("radial gradient", '<radialGradient id="g"><stop stop-color="red"/><stop offset="0.5" stop-color="red"/><stop offset="0.5" stop-color="blue"/></radialGradient><rect width="40" height="40" fill="url(#g)"/>', {(20, 20): RED, (20, 14): RED, (1, 1): BLUE}),
    ("pattern", '<pattern id="p" width="10" height="10" patternUnits="userSpaceOnUse"><rect width="5" height="10" fill="red"/></pattern><rect width="40" height="40" fill="url(#p)"/>', {(2, 20): RED, (7, 20): WHITE, (12, 20): RED, (37, 3): WHITE}),
    ("marker", '<marker id="m" markerWidth="4" markerHeight="4" orient="auto"><rect width="4" height="4" fill="red"/></marker><path d="M0 20 L20 20" stroke="black" stroke-width="2" marker-end="url(#m)"/>', {(24, 24): RED, (24, 16): WHITE, (10, 20): BLACK}),
    ("marker turned", '<marker id="m" markerWidth="4" markerHeight="4" orient="auto"><rect width="4" height="4" fill="red"/></marker><path d="M20 0 L20 20" stroke="black" stroke-width="2" marker-end="url(#m)"/>', {(16, 24): RED, (24, 24): WHITE}),
    ("undefined marker", '<path d="M0 20 L40 20" stroke="red" stroke-width="4" marker-end="url(#x)"/>', {(20, 20): RED}),
    ("dashes", '<path d="M0 20 H40" stroke="red" stroke-width="4" stroke-dasharray="10"/>', {(5, 20): RED, (15, 20): WHITE, (25, 20): RED}),
    ("dashes without end", '<path d="M0 20 H40" stroke="red" stroke-width="4" stroke-dasharray="0.0000001"/>', {(5, 20): RED}),
    ("first fitting child of a switch", f'<switch><foreignObject/>{RED_BOX}<rect width="40" height="40" fill="blue"/></switch>', {(20, 20): RED}),
    ("switch by language", f'<switch><g systemLanguage="de"><rect width="40" height="40"/></g><g systemLanguage="fr, en-GB">{RED_BOX}</g></switch>', {(20, 20): RED}),
    ("switch by extension", f'<switch><g requiredExtensions="http://localhost/none"><rect width="40" height="40"/></g>{RED_BOX}</switch>', {(20, 20): RED}),
    ("extension of browsers", f'<g requiredExtensions="http://www.w3.org/1999/xhtml">{RED_BOX}</g>', {(20, 20): RED}),
    ("chosen child that is not displayed", f'<switch><g display="none"/>{RED_BOX}</switch>', {(20, 20): WHITE}),
    ("title in a switch", f'<switch><title>a</title>{RED_BOX}</switch>', {(20, 20): RED}),
    ("other language", f'<g systemLanguage="de">{RED_BOX}</g>', {(20, 20): WHITE}),
    ("language that begins alike", f'<g systemLanguage="enx">{RED_BOX}</g>', {(20, 20): WHITE}),
    ("no language", f'<g systemLanguage="">{RED_BOX}</g>', {(20, 20): WHITE}),
    ("no extension", f'<g requiredExtensions="">{RED_BOX}</g>', {(20, 20): WHITE}),
    ("symbol of another language", f'<symbol id="s" systemLanguage="de">{RED_BOX}</symbol><use href="#s"/>', {(20, 20): WHITE}),
    ("tspan of another language", '<text y="36" font-size="40" fill="red"><tspan systemLanguage="de">&#x2588;</tspan></text>', {(10, 20): WHITE}),
    ("inherit by style", '<g fill="red"><rect width="40" height="40" fill="blue" style="fill:inherit"/></g>', {(20, 20): RED}),
    ("inherit of opacity", '<g opacity="0.5"><rect width="40" height="40" fill="red" opacity="inherit"/></g>', {(20, 20): (255, 191, 191)}),
    ("inherit of clip-path", f'<clipPath id="c"><rect width="20" height="40"/></clipPath><g transform="translate(20)" clip-path="url(#c)"><g clip-path="inherit" transform="translate(-20)">{RED_BOX}</g></g>', {(10, 20): WHITE, (30, 20): WHITE}),
    ("inherit of a stop", '<linearGradient id="a" stop-color="red"><stop stop-color="inherit"/></linearGradient><rect width="40" height="40" fill="url(#a)"/>', {(20, 20): RED}),
    ("current colour of a stop", '<g color="red"><linearGradient id="a"><stop stop-color="currentColor"/></linearGradient></g><rect width="40" height="40" fill="url(#a)"/>', {(20, 20): RED}),
    ("initial", '<g fill="red"><rect width="40" height="40" fill="initial"/></g>', {(20, 20): BLACK}),
    ("unset", '<g fill="red"><rect width="40" height="40" style="fill:unset;opacity:unset" opacity="0"/></g>', {(20, 20): RED}),
    ("multiply", '<rect width="40" height="40" fill="#8080ff"/><rect width="40" height="40" fill="#ff8000" style="mix-blend-mode:multiply"/>', {(20, 20): (128, 64, 0)}),
    ("screen", '<rect width="40" height="40" fill="blue"/><rect width="40" height="40" fill="red" style="mix-blend-mode:screen"/>', {(20, 20): (255, 0, 255)}),
    ("difference", '<rect width="40" height="40" fill="#ff0080"/><rect width="40" height="40" fill="red" style="mix-blend-mode:difference"/>', {(20, 20): (0, 0, 128)}),
    ("isolated", f'{RED_BOX}<g style="isolation:isolate"><rect width="40" height="40" fill="blue" style="mix-blend-mode:multiply"/></g>', {(20, 20): BLUE}),
    ("not isolated", f'{RED_BOX}<g><rect width="40" height="40" fill="blue" style="mix-blend-mode:multiply"/></g>', {(20, 20): BLACK}),
    ("clip path without a fill", f'<clipPath id="c"><circle cx="20" cy="20" r="10" fill="none"/></clipPath><g clip-path="url(#c)">{RED_BOX}</g>', {(20, 20): RED, (8, 8): WHITE}),
    ("clip rule from a group", f'<clipPath id="c"><g clip-rule="evenodd"><path d="M0 0H40V40H0z M10 10H30V30H10z"/></g></clipPath><g clip-path="url(#c)">{RED_BOX}</g>', {(5, 5): RED, (20, 20): WHITE}),
    ("clip path of two parts", f'<clipPath id="c"><path d="M0 0H20V40H0z M5 5H15V35H5z" clip-rule="evenodd"/><circle cx="30" cy="20" r="8"/></clipPath><g clip-path="url(#c)">{RED_BOX}</g>', {(2, 2): RED, (10, 20): WHITE, (30, 20): RED, (38, 2): WHITE}),
    ("font shorthand", '<text x="0" y="36" style="font: bold 40px Arial; fill: red">&#x2588;&#x2588;</text>', {(10, 20): RED}),
]  # fmt: skip


@pytest.mark.parametrize(("content", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_pixels(content: str, wanted: dict[tuple[int, int], tuple[int, int, int]]):
    picture = pixels(content)
    for (x, y), colour in wanted.items():
        assert all(abs(a - b) <= 2 for a, b in zip(at(picture, x, y), colour, strict=True)), ((x, y), at(picture, x, y))


def test_a_view_box_is_scaled_and_centred():
    picture = pixels(RED_BOX, 'viewBox="0 0 40 40"', (80, 40))
    assert picture.shape == (40, 80, 3)
    assert at(picture, 19, 20) == WHITE and at(picture, 21, 20) == RED and at(picture, 61, 20) == WHITE


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ('width="30" height="20"', (30, 20)),
        ('viewBox="0 0 50 60"', (50, 60)),
        ('width="100" viewBox="0 0 50 60"', (100, 120)),
        ('width="1in" height="2cm"', (96, 76)),
        ('width="50%" viewBox="0,0,100,40"', (50, 20)),
        ("", (300, 150)),
        ('width="0" height="-3" viewBox="0 0 7 8"', (7, 8)),
    ],
)
def test_the_size_that_a_document_declares(attributes: str, size: tuple[int, int]):
    picture = draw_svg(DrawJob(svg(RED_BOX, attributes))).pixels
    assert (picture.shape[1], picture.shape[0]) == size


def test_a_huge_document_is_scaled_down():
    picture = draw_svg(DrawJob(svg(RED_BOX, 'width="1e6" height="1e6"')), SvgLimits(pixels=10_000)).pixels
    assert picture.shape == (100, 100, 3)


def texts(content: str) -> list[tuple[str, float, float]]:
    """(text, left, right) of each run."""
    from vlmrl.svg.geometry import bounds

    scene = build_scene(parse_svg(svg(content)))
    runs = []
    for leaf, _ in scene.leaves():
        assert isinstance(leaf, Shape)
        box = bounds(leaf.commands)
        assert box is not None
        runs.append((leaf.text, box.x, box.right))
    return runs


def test_text_is_anchored():
    (_, left, right), (_, left_m, right_m), (_, _, right_e) = texts(
        '<text x="20" y="9">HH</text><text x="20" y="9" text-anchor="middle">HH</text>'
        '<text x="20" y="9" text-anchor="end">HH</text>'
    )
    assert left == pytest.approx(21.2, abs=0.5)
    assert (left_m + right_m) / 2 == pytest.approx(20, abs=0.1)
    assert right_e < 20 and right - left == pytest.approx(right_m - left_m)


def test_spaces_of_text_are_collapsed_and_spans_are_runs():
    assert [text for text, *_ in texts("<text x='0' y='9'>\n  a\n <tspan>b  c</tspan> d \n</text>")] == [
        "a ",
        "b c",
        " d",
    ]


def test_lines_of_spans_begin_where_they_say():
    (_, first, _), (_, second, _) = texts(
        '<text y="9"><tspan x="3" y="9">H</tspan><tspan x="13" dy="12">H</tspan></text>'
    )
    assert second - first == pytest.approx(10, abs=1e-6)


def test_a_symbol_that_the_font_lacks_comes_from_another_one():
    picture = pixels('<text x="0" y="36" font-size="40">\u2714</text>')
    assert (picture < 128).any()


FORBIDDEN = [
    "<script>1</script>",
    "<g><foreignObject/></g>",
    '<rect onclick="x()" width="1" height="1"/>',
    '<image href="file:///etc/passwd"/>',
    '<image xlink:href="http://localhost/x.png"/>',
    '<use href="other.svg#a"/>',
    '<image href="data:image/png;base64,AAAA"/>',
]


@pytest.mark.parametrize("content", FORBIDDEN)
def test_what_loads_or_runs_is_refused(content: str):
    with pytest.raises(CodeRefused) as error:
        draw_svg(DrawJob(svg(content)))
    assert error.value.kind == "forbidden"


def test_embedded_pictures_by_policy():
    data = io.BytesIO()
    Image.new("RGB", (2, 2), (255, 0, 0)).save(data, "PNG")
    import base64

    href = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    text = svg(f'<image href="{href}" width="40" height="40"/>')
    assert at(draw_svg(DrawJob(text), images="draw").pixels, 20, 20) == RED
    assert draw_svg(DrawJob(text), images="drop").is_blank
    broken = svg('<image href="data:image/png;base64,iVBORw0KGgo=" width="40" height="40"/>')
    with pytest.raises(CodeRefused) as error:
        draw_svg(DrawJob(broken), images="draw")
    assert error.value.kind == "drawing"


def nested_uses(levels: int, each: int) -> str:
    parts = ['<rect id="u0" width="1" height="1"/>']
    for level in range(levels):
        parts.append(f'<g id="u{level + 1}">' + f'<use href="#u{level}"/>' * each + "</g>")
    return "<defs>" + "".join(parts) + f'</defs><use href="#u{levels}"/>'


LIMITS = [
    ("uses", nested_uses(8, 10)),
    ("pattern", '<pattern id="p" width="30000" height="30000" patternUnits="userSpaceOnUse"><rect width="9" height="9"/></pattern><rect width="40" height="40" fill="url(#p)"/>'),
    ("depth", "<g>" * 150 + "</g>" * 150),
    ("elements", "<g/>" * 20_001),
    ("layers", '<g opacity="0.9"><path d="M0 0H9V9Z"/>' * 90 + "</g>" * 90),
    ("path", '<path d="' + "M0 0" + "L1 1" * 50_001 + '"/>'),
]  # fmt: skip


@pytest.mark.parametrize("content", [case[1] for case in LIMITS], ids=[case[0] for case in LIMITS])
def test_what_is_too_much_is_refused(content: str):
    with pytest.raises(CodeRefused) as error:
        draw_svg(DrawJob(svg(content)))
    assert error.value.kind == "limit"


@pytest.mark.parametrize(
    "content",
    [
        '<circle cx="20" cy="20" r="1e300" fill="red"/>',
        '<circle cx="20" cy="20" r="9999999" stroke="blue" stroke-width="9999999" stroke-dasharray="1"/>',
        '<path d="M0 0 L1e7 1e7 L-1e7 3" stroke="red" stroke-dasharray="0.01 0.01" transform="scale(1e6)"/>',
        '<rect width="1e7" height="1e7" rx="1e7" stroke="red" transform="matrix(1e5 0 0 1e5 0 0) rotate(3)"/>',
        '<text font-size="1e9" y="20">a</text>',
        '<text rotate="1e300" x="NaN" y="inf" letter-spacing="1e7">abc</text>',
        '<radialGradient id="g" r="1e-30" fx="9e6"><stop/><stop offset="1" stop-color="red"/></radialGradient><rect width="9" height="9" fill="url(#g)"/>',
        '<g transform="skewX(90)"><rect width="9" height="9"/></g>',
        '<path d="M1 1 Z Z Z L Z" stroke="red" marker-start="url(#a)"/><marker id="a"><path d="M0 0H3V3Z" marker-mid="url(#a)"/></marker>',
        '<mask id="m"><rect width="9" height="9" mask="url(#m)"/></mask><rect width="9" height="9" mask="url(#m)"/>',
        '<clipPath id="c"><rect width="9" height="9" clip-path="url(#c)"/></clipPath><rect width="9" height="9" clip-path="url(#c)"/>',
        '<pattern id="p" width="9" height="9"><rect width="9" height="9" fill="url(#p)"/></pattern><rect width="9" height="9" fill="url(#p)"/>',
    ],
)  # fmt: skip
def test_extreme_numbers_and_cycles_are_drawn_without_harm(content: str):
    drawing = draw_svg(DrawJob(svg(content)))
    assert drawing.pixels.shape == (40, 40, 3) and drawing.seconds < 3


def test_drawn_figures_look_as_cairosvg_draws_them():
    """Fonts differ, so that texts are left out: the shapes, fills, patterns, dashes and arrows remain."""
    worst = 0.0
    for seed in range(24):
        text = draw_figure(random.Random(seed), DrawnSettings(simple=seed % 4 == 0)).svg
        text = text.replace("<text", "<metadata").replace("</text>", "</metadata>")
        ours = draw_svg(DrawJob(text)).pixels.astype(int)
        png = cairosvg.svg2png(bytestring=text.encode(), background_color="white")
        assert png is not None
        theirs = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
        assert ours.shape == theirs.shape
        worst = max(worst, float((np.abs(ours - theirs).max(axis=2) > 64).mean()))
    assert worst < 0.004, worst


def test_equal_texts_have_equal_digests():
    text = svg('<text y="20">abc</text>')
    assert draw_svg(DrawJob(text)).digest == draw_svg(DrawJob(text)).digest
    assert draw_svg(DrawJob(text)).digest != draw_svg(DrawJob(text), SvgLimits(pixels=100)).digest


def test_a_leaf_alone_is_what_it_is_in_the_whole():
    from vlmrl.svg.draw import Painter, view_of

    scene = build_scene(
        parse_svg(
            svg(
                f'<g opacity="0.5" clip-path="url(#c)">{RED_BOX}</g><clipPath id="c"><rect width="20" height="40"/></clipPath>'
            )
        )
    )
    painter = Painter(40, 40, view_of(scene, 40, 40))
    painter.background(1, 1, 1)
    for leaf, groups in scene.leaves():
        painter.draw_leaf(leaf, groups)
    assert (painter.rgb() == paint(scene, 40, 40)).all()


@pytest.mark.parametrize(
    "root",
    [
        'style="background-color: #102030"', 'style="background:rgb(16 32 48)"', 'class="dark"',
        'viewBox="0 0 40 10" style="background: #102030"',
    ],
)  # fmt: skip
def test_the_background_of_the_root_is_drawn_below_all_else_as_browsers_do(root: str):
    style = "<style>.dark { background: #102030 }</style>"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" {root}>{style}<rect width="5" height="9"/></svg>'
    picture = draw_svg(DrawJob(svg)).pixels
    assert (picture[-1, -1] == (16, 32, 48)).all() and (picture[0, -1] == (16, 32, 48)).all()
    assert (picture == 0).all(axis=2).any()
    for value in ("transparent", "url(#a)", "none", "red url(https://example.org/a.png)"):
        plain = svg.replace(root, f'style="background: {value}"')
        assert (draw_svg(DrawJob(plain)).pixels[-1, -1] == 255).all()
