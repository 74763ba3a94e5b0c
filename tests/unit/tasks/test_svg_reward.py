"""The reward `svg`: 1 for the truth, nothing for what cannot be seen, and less for every fault."""

# ruff: noqa: E501

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from svg_scores import result, value

from vlmrl.errors import RewardError
from vlmrl.svg.geometry import Box
from vlmrl.tasks.vfig.drawn.figure import DrawnFigure, DrawnSettings, draw_figure
from vlmrl.tasks.vfig.pictures import overlaid
from vlmrl.tasks.vfig.rewards import WEIGHTS, svg_figure
from vlmrl.tasks.vfig.scoring.compare import length_share, read_figure
from vlmrl.tasks.vfig.scoring.elements import GRID, raster
from vlmrl.tasks.vfig.scoring.picture import PictureScore, TruePicture, background, ssim, window_sums

BOX = '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="100">'


def figure(seed: int, *, simple: bool = False) -> DrawnFigure:
    return draw_figure(random.Random(seed), DrawnSettings(simple=simple))


def wrapped(svg: str, attributes: str) -> str:
    start, end = svg.index(">") + 1, svg.rindex("</svg>")
    return f"{svg[:start]}<g {attributes}>{svg[start:end]}</g></svg>"


@pytest.mark.parametrize("seed", range(8))
def test_the_truth_scores_one(seed: int):
    svg = figure(seed, simple=seed % 2 == 0).svg
    parts = result(svg, f"Here it is:\n```svg\n{svg}\n```").parts
    assert all(part in (1.0, None) for part in parts.values()), parts


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_every_part_is_a_share(seed: int, other: int):
    parts = result(figure(seed, simple=True).svg, figure(other, simple=other % 2 == 0).svg).parts
    assert all(part is None or 0.0 <= part <= 1.0 for part in parts.values())


HIDDEN = [
    'display="none"', 'visibility="hidden"', 'opacity="0"', 'opacity="0.02"', 'transform="translate(5000 0)"',
    'transform="scale(0.0001)"', 'fill-opacity="0" stroke-opacity="0" style="visibility: collapse"',
]  # fmt: skip


@pytest.mark.parametrize("attributes", HIDDEN)
@pytest.mark.parametrize("seed", [1, 2])
def test_hidden_content_earns_nothing(seed: int, attributes: str):
    svg = figure(seed).svg
    assert value(svg, wrapped(svg, attributes)) < 0.03


def test_content_behind_a_cover_earns_nothing():
    one = figure(3)
    cover = f'<rect width="{one.width}" height="{one.height}" fill="white"/>'
    assert value(one.svg, one.svg.replace("</svg>", f"{cover}</svg>")) == 0


def test_an_empty_picture_earns_nothing():
    svg = figure(4).svg
    head = svg[: svg.index(">") + 1]
    assert value(svg, f"{head}</svg>") == 0
    assert value(svg, f'{head}<rect width="10000" height="10000" fill="#ccc"/></svg>') == 0


def test_a_note_says_why_a_picture_with_something_in_it_earns_nothing():
    """Such as an element that shows itself: what is left of it is a speck."""
    speck = '<svg xmlns="http://www.w3.org/2000/svg"><g id="a"><use href="#a"/><rect width="9" height="9"/></g></svg>'
    truth = f'{BOX}<circle cx="60" cy="70" r="20" fill="red"/></svg>'
    assert value(truth, speck) < 0.001 and result(truth, speck).note == "hardly anything in it is like the truth"
    assert result(truth, truth).note == "" == result(truth, truth.replace("60", "50")).note


