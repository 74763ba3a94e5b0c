"""Pictures that cairosvg draws in a worker: equal to its own, after the same checks, without what it would fetch."""

from __future__ import annotations

import io
import random
import sys
import time
from pathlib import Path

import cairosvg
import numpy as np
import pytest
from PIL import Image
from svg_attack_parts import PAID, PAYLOAD_PNG, XMLNS, image, svg

from vlmrl.errors import RewardError
from vlmrl.svg import cairosvg_drawing
from vlmrl.svg.cairosvg_drawing import draw_with_cairosvg
from vlmrl.svg.draw import Drawing, DrawJob, draw_svg
from vlmrl.svg.parse import SvgLimits, Work
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.judged import rewards
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure
from vlmrl.untrusted import CodeRefused

JUDGE = {"provider": "vllm", "model": "m", "endpoint": "http://127.0.0.1:9/v1"}


def drawn_by_cairosvg(text: str, size: tuple[int, int]) -> np.ndarray:
    """Return the picture as VFig's published reward has it."""
    png = cairosvg.svg2png(bytestring=text.encode(), output_width=size[0], output_height=size[1])
    picture = Image.open(io.BytesIO(png or b"")).convert("RGBA")
    page = Image.new("RGB", picture.size, (255, 255, 255))
    page.paste(picture, (0, 0), picture)
    return np.asarray(page)


def test_a_worker_draws_what_cairosvg_draws():
    texts = [draw_figure(random.Random(seed), DrawnSettings(simple=seed < 2)).svg for seed in range(6)]
    texts.append(
        svg('<text y="50" xml:space="preserve">a <tspan>b</tspan>  c<!-- --> d</text><style>text{fill:red}</style>')
    )
    jobs = [DrawJob(text, (90, 120)) for text in texts]
    with SvgRenderer(drawer="cairosvg") as renderer:
        for job, drawing in zip(jobs, renderer.draw(jobs), strict=True):
            assert isinstance(drawing, Drawing)
            assert np.abs(drawing.pixels.astype(int) - drawn_by_cairosvg(job.svg, (90, 120))).max() <= 1


@pytest.mark.parametrize(
    "text",
    ["<svg", svg("<script/>"), svg(image(PAYLOAD_PNG)), svg(image("http://127.0.0.1:9/a")), svg("<!DOCTYPE svg>"),
     svg('<polygon points="1 2" opacity="x"/>')],
)  # fmt: skip
def test_what_is_refused(text: str):
    with pytest.raises(CodeRefused):
        draw_with_cairosvg(DrawJob(text))


def test_counted_work_refuses_before_cairosvg_draws():
    with pytest.raises(CodeRefused, match="steps of work"):
        draw_with_cairosvg(DrawJob(svg(PAID * 90)), SvgLimits(steps=9_000))


