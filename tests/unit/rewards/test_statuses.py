"""Services that are down, and responses that hang or kill their grader: whose fault it is, and what becomes of them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from vlmrl import RewardInput, RewardUnavailable
from vlmrl.errors import RewardError
from vlmrl.rewards import reward_record
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.tasks.builtin_rewards import load_recorded, load_reward

QUICK = {"timeout_seconds": 1.0}
DOWN = """
from vlmrl import RewardUnavailable
def reward(x):
    if x.response == "down":
        raise RewardUnavailable("no answer from judge:8000")
    return 1.0
"""


def test_strict_stops_in_the_words_of_the_service(scorer):
    with scorer(DOWN) as s, pytest.raises(RewardUnavailable) as error:
        s.score([RewardInput("up"), RewardInput("down")], strict=True, rows=["row a", "row b"])
    assert error.value.message == "reward `mine.py:reward` is unavailable: no answer from judge:8000"
    assert error.value.where == "row b" and "not a bug" in (error.value.hint or "")


def test_the_reason_may_be_an_exception_or_nothing(scorer):
    source = """
    from vlmrl import RewardUnavailable
    def reward(x):
        raise RewardUnavailable(ConnectionError("refused")) if x.response else RewardUnavailable
    """
    with scorer(source) as s:
        scores = s.score([RewardInput("a"), RewardInput("")])
    assert [score.error for score in scores] == ["refused", "a service that it needs is down"]
    error = RewardUnavailable(ConnectionError("refused"), where="row 3", hint="wait")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.where, again.hint) == (RewardUnavailable, "refused", "row 3", "wait")


HANGS = """
import os, time
{declared}
def reward(x):
    if x.response == "hang": time.sleep(60)
    if x.response == "exit": os._exit(3)
    if x.response == "bug": 1 / 0
    if x.response == "once" and not os.path.exists({once!r}):
        open({once!r}, "w").close()
        time.sleep(60)
    return {{"answer": 1.0, "format": 1.0}}
