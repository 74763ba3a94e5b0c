"""Calls that wait for a service: missing inputs are asked again, the others keep their scores."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.rewards import RewardSpec
from vlmrl.rewards.attempts import AttemptRule, Attempts, Ranks
from vlmrl.rewards.outcomes import Failure, Place, Result
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.types import RewardInput
from vlmrl.workers.frames import UNAVAILABLE

SERVICE = """
import os, pathlib, time
from vlmrl import RewardUnavailable
HERE = pathlib.Path(__file__).parent
def asked(word):
    with open(HERE / "log", "a") as file:
        file.write(word + "\\n")
def reward(x):
    asked(x.response)
    if x.response == "bug":
        raise KeyError("bug")
    if x.response.startswith("bomb"):
        if (HERE / "second").exists() and (HERE / "down").exists():
            raise RewardUnavailable("no answer")
        (HERE / "second").touch()
        os._exit(3)
    if x.response.startswith("s") and (HERE / "down").exists():
        raise RewardUnavailable("no answer")
    return float(len(x.response))
def lists(completions, **columns):
    asked(str(len(completions)))
    if len(completions) > 1 and (HERE / "one_by_one").exists():
        raise ValueError("a bug with several")
    if (HERE / "down").exists():
        raise RewardUnavailable("no answer")
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(AttemptRule, "first_seconds", 0.05)


def group(*texts: str) -> list[RewardInput]:
    return [RewardInput(text) for text in texts]


def asked(tmp_path: Path) -> Counter[str]:
    return Counter((tmp_path / "log").read_text().split())


def finished(scorer: Scorer, groups: dict[int, list[RewardInput]], repair=lambda: None, **options) -> dict:
    """The scores of groups that wait; `repair` is called when the session says that the service is down."""
    heard: list[str] = []

    def say(text: str) -> None:
        heard.append(text)
        if len(heard) == 1:
            repair()

    with waits(scorer, ranks=Ranks(say=say), **options) as session:
        for key, inputs in groups.items():
            session.submit(key, "", inputs)
        scores = {of_group.key: list(of_group.scores) for of_group in session.collect()}
        assert session.waited_seconds > 0 and len(heard) == 2
    assert "no answer" in heard[0] and "answers again" in heard[1] and scorer.session is None
    return scores


def waits(scorer: Scorer, **options) -> ScoringSession:
    return ScoringSession({"": scorer}, AttemptRule("wait"), **{"strict": False, **options})


@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_missing_are_asked_again(scorer, tmp_path, workers):
    (tmp_path / "down").touch()
    with scorer(SERVICE, options={"workers": workers}) as s:
        groups = {1: group("s1", "a"), 0: group("bb", "s22", "s333")}
        scores = finished(s, groups, (tmp_path / "down").unlink, strict=True)
        assert [[x.value for x in scores[key]] for key in (0, 1)] == [[2.0, 3.0, 4.0], [2.0, 1.0]]
        assert all(x.status == "ok" and not x.note for of_group in scores.values() for x in of_group)
        assert s.failures == 0
    counts = asked(tmp_path)
    assert counts["a"] == counts["bb"] == 1 and min(counts[f"s{n}"] for n in ("1", "22", "333")) >= 2


