"""What two ranks do when the service of one of them is down: both wait, and both come to the same end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrl.dist import world
from vlmrl.dist.world import World
from vlmrl.rollout import scoring as rule
from vlmrl.rollout.scoring import Missing, OutageError, Outages, StepLeftError


class Meeting:
    """Where two threads exchange values, as two ranks do."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(2, timeout=30), [None, None]

    def gather(self, rank: int, mine: Any) -> list[Any]:
        self.values[rank] = mine
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass(frozen=True)
class Thread(World):
    """A rank that is a thread."""

    meeting: Any = field(default=None, compare=False)

    def gather(self, mine: Any) -> list[Any]:
        return self.meeting.gather(self.rank, mine)


class Scripted:
    """Scores that wait for a service for so many ticks (-1 = for ever); its last answer was `silent` seconds ago."""

    ended = None

    def __init__(self, ticks: int, silent: float = 1.0) -> None:
        self.ticks, self.silent, self.advanced = ticks, silent, 0

    @property
    def is_open(self) -> bool:
        return self.ticks != 0

    def missing(self) -> Missing | None:
        return Missing(3, "no answer from judge:8000", 0.0, self.silent) if self.is_open else None

    def settle(self) -> None: ...

    def advance(self, seconds: float) -> None:
        self.advanced += 1
        self.ticks -= self.ticks > 0

    def finish(self, seconds: float | None = None) -> list[Any]:
        assert not self.is_open
        return []


def two_ranks(work: Callable[[int, Thread], Any]) -> list[Any]:
    """Return what the work returns or raises on both ranks."""
    meeting, results = Meeting(), [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Thread(rank, 2, meeting=meeting))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def phases(monkeypatch) -> list[str]:
    entered: list[str] = []
    monkeypatch.setattr(world, "phase", lambda name, step=None: entered.append(name))
    return entered


def test_both_wait_while_the_service_of_one_is_down_and_the_watch_sees_that_they_live(phases):
    scores, heard = [Scripted(0), Scripted(5)], []

    def work(rank: int, world: Thread) -> list[Any]:
        rule = Outages("wait", 30.0, world, lambda text: heard.append((rank, text)))
        return rule.finish(scores[rank])

    assert two_ranks(work) == [[], []]
    assert [one.advanced for one in scores] == [5, 5]
    assert phases == ["waiting for a service"] * 10
    assert sorted(rank for rank, text in heard if "no answer from judge:8000" in text) == [0, 1]
    assert sum("answers again" in text for _, text in heard) == 2


def test_without_an_outage_nothing_is_said_and_no_phase_is_entered(phases):
    heard: list[str] = []
    assert two_ranks(lambda rank, world: Outages("wait", 30.0, world, heard.append).finish(Scripted(0))) == [[], []]
    assert heard == [] and phases == []


@pytest.mark.parametrize(
    ("silent", "asked", "expected"),
    [(1801.0, None, OutageError), (1.0, "interrupted", StepLeftError), (1.0, "the time limit", StepLeftError)],
)
def test_both_end_at_the_bound_and_when_one_is_asked_to_stop(silent, asked, expected):
    scores = [Scripted(0), Scripted(-1, silent)]

    def work(rank: int, world: Thread) -> Any:
        def reason() -> str | None:
            return next((r for r in world.gather(asked if rank == 0 else None) if r), None)

        return Outages("wait", 30.0, world, stop_reason=reason).finish(scores[rank])

    errors = two_ranks(work)
    assert [type(error) for error in errors] == [expected] * 2
    if expected is OutageError:
        assert all("30 min 01 s" in str(error) and "no answer from judge:8000" in str(error) for error in errors)
    else:
        assert [error.reason for error in errors] == [asked] * 2


def test_both_stop_when_one_has_samples_without_a_score():
    def work(rank: int, world: Thread) -> Any:
        score = SimpleNamespace(status="unavailable" if rank else "ok", error="no answer" if rank else None)
        groups = [SimpleNamespace(samples=[SimpleNamespace(score=score)] * 2)]
        scoring: Any = SimpleNamespace(finish=lambda seconds: groups, ended=None)
        return Outages("stop", 30.0, world).finish(scoring)

    errors = two_ranks(work)
    assert [type(error) for error in errors] == [OutageError] * 2
    assert all("unavailable for 2 sample(s): no answer" in str(error) for error in errors)


def test_a_long_outage_is_told_again_from_time_to_time(monkeypatch):
    now, heard = 0.0, []
    monkeypatch.setattr(rule.time, "monotonic", lambda: now)
    outages = Outages(say=heard.append)
    for _ in range(12):
        outages._tell(Missing(3, "no answer", 0.0, now))
        now += 100.0
    assert len(heard) == 4 and [text.startswith("still waiting") for text in heard] == [False, True, True, True]