PAGES = [
    '<rect width="100" height="100" fill="white" stroke="gray" stroke-width="6"/>',
    '<linearGradient id="g"><stop offset="0" stop-color="white"/><stop offset="1" stop-color="navy"/></linearGradient>'
    '<rect width="100" height="100" fill="url(#g)"/>',
]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_alone_earns_nothing_and_a_wrong_shape_no_less(page: str):
    red, blue = (
        '<circle cx="30" cy="40" r="12" fill="red"/>',
        '<rect x="60" y="70" width="20" height="15" fill="blue"/>',
    )
    truth = f"{BOX}{page}{red}{blue}</svg>"
    assert value(truth, f"{BOX}{page}</svg>") == 0
    one, wrong = value(truth, f"{BOX}{page}{red}</svg>"), value(truth, f"{BOX}{page}{red.replace('40', '80')}</svg>")
    assert 0 <= wrong < one < value(truth, truth) == 1
    # Without the page the shapes still earn nearly all of their own part; shades show through at their edges.
    assert (result(truth, f"{BOX}{red}{blue}</svg>").parts["elements"] or 0.0) > 0.98


DISC = '<circle cx="50" cy="50" r="30" fill="red"{}/>'
SLIT = '<clipPath id="c"><rect x="50" y="20" width="4" height="60"/></clipPath>'
CUT = [
    SLIT + DISC.format(' clip-path="url(#c)"'),
    DISC.format("") + '<rect width="74" height="97" fill="white"/>',
    DISC.format(' transform="translate(70 0)"'),
]


@pytest.mark.parametrize("content", CUT)
def test_an_element_that_is_cut_or_covered_counts_as_what_shows_of_it(content: str):
    truth = f"{BOX}{DISC.format('')}</svg>"
    # A quarter of the disc or less shows.
    assert value(truth, f"{BOX}{content}</svg>") < 0.3 and value(truth, truth) == 1


@pytest.mark.parametrize(("seed", "simple"), [(1, True), (2, True), (3, False)])
def test_the_fainter_a_copy_is_the_less_it_earns(seed: int, simple: bool):
    svg = figure(seed, simple=simple).svg
    values = [value(svg, wrapped(svg, f'opacity="{opacity}"')) for opacity in (0.03, 0.06, 0.12, 0.3, 0.6, 1)]
    # A pixel that changes by 64 of 255 or more counts whole, so at 6% an element has a quarter of its ink: it is alike
    # by half at most, and its colour is wrong.
    assert values == sorted(values) and values[1] < 0.25 and values[-1] == 1


def test_a_ring_of_the_size_of_the_picture_is_a_shape_and_no_page():
    ring = '<path fill-rule="evenodd" d="M0 0H100V100H0ZM10 10V90H90V10Z"/>'
    disc = '<circle cx="50" cy="50" r="20" fill="red"/>'
    truth = f"{BOX}{ring}{disc}</svg>"
    # 2 * 1 right element / (2 + 1)
    for one in (ring, disc):
        assert result(truth, f"{BOX}{one}</svg>").parts["elements"] == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize("fill", ["(" * 30_000, "url(#a) " * 4_000, "[{(" * 9_000])
def test_styles_of_any_depth_are_no_error_of_the_reward(fill: str):
    svg = f'{BOX}<rect style="fill:{fill}" width="9" height="9"/></svg>'
    assert value(figure(1).svg, svg) < 0.1
    assert value(figure(1).svg, svg.replace("style", "data-x").replace("fill:", "")) < 0.1


def test_what_is_no_svg_earns_nothing_and_says_why():
    svg = figure(5).svg
    for response, kind in (
        ("no code", "missing"),
        (svg[:-8], "cut"),
        (svg.replace("<g", "<script/><g", 1), "forbidden"),
    ):
        outcome = result(svg, response)
        assert not any(outcome.parts[name] for name in (*WEIGHTS, "render"))
        assert outcome.detail["refused"] == kind and outcome.note.startswith("not drawn: ")


@pytest.mark.parametrize("seed", range(3))
def test_the_farther_the_lower(seed: int):
    one = figure(seed)
    values = [
        value(one.svg, wrapped(one.svg, f'transform="translate({one.width * share} 0)"'))
        for share in (0, 0.01, 0.03, 0.08, 0.2)
    ]
    assert values == sorted(values, reverse=True) and values[0] == 1 and values[-1] < 0.4


