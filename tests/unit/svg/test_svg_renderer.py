"""Pool of processes that draw SVG text: order, limits of time and memory, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import time

import pytest

from vlmrl.svg.draw import Drawing, DrawJob, draw_svg
from vlmrl.svg.limits import SvgLimits, SvgRefused
from vlmrl.svg.renderer import SvgRenderer

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
SLOW = HEAD + '<path d="M0 0H20V20Z"/>' * 19_000 + "</svg>"


def box(side: int) -> DrawJob:
    return DrawJob(f'{HEAD}<rect width="{side}" height="{side}"/></svg>')


def test_pictures_come_in_the_order_of_the_texts_and_equal_those_of_this_process():
    jobs = [box(side) for side in range(1, 20)]
    with SvgRenderer(workers=2) as renderer:
        drawings = renderer.draw(jobs)
    for job, drawing in zip(jobs, drawings, strict=True):
        assert isinstance(drawing, Drawing)
        assert drawing.digest == draw_svg(job).digest
        assert (drawing.pixels == draw_svg(job).pixels).all()


def test_refusals_stand_at_their_places():
    with SvgRenderer() as renderer:
        first, second, third = renderer.draw([box(3), DrawJob("<svg"), DrawJob("x" * 1_000_001)])
        assert renderer.draw([]) == []
    assert isinstance(first, Drawing)
    assert isinstance(second, SvgRefused) and second.kind == "syntax"
    assert isinstance(third, SvgRefused) and third.kind == "limit"


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_is_drawn():
    limits = SvgLimits(seconds=0.3, pixels=4096 * 4096)
    with SvgRenderer(workers=1, limits=limits) as renderer:
        renderer.draw([box(1)])
        begin = time.monotonic()
        slow, fine = renderer.draw([DrawJob(SLOW, (4000, 4000)), box(4)])
        seconds = time.monotonic() - begin
    assert isinstance(slow, SvgRefused) and slow.kind == "limit" and "0.3 s" in slow.reason
    assert isinstance(fine, Drawing)
    assert seconds < 20


def test_a_text_that_needs_too_much_memory_is_refused():
    limits = SvgLimits(memory_mb=20, pixels=4096 * 4096)
    with SvgRenderer(limits=limits) as renderer:
        large, fine = renderer.draw([DrawJob(box(3).svg, (4000, 4000)), box(4)])
    assert isinstance(large, SvgRefused) and large.kind == "limit"
    assert isinstance(fine, Drawing)


def test_a_process_that_is_killed_is_replaced():
    with SvgRenderer() as renderer:
        renderer.draw([box(1)])
        os.kill(renderer._workers[0]._process.pid, signal.SIGKILL)
        time.sleep(0.2)
        refused, fine = renderer.draw([box(2), box(3)])
        assert isinstance(refused, SvgRefused) and isinstance(fine, Drawing)


def test_no_process_remains():
    with SvgRenderer(workers=2) as renderer:
        renderer.draw([box(1), box(2)])
        processes = [worker._process for worker in renderer._workers]
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)


def test_workers_do_not_see_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GEMINI_API_KEY", "secret-value")
    with SvgRenderer() as renderer:
        renderer.draw([box(1)])
        with open(f"/proc/{renderer._workers[0]._process.pid}/environ", "rb") as file:
            assert b"secret-value" not in file.read()
