"""Simple drawn figures: one canonical form, and arrows that join their shapes."""

from __future__ import annotations

import random
import re

import numpy as np
from drawn_figures import entities, many, pixels, within_chance

from vlmrl.tasks.vfig.drawn.figure import DrawnFigure, DrawnSettings, draw_figure
from vlmrl.tasks.vfig.drawn.shapes import Box, Point


def serialised(figure: DrawnFigure) -> str:
    """Write a simple figure from its metadata alone, the ends of the arrow aside."""
    code, line = [], re.search(r"<line[^>]*>", figure.svg)
    for shape in entities(figure, "shape"):
        x1, y1, x2, y2 = shape["bounds"]
        x, y, fill = (x1 + x2) // 2, (y1 + y2) // 2, f'fill="{shape["fillColor"]}"'
        code.append(
            {
                "circle": f'<circle cx="{x}" cy="{y}" r="{(x2 - x1) // 2}" {fill}/>',
                "ellipse": f'<ellipse cx="{x}" cy="{y}" rx="{(x2 - x1) // 2}" ry="{(y2 - y1) // 2}" {fill}/>',
                "triangle": f'<polygon points="{x},{y1} {x2},{y2} {x1},{y2}" {fill}/>',
            }.get(shape["shape"], f'<rect x="{x1}" y="{y1}" width="{x2 - x1}" height="{y2 - y1}" {fill}/>')
        )
    head = '<marker id="a" refX="3" refY="1.5" orient="auto"><path d="M0 0L3 1.5 0 3"/></marker>'
    body = "".join([head, *code, line[0]] if line else code)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">{body}</svg>'


def test_a_simple_figure_has_one_canonical_form() -> None:
    for figure in many(simple=True):
        assert figure.svg == serialised(figure) and len(figure.svg) <= 420
        members = entities(figure, "shape")
        assert 1 <= len(members) <= 3 and len(entities(figure, "arrow")) <= 1
        boxes = [Box(*shape["bounds"]) for shape in members]
        assert all(box.width in (8, 12) and box.height in (8, 12) for box in boxes)
        # Each in the middle of a cell of 16 x 16 pixels of its own.
        assert all(box.centre.x % 16 == box.centre.y % 16 == 8 for box in boxes)
        middles = [(box.centre.y, box.centre.x) for box in boxes]
        assert middles == sorted(set(middles))


def test_a_simple_arrow_joins_its_shapes_on_the_grid_and_touches_no_other() -> None:
    several = arrows = 0
    for figure in many(simple=True):
        several += len(entities(figure, "shape")) > 1
        for arrow in entities(figure, "arrow"):
            arrows += 1
            line = re.search(r'<line x1="(\d+)" y1="(\d+)" x2="(\d+)" y2="(\d+)" stroke="black"', figure.svg)
            assert line and all(int(n) % 2 == 0 for n in line.groups())
            ends = [Point(*map(float, line.group(1, 2))), Point(*map(float, line.group(3, 4)))]
            outline = re.sub(r"<line.*?>|<marker.*</marker>", "", figure.svg)
            image = pixels(re.sub(r'viewBox="0 0 64 64"', 'viewBox="0 0 64 64" width="256" height="256"', outline))
            is_ink = np.any(image < 250, axis=-1)
            for end, key in zip(ends, ("from", "to"), strict=True):
                box = Box(*figure.metadata["entities"][arrow[key]]["bounds"])
                assert box.grown(0.1).contains(end) and not box.grown(-0.1).contains(end)
                x, y = int(4 * end.x), int(4 * end.y)
                window = is_ink[max(0, y - 4) : y + 4, max(0, x - 4) : x + 4]
                assert window.any() and not window.all()
            for share in np.linspace(0.2, 0.8, 20):
                x, y = (int(4 * (a + (b - a) * share)) for a, b in zip(*ends, strict=True))
                assert not is_ink[y, x]
    assert within_chance(arrows, several, 0.5)


def test_a_simple_figure_is_the_text_that_the_documentation_shows() -> None:
    plain = DrawnSettings(simple=True, most=1)
    circles = [figure for seed in range(60) if "<circle" in (figure := draw_figure(random.Random(seed), plain)).svg]
    root = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">'
    pattern = root + r'<circle cx="\d+" cy="\d+" r="\d+" fill="\w+"/></svg>'
    assert circles and all(re.fullmatch(pattern, figure.svg) for figure in circles)
