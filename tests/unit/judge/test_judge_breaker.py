"""The circuit breaker and the attempts of a request, by a clock of the test."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import settings_for

from vlmrl.services.calls import Attempts, Breaker, Turn
from vlmrl.services.client import Pauses
from vlmrl.services.protocol import EndpointDown, JudgeDown

NORMAL, PROBE = Turn(is_probe=False), Turn(is_probe=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, failures: int = 3) -> Breaker:
    return Breaker(failures=failures, first_seconds=1.0, most_seconds=4.0, rng=random.Random(0), clock=clock)


def test_the_circuit_opens_after_failures_in_a_row_and_an_answer_begins_the_count_again() -> None:
    one = breaker(Clock())
    assert [one.fail(NORMAL) for _ in range(2)] == [False, False]
    one.answer()
    assert [one.fail(NORMAL) for _ in range(3)] == [False, False, True] and one.is_open and one.opened == 1
    assert one.take() is None


def test_one_probe_at_a_time_with_growing_pauses() -> None:
    clock = Clock()
    one = breaker(clock)
    for _ in range(3):
        one.fail(NORMAL)
    for whole in (1.0, 2.0, 4.0, 4.0):
        assert whole / 2 <= one.seconds_left() <= whole
        clock.now += one.seconds_left() - 1e-6
        assert one.take() is None
        clock.now += 2e-6
        assert one.take() == PROBE and one.take() is None
        one.fail(NORMAL)  # one that was in flight before says nothing new
        assert one.take() is None
        one.fail(PROBE)
    clock.now += 4.0
    assert one.take() == PROBE
    one.leave(PROBE)  # cancelled: the next one tries
    assert one.take() == PROBE
    one.answer()
    assert one.take() == NORMAL and not one.is_open


def test_a_wait_ends_when_the_circuit_closes() -> None:
    async def work() -> None:
        one = breaker(Clock())
        for _ in range(3):
            one.fail(NORMAL)
        waiting = [asyncio.create_task(one.wait(1000.0)) for _ in range(3)]
        await asyncio.sleep(0)
        one.answer()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        await one.wait(0.0)

    asyncio.run(work())


@given(st.lists(st.sampled_from(["take", "answer", "fail", "leave", "time"]), max_size=60))
def test_while_it_is_open_no_two_probes_are_out(events: list[str]) -> None:
    clock = Clock()
    one, out = breaker(clock), []
    for event in events:
        if event == "take" and (turn := one.take()) is not None:
            out.append(turn)
        elif event == "time":
            clock.now += 2.0
        elif event in ("answer", "fail", "leave") and out:
            turn = out.pop()
            one.answer() if event == "answer" else getattr(one, event)(turn)
            if event == "answer":
                out = [NORMAL for _ in out]
        assert sum(turn.is_probe for turn in out) <= 1


def attempts(clock: Clock, **more) -> Attempts:
    settings = settings_for("http://127.0.0.1:1/v1", **more)
    return Attempts(settings, Pauses(first=1.0, most=3.0, most_retry_after=60.0), random.Random(0), clock)


def down(retry_after: float = 0.0) -> EndpointDown:
    error = EndpointDown("it fails", where="there")
    error.retry_after = retry_after
    return error


def test_pauses_double_up_to_the_longest_and_a_retry_after_comes_on_top() -> None:
    one = attempts(Clock(), attempts=6)
    for whole in (1.0, 2.0, 3.0):
        assert whole / 2 <= one.pause_after(down()) <= whole
    assert 10 + 1.5 <= one.pause_after(down(10.0)) <= 10 + 3.0
    assert 60 + 1.5 <= one.pause_after(down(1e8)) <= 60 + 3.0
    with pytest.raises(JudgeDown, match="no judgement in 6 attempts: it fails") as raised:
        one.pause_after(down())
    assert raised.value.where == "there"


def test_an_attempt_that_was_not_sent_counts() -> None:
    one = attempts(Clock(), attempts=2)
    one.pause_after(None)
    with pytest.raises(JudgeDown, match="several times in a row"):
        one.pause_after(None)


def test_a_wait_has_as_many_attempts_as_its_time_allows() -> None:
    clock = Clock()
    one = attempts(clock, outage="wait", outage_minutes=1.0, attempts=1)
    for _ in range(59):
        one.pause_after(down())
        clock.now += 1.0
    clock.now += 1.0
    with pytest.raises(JudgeDown, match="60 attempts"):
        one.pause_after(down())