@pytest.mark.parametrize("seed", range(3))
def test_missing_and_needless_elements_cost(seed: int):
    svg = figure(seed).svg
    rects = re.findall(r"<(?:rect|circle|ellipse|polygon)[^>]*/>", svg)
    less = svg.replace(rects[0], "")
    junk = "".join(f'<rect x="{9 * k}" y="{7 * k}" width="20" height="12" fill="orange"/>' for k in range(1, 26))
    assert value(svg, less) < 1
    assert value(svg, svg.replace("</svg>", f"{junk}</svg>")) < 0.9


def test_a_reversed_arrow_is_wrong():
    head = '<marker id="a" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto"><path d="M0 0L6 3L0 6Z"/></marker>'
    arrow = (
        f'{BOX}{head}<line x1="10" y1="50" x2="90" y2="50" stroke="black" stroke-width="2" marker-end="url(#a)"/></svg>'
    )
    back = arrow.replace('x1="10"', 'x1="_"').replace('x2="90"', 'x2="10"').replace('x1="_"', 'x1="90"')
    none = arrow.replace(' marker-end="url(#a)"', "")
    parts, plain = result(arrow, back).parts, result(arrow, none).parts
    assert (parts["lines"] or 0) < 0.5 and 0.5 < (plain["lines"] or 0) < 1


def test_a_separate_head_is_that_of_its_line():
    line = '<line x1="10" y1="50" x2="80" y2="50" stroke="black" stroke-width="2"/>'
    svg = f'{BOX}{line}<polygon points="80,45 90,50 80,55"/></svg>'
    (element,) = read_figure(svg).elements
    assert element.kind == "line" and element.heads == (False, True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('<rect x="10" y="10" width="30" height="20"/>', '<path d="M10 10H40V30H10Z"/>'),
        ('<rect x="10" y="10" width="30" height="20"/>', '<g transform="translate(10 10) scale(10)"><rect width="3" height="2"/></g>'),
        ('<circle cx="50" cy="50" r="20" fill="red"/>', '<ellipse cx="50" cy="50" rx="20" ry="20" style="fill:#f00"/>'),
        ('<rect x="9" y="9" width="50" height="50" fill="blue"/>', '<defs><rect id="r" width="50" height="50"/></defs><use href="#r" x="9" y="9" fill="blue"/>'),
        ('<line x1="1" y1="1" x2="90" y2="90" stroke="black"/>', '<polyline points="1 1 90 90" stroke="black" fill="none"/>'),
    ],
)  # fmt: skip
def test_another_spelling_of_the_same_shape_has_the_same_elements(first: str, second: str):
    parts = result(f"{BOX}{first}</svg>", f"{BOX}{second}</svg>").parts
    assert parts["elements"] == pytest.approx(1, abs=1e-6) and parts["picture"] == pytest.approx(1, abs=0.02)


def test_elements_and_pictures_are_compared_symmetrically():
    a, b = figure(7), figure(8)
    there, back = result(a.svg, b.svg).parts, result(b.svg, a.svg).parts
    assert there["elements"] == pytest.approx(back["elements"], abs=0.05)


def test_a_truth_that_cannot_be_drawn_is_the_rows_fault():
    with pytest.raises(RewardError, match="true SVG cannot be drawn"):
        result("<svg><script/></svg>", f"{BOX}</svg>")


def test_unknown_policies_are_refused():
    with pytest.raises(RewardError, match="policy"):
        svg_figure(images="yes")


def test_pictures_are_artifacts_if_they_are_wanted():
    svg = figure(2, simple=True).svg
    artifacts = result(svg, svg, pictures=True).artifacts
    assert set(artifacts) == {"render", "overlay"} and artifacts["render"].size == artifacts["overlay"].size
    assert not result(svg, svg).artifacts


@pytest.mark.parametrize("is_dark", [False, True])
def test_an_overlay_has_the_colours_that_its_legend_names(is_dark):
    page, ink = (0, 255) if is_dark else (255, 0)
    truth, response = (np.full((2, 4, 3), page, np.uint8) for _ in range(2))
    truth[0, :3] = (200, 40, 40)  # on both pages: a colour as bright as the blue of the response
    response[0, 1] = (40, 40, 200)
    response[0, 2] = (200, 40, 40)
    response[0, 3] = ink
    missing, other, right, needless = (tuple(int(c) for c in colour) for colour in overlaid(truth, response)[0])
    assert missing == (225, 30, 30) and needless == (30, 80, 235)
    assert other[0] > 100 and other[2] > 100 and other[1] < 80  # red and blue together
    assert right[0] == right[1] == right[2] < 255
    assert (overlaid(truth, response)[1] == 255).all()  # the page, dark or light


