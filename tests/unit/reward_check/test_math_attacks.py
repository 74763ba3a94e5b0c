"""Tricks against graders of boxed answers: none pays against `math`; naive graders pay for what they are known for."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.reward_check.probe import probe_reward
from vlmrl.reward_check.tricks import math_attacks
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.answer_forms import FRAMES, AnswerForm
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

GOLDS = ("20", r"6\sqrt{5}", "12 cm", r"45^\circ", r"\{1,2\}", "B", "2.5", r"So AB is long, and it is \boxed{7}.")
ROWS = [RewardInput("", truth={"answer": gold}, prompt="How long?") for gold in GOLDS]


def flagged(report: dict[str, Any]) -> set[str]:
    return {probe["name"] for probe in report["probes"] if probe["flagged"]}


@pytest.mark.slow
def test_no_trick_pays_against_math():
    spec = load_reward("math")
    report = probe_reward(spec, spec.weights, ROWS)
    assert flagged(report) == set() and report["flagged"] == 0 and report["warnings"] == 0
    assert (report["honest"]["informed"], report["honest"]["wrong"]) == (1.0, 0.0)
    names = {probe["name"] for probe in report["probes"]}
    assert {attack.name for attack in math_attacks(AnswerForm(*FRAMES[2]), GOLDS)} <= names


def naive(judge) -> RewardSpec:
    """A grader in this process that compares what stands in the last box by `judge(answer, gold)`."""

    def score(x: RewardInput) -> float:
        gold = AnswerForm().text(x)
        answer = x.response.rpartition("\\boxed{")[2].rpartition("}")[0]
        return float("\\boxed{" in x.response and judge(answer, gold))

    return RewardSpec("naive", score, {"reward": (0.0, 1.0)}, {"reward": 1.0}, pure=True)


def number(text: str) -> float:
    digits = "".join(c for c in text if c in "0123456789.")
    return float(digits) if digits.replace(".", "", 1).isdigit() else float("nan")


@pytest.mark.parametrize(
    ("judge", "found"),
    [
        (lambda answer, gold: gold in answer, {"denied in the box", "or in the box", "power"}),
        (lambda answer, gold: answer in gold, {"empty box"}),
        (lambda answer, gold: abs(number(answer) - number(gold)) <= 0.0101, {"other unit"}),
        (
            lambda answer, gold: any(number(answer) == number(gold) * factor for factor in (0.01, 1, 100)),
            {"a hundred times"},
        ),
        (lambda answer, gold: answer.partition("^")[0] == gold.partition("^")[0], {"power"}),
        (lambda answer, gold: answer.strip("(){}\\") == gold.strip("(){}\\"), {"tuple for a set"}),
        (lambda answer, gold: answer.split("=")[-1].strip() == gold, {"wrong, then = right"}),
        (lambda answer, gold: answer == gold or "correct" in answer, {"words in the box"}),
    ],
)
def test_naive_graders_are_found_out(judge, found):
    report = probe_reward(naive(judge), {"reward": 1.0}, ROWS)
    assert found <= flagged(report)


@pytest.mark.slow
def test_the_published_rule_is_found_out():
    spec = load_reward("maye")
    rows = [
        RewardInput("", truth={"answer": f"\\boxed{{{gold}}}"}) for gold in ("20", "12 cm", r"\{1,2\}", r"35^\circ")
    ]
    report = probe_reward(spec, spec.weights, rows, limits={"timeout_seconds": 1.0})
    assert {"denied in the box", "power", "tuple for a set", "other unit"} <= flagged(report)
    assert {"box in the thought"} <= {probe["name"] for probe in report["probes"] if probe["verdict"] == "lenient"}


def test_rewards_without_a_box_see_no_box_tricks():
    spec = load_reward("exact_match")
    rows = [RewardInput("", truth={"answer": str(n)}) for n in (3, 5, 7)]
    assert "power tower" not in {probe["name"] for probe in probe_reward(spec, spec.weights, rows)["probes"]}