def test_while_the_service_is_down_one_input_at_a_time_is_asked(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s, waits(s) as session:
        session.submit(0, "", group(*(f"s{n}" for n in range(30))))
        while session.waiting is None or session.waiting.number < 30:
            session.listen(0.01)
        session.listen(0.8)  # pauses of 0.05 s, doubled each time: 4 tries or 5
        tries = sum(asked(tmp_path).values())
        assert 30 + 2 <= tries <= 30 + 8 and session.waiting.number == 30
        assert max(asked(tmp_path).values()) == 2, "each time another one"
        session.cancel()
        assert s.session is None and session.collect() == []


def test_inputs_that_no_worker_has_are_held_back_when_many_got_no_answer(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrl.rewards.scoring.CHUNK", 4)
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s, waits(s) as session:
        session.submit(0, "", group(*(f"s{n}" for n in range(100))))
        while session.waiting is None or session.waiting.number < 100:
            session.listen(0.01)
        assert sum(asked(tmp_path).values()) <= 16
        session.submit(1, "", group("aaa"))
        session.listen()
        assert asked(tmp_path)["aaa"] == 0, "a group that comes later waits, too"
        (tmp_path / "down").unlink()
        many, late = session.collect()
    assert len(many.scores) == 100 and late.scores[0].value == 3.0 and all(x.status == "ok" for x in many.scores)


def test_a_strict_call_that_waits_still_stops_at_a_bug(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s:
        with waits(s, strict=True) as session, pytest.raises(RewardError, match="KeyError"):
            session.submit(0, "", group("s", "bug"))
            session.collect()
        assert s.session is None


@pytest.mark.parametrize(("on_outage", "strict"), [("mask", True), ("mask", False), ("raise", False)])
def test_a_call_that_masks_has_no_score_and_no_bug(scorer, tmp_path, on_outage, strict):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s:
        with ScoringSession({"": s}, AttemptRule(on_outage), strict=strict) as session:
            session.submit(0, "", group("s", "a"))
            down, fine = session.collect()[0].scores
        assert (down.status, down.error, fine.value) == ("unavailable", "no answer", 1.0)
        assert math.isnan(down.value) and s.failures == 0
        with ScoringSession({"": s}, AttemptRule(on_outage), strict=strict) as session:
            session.submit(0, "", group("s"))
            assert session.collect()[0].scores[0].status == "unavailable", "nothing is scored: no bug either"


def test_a_function_of_lists_that_fails_with_several_is_asked_one_by_one_after_an_outage(scorer, tmp_path):
    (tmp_path / "down").touch()
    (tmp_path / "one_by_one").touch()
    with scorer(SERVICE, function="lists") as s:
        scores = finished(s, {0: group(*(k * "a" for k in range(1, 9)))}, (tmp_path / "down").unlink)[0]
        assert [x.value for x in scores] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert set(asked(tmp_path)) == {"8", "1"}


def test_a_function_of_lists_is_called_again_with_all_of_them(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE, function="lists") as s:
        scores = finished(s, {0: group("a", "bb"), 1: group("ccc")}, (tmp_path / "down").unlink)
        assert [[x.value for x in scores[key]] for key in (0, 1)] == [[1.0, 2.0], [3.0]]
    assert set(asked(tmp_path)) == {"3"}


def test_a_reward_of_this_process_is_asked_again_too():
    calls: list[str] = []

    def judge(x: RewardInput) -> float:
        calls.append(x.response)
        if len(calls) < 4 and x.response == "s":
            raise RewardUnavailable("no answer")
        return 1.0

    with Scorer(RewardSpec("judge", judge, {}, {}, pure=True)) as s:
        assert [x.value for x in finished(s, {0: group("s", "a")}, strict=True)[0]] == [1.0, 1.0]
    assert calls == ["s", "a", "s", "s"]


@pytest.mark.parametrize("on_outage", ["wait", "mask"])
def test_an_outage_in_the_middle_of_a_second_try(scorer, tmp_path, on_outage):
    """The bomb has ended its worker once. Alone, the service is down: it waits or is masked, and earns nothing."""
    (tmp_path / "down").touch()
    with scorer(SERVICE + "\nON_TIMEOUT = {'reward': -1.0}\n") as s:
        if on_outage == "mask":
            with ScoringSession({"": s}, AttemptRule("mask"), strict=False) as session:
                session.submit(0, "", group("a", "bomb"))
                fine, bomb = session.collect()[0].scores
            assert (fine.value, bomb.status) == (1.0, "unavailable")
            return
        fine, bomb = finished(s, {0: group("a", "bomb")}, (tmp_path / "down").unlink)[0]
    assert (fine.value, bomb.value) == (1.0, -1.0) and bomb.note.endswith("scored as `on_timeout`")


def test_pauses_double_up_to_a_limit_and_are_short_again_after_an_answer(monkeypatch):
    monkeypatch.setattr(AttemptRule, "first_seconds", 1.0)
    monkeypatch.setattr(AttemptRule, "jitter", 0.0)
    now, pauses, places = 100.0, [], [(0, 0), (0, 1)]
    one, two = places
    tries = Attempts(AttemptRule("wait"), places, {}, batched=False, on_timeout={}, answered=True)

    def down(place: Place, reason: str = "no answer") -> None:
        assert tries.take(place, Failure(UNAVAILABLE, reason), now) is None

    def due() -> list[Place]:
        return tries.due(now, idle=True, last=True)

    down(one), down(two)
    assert due() == []
    for number in range(7):
        pauses.append(tries.outage.seconds_left(now))
        now += pauses[-1]
        assert due() == [places[number % 2]] and math.isinf(tries.outage.seconds_left(now)), "each time another one"
        down(places[number % 2], "still no answer")
    most = AttemptRule.most_seconds
    assert pauses == [1.0, 2.0, 4.0, 8.0, most, most, most]
    assert now - tries.outage.last_answer == sum(pauses) and tries.outage.reason == "still no answer"
    now += 30.0
    assert due() == [two] and tries.is_silent
    tries.take(two, Result({}, "", 0.0), now)
    assert not tries.is_silent, "an answer ends the row of inputs without one"
    assert (tries.outage.seconds_left(now), tries.outage.last_answer) == (0.0, now)
    assert due() == [one], "the service answers: all at once"
    down(one, "busy")
    assert tries.outage.seconds_left(now) == 2.0
    now += 2.0
    assert due() == [one] and tries.take(one, Result({}, "", 0.0), now) and tries.outage is None and due() == []
