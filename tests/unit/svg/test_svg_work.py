"""Counted work of SVG text: hostile text is refused by it, honest text is far below it, and it is equal each time."""

from __future__ import annotations

import random

import pytest
from svg_attack_parts import svg
from svg_attacks_load import star

from vlmrl.svg import build, draw, parse
from vlmrl.svg.draw import DrawJob, draw_svg
from vlmrl.svg.parse import SvgLimits, Work
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure
from vlmrl.untrusted import CodeRefused

DISC = '<circle cx="50" cy="50" r="49" fill="{}"/>'
STOPS = '<stop stop-color="red"/>' * 200
HOSTILE = {
    "masks": svg(f'<mask id="m">{DISC.format("white")}</mask>' + f'<g mask="url(#m)">{DISC}</g>' * 9_000),
    "layers": svg(f'<g opacity=".5">{DISC.format("red") * 2}</g>' * 4_000),
    "large fills": svg(DISC.format("red").replace("49", "999") * 9_000),
    "stops": svg(f'<linearGradient id="a">{STOPS}</linearGradient>' + DISC.format("url(#a)") * 9_000),
    "crossings": svg(f'<path id="s" d="M{star(9_001)}"/>' + '<use href="#s"/>' * 60),
    "wide strokes": svg(f'<g stroke-width="90"><polygon id="s" stroke="red" points="{star(9_001)}"/></g>'),
    "dashes": svg('<path d="M0 50H999" stroke="red" stroke-dasharray=".02"/>' * 3_000),
    "letters of a path": svg(f'<path id="p" d="M0 0{"L9 9" * 9_000}"/>' + '<use href="#p"/>' * 900),
    "clip paths": svg(
        f'<clipPath id="c"><path d="M{star(9_001)}"/></clipPath>' + f'<g clip-path="url(#c)">{DISC}</g>' * 900
    ),
    "style rules": svg(
        "<style>" + ".a g > .b{fill:red}" * 500 + "</style>" + '<g class="a"><g class="b"/></g>' * 9_000
    ),
    "declarations": svg("<style>rect{" + "fill:red;" * 90_000 + "}</style>" + "<rect/>" * 200),
    "custom properties": svg(f"<style>g{{--a:{'x' * 999};fill:{'var(--a)' * 120}}}</style>" + "<g/>" * 19_000),
    "long text": svg(f'<text id="t">{"@" * 9_000}</text>' + '<use href="#t"/>' * 900),
    "text on a line": svg(
        f'<path id="p" d="M{star(9_001)}"/><text id="t"><textPath href="#p">a</textPath></text>'
        + '<use href="#t"/>' * 900
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_by_its_work(name: str):
    with pytest.raises(CodeRefused, match="steps of work"):
        draw_svg(DrawJob(HOSTILE[name], (1_000, 1_000)), SvgLimits(steps=SvgLimits.steps // 20))


def counted(text: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the steps that are left after reading a text and after painting it."""
    made: list[Work] = []

    def make(most: int) -> Work:
        made.append(parse.Work(most))
        return made[-1]

    for module in (build, draw):
        monkeypatch.setattr(module, "Work", make)
    draw_svg(DrawJob(text))
    return [work.left / work.most for work in made]


@pytest.mark.parametrize("seed", range(4))
def test_diagrams_take_a_hundredth_of_the_work_and_the_same_each_time(seed: int, monkeypatch: pytest.MonkeyPatch):
    text = draw_figure(random.Random(seed), DrawnSettings(simple=False)).svg
    left = counted(text, monkeypatch)
    assert left == counted(text, monkeypatch) and len(left) == 2 and min(left) > 0.98


def test_a_plot_of_a_thousand_labels_and_a_long_curve_is_drawn():
    numbers = random.Random(1)
    labels = "".join(f'<text x="{i % 40}" y="{i % 97}">label {i}</text>' for i in range(1_000))
    points = " ".join(f"{i / 100},{numbers.random() * 100:.1f}" for i in range(10_000))
    line = f'<polyline points="{points}" fill="none" stroke="blue" stroke-dasharray="3 2"/>'
    draw_svg(DrawJob(svg(labels + line), (1_000, 1_000)))
