"""Pictures that cairosvg draws in a worker: equal to its own, after the same checks, without what it would fetch."""

from __future__ import annotations

import io
import random
from pathlib import Path

import cairosvg
import numpy as np
import pytest
from PIL import Image
from svg_attack_parts import PAID, PAYLOAD_PNG, XMLNS, image, svg

from vlmrl.errors import RewardError
from vlmrl.svg.cairosvg_drawing import draw_with_cairosvg
from vlmrl.svg.draw import Drawing, DrawJob
from vlmrl.svg.limits import SvgLimits, SvgRefused
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.judged import reward
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure

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
    with pytest.raises(SvgRefused):
        draw_with_cairosvg(DrawJob(text))


def test_counted_work_refuses_before_cairosvg_draws():
    with pytest.raises(SvgRefused, match="steps of work"):
        draw_with_cairosvg(DrawJob(svg(PAID * 90)), SvgLimits(steps=9_000))


def test_nothing_is_drawn_that_vlmrls_own_drawing_does_not_look_at(tmp_path: Path):
    sheet = tmp_path / "a.css"
    sheet.write_text("rect{fill:#ff00ff}", "utf-8")
    hidden = [f"<unknown>{image(PAYLOAD_PNG)}</unknown>", f'<a:b xmlns:a="x">{PAID}</a:b>', f"<view>{PAID}</view>"]
    hidden.append(f'<style>@import url("file://{sheet}");</style><rect width="100" height="100" fill="white"/>')
    for content in hidden:
        text = f'<svg {XMLNS} width="100" height="100">{content}</svg>'
        assert (draw_with_cairosvg(DrawJob(text)).pixels == 255).all(), content


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match="cairosvg, and that package is not installed"):
        reward.vfig(judge=JUDGE)
    reward.judge(judge=JUDGE)
