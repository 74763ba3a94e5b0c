"""What the launcher says of a run's end, from the words the ranks left and the exit codes the agent saw."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from vlmrl.dist.world import BEAT_BYTES
from vlmrl.launch.ranks import Watch


class Ranks:
    """Writes what ranks write; this very process stands in for each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def beat(self, rank: int, ticks: int = 1, phase: str = "update", pid: int | None = None) -> None:
        state = {
            "rank": rank,
            "pid": pid or os.getpid(),
            "phase": phase,
            "step": 7,
            "ticks": ticks,
            "run": None,
            "log": None,
        }
        (self.folder / f"rank-{rank}.beat").write_bytes(json.dumps(state).encode().ljust(BEAT_BYTES))

    def word(self, rank: int, code: int, message: str = "", time: float = 0.0) -> None:
        reason = message.removeprefix("error: ")
        content = {"code": code, "message": message, "reason": reason, "time": time, "halved": {}}
        (self.folder / f"rank-{rank}.end").write_text(json.dumps(content))


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_all_well(ranks: Ranks) -> None:
    ranks.word(0, 0), ranks.word(1, 0)
    assert Watch(ranks.folder, 10).ending({}).code == 0


def test_of_several_errors_the_first_in_time_is_shown(ranks: Ranks) -> None:
    ranks.word(0, 1, "connection closed by peer", 2.0)
    ranks.word(1, 2, "error: the row is bad", 1.0)
    ending = Watch(ranks.folder, 10).ending({0: 1, 1: 2})
    assert ending.code == 2 and ending.message.startswith("error: the row is bad") and "rank 1" in ending.message
    assert ending.reason == "the row is bad"


def test_a_rank_whose_debugger_was_left_is_no_failure_of_the_others(ranks: Ranks) -> None:
    ranks.word(0, 130, "the debugger was quit", 1.0)
    ranks.word(1, 1, "connection closed by peer", 2.0)
    ending = Watch(ranks.folder, 10).ending({0: 130, 1: 1})
    assert (ending.code, ending.message) == (130, "the debugger was quit")
    ranks.word(1, 2, "error: the row is bad", 0.5)
    assert Watch(ranks.folder, 10).ending({0: 130, 1: 2}).code == 2, "an error that came first is the cause"


def test_budgets_to_start_again_with_are_those_of_the_first_error(ranks: Ranks) -> None:
    ranks.word(0, 1, "connection closed by peer", 2.0)
    half = {"train.tokens_per_row": [400, 200]}
    told = {"code": 2, "message": "error: out of memory", "reason": "out of memory", "time": 1.0, "halved": half}
    (ranks.folder / "rank-1.end").write_text(json.dumps(told))
    assert Watch(ranks.folder, 10).ending({0: 1, 1: 2}).halved == half
    ranks.word(0, 2, "error: the row is bad", 0.5)
    assert Watch(ranks.folder, 10).ending({0: 2, 1: 2}).halved == {}


def test_a_rank_the_system_killed_is_the_cause_of_what_the_others_say(ranks: Ranks) -> None:
    ranks.word(0, 1, "connection closed by peer", 1.0)
    ending = Watch(ranks.folder, 10).ending({0: 1, 1: -signal.SIGKILL})
    assert ending.code == 2 and "rank 1 was killed by SIGKILL" in ending.message and "dmesg" in ending.message
    assert ending.reason == "rank 1 was killed by SIGKILL in its start-up phase"


def test_a_rank_that_we_or_the_agent_or_a_library_ended_is_not_the_cause(ranks: Ranks) -> None:
    ranks.word(0, 2, "error: the row is bad", 1.0)
    watch = Watch(ranks.folder, 10)
    watch.killed = {1}
    codes = {0: 2, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGABRT}
    assert watch.ending(codes).message.startswith("error: the row is bad")


def test_an_asked_interruption_is_one_whatever_the_peers_say_of_it(ranks: Ranks) -> None:
    ranks.word(0, 130, "interrupted", 1.0), ranks.word(1, 1, "connection closed by peer", 2.0)
    watch = Watch(ranks.folder, 10)
    watch.signals = [signal.SIGINT]
    assert watch.ending({0: 130, 1: 1}).code == 130
    ranks.word(1, 2, "error: the disk is full", 2.0)
    assert watch.ending({0: 130, 1: 2}).code == 2


def test_a_hang_names_the_rank_that_entered_fewest_phases(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "_kill_all", lambda self: None)
    monkeypatch.setattr(Watch, "_signal", lambda *_: None)
    monkeypatch.setattr("vlmrl.launch.ranks.STACK_SECONDS", 0.0)
    watch = Watch(ranks.folder, 10)
    ranks.beat(0, ticks=5), ranks.beat(1, ticks=4, phase="rollout")
    watch._look(0.2)
    watch._look(9.0)
    assert watch.hang is None
    ranks.beat(0, ticks=6)  # rank 0 goes on: only rank 1 is idle
    watch._look(2.0)
    assert watch.hang is not None
    assert "rank 1 hangs: in phase `rollout` of step 7 for more than 10 s (rank 0 in `update`)" in watch.hang


def test_a_phase_in_time_is_no_hang(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "_end_hang", lambda self: setattr(self, "hang", "found"))
    watch = Watch(ranks.folder, 10)
    for ticks in range(1, 20):
        ranks.beat(0, ticks=ticks)
        watch._look(9.0)  # the look that sees the new phase
        watch._look(9.0)
    assert watch.hang is None


def test_a_torn_file_is_read_the_next_time(ranks: Ranks) -> None:
    (ranks.folder / "rank-0.beat").write_bytes(b'{"rank": 0, "pi')
    watch = Watch(ranks.folder, 10)
    watch._look(0.2)
    assert watch.ranks == {}
    ranks.beat(0)
    watch._look(0.2)
    assert list(watch.ranks) == [0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_ends_the_launcher_and_later_ones_are_kept_for_the_ranks(
    ranks: Ranks, number: int
) -> None:
    watch = Watch(ranks.folder, 10)
    with watch.catching_signals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        ranks.beat(0)  # it runs, and the watch has not looked since
        assert not watch.ranks
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            pytest.fail("the rank was not asked to save")
    assert watch.signals == [number]
