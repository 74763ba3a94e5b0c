"""One outcome an answer: what a task measures from the reward's detail is what it measures from the text."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.rewards.base import UNSCORED
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import REWARDS, load_reward
from vlmrl.tasks.pairs.reward import PairReading, PairReward
from vlmrl.tasks.pairs.task import outcome_as
from vlmrl.types import RewardInput

LEVELS = ["loop", "digit"]
OWN: dict[str, dict[str, Any]] = {
    "taxonomy": {"levels": LEVELS},
    "taxonomy_relations": {"levels": LEVELS, "levels_decide": "different"},
    "pair_labels": {"tag": "loop", "labels": ["a", "b"], "levels_decide": "different"},
    "pair_answer": {},
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"consistency": "part"},
    {"consistency": "off"},
    {"complete": False},
    {"relaxed": True},
    {"levels_decide": False},
    {"aliases": {"c": "a"}},
    {"answer": "truncated_bce"},
]
PIECES = [f"<{slash}{tag}>" for tag in ("think", "answer", *LEVELS) for slash in ("", "/")]
PIECES += ["0.5", "1", "a; b", "a; a", "same", "Different", ";", " ", "\n", "x", "\ud800"]
NAMES = st.sampled_from(["a", "b"])
BODIES = st.sampled_from(["a; b", "a; a", "c; a", "same", "Different", "uncertain", "", "x"])


@st.composite
def responses(draw) -> str:
    if draw(st.booleans()):
        return "".join(draw(st.lists(st.sampled_from(PIECES), max_size=24)))
    tags = "".join(f"<{level}>{draw(BODIES)}</{level}>" for level in LEVELS if draw(st.integers(0, 3)))
    probability, slash = draw(st.sampled_from(["0.1", "0.5", "0.9", "2"])), draw(st.sampled_from(["/", ""]))
    return f"<think>{tags}.</think><answer>{probability}<{slash}answer>"


@st.composite
def truths(draw) -> dict[str, Any]:
    first = [draw(NAMES), draw(NAMES)]
    second = first if draw(st.booleans()) else [draw(NAMES), draw(NAMES)]
    pairs = {level: [one, other] for level, one, other in zip(LEVELS, first, second, strict=True)}
    return {"same": first == second, **pairs}


@pytest.mark.parametrize("name", OWN)
@given(st.sampled_from(CHANGES), responses(), truths(), st.sampled_from(["stop", "length"]))
def test_what_a_task_measures_of_a_score_is_what_it_measures_of_the_text(name, change, text, truth, finish):
    takes = inspect.signature(REWARDS[name].build).parameters.keys() - ({"aliases"} if name == "pair_labels" else set())
    args = OWN[name] | {k: v for k, v in change.items() if k in takes}
    if args.get("levels_decide", True) is not True:
        truth = truth | {"same": truth["same"] and truth["loop"][0] == truth["loop"][1]}
    spec = load_reward(name, args=args)
    (score,) = Scorer(spec).score([RewardInput(text, truth, finish=finish)], strict=True)
    assert score.detail is not None and set(score.detail) == {name}
    measure = outcome_as(name, OWN[name])(spec)
    by_text = measure(RewardInput(text, truth), UNSCORED)
    assert measure(RewardInput(text, truth), score) == by_text
    assert measure(RewardInput(text, truth), replace(score, detail=json.loads(json.dumps(score.detail)))) == by_text


def test_an_answer_that_was_scored_is_not_read_again(monkeypatch):
    spec = load_reward("taxonomy", args=OWN["taxonomy"])
    text = "<think><loop>a; a</loop><digit>a; b</digit></think><answer>0.1</answer>"
    x = RewardInput(text, {"same": False, "loop": ["a", "a"], "digit": ["a", "b"]})
    (score,) = Scorer(spec).score([x], strict=True)
    measure = outcome_as("taxonomy", OWN["taxonomy"])(spec)
    reads: list[str] = []
    free = PairReward.read_freely

    def counted(self: PairReward, response: str) -> Any:
        reads.append(response)
        return free(self, response)

    monkeypatch.setattr(PairReward, "read_freely", counted)
    assert measure(x, score)["accuracy"] == 1.0 and reads == []
    assert measure(x, UNSCORED)["accuracy"] == 1.0 and reads == [text], "an older rollout has no detail"


def test_a_reward_that_reads_otherwise_does_not_measure():
    """The rewards of a recipe may know other levels than the task: their reading is then none of the task's."""
    text = "<think><loop>a; a</loop></think><answer>0.9</answer>"
    x = RewardInput(text, {"same": True, "loop": ["a", "a"], "digit": ["a", "a"]})
    other = load_reward("taxonomy", args={"levels": ["loop"]})
    (score,) = Scorer(other).score([x], strict=True)
    measure = outcome_as("taxonomy", OWN["taxonomy"])(other)
    assert measure(x, score) == measure(x, UNSCORED)
    assert measure(x, score)["accuracy/digit"] == 0.0


@pytest.mark.parametrize(
    "detail",
    [
        None,
        7,
        [],
        {},
        {"problem": ""},
        {"problem": 3},
        {"confidence": "0.5", "stated": {}, "agrees": None},
        {"confidence": 7.0, "stated": {}, "agrees": None},
        {"confidence": 0.5, "stated": [], "agrees": None},
        {"confidence": 0.5, "stated": {"loop": 3}, "agrees": None},
        {"confidence": 0.5, "stated": {}, "agrees": 5},
        {"problem": "bad", "confidence": 0.5},
    ],
)
def test_a_damaged_detail_is_not_believed(detail):
    assert PairReading.of_detail(detail) is None
    spec = load_reward("taxonomy", args=OWN["taxonomy"])
    truth = {"same": False, **{level: ["a", "b"] for level in LEVELS}}
    x = RewardInput("<think><loop>a; b</loop></think><answer>0.1</answer>", truth)
    score = replace(Scorer(spec).score([x], strict=True)[0], detail={"taxonomy": detail})
    measure = outcome_as("taxonomy", OWN["taxonomy"])(spec)
    assert measure(x, score) == measure(x, UNSCORED)


@pytest.mark.parametrize(
    ("name", "args", "truth", "detail"),
    [
        ("exact_match", {}, {"answer": "b"}, {"answer": "b"}),
        ("number_match", {}, {"answer": "2"}, {"answer": "b"}),
        ("token_f1", {}, {"answer": "a b"}, {"answer": "b"}),
        ("taxonrl", {"function": "lfw:compute_score"}, {"ground_truth": "1"}, {"answer": "b"}),
    ],
)
def test_built_ins_say_what_they_read(name, args, truth, detail):
    (score,) = Scorer(load_reward(name, args=args)).score([RewardInput("<answer> b </answer>", truth)], strict=True)
    assert score.detail == {name: detail} and json.loads(json.dumps(score.detail)) == score.detail