"""


def hangs(tmp_path, declared: str = "ON_TIMEOUT = {'answer': 0.0, 'format': 0.25}") -> str:
    return HANGS.format(declared=declared, once=str(tmp_path / "once"))


@pytest.mark.slow
def test_a_response_that_hangs_or_kills_its_grader_earns_what_is_declared(scorer, tmp_path):
    with scorer(hangs(tmp_path), options=QUICK) as s:
        texts = ("fine", "hang", "exit", "bug", "fine", "once")
        fine, hang, killed, bug, last, once = s.score([RewardInput(text) for text in texts])
    assert (fine.value, last.value) == (2.0, 2.0)
    for score, why in ((hang, "no answer within 1 s"), (killed, "exit code 3")):
        assert (score.value, score.status, score.error, score.detail) == (0.25, "ok", None, None)
        assert dict(score.parts) == {"answer": 0.0, "format": 0.25}
        assert why in score.note and score.note.endswith("; failed again when scored alone; scored as `on_timeout`")
    assert bug.status == "failed" and "ZeroDivisionError" in (bug.error or ""), "a bug is none of the response's doing"
    assert once.value == 2.0 and once.note.startswith("scored again on its own: no answer within 1 s")


def test_a_grader_that_never_answered_hangs_by_itself(scorer, tmp_path):
    with scorer(hangs(tmp_path), options=QUICK) as s:
        (score,) = s.score([RewardInput("exit")])
        assert score.status == "failed"
        s.score([RewardInput("fine")])
        (score,) = s.score([RewardInput("exit")])
        assert score.value == 0.25


@pytest.mark.slow
def test_a_run_of_lost_rows_ends_the_call_unless_it_has_a_price(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrl.rewards.attempts.AttemptRule.lost_in_a_row", 2)
    rows = [RewardInput(t) for t in ("fine", "exit", "exit", "fine")]
    with scorer(hangs(tmp_path)) as s:
        scores = s.score(rows)
        strict = s.score([RewardInput(t) for t in ("exit", "fine")], strict=True)
    assert [score.value for score in scores] == [2.0, 0.25, 0.25, 2.0]
    assert [score.value for score in strict] == [0.25, 2.0]
    with scorer(hangs(tmp_path)) as s:
        scores = s.score(rows[1:])
    assert [score.value for score in scores] == [0.25, 0.25, 2.0], "the first calls of all hang: the rule is off, too"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_many_bombs_in_a_batch_earn_their_price_and_the_others_their_score(scorer, workers):
    """They are the first of all calls, and more in a row than a batch may have failures without a price."""
    source = """
    import os
    ON_TIMEOUT = {"reward": -1.0}
    def reward(completions, **columns):
        if "exit" in completions: os._exit(0)
        return [float(len(text)) for text in completions]
    """
    texts = ["exit"] * 5 + ["a", "bb", "exit", "ccc"]
    with scorer(source, options={"workers": workers}) as s, ScoringSession({"": s}, strict=False) as session:
        for key, part in enumerate((texts[:4], texts[4:])):
            session.submit(key, "", [RewardInput(text) for text in part])
        scores = [score for group in session.collect() for score in group.scores]
    assert [score.value for score in scores] == [-1.0] * 5 + [1.0, 2.0, -1.0, 3.0]
    assert s.failures == 0 and all(score.note for score in scores)


@pytest.mark.slow
def test_a_grader_that_never_answers_is_tried_again_with_a_few_rows_only(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrl.rewards.attempts.AttemptRule.first_tries", 2)
    monkeypatch.setattr("vlmrl.rewards.attempts.AttemptRule.lost_in_a_row", 3)
    source = f"""
    import os
    ON_TIMEOUT = {{"reward": 0.25}}
    def reward(x):
        open({str(tmp_path / "log")!r}, "a").write("x")
        os._exit(3)
    """
    with scorer(source) as s:
        scores = s.score([RewardInput("a")] * 5)
    assert all(score.status == "failed" and "exit code 3" in score.error for score in scores)
    assert len((tmp_path / "log").read_text()) == 5 + 2


def test_a_large_batch_that_is_lost_has_a_score_or_an_error_for_each_row(scorer):
    source = """
    import os
    def reward(completions, **columns):
        if len(completions) > 1: os._exit(0)
        return [1.0]
    """
    with scorer(source) as s:
        scores = s.score([RewardInput("a")] * 20)
    assert [score.value for score in scores] == [1.0] * 20


def test_a_recipe_may_say_it_and_a_record_keeps_it(reward_file, tmp_path):
    spec = reward_file(hangs(tmp_path, "RANGES = {'answer': (0, 1)}"))
    assert spec.on_timeout == {}
    from vlmrl.rewards import earn_on_timeout

    priced = earn_on_timeout(spec, {"answer": 0.5})
    record = reward_record(priced, {})
    assert load_recorded(record, base_dir=tmp_path).on_timeout == {"answer": 0.5}
    assert "on_timeout" not in reward_record(spec, {})
    with pytest.raises(RewardError, match=r"on_timeout cannot be used: .*outside its declared range"):
        earn_on_timeout(spec, {"answer": 7.0})
    with pytest.raises(RewardError, match="has no part `anwser`"):
        earn_on_timeout(load_reward("exact_match"), {"anwser": 0.0})


@pytest.mark.parametrize(
    ("declared", "told"),
    [("ON_TIMEOUT = 0.0", "not parts with their numbers"), ("ON_TIMEOUT = {'a': 'b'}", "not a finite number")],
)
def test_a_declaration_that_makes_no_sense_is_an_error_of_the_file(reward_file, tmp_path, declared, told):
    with pytest.raises(RewardError, match=told):
        reward_file(hangs(tmp_path, declared))


def test_a_price_that_no_weight_counts_is_an_error_when_it_is_opened(reward_file, tmp_path):
    spec = replace(reward_file(hangs(tmp_path, "")), on_timeout={"anwser": 0.0})
    with pytest.raises(RewardError, match="on_timeout cannot be used: its weights name answer"):
        Scorer(spec, {"answer": 1.0})