POINTS = " ".join(f"{i % 97} {i % 89}" for i in range(9_000))
SLOW_IN_CAIROSVG = {  # vlmrl's own painter draws each of them at once, or does not look at it
    "dashes": '<path d="M0 0L1e6 1e6" stroke="red" stroke-dasharray="0.2 0.3"/>' * 50,
    "dashes on curves": '<path d="M0 0C1e6 0 0 1e6 1e6 1e6" stroke="red" stroke-dasharray=".2"/>' * 9,
    "a circle beyond floats": '<circle r="1e300"/>',
    "arcs with a fine tolerance": '<path d="M0 0' + "A1e7 1e7 0 1 1 50 50A1e7 1e7 0 1 1 0 0" * 900 + '" stroke="red"/>',
    "a box that is never read to its end": '<linearGradient id="a"><stop/></linearGradient><path d="M0 0L9 9Z 5 5" '
    'fill="url(#a)"/>',
    "an inherited outline": f'<g d="M{POINTS}">' + "<path/>" * 300 + "</g>",
    "an inherited polyline": f'<g points="{POINTS}">' + "<polyline/>" * 300 + "</g>",
    "a path for each vertex": '<marker id="m" viewBox="0 0 9 9"><path d="M0 0"/></marker><polyline '
    f'points="{POINTS[:3000]}" marker-mid="url(#m)"/>',
    "references": "<defs>" + "".join(f'<g id="i{i}"/><use href="#i{i}"/>' for i in range(2_000)) + "</defs>"
    + '<use href="#i1999"/>' * 300,
    "fonts": "".join(f'<text font-family="f{i}" y="9">a</text>' for i in range(200)),
    "a font of 10^9 pixels": '<text font-size="1e9">a</text>',
    "patterns": '<pattern id="p" width=".1" height=".1"><circle r="9"/></pattern>'
    + '<rect width="9" height="9" fill="url(#p)"/>' * 300,
    "masks": f'<mask id="m">{PAID}</mask>' + '<rect width="9" height="9" mask="url(#m)"/>' * 300,
    "attributes": "<g " + " ".join(f'a{i}="1"' for i in range(9_000)) + ">" + "<g/>" * 900 + "</g>",
    "rotated letters": f'<text rotate="{"1 " * 9_000}" dx="{"1 " * 9_000}">{"<tspan>aa</tspan>" * 200}</text>',
    "a colour of many brackets": f'<rect stroke="{"rgb(" * 9_000}"/>',
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW_IN_CAIROSVG)
def test_the_work_of_cairosvg_is_counted(name: str):
    job = DrawJob(svg(SLOW_IN_CAIROSVG[name]), (100, 100))
    limits = SvgLimits(steps=SvgLimits.steps // 25)
    draw_svg(job, limits)
    before = time.process_time()
    with pytest.raises(CodeRefused, match="steps of work"):
        draw_with_cairosvg(job, limits)
    assert time.process_time() - before < 5


def test_figures_take_a_twentieth_of_the_work_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch):
    works: list[Work] = []
    monkeypatch.setattr(cairosvg_drawing, "Work", lambda most: works.append(Work(most)) or works[-1])
    text = draw_figure(random.Random(3), DrawnSettings(simple=False)).svg
    for _ in range(2):
        draw_with_cairosvg(DrawJob(text))
    assert works[0].left == works[1].left > 0.95 * works[0].most and sys.getprofile() is None


def test_a_font_that_cairo_gave_up_leaves_no_trace_in_other_pictures():
    figures = [DrawJob(svg(f'<text y="50" font-size="{size}">figure</text>')) for size in (17, 18, 19)]
    huge = DrawJob(svg('<text y="50" font-size="1e9">@</text>'))
    with SvgRenderer(limits=SvgLimits(steps=10**12), drawer="cairosvg") as renderer:
        broken, first = renderer.draw([huge, figures[0]])
        assert isinstance(broken, CodeRefused) and broken.kind == "drawing" and isinstance(first, Drawing)
        assert isinstance(renderer.draw([huge])[0], CodeRefused)
        assert all(isinstance(one, Drawing) for one in renderer.draw(figures[1:]))


def test_nothing_is_drawn_that_vlmrls_own_drawing_does_not_look_at(tmp_path: Path):
    sheet = tmp_path / "a.css"
    sheet.write_text("rect{fill:#ff00ff}", "utf-8")
    hidden = [f"<unknown>{image(PAYLOAD_PNG)}</unknown>", f'<a:b xmlns:a="x">{PAID}</a:b>', f"<view>{PAID}</view>"]
    hidden.append(f'<style>@import url("file://{sheet}");</style><rect width="100" height="100" fill="white"/>')
    for content in hidden:
        text = f'<svg {XMLNS} width="100" height="100">{content}</svg>'
        assert (draw_with_cairosvg(DrawJob(text)).pixels == 255).all(), content


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match="cairosvg, and that package is not installed"):
        rewards.vfig(judge=JUDGE)
    rewards.judge(judge=JUDGE)
