"""What two ranks do when the service of one of them is down: both wait, and both come to the same end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from vlmrl.dist import world
from vlmrl.dist.world import World
from vlmrl.errors import RewardUnavailable
from vlmrl.rewards import attempts
from vlmrl.rewards.attempts import AttemptRule, OutageError, Ranks, StepLeftError, Waiting
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rollout.sample import ranks_of
from vlmrl.types import RewardInput


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


class Judge(Scorer):
    """A reward whose service gives no answer so many times (-1 = for ever)."""

    def __init__(self, down: int) -> None:
        self.calls = 0

        def score(x: RewardInput) -> float:
            self.calls += 1
            if down < 0 or self.calls <= down:
                raise RewardUnavailable("no answer from judge:8000")
            return 1.0

        super().__init__(RewardSpec("judge", score, {}, {}, pure=True))


def ranks_on(world: Thread, **hooks: Any) -> Ranks:
    ranks = ranks_of(world, hooks.pop("say", lambda text: None))
    for name, hook in hooks.items():
        setattr(ranks, name, hook)
    return ranks


def scored(judge: Judge, rule: AttemptRule, ranks: Ranks, samples: int = 1) -> list[float]:
    with ScoringSession({"judge": judge}, rule, strict=True, ranks=ranks) as session:
        session.submit(0, "judge", [RewardInput("a")] * samples)
        return [score.value for group in session.collect() for score in group.scores]


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


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(AttemptRule, "first_seconds", 0.05)
    monkeypatch.setattr("vlmrl.rewards.scoring.TICK_SECONDS", 0.03)


def test_both_wait_while_the_service_of_one_is_down_and_the_watch_sees_that_they_live(phases):
    judges, heard = [Judge(0), Judge(3)], []

    def work(rank: int, world: Thread) -> list[float]:
        return scored(judges[rank], AttemptRule("wait"), ranks_on(world, say=lambda text: heard.append((rank, text))))

    assert two_ranks(work) == [[1.0], [1.0]]
    assert [judge.calls for judge in judges] == [1, 4]
    assert set(phases) == {"waiting for a service"} and len(phases) % 2 == 0 and len(phases) >= 6
    assert sorted(rank for rank, text in heard if "no answer from judge:8000" in text) == [0, 1]
    assert sum("answers again" in text for _, text in heard) == 2


def test_without_an_outage_nothing_is_said_and_no_phase_is_entered(phases):
    heard: list[str] = []
    work = lambda rank, world: scored(Judge(0), AttemptRule("wait"), ranks_on(world, say=heard.append))  # noqa: E731
    assert two_ranks(work) == [[1.0], [1.0]]
    assert heard == [] and phases == []


@pytest.mark.parametrize(
    ("minutes", "asked", "expected"),
    [(0.001, None, OutageError), (30.0, "interrupted", StepLeftError), (30.0, "the time limit", StepLeftError)],
)
def test_both_end_at_the_bound_and_when_one_is_asked_to_stop(minutes, asked, expected):
    def work(rank: int, world: Thread) -> Any:
        def reason() -> str | None:
            return next((r for r in world.gather(asked if rank == 0 else None) if r), None)

        return scored(Judge(-1 if rank else 0), AttemptRule("wait", minutes), ranks_on(world, stop_reason=reason), 3)

    errors = two_ranks(work)
    assert [type(error) for error in errors] == [expected] * 2
    if expected is OutageError:
        assert str(errors[0]) == str(errors[1]) and "(3 samples waiting for it): no answer from judge" in str(errors[0])
    else:
        assert [error.reason for error in errors] == [asked] * 2


def test_both_stop_when_one_has_samples_without_a_score():
    errors = two_ranks(lambda rank, world: scored(Judge(-rank), AttemptRule("stop"), ranks_on(world), 2))
    assert [type(error) for error in errors] == [OutageError] * 2
    assert all("unavailable for 2 samples: no answer" in str(error) for error in errors)


def test_a_long_outage_is_told_again_from_time_to_time(monkeypatch):
    now, heard = 0.0, []
    monkeypatch.setattr(attempts.time, "monotonic", lambda: now)
    ranks = Ranks(say=heard.append)
    for _ in range(12):
        ranks.tell(Waiting(3, "no answer", 0.0, now), AttemptRule("wait"))
        now += 100.0
    assert len(heard) == 4 and [text.startswith("still waiting") for text in heard] == [False, True, True, True]
