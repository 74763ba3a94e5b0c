"""Several rewards as one score: the sum, what does not apply, gates, the names of parts, records and identity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.rewards import load_recorded, load_reward, name_accuracy, reward_record
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import (
    EARNED,
    RewardSpec,
    accuracy_part,
    accuracy_parts,
    earned_on_timeout,
    other_choices,
    value_bounds,
)
from vlmrl.rewards.identity import identity_of
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rewards.several import (
    Member,
    compose,
    declared_parts,
    faults,
    possible_values,
    score_of,
    stages,
    total,
    weights_of_parts,
)
from vlmrl.types import INAPPLICABLE, RewardInput, Score, Status

WIDE = (-1e6, 1e6)


def fixed(label: str, parts: Any = None, *, weight: float = 1.0, gate: str | None = None, **more: Any) -> Member:
    """A reward that returns `parts` (a value, or a function of the input), in this process."""
    fn = parts if callable(parts) else lambda x: parts
    spec = RewardSpec(label, fn, more.pop("ranges", {}), more.pop("weights", {}), pure=True, **more)
    return Member(label, spec, dict(spec.weights), weight, gate)


def scored(members: Sequence[Member], *texts: str, **options: Any) -> list[Score]:
    with Scorer(compose(members)) as scorer:
        return scorer.score([RewardInput(text) for text in texts], **options)


def test_the_score_is_the_weighted_sum_of_the_rewards_scores():
    spread = fixed(
        "style", {"format": 1.0, "tone": None, "extra": 9.0}, weight=-0.5, weights={"format": 0.5, "tone": 0.5}
    )
    (score,) = scored([fixed("grade", 0.75, weight=2.0), spread, fixed("flag", True, weight=0.25)], "a")
    # 2 x 0.75 - 0.5 x style + 0.25 x 1; style: tone does not apply, its 0.5 goes to format: 1 x 1 = 1
    assert score.value == 1.5 - 0.5 + 0.25
    assert score.parts == {"grade": 0.75, "style.format": 1.0, "style.tone": None, "style.extra": 9.0, "flag": 1.0}


def test_a_list_of_one_reward_scores_as_the_reward_alone():
    spec = load_reward("exact_match", args={"key": "answer"})
    x = [RewardInput(text, {"answer": "4"}) for text in ("<answer>4</answer>", "4", "5")]
    with Scorer(spec) as alone, Scorer(compose([Member("m", spec, dict(spec.weights))])) as listed:
        for one, other in zip(alone.score(x), listed.score(x), strict=True):
            assert other.value == one.value and other.detail == {"m": one.detail["exact_match"]}
            assert other.parts == {f"m.{name}": value for name, value in one.parts.items()}
            assert score_of(other, listed.spec.members[0]) == replace(one, note=other.note)


numbers = st.floats(-1e3, 1e3, allow_nan=False)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.lists(numbers, min_size=n, max_size=n),
            st.lists(st.lists(st.none() | numbers, min_size=n, max_size=n), min_size=1, max_size=6),
        )
    )
)
def test_the_sum_is_that_of_trl(case):
    """TRL: (rewards * weights).nansum(dim=1), and NaN where every function returned None."""
    weights, rows = case
    labels = [f"f{i}" for i in range(len(weights))]
    members = [fixed(label, weight=weight) for label, weight in zip(labels, weights, strict=True)]
    per_function = np.array([[math.nan if v is None else v for v in row] for row in rows])
    expected = np.nansum(per_function * np.array(weights), axis=1)
    expected[np.isnan(per_function).all(axis=1)] = math.nan
    for row, wanted in zip(rows, expected, strict=True):
        each = {
            f: Score(math.nan, {}, error=INAPPLICABLE) if v is None else Score(v, {"reward": v})
            for f, v in zip(labels, row, strict=True)
        }
        score = total(members, dict(zip(labels, weights, strict=True)), each)
        if math.isnan(wanted):
            assert score.error == INAPPLICABLE and score.status == "ok" and not score.parts
        else:
            assert score.value == pytest.approx(wanted, abs=1e-9) and score.error is None
            assert [score.parts.get(f) for f in labels] == row


@given(st.lists(st.sampled_from(["ok", "none", "failed", "unavailable", "closed"]), min_size=1, max_size=4))
def test_a_failure_goes_before_an_outage_and_both_before_a_value(states: list[str]):
    kinds: Mapping[str, Score | None] = {
        "ok": Score(1.0, {"reward": 1.0}),
        "none": Score(math.nan, {}, error=INAPPLICABLE),
        "failed": Score(math.nan, {}, error="bug", status="failed"),
        "unavailable": Score(math.nan, {}, error="down", status="unavailable"),
        "closed": None,
    }
    members = [fixed(f"r{i}", gate="other.x" if state == "closed" else None) for i, state in enumerate(states)]
    score = total(members, {m.label: 1.0 for m in members}, {f"r{i}": kinds[state] for i, state in enumerate(states)})
    status: Status = "failed" if "failed" in states else "unavailable" if "unavailable" in states else "ok"
    assert score.status == status
    if status != "ok":
        bad = [f"r{i}: {'bug' if status == 'failed' else 'down'}" for i, state in enumerate(states) if state == status]
        assert score.error == "; ".join(bad) and not score.parts and math.isnan(score.value)
    elif "ok" in states:
        assert score.value == states.count("ok") and score.error is None
    else:
        assert score.error == INAPPLICABLE


def test_a_closed_gate_never_calls_the_reward_and_adds_nothing():
    seen: list[str] = []

    def judge(x: RewardInput) -> Any:
        seen.append(x.response)
        return {"quality": 0.5}

    grade = fixed("grade", lambda x: {"accuracy": float(len(x.response)), "format": 1.0}, weights={"accuracy": 1.0})
    first, second = scored([fixed("judge", judge, weight=3.0, gate="grade.accuracy"), grade], "", "ab")
    assert seen == ["ab"]
    assert first.value == 0.0 and first.parts == {"judge.gate": 0.0, "grade.accuracy": 0.0, "grade.format": 1.0}
    assert second.value == 2.0 + 3.0 * 0.5 and second.parts["judge.gate"] == 1.0


def test_gates_in_a_row_each_open_the_next():
    members = [
        fixed("c", 1.0, gate="b"),
        fixed("b", lambda x: float("b" in x.response), gate="a"),
        fixed("a", lambda x: float("a" in x.response)),
    ]
    assert [[m.label for m in stage] for stage in stages(members)] == [["a"], ["b"], ["c"]]
    scores = scored(members, "", "a", "ab", "b")
    assert [s.value for s in scores] == [0.0, 1.0, 3.0, 0.0]
    assert scores[0].parts == {"c.gate": 0.0, "b.gate": 0.0, "a": 0.0}
    assert scores[1].parts == {"c.gate": 0.0, "b.gate": 1.0, "b": 0.0, "a": 1.0}


def test_a_gate_on_a_part_that_does_not_apply_is_closed_and_a_failure_stays_a_failure():
    def grade(x: RewardInput) -> Any:
        if x.response == "bug":
            raise ValueError("no")
        return {"accuracy": None if x.response == "none" else 1.0, "format": 1.0}

    scores = scored([fixed("grade", grade), fixed("extra", 1.0, gate="grade.accuracy")], "none", "bug", "yes")
    assert [s.parts.get("extra.gate") for s in scores] == [0.0, None, 1.0]
    assert scores[1].failed and "grade: " in str(scores[1].error) and scores[2].value == 3.0


def test_a_gate_that_no_reward_returns_is_named_at_the_first_score():
    members = [fixed("grade", {"accuracy": 1.0, "format": 0.0}), fixed("extra", 1.0, gate="grade.acuracy")]
    with pytest.raises(RewardError, match=r"gate of `extra` is the part `grade.acuracy`") as error:
        scored(members, "a", strict=True)
    assert "did you mean `grade.accuracy`?" in str(error.value.hint)
    with Scorer(compose(members)) as scorer:  # the scorer can be used again
        for _ in range(2):
            with pytest.raises(RewardError):
                scorer.score([RewardInput("a")], strict=True)
    builtin = load_reward("exact_match", args={"key": "answer"})
    with pytest.raises(RewardError, match="does not return"):
        compose([Member("m", builtin, dict(builtin.weights)), fixed("extra", 1.0, gate="m")])


@pytest.mark.parametrize("texts", ["ab", "ba"])
def test_a_gate_on_a_part_of_some_responses_does_not_depend_on_their_order(texts: str):
    members = [
        fixed("a", lambda x: {"ok": 1.0, "bonus": 1.0} if x.response == "b" else {"ok": 1.0}),
        fixed("b", 5.0, gate="a.bonus"),
    ]
    assert {text: s.parts["b.gate"] for text, s in zip(texts, scored(members, *texts), strict=True)} == {"a": 0, "b": 1}
    with Scorer(compose(members)) as scorer:  # "a" alone does not have it: that is no error of a whole run
        assert scorer.score([RewardInput("a")])[0].parts["b.gate"] == 0.0


def test_a_response_that_hangs_or_is_left_to_the_gate_leaves_no_group_waiting():
    members = [fixed("a", lambda x: float(x.response == "a")), fixed("b", 1.0, gate="a")]
    with Scorer(compose(members)) as scorer, ScoringSession({"": scorer}, strict=True) as session:
        groups = {key: [RewardInput(t) for t in ("a", "b")[: 1 + key % 2]] for key in range(5)}
        for key in (3, 0, 4):
            session.submit(key, "", groups[key])
        session.listen()
        assert sorted(session.scored) == [0, 3, 4]
        for key in (1, 2):
            session.submit(key, "", groups[key])
        scored_groups = session.collect()
        assert [group.key for group in scored_groups] == [0, 1, 2, 3, 4] and session.collect() == []
        for group in scored_groups:
            assert [s.value for s in group.scores] == [2.0, 0.0][: len(groups[group.key])] and len(group.seconds)


@pytest.mark.parametrize(
    ("labels", "gates", "message"),
    [
        (["a", "a"], [None, None], "rewards 0 and 1 are both called `a`"),
        (["a.b"], [None], "'a.b' cannot be the label"),
        ([""], [None], "'' cannot be the label"),
        (["a"], ["a.x"], "the gates go round in a circle: a -> a"),
        (["a", "b", "c"], ["b.x", "c", "a"], "the gates go round in a circle: a -> b -> c -> a"),
        (["a", "b"], ["c.x", None], "the gate of `a` is `c.x`, and no reward is called `c`"),
    ],
)
def test_labels_and_gates_that_cannot_be(labels, gates, message):
    assert any(message in fault.message for fault in faults(labels, gates))
    members = [fixed(label, 1.0, gate=gate) for label, gate in zip(labels, gates, strict=True)]
    with pytest.raises(RewardError, match=message.replace(".", r"\.")):
        compose(members)


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e10])
def test_a_weight_that_is_no_number_is_refused(weight: float):
    with pytest.raises(RewardError, match="weight"):
        compose([fixed("a", 1.0, weight=weight)])
    with pytest.raises(RewardError, match="no reward is called `b`"):
        Scorer(compose([fixed("a", 1.0)]), {"b": 1.0})


@pytest.mark.parametrize("returned", [math.nan, math.inf, "1", [1.0]])
def test_one_reward_that_returns_no_number_fails_the_sample(returned: Any):
    score, fine = scored([fixed("a", lambda x: returned if x.response else 1.0), fixed("b", 1.0)], "x", "")
    assert score.failed and str(score.error).startswith("a: ") and fine.value == 2.0
    with pytest.raises(RewardError, match="row 0"):
        scored([fixed("a", returned), fixed("b", 1.0)], "x", strict=True)


def test_a_sum_beyond_the_largest_score_fails():
    (score,) = scored([fixed("a", 9e8, weight=1.0), fixed("b", 9e8, weight=1.0)], "x")
    assert score.failed and "beyond" in str(score.error)
    with pytest.raises(RewardError, match="beyond"):
        scored([fixed("a", 9e8), fixed("b", 9e8)], "x", strict=True)


def test_a_reward_with_a_gate_cannot_return_a_part_of_that_name():
    (score,) = scored([fixed("a", 1.0), fixed("b", {"gate": 1.0}, gate="a")], "x")
    assert score.failed and "called `gate`" in str(score.error)


def test_notes_have_labels_and_that_of_a_response_that_hung_comes_last():
    parts = {"reward": 1.0}
    scores = {"a": Score(1.0, parts, f"killed; {EARNED}"), "b": Score(1.0, parts, "fine"), "c": Score(1.0, parts)}
    score = total([fixed(label) for label in scores], dict.fromkeys(scores, 1.0), scores)
    assert score.note == f"b: fine; a: killed; {EARNED}" and earned_on_timeout(score)


def two(first: str, second: str, **more: Any) -> list[Member]:
    return [fixed(label, dict.fromkeys(parts, 1.0)) for label, parts in (("a", first.split()), ("b", second.split()))]


def test_the_accuracy_is_that_of_the_first_reward_without_a_gate():
    spec = compose(two("format correct", "accuracy"))
    parts = ["a.format", "a.correct", "b.accuracy"]
    assert accuracy_parts(parts, spec) == ["a.correct", "b.accuracy"] and accuracy_part(parts, spec) == "a.correct"
    assert "the accuracy is `a.correct`, not `b.accuracy`" in other_choices(parts, spec)
    known = {"accuracy": (0.0, 1.0), "acc": (0.0, 1.0)}
    gated = compose([fixed("a", {"accuracy": 1.0}, gate="b.acc", ranges=known), fixed("b", {"acc": 1.0}, ranges=known)])
    assert (
        accuracy_part(["a.accuracy", "b.acc"], gated) == "b.acc" and other_choices(["a.accuracy", "b.acc"], gated) == ""
    )
    named = name_accuracy(gated, "a.accuracy")
    assert accuracy_part(["a.accuracy", "b.acc"], named) == "a.accuracy" and named.accuracy_named
    with pytest.raises(RewardError, match="no reward is called `c`"):
        name_accuracy(gated, "c.accuracy")
    with pytest.raises(RewardError, match="none of the rewards returns"):
        user = replace(named, members=tuple(replace(m, gate=None) for m in named.members), accuracy="a.x")
        with Scorer(user) as scorer:
            scorer.score([RewardInput("a")], strict=True)


def test_values_stay_within_the_declared_ranges():
    members = [
        fixed("a", ranges={"reward": (0.0, 1.0)}, weights={"reward": 1.0}, weight=2.0),
        fixed("b", ranges={"x": (-1.0, 0.0)}, weights={"x": 0.5}, weight=-1.0, gate="a"),
    ]
    spec = compose(members)
    # a: 2 x [0, 1]; b: -1 x 0.5 x [-1, 0] = [0, 0.5], or 0 where the gate is closed
    assert value_bounds(spec, spec.weights) == (0.0, 2.5)
    closed: dict[str, float | None] = {"a": 0.0, "b.gate": 0.0, "b": None}
    assert possible_values([closed], spec, spec.weights) == (0.0, 2.0)
    assert possible_values([closed, {"a": 1.0, "b.gate": 1.0, "b": -1.0}], spec, spec.weights) == (0.0, 2.5)
    assert possible_values([], spec, spec.weights) is None
    open_ended = compose([*members, fixed("c", 1.0)])
    assert possible_values([{"a": 1.0, "c": 3.0}], open_ended, open_ended.weights) is None
    assert declared_parts(spec, {}) == ["a", "b", "b.gate"] and weights_of_parts(spec, spec.weights) == {
        "a": 2.0,
        "b": -0.5,
    }


MINE = """
def grade(x):
    return {"accuracy": float(x.response == x.truth["answer"]), "format": 1.0}

