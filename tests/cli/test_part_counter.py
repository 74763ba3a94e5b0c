from __future__ import annotations

import io

from vlmrl.cli.progress import PartCounter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_shows_the_time_that_is_left_from_the_parts_made_in_this_run() -> None:
    stream, clock = Terminal(), Clock()
    told = PartCounter(stream, clock)
    told("reading rows", 600, 1600)  # an earlier run made 600: they took no time
    clock.now += 50
    told("reading rows", 800, 1600)  # 200 in 50 s: 800 more take 200 s
    clock.now += 200
    told("reading rows", 1600, 1600)
    told("writing images", 0, 2)
    clock.now += 10
    told("writing images", 1, 2)
    assert stream.getvalue().split("\r\033[K")[1:] == [
        "reading rows: 600 of 1,600 parts",
        "reading rows: 800 of 1,600 parts, 3 min 20 s left",
        "reading rows: 1,600 of 1,600 parts\n",
        "writing images: 0 of 2 parts",
        "writing images: 1 of 2 parts, 10 s left",
    ]


def test_a_log_file_gets_a_line_a_minute_and_one_at_the_end_of_a_stage() -> None:
    stream, clock = io.StringIO(), Clock()
    told = PartCounter(stream, clock)
    for done in range(0, 101):
        told("reading rows", done, 100)
        clock.now += 1.25  # 48 parts a minute
    told("reading rows", 0, 1)
    told("reading rows", 1, 1)  # a stage of one part says nothing
    assert stream.getvalue() == (
        "reading rows: 48 of 100 parts, 1 min 05 s left\n"
        "reading rows: 96 of 100 parts, 5 s left\n"
        "reading rows: 100 parts\n"
    )


def test_the_same_stage_twice_starts_anew() -> None:
    stream, clock = Terminal(), Clock()
    told = PartCounter(stream, clock)
    for _ in range(2):
        told("resizing images", 0, 10)
        clock.now += 7
        told("resizing images", 7, 10)
    assert stream.getvalue().count("7 of 10 parts, 3 s left") == 2