def test_length_is_free_up_to_a_factor():
    assert length_share(1000, 1000) == length_share(1700, 1000) == 1
    assert length_share(2950, 1000) == pytest.approx(0.5)
    assert length_share(4200, 1000) == length_share(10**7, 1000) == 0


def test_raster_of_a_triangle():
    form = raster([[(0, 0), (10, 0), (0, 10)]], Box(0, 0, 10, 10))
    cells = form.reshape(GRID, GRID)
    assert cells[0, 0] and not cells[-1, -1] and abs(form.mean() - 0.5) < 0.06


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Mean structural similarity, window by window."""
    values = []
    for channel in range(3):
        for y in range(a.shape[0] - 6):
            for x in range(a.shape[1] - 6):
                p = a[y : y + 7, x : x + 7, channel].astype(float).ravel()
                q = b[y : y + 7, x : x + 7, channel].astype(float).ravel()
                cov = np.cov(p, q)
                c1, c2 = 6.5025, 58.5225
                top = (2 * p.mean() * q.mean() + c1) * (2 * cov[0, 1] + c2)
                values.append(top / ((p.mean() ** 2 + q.mean() ** 2 + c1) * (cov[0, 0] + cov[1, 1] + c2)))
    return float(np.mean(values))


def test_ssim_beside_a_slow_one():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (12, 15, 3), np.uint8)
    b = np.clip(a.astype(int) + rng.integers(-40, 40, a.shape), 0, 255).astype(np.uint8)
    assert ssim(a, b) == pytest.approx(slow_ssim(a, b), abs=1e-9)
    assert ssim(a, a) == pytest.approx(1, abs=1e-12)
    with pytest.raises(ValueError, match="SSIM needs one size"):
        ssim(a, b[:6])


def test_window_sums():
    values = np.arange(12).reshape(3, 4)
    assert window_sums(values, 2).tolist() == [[10, 14, 18], [26, 30, 34]]


def picture_similarity(truth: np.ndarray, drawn: np.ndarray, page: np.ndarray | None = None) -> PictureScore:
    return TruePicture(truth, page).similarity(drawn)


def test_similarity_of_pictures():
    white = np.full((40, 60, 3), 255, np.uint8)
    one = white.copy()
    one[10:30, 10:30] = (200, 0, 0)
    moved, pale, gone = np.roll(one, 2, axis=1), one.copy(), white.copy()
    pale[10:30, 10:30] = (255, 200, 200)
    gone[10:20, 10:30] = (200, 0, 0)
    values = [picture_similarity(one, other).value for other in (one, moved, gone, white)]
    assert values == sorted(values, reverse=True) and values[0] == 1 and values[-1] == 0
    assert picture_similarity(one, pale).value < 0.7
    framed = one.copy()
    framed[:2] = framed[-2:] = framed[:, :2] = framed[:, -2:] = 128
    page = framed.copy()
    page[10:30, 10:30] = 255
    assert picture_similarity(framed, page).value > 0.5  # nobody said what the page is
    assert picture_similarity(framed, page, page).value == 0 and picture_similarity(framed, framed, page).value == 1
    assert 0 < picture_similarity(framed, one, page).value < picture_similarity(framed, framed, page).value
    assert background(one).tolist() == [255, 255, 255]
    with pytest.raises(ValueError, match="different sizes"):
        picture_similarity(one, white[:20])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**31))
def test_similarity_is_a_share_for_any_pictures(height: int, width: int, seed: int):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, rng.integers(1, 256), (height, width, 3)).astype(np.uint8) for _ in range(2))
    score = picture_similarity(a, b)
    assert all(0 <= number <= 1 for number in score)
    assert picture_similarity(a, a).value == 1