def lengths(completions, **columns):
    return [None if not c else float(len(c)) for c in completions]

def calls(completions, **columns):
    return [float(len(completions)) for c in completions]

class Down:
    pass
"""


@pytest.fixture
def mine(reward_file: Callable[..., RewardSpec]) -> Callable[..., Member]:
    def load(function: str, label: str = "", **more: Any) -> Member:
        style = "auto" if function == "grade" else "trl"
        spec = reward_file(MINE, function=function, style=style)
        return Member(label or function, spec, dict(spec.weights), **more)

    return load


def test_functions_of_lists_get_all_groups_in_one_call_each(mine):
    members = [
        mine("calls"),
        mine("lengths", weight=10.0),
        mine("grade"),
        mine("calls", "again", gate="grade.accuracy"),
    ]
    x = {key: [RewardInput(t, {"answer": "ab"}) for t in ("ab", "", "abc")[: 2 + key]] for key in range(2)}
    with Scorer(compose(members), workers=2) as scorer:
        for _ in range(2):  # the workers live on
            with ScoringSession({"": scorer}, strict=True) as session:
                for key in (1, 0):
                    session.submit(key, "", x[key])
                session.listen(0.2)
                assert session.scored == {}  # a function of lists answers at the end
                groups = session.collect()
            scores = [group.scores for group in groups]
            values = [[s.value for s in scores[key]] for key in (0, 1)]
            # calls: 5 responses; lengths: 10 x 2, None, 10 x 3; grade: (1 or 0) + 1; again: 2 right answers
            assert values == [[5 + 20 + 2 + 2, 5 + 1], [5 + 20 + 2 + 2, 5 + 1, 5 + 30 + 1]]
            assert scores[0][1].parts["lengths"] is None and scores[0][1].parts["again.gate"] == 0.0
            assert all(second > 0 for group in groups for second in group.seconds)


def test_a_reward_may_not_apply_to_a_whole_call_but_not_all_of_them(mine):
    empty = [RewardInput("", {"answer": ""})] * 2
    with Scorer(compose([mine("lengths"), mine("grade")])) as scorer:
        assert [s.value for s in scorer.score(empty, strict=True)] == [2.0, 2.0]
    with Scorer(compose([mine("lengths"), mine("lengths", "other")])) as scorer:
        with pytest.raises(RewardError, match="all returned None"):
            scorer.score(empty, strict=True)
        assert [s.error for s in scorer.score(empty)] == [INAPPLICABLE] * 2 and scorer.failures == 0


def test_records_load_the_same_rewards_and_every_change_shows(mine, tmp_path):
    language = load_reward("language")
    members = [
        mine("grade", weight=2.0),
        Member("language", language, dict(language.weights), 0.1, "grade.accuracy", 3.0, of_task=True),
    ]
    spec = compose(members)
    record = json.loads(json.dumps(reward_record(spec, spec.weights)))
    loaded = load_recorded(record, tmp_path)
    strip = lambda member: replace(member, spec=replace(member.spec, fn=language.fn, version=None))  # noqa: E731
    assert [strip(m) for m in loaded.members] == [strip(m) for m in members]
    assert loaded.name == "grade + language" and reward_record(loaded, {}) == record
    same = identity_of(record)
    assert same == identity_of(reward_record(loaded, loaded.weights))
    for change in ({"weight": 1.0}, {"gate": None}, {"label": "b"}, {"weights": {"language": 2.0}}):
        other = {**record, "rewards": [record["rewards"][0], {**record["rewards"][1], **change}]}
        assert identity_of(other) != same and identity_of(other).beside(same) != ""
        assert identity_of(other).without_args() == same.without_args() or "label" in change
    assert identity_of({**record, "rewards": record["rewards"][::-1]}) != same


def test_one_reward_of_several_reads_as_if_it_were_alone():
    found = RewardSpec("pair", lambda x: {"reward": 1.0, "detail": {"read": x.response}}, {}, {}, pure=True)
    members = [Member("own", found, of_task=True), fixed("b", 1.0, gate="own")]
    (score,) = scored(members, "text")
    assert score.detail == {"own": {"read": "text"}}
    own = score_of(score, members[0])
    assert own.detail == {"pair": {"read": "text"}} and own.parts == {"reward": 1.0} and own.value == 1.0
    failed = Score(math.nan, {}, error="bug")
    assert score_of(failed, members[0]) is failed


def test_workers_end_with_the_scorer(mine):
    scorer = Scorer(compose([mine("grade"), mine("lengths")]))
    scorer.score([RewardInput("a", {"answer": "a"})])
    import os

    pids = scorer.pids()
    assert len(pids) == 2 and os.getpid() not in pids
    scorer.close()
    assert scorer.pids() == []


def response(text: str, finish: str, tokens: int) -> RewardInput:
    return RewardInput(text, {"answer": "4"}, finish=finish, num_tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (response(r"<think>a</think> \boxed{4}", "stop", 9), 2.0),  # accuracy 1 + format 1
        (response(r"<think>a</think> \boxed{5}", "stop", 9), 1.0),
        (response(r"<think>a</think> \boxed{4}", "length", 9), -0.1),  # cut: -0.1 in place of all else
        (response(r"\boxed{4}", "stop", 1), -0.1),  # too short
        (
            response("ab\u4f60\u597d \\boxed{4}", "stop", 9),
            0.9778,
        ),
    ],
)
def test_mayes_rule_as_a_list_of_rewards(x: RewardInput, expected: float):
    """accuracy + format + 0.1 x language; a response without an end, or of 1 token, gets -0.1 in their place."""

    def member(label: str, name: str, weight: float, gate: str | None = "ended", **args: Any) -> Member:
        spec = load_reward(name, args=args)
        return Member(label, spec, dict(spec.weights), weight, gate)

    accuracy = fixed("accuracy", lambda x: float(r"\boxed{4}" in x.response), gate="ended")
    members = [
        member("ended", "ending", 0.0, None, min_tokens=2, ended=1.0),
        member("ending", "ending", 0.1, None, min_tokens=2),
        accuracy,
        member("format", "think_format", 1.0),
        member("language", "language", 0.1),
    ]
    with Scorer(compose(members)) as scorer:
        (score,) = scorer.score([x])
    assert score.value == pytest.approx(expected, abs=1e-4)


def test_an_outage_of_one_reward_is_waited_for_and_the_others_are_asked_once(monkeypatch):
    monkeypatch.setattr(AttemptRule, "first_seconds", 0.01)
    asked: list[str] = []

    def service(label: str, down: int) -> Callable[[RewardInput], Any]:
        def score(x: RewardInput) -> Any:
            asked.append(label)
            if asked.count(label) <= down:
                raise RewardUnavailable(f"{label} is down")
            return 1.0

        return score

    members = [
        fixed("judge", service("judge", 2), gate="grade", weight=10.0),
        fixed("grade", service("grade", 3)),
        fixed("sure", service("sure", 0), weight=100.0),
    ]
    with Scorer(compose(members)) as scorer:
        with ScoringSession({"": scorer}, AttemptRule("wait"), strict=True) as session:
            for key in (1, 0):
                session.submit(key, "", [RewardInput("a"), RewardInput("b")])
            assert session.waiting.number == 3 and "grade is down" in session.waiting.reason
            assert session.scored == {} and "judge" not in asked  # no group has all its grades
            groups = session.collect()
        assert {group.key: [s.value for s in group.scores] for group in groups} == {0: [111.0] * 2, 1: [111.0] * 2}
        assert asked.count("sure") == 4 and session.waiting is None
        asked.clear()
        with ScoringSession({"": scorer}, AttemptRule("mask"), strict=True) as session:
            session.submit(0, "", [RewardInput("a")])
            ((score,),) = [group.scores for group in session.collect()]
        assert score.status == "unavailable" and "grade is down" in str(score.error) and "judge" not in asked
        with pytest.raises(RewardUnavailable):
            scorer.score([RewardInput("a")], strict=True)
        assert scorer.session is None
