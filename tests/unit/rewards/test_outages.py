"""Calls that wait for a service: missing inputs are asked again, the others keep their scores."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path

import pytest

from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.rewards import RewardSpec, attempts
from vlmrl.rewards.attempts import MOST_SECONDS, Outage
from vlmrl.rewards.scorer import Scorer
from vlmrl.types import RewardInput, Score

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
    monkeypatch.setattr(attempts, "FIRST_SECONDS", 0.05)


def group(*texts: str) -> list[RewardInput]:
    return [RewardInput(text) for text in texts]


def asked(tmp_path: Path) -> Counter[str]:
    return Counter((tmp_path / "log").read_text().split())


def finished(scorer: Scorer, repair=lambda: None, seconds: float = 60.0) -> dict[int, list[Score]]:
    """The scores of a call that waits; `repair` is called when the call has found that the service is down."""
    scores = dict(scorer.collect())
    assert scorer.is_open and scorer.missing and scorer.outage is not None
    repair()
    end = time.monotonic() + seconds
    while scorer.is_open and time.monotonic() < end:
        scores |= dict(scorer.collect(0.02))
        if scorer.is_open and not scorer.is_busy:
            scores |= dict(scorer.collect())
    assert not scorer.is_open
    return scores


@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_missing_are_asked_again(scorer, tmp_path, workers):
    (tmp_path / "down").touch()
    with scorer(SERVICE, options={"workers": workers}) as s:
        s.submit(1, group("s1", "a"), on_outage="wait", strict=True)
        s.submit(0, group("bb", "s22", "s333"), on_outage="wait", strict=True)
        scores = finished(s, (tmp_path / "down").unlink)
        assert [[x.value for x in scores[key]] for key in (0, 1)] == [[2.0, 3.0, 4.0], [2.0, 1.0]]
        assert all(x.status == "ok" and not x.note for of_group in scores.values() for x in of_group)
        assert s.failures == 0 and len(s.seconds) == 5
    counts = asked(tmp_path)
    assert counts["a"] == counts["bb"] == 1 and min(counts[f"s{n}"] for n in ("1", "22", "333")) >= 2


def test_while_the_service_is_down_one_input_at_a_time_is_asked(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s:
        s.submit(0, group(*(f"s{n}" for n in range(30))), on_outage="wait")
        s.collect()
        s.collect(0.8)  # pauses of 0.05 s, doubled each time: 4 tries or 5
        tries = sum(asked(tmp_path).values())
        assert 30 + 2 <= tries <= 30 + 8 and s.missing == 30
        assert max(asked(tmp_path).values()) == 2, "each time another one"
        s.cancel()
        assert not s.is_open and s.collect() == []


def test_inputs_that_no_worker_has_are_held_back_when_many_got_no_answer(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrl.rewards.attempts.CHUNK", 4)
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s:
        s.submit(0, group(*(f"s{n}" for n in range(100))), on_outage="wait")
        s.collect()
        assert sum(asked(tmp_path).values()) <= 16 and s.missing == 100
        s.submit(1, group("aaa"), on_outage="wait")
        s.collect(0.0)
        assert asked(tmp_path)["aaa"] == 0, "a group that comes later waits, too"
        scores = finished(s, (tmp_path / "down").unlink)
    assert len(scores[0]) == 100 and scores[1][0].value == 3.0 and all(x.status == "ok" for x in scores[0])


def test_a_strict_call_that_waits_still_stops_at_a_bug(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s:
        s.submit(0, group("s", "bug"), on_outage="wait", strict=True)
        with pytest.raises(RewardError, match="KeyError"):
            s.collect()
        assert not s.is_open


@pytest.mark.parametrize(("on_outage", "strict"), [("mask", True), ("mask", False), ("raise", False)])
def test_a_call_that_masks_has_no_score_and_no_bug(scorer, tmp_path, on_outage, strict):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s:
        s.submit(0, group("s", "a"), on_outage=on_outage, strict=strict)
        ((_, (down, fine)),) = s.collect()
        assert (down.status, down.error, fine.value) == ("unavailable", "no answer", 1.0)
        assert math.isnan(down.value) and s.failures == 0
        s.submit(0, group("s"), on_outage=on_outage, strict=strict)
        assert s.collect()[0][1][0].status == "unavailable", "a call in which nothing is scored is no bug either"


def test_a_strict_call_that_raises_names_the_row(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE) as s, pytest.raises(RewardUnavailable):
        s.score(group("s"), strict=True)


def test_a_function_of_lists_that_fails_with_several_is_asked_one_by_one_after_an_outage(scorer, tmp_path):
    (tmp_path / "down").touch()
    (tmp_path / "one_by_one").touch()
    with scorer(SERVICE, function="lists") as s:
        s.submit(0, group(*(k * "a" for k in range(1, 9))), on_outage="wait")
        scores = finished(s, (tmp_path / "down").unlink)[0]
        assert [x.value for x in scores] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert set(asked(tmp_path)) == {"8", "1"}


def test_a_function_of_lists_is_called_again_with_all_of_them(scorer, tmp_path):
    (tmp_path / "down").touch()
    with scorer(SERVICE, function="lists") as s:
        s.submit(0, group("a", "bb"), on_outage="wait")
        s.submit(1, group("ccc"), on_outage="wait")
        scores = finished(s, (tmp_path / "down").unlink)
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
        s.submit(0, group("s", "a"), on_outage="wait", strict=True)
        assert [x.value for x in finished(s)[0]] == [1.0, 1.0]
    assert calls == ["s", "a", "s", "s"]


@pytest.mark.parametrize("on_outage", ["wait", "mask"])
def test_an_outage_in_the_middle_of_a_second_try(scorer, tmp_path, on_outage):
    """The bomb has ended its worker once. Alone, the service is down: it waits or is masked, and earns nothing."""
    (tmp_path / "down").touch()
    with scorer(SERVICE + "\nON_TIMEOUT = {'reward': -1.0}\n") as s:
        s.submit(0, group("a", "bomb"), on_outage=on_outage)
        if on_outage == "mask":
            ((_, (fine, bomb)),) = s.collect()
            assert (fine.value, bomb.status) == (1.0, "unavailable")
            return
        (fine, bomb) = finished(s, (tmp_path / "down").unlink)[0]
    assert (fine.value, bomb.value) == (1.0, -1.0) and bomb.note.endswith("it earns `on_timeout`")


def test_pauses_double_up_to_a_limit_and_are_short_again_after_an_answer(monkeypatch):
    now = 100.0
    monkeypatch.setattr(attempts.time, "monotonic", lambda: now)
    monkeypatch.setattr(attempts, "FIRST_SECONDS", 1.0)
    monkeypatch.setattr(attempts, "JITTER", 0.0)
    one, two = (0, 0), (0, 1)
    down, pauses = Outage("no answer"), []
    for _ in range(7):
        pauses.append(down.seconds_left)
        now += down.seconds_left
        assert down.begin_round([one, two], at_once=False) == [one] and math.isinf(down.seconds_left)
        down.take(one, answered=False, reason="still no answer")
    assert pauses == [1.0, 2.0, 4.0, 8.0, MOST_SECONDS, MOST_SECONDS, MOST_SECONDS]
    assert down.silent_seconds == sum(pauses) and down.reason == "still no answer"
    now += 30.0
    down.begin_round([one, two], at_once=False)
    down.take(one, answered=True)
    assert (down.seconds_left, down.silent_seconds) == (0.0, 0.0)
    assert down.begin_round([two, one], at_once=False) == [two, one], "the service answers: all at once"
    down.take(two, answered=True), down.take(one, answered=False, reason="busy")
    assert down.seconds_left == 1.0
