"""Drawn diagrams: metadata is read back from the code and the picture; probabilities; determinism."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from drawn_figures import (
    ALLOWED,
    ATTRIBUTES,
    SVG,
    drawn,
    ends_of,
    entities,
    many,
    pixels,
    read_border,
    read_shape,
    shapes,
    tags_of,
    within_chance,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.errors import DataError
from vlmrl.tasks.vfig.drawn.figure import FONTS, LETTER, DrawnFigure, DrawnSettings, draw_figure
from vlmrl.tasks.vfig.drawn.layouts import LAYOUTS, edge_count, place
from vlmrl.tasks.vfig.drawn.shapes import DASHES, FILLS, FLAT, KINDS, ROUNDABLE, WORDS, Box, Point, hull, leave, number


def test_the_metadata_of_shapes_is_what_the_code_shows() -> None:
    for figure in many():
        root = ElementTree.fromstring(figure.svg)
        assert (root.get("viewBox"), root.get("width")) == (f"0 0 {figure.width} {figure.height}", str(figure.width))
        for index, shape in enumerate(entities(figure, "shape")):
            read = read_shape(root, index)
            assert (read["tags"][0], read["corners"]) == tags_of(shape)
            assert (len(read["tags"]) > 1) == shape["shape"].startswith("3d-")
            assert shape["id"] == f"shape_{index}"
            if read["bounds"] and shape["shape"] != "3d-cylinder":
                assert read["bounds"] == pytest.approx(shape["bounds"], abs=0.06), shape
            elif read["bounds"]:
                assert read["bounds"][::2] + read["bounds"][3:] == shape["bounds"][::2] + shape["bounds"][3:]
            same = ("label", "font", "fillStyle", "fillColor", "strokeColor", "strokeWidth", "borderStyle", "stacked")
            for key in (*same, "rounded"):
                assert read[key] == shape[key], (key, shape)


def test_the_metadata_of_arrows_is_what_the_code_shows() -> None:
    for figure in many():
        root = ElementTree.fromstring(figure.svg)
        heads = {e.get("id"): e[0].get("fill") for e in root.iter(f"{SVG}marker")}
        elements = [e for e in root if (e.get("id") or "").startswith("arrow_")]
        for element, arrow in zip(elements, entities(figure, "arrow"), strict=True):
            assert element.get("id") == arrow["id"] and arrow["type"] == "arrow"
            assert (element.get("stroke"), float(element.get("stroke-width", "0"))) == (arrow["color"], arrow["width"])
            assert heads[element.get("marker-end", "")[5:-1]] == arrow["color"]
            assert ("Q" in element.get("d", "")) == (arrow["style"] == "curved")
            assert read_border(element) == arrow["dash"]
            assert arrow["from"] != arrow["to"] and {arrow["from"], arrow["to"]} <= figure.metadata["entities"].keys()
        pairs = [frozenset((a["from"], a["to"])) for a in entities(figure, "arrow")]
        assert len(set(pairs)) == len(pairs)


def silhouettes(figure: DrawnFigure) -> np.ndarray:
    """Return a picture in which shape i has the value 20 (i + 1) and everything else 255."""
    root = ElementTree.fromstring(figure.svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{SVG}text", f"{SVG}defs", f"{SVG}line") or (child.get("id") or "").startswith("arrow_"):
                parent.remove(child)
    for i, shape in enumerate(root):
        for element in shape.iter():
            if element.get("fill"):
                element.attrib.update({"fill": "#" + f"{20 * (i + 1):02x}" * 3, "stroke": "none"})
    return pixels(ElementTree.tostring(root, "unicode"))[..., 0]


def test_arrows_start_and_end_on_the_outlines_in_the_picture() -> None:
    ends = 0
    for figure in many(count=40):
        image = silhouettes(figure)
        root = ElementTree.fromstring(figure.svg)
        for arrow in entities(figure, "arrow"):
            element = next(e for e in root if e.get("id") == arrow["id"])
            for point, shape in zip(ends_of(element), (arrow["from"], arrow["to"]), strict=True):
                x, y = (round(float(n)) for n in point)
                window = image[max(0, y - 3) : y + 3, max(0, x - 3) : x + 3]
                inside = window == 20 * (int(shape.removeprefix("shape_")) + 1)
                assert inside.any() and not inside.all(), (arrow, point)
                ends += 1
    assert ends > 200


def test_the_bounds_of_curved_shapes_are_those_of_the_picture() -> None:
    checked: Counter[str] = Counter()
    kinds = ("cloud", "3d-cylinder")
    for figure in many(count=60):
        round_ones = [s for s in entities(figure, "shape") if s["shape"] in kinds and s["stacked"] == 1]
        image = silhouettes(figure) if round_ones else np.empty((0, 0))
        for shape in round_ones:
            x1, y1, x2, y2 = shape["bounds"]
            # Edges of other shapes are smoothed, so that some of their pixels have this shape's value, too.
            near = image[y1 - 6 : y2 + 6, x1 - 6 : x2 + 6]
            ys, xs = np.nonzero(near == 20 * (int(shape["id"].removeprefix("shape_")) + 1))
            sides = [x1 - 6 + xs.min(), y1 - 6 + ys.min(), x1 - 5 + xs.max(), y1 - 5 + ys.max()]
            assert sides == pytest.approx(shape["bounds"], abs=1.6), shape
            checked[shape["shape"]] += 1
    assert min(checked["cloud"], checked["3d-cylinder"]) >= 5


def extents(figure: DrawnFigure) -> list[Box]:
    root = ElementTree.fromstring(figure.svg)
    boxes = []
    for index, shape in enumerate(entities(figure, "shape")):
        steps = read_shape(root, index)["steps"]
        x1, y1, x2, y2 = shape["bounds"]
        across, up = max([0, *(x for x, _ in steps)]), min([0, *(y for _, y in steps)])
        boxes.append(Box(x1, y1 + up, x2 + across, y2))
    return boxes


def test_no_boxes_overlap_and_all_are_on_the_canvas() -> None:
    for figure in many():
        boxes = extents(figure)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(b.x1 >= 0 and b.y1 >= 0 and b.x2 <= figure.width and b.y2 <= figure.height for b in boxes)


def test_straight_arrows_pass_no_other_shape() -> None:
    passed = total = 0
    for figure in many():
        boxes = extents(figure)
        root = ElementTree.fromstring(figure.svg)
        for arrow in entities(figure, "arrow"):
            if arrow["style"] == "straight":
                start, tip = ends_of(next(e for e in root if e.get("id") == arrow["id"]))
                others = [b for i, b in enumerate(boxes) if f"shape_{i}" not in (arrow["from"], arrow["to"])]
                way = [Point(*(start + (tip - start) * i / 60)) for i in range(61)]
                total += 1
                passed += any(box.contains(point) for box in others for point in way)
    assert total > 600 and passed <= 0.005 * total  # a diagram without another free pair may have one


def test_labels_are_unique_words_that_fit_their_shapes() -> None:
    assert not [a for a in WORDS for b in WORDS if a != b and a.lower() in b.lower()]
    small = 0
    for figure in many():
        labels = [shape["label"] for shape in entities(figure, "shape")]
        assert len(set(labels)) == len(labels) and {*labels} <= {*WORDS}
        texts = list(ElementTree.fromstring(figure.svg).iter(f"{SVG}text"))
        for text, shape in zip(texts, entities(figure, "shape"), strict=True):
            x, y, size = (float(text.get(key, "0")) for key in ("x", "y", "font-size"))
            half = LETTER * size * len(shape["label"]) / 2
            x1, y1, x2, y2 = shape["bounds"]
            small += size < 9
            assert size <= 7 or (x1 <= x - half and x + half <= x2 and y1 <= y - 0.8 * size and y <= y2)
    assert small <= 0.02 * len(shapes())


def test_every_layout_kind_fill_border_font_and_size_occurs() -> None:
    assert len(LAYOUTS) == 19 and len(FLAT) == 12 and len(KINDS) == 18 and len(FILLS) == 7 and len(DASHES) == 4
    assert {name for figure in many() for name in figure.metadata["layouts"]} == set(LAYOUTS)
    seen = shapes()
    assert {shape["shape"] for shape in seen} == set(KINDS)
    assert {shape["type"] for shape in seen} == {
        "circle", "ellipse", "rectangle", "square", "polygon", "cloud", "3d-cylinder", "3d-prism", "3d-cube",
        "3d-diamond", "3d-hexagon", "3d-trapezoid",
    }  # fmt: skip
    assert {shape["fillStyle"] for shape in seen} == set(FILLS)
    assert {shape["borderStyle"] for shape in seen} == set(DASHES)
    assert {shape["font"] for shape in seen} == set(FONTS) and len(FONTS) == 8
    assert {len(entities(figure, "shape")) for figure in many()} == set(range(3, 13))
    for figure in many():
        assert len({shape["shape"] for shape in entities(figure, "shape")}) in (2, 3)


def test_the_choices_have_their_probabilities() -> None:
    seen = shapes()
    flat = [shape for shape in seen if shape["shape"] in FLAT]
    stacks = Counter(shape["stacked"] for shape in flat if shape["stacked"] > 1)
    assert within_chance(stacks.total(), len(flat), 0.15) and set(stacks) == {2, 3, 4}
    assert all(within_chance(n, stacks.total(), 1 / 3) for n in stacks.values())
    assert all(shape["stacked"] == 1 for shape in seen if shape["shape"] not in FLAT)
    corners = [shape["rounded"] for shape in seen if shape["shape"] in ROUNDABLE]
    assert within_chance(sum(corners), len(corners), 0.6)
    assert not any(shape["rounded"] for shape in seen if shape["shape"] not in ROUNDABLE)
    splits = [len(f.metadata["layouts"]) == 2 for f in many() if len(entities(f, "shape")) >= 4]
    assert within_chance(sum(splits), len(splits), 0.3)
    curved = [arrow["style"] == "curved" for figure in many() for arrow in entities(figure, "arrow")]
    assert within_chance(sum(curved), len(curved), 0.4)
    for key, names in (("fillStyle", FILLS), ("borderStyle", DASHES)):
        counts = Counter(shape[key] for shape in seen)
        assert all(within_chance(counts[name], len(seen), 1 / len(names)) for name in names)


def test_the_number_of_arrows_is_between_two_shares_of_the_number_of_shapes() -> None:
    # 10 shapes: at least floor(4 to 6) = 4 or 5, at most floor(6 to 8) = 6 or 7, each with probability 1/2.
    # P(4) = (1/3 + 1/4) / 4 [4..6, 4..7], so 7/48; P(7) = (1/4 + 1/3) / 4 = 7/48.
    rng = random.Random(1)
    counts = Counter(edge_count(10, rng) for _ in range(4000))
    assert set(counts) == {4, 5, 6, 7}
    assert within_chance(counts[4], 4000, 7 / 48) and within_chance(counts[7], 4000, 7 / 48)
    assert {edge_count(1, rng) for _ in range(50)} == {0}
    for figure in many():
        num_shapes, num_arrows = (len(entities(figure, kind)) for kind in ("shape", "arrow"))
        assert math.floor(0.4 * num_shapes) <= num_arrows <= math.floor(0.8 * num_shapes)


@pytest.mark.parametrize("simple", [False, True])
def test_a_seed_repeats_its_figure_and_others_differ(simple: bool) -> None:
    style = DrawnSettings(simple=simple)
    again = [draw_figure(random.Random(seed), style) for seed in range(20)]
    assert again == [drawn(seed, simple) for seed in range(20)]
    assert len({figure.svg for figure in many(simple, 60)}) >= 59


@pytest.mark.parametrize("simple", [False, True])
def test_the_code_is_of_a_strict_list_of_elements_and_every_picture_shows_something(simple: bool) -> None:
    for seed, figure in enumerate(many(simple, 150)):
        elements = list(ElementTree.fromstring(figure.svg).iter())
        assert {e.tag.removeprefix(SVG) for e in elements} <= ALLOWED
        assert {key for e in elements for key in e.attrib} <= ATTRIBUTES
        names = [e.get("id") for e in elements if e.get("id")]
        assert len(set(names)) == len(names)
        assert {*re.findall(r"url\(#(\w+)\)", figure.svg)} <= {*names}
        if seed < 40:
            image = pixels(figure.svg)
            assert image.shape == (figure.height, figure.width, 3)
            assert 0.005 < (image < 250).any(-1).mean() < 0.7


# ---- settings and parts


@pytest.mark.parametrize(
    "values",
    [
        {"fewest": 0},
        {"fewest": 5, "most": 4},
        {"most": 1000},
        {"sizes": ((640, 10),)},
        {"sizes": ((640, 5000),)},
        {"simple": True, "sizes": ((66, 64),)},
        {"arrow_chance": 1.5},
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        DrawnSettings(**values)
    assert error.value.hint


@pytest.mark.parametrize("simple", [False, True])
def test_shapes_that_do_not_fit_are_an_error(simple: bool) -> None:
    with pytest.raises(DataError, match="do not fit") as error:
        draw_figure(random.Random(0), DrawnSettings(simple=simple, sizes=((32, 32),), fewest=9))
    assert "larger canvases" in str(error.value.hint)


def test_a_bound_that_is_set_moves_the_usual_one() -> None:
    assert [DrawnSettings(most=2).range, DrawnSettings(fewest=20).range] == [(2, 2), (20, 20)]
    assert [DrawnSettings().range, DrawnSettings(simple=True).range] == [(3, 12), (1, 3)]
    assert DrawnSettings(simple=True, fewest=2, most=2).range == (2, 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(32, 900), st.integers(32, 900), st.integers(1, 20), st.booleans())
def test_any_settings_give_valid_code_or_an_error(seed: int, width: int, height: int, most: int, simple: bool) -> None:
    size = (width // 16 * 16, height // 16 * 16)
    try:
        figure = draw_figure(random.Random(seed), DrawnSettings(simple, (size,), 1, most))
    except DataError as error:
        assert "do not fit" in str(error)
        return
    assert (figure.width, figure.height) == size
    assert ElementTree.fromstring(figure.svg).get("viewBox") == f"0 0 {size[0]} {size[1]}"
    boxes = [Box(*shape["bounds"]) for shape in entities(figure, "shape")]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9))
def test_placed_boxes_never_overlap(centres: list[tuple[float, float]]) -> None:
    boxes = [box.grown(-1e-6) for box in place([Point(*c) for c in centres], Box(10, 20, 410, 320))]
    real = [box for box in boxes if box.width > 0 and box.height > 0]
    assert not any(a.overlaps(b) for i, a in enumerate(real) for b in real[:i])


def test_rays_hulls_and_numbers_worked_out_by_hand() -> None:
    square = [Point(0, 0), Point(4, 0), Point(4, 4), Point(0, 4)]
    assert leave(Point(1, 2), Point(2, 2), square) == (4, 2)
    assert leave(Point(2, 2), Point(3, 3), square) == (4, 4)
    assert leave(Point(9, 9), Point(10, 10), square) == (9, 9)
    assert set(hull([*square, Point(2, 2), Point(2, 0)])) == set(square)
    assert [number(n) for n in (3.04, -0.02, 7, 2.25, 12.5)] == ["3", "0", "7", "2.2", "12.5"]
