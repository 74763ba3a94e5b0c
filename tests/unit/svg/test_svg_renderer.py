"""Pool of processes that draw SVG text: order, limits of time and memory, and what happens when one dies."""

from __future__ import annotations

import os
import resource
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from processes import lives

from vlmrl.errors import VlmrlError
from vlmrl.svg.draw import Drawing, DrawJob, draw_svg
from vlmrl.svg.parse import SvgLimits
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.untrusted import CodeRefused
from vlmrl.workers.pool import Lost

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
    assert isinstance(second, CodeRefused) and second.kind == "syntax"
    assert isinstance(third, CodeRefused) and third.kind == "limit"


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_is_drawn():
    limits = SvgLimits(seconds=0.3, pixels=4096 * 4096)
    with SvgRenderer(workers=1, limits=limits) as renderer:
        renderer.draw([box(1)])
        begin = time.monotonic()
        slow, fine = renderer.draw([DrawJob(SLOW, (4000, 4000)), box(4)])
        seconds = time.monotonic() - begin
    assert isinstance(slow, CodeRefused) and slow.kind == "limit" and "0.3 s" in slow.reason
    assert isinstance(fine, Drawing)
    assert seconds < 20


def test_a_text_that_needs_too_much_memory_is_refused():
    limits = SvgLimits(memory_mb=20, pixels=4096 * 4096)
    with SvgRenderer(limits=limits) as renderer:
        large, fine = renderer.draw([DrawJob(box(3).svg, (4000, 4000)), box(4)])
    assert isinstance(large, CodeRefused) and large.kind == "limit"
    assert isinstance(fine, Drawing)


def test_a_process_that_is_killed_is_replaced():
    with SvgRenderer() as renderer:
        renderer.draw([box(1)])
        os.kill(renderer.pids()[0], signal.SIGKILL)
        time.sleep(0.2)
        assert all(isinstance(one, Drawing) for one in renderer.draw([box(2), box(3)]))


def test_a_text_is_refused_by_its_work_and_not_by_the_clock():
    heavy = DrawJob(HEAD + '<path d="M0 0H20V20Z"/>' * 900 + "</svg>")
    with SvgRenderer(limits=SvgLimits(steps=200_000)) as renderer:
        refused, fine = renderer.draw([heavy, box(4)])
        (pid,) = renderer.pids()
        assert isinstance(refused, CodeRefused) and "more than 200,000 steps of work" in refused.reason
        assert isinstance(fine, Drawing) and lives(pid)
    with SvgRenderer() as renderer:
        assert isinstance(renderer.draw([heavy])[0], Drawing)


def test_a_shells_limit_of_processor_time_is_no_fault_of_a_text():
    with SvgRenderer() as renderer:
        renderer.draw([box(1)])
        pid = renderer.pids()[0]
        resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))  # as `ulimit -t 1`, of which drawing other texts used a part
        assert isinstance(renderer.draw([DrawJob(SLOW)])[0], Drawing)
        assert renderer.pids()[0] != pid


def lost(renderer: SvgRenderer, number: int, *, busy: bool = True) -> CodeRefused:
    """Outcome when a signal ends a process that has drawn nothing."""
    worker: Any = SimpleNamespace(busy=[0] * busy, answered=0, facts={} if busy else None)
    ((_, refusal),) = renderer._lost(worker, Lost("ended", f"signal {number:d}", ""))
    assert isinstance(refusal, CodeRefused)
    return refusal


@pytest.mark.parametrize("busy", [False, True])
def test_a_shell_that_allows_too_little_processor_time_is_named(monkeypatch: pytest.MonkeyPatch, busy: bool):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3, 3))
    for ending in (signal.SIGXCPU, signal.SIGKILL):
        with pytest.raises(VlmrlError, match="this shell allows it 3 s of processor time") as caught:
            lost(SvgRenderer(), ending, busy=busy)
        assert "ulimit -t" in str(caught.value.hint)


def test_a_text_that_ends_a_new_process_is_refused_with_the_cause():
    renderer = SvgRenderer(limits=SvgLimits(cpu_seconds=7))
    for ending, words in ((signal.SIGXCPU, "7 s of processor time"), (signal.SIGSEGV, "ended its process")):
        assert words in lost(renderer, ending).reason


def test_no_process_remains():
    with SvgRenderer(workers=2) as renderer:
        renderer.draw([box(1), box(2)])
        keepers = [worker._keeper.pid for worker in renderer._workers]
        pids = renderer.pids()  # of those that are ready
    assert len(keepers) == 2 and pids and not any(map(lives, keepers + pids))


def test_workers_do_not_see_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GEMINI_API_KEY", "secret-value")
    with SvgRenderer() as renderer:
        renderer.draw([box(1)])
        with open(f"/proc/{renderer.pids()[0]}/environ", "rb") as file:
            assert b"secret-value" not in file.read()
