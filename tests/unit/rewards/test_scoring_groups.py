"""Groups that are scored while others are still generated: the same scores as in one call, each group once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards import RewardSpec
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.types import RewardInput, Score
from vlmrl.workers import pool

MINE = """
import os
import time

def reward(x):
    if x.response == "hang":
        time.sleep(60)
    if x.response == "slow":
        time.sleep(0.3)
    if x.response == "bug":
        raise KeyError("bug")
    return {"length": float(len(x.response)), "step": float(x.step or 0)}

def lists(completions, **columns):
    return [float(len(completions)) + index for index, _ in enumerate(completions)]
"""


def group(*texts: str) -> list[RewardInput]:
    return [RewardInput(text, {}) for text in texts]


def opened(scorer: Scorer, *, strict: bool = False) -> ScoringSession:
    return ScoringSession({"": scorer}, strict=strict)


def scored(session: ScoringSession, key: int) -> list[Score]:
    """Wait for one group, while more may come."""
    end = time.monotonic() + 60
    while key not in session.scored:
        assert time.monotonic() < end, f"group {key} did not come"
        session.listen(0.05)
    return list(session.scored[key].scores)


def collected(session: ScoringSession) -> dict[int, list[Score]]:
    return {group.key: list(group.scores) for group in session.collect()}


@pytest.mark.parametrize("workers", [1, 3])
def test_groups_in_any_order_have_the_scores_of_one_call(scorer, workers):
    groups = {key: group(*("abcdefg"[: key + k] for k in range(4))) for key in range(5)}
    with scorer(MINE, options={"workers": workers}) as s:
        whole = s.score([x for key in range(5) for x in groups[key]])
        with opened(s) as session:
            for key in (3, 0, 4, 1, 2):
                session.submit(key, "", groups[key])
            found = session.collect()
            assert [group.key for group in found] == [0, 1, 2, 3, 4]
            assert [score for group in found for score in group.scores] == whole
            assert all(second > 0 for group in found for second in group.seconds) and session.collect() == []
        assert s.score(groups[1]) == whole[4:8] and len(s.seconds) == 4


def test_a_group_is_scored_before_another_is_there_and_each_comes_once(scorer):
    with scorer(MINE, options={"workers": 2}) as s, opened(s) as session:
        session.submit(1, "", group("aa", "b"))
        assert [score.parts["length"] for score in scored(session, 1)] == [2.0, 1.0]
        session.submit(0, "", group("ccc"))
        with pytest.raises(ValueError, match="twice"):
            session.submit(1, "", group("a"))
        with pytest.raises(ValueError, match="another one of the same scorer"):
            s.score(group("a"))
        lengths = {key: [x.parts["length"] for x in scores] for key, scores in collected(session).items()}
        assert lengths == {0: [3.0], 1: [2.0, 1.0]}
        assert s.score(group("a"))[0].parts["length"] == 1.0


def test_a_built_in_reward_scores_when_a_group_comes():
    heard = []
    spec = RewardSpec("own", lambda x: heard.append(x.response) or {"reward": 1.0}, {}, {}, pure=True)
    with Scorer(spec) as s, opened(s) as session:
        session.submit(2, "", group("late"))
        assert heard == ["late"] and session.is_idle
        session.listen()
        assert list(session.scored) == [2]
        session.submit(0, "", group("early"))
        assert list(collected(session)) == [0, 2] and heard == ["late", "early"]


def test_a_function_of_lists_gets_all_groups_in_one_call_in_their_order(scorer):
    with scorer(MINE, function="lists") as s, opened(s) as session:
        session.submit(1, "", group("c", "d"))
        session.submit(0, "", group("a", "b"))
        session.listen()
        assert session.scored == {}
        found = collected(session)
        # one call of 4 rows: 4 + index, and group 0 comes first
        assert [[x.value for x in found[key]] for key in (0, 1)] == [[4.0, 5.0], [6.0, 7.0]]


def test_a_strict_failure_names_its_row_and_ends_the_call_before_the_others_are_there(scorer):
    with scorer(MINE) as s:
        with opened(s, strict=True) as session, pytest.raises(RewardError, match="KeyError") as caught:
            session.submit(3, "", group("a", "bug"), ["row a", "row b"])
            scored(session, 3)
        assert "row b" in str(caught.value.where)
        assert s.score(group("a"))[0].error is None, "the scorer can be used again"


def test_what_hangs_is_tried_again_alone_at_the_end_and_the_other_groups_do_not_wait(scorer):
    source = MINE + "\nON_TIMEOUT = {'length': 0.0, 'step': 0.0}\n"
    with scorer(source, options={"timeout_seconds": 0.7, "workers": 2}) as s, opened(s) as session:
        session.submit(0, "", group("hang", "a"))
        session.submit(1, "", group("bb"))
        assert [x.value for x in scored(session, 1)] == [2.0] and 0 not in session.scored
        scores = collected(session)[0]
        assert [x.parts["length"] for x in scores] == [0.0, 1.0] and "on_timeout" in scores[0].note


def test_without_on_timeout_a_lost_row_is_final_at_once(scorer):
    with scorer(MINE, options={"timeout_seconds": 0.5}) as s, opened(s) as session:
        session.submit(0, "", group("hang"))
        assert scored(session, 0)[0].status == "failed" and s.failures == 1


def test_the_time_in_which_nobody_listened_does_not_count(scorer, monkeypatch):
    away = 0.0
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + away))
    with scorer(MINE, options={"timeout_seconds": 5.0}) as s:
        s.score(group("a"))  # starts the worker
        with opened(s) as session:
            session.submit(0, "", group("slow"))
            away = 100.0  # a long prefill: nobody calls the session meanwhile
            session.listen()
            assert session.scored == {} and scored(session, 0)[0].error is None


def test_images_are_final_at_the_end_of_the_call(scorer, monkeypatch):
    from vlmrl.rewards.outcomes import artifact_files

    source = """
    from PIL import Image
    from vlmrl import RewardResult
    def reward(x):
        return RewardResult(1.0, artifacts={"a": Image.new("L", (9, 9))})
    """
    from PIL import Image

    size = len(artifact_files({"a": Image.new("L", (9, 9))})["a"])
    monkeypatch.setattr("vlmrl.rewards.scoring.MOST_CALL_BYTES", 2 * size)
    with scorer(source) as s, opened(s) as session:
        session.submit(1, "", group("c", "d"))
        session.listen(1.0)
        assert session.scored == {}
        session.submit(0, "", group("a", "b"))
        found = collected(session)
        assert [[bool(x.files) for x in found[key]] for key in (0, 1)] == [[True, True], [False, False]]
        assert s.images_left_out == 2 and all("left out" in x.note for x in found[1])


def test_what_was_submitted_can_be_cancelled(scorer):
    with scorer(MINE) as s:
        with opened(s) as session:
            session.submit(0, "", group("hang"))
            session.cancel()
            assert session.collect() == []
        assert [x.value for x in s.score(group("abc"))] == [3.0]
