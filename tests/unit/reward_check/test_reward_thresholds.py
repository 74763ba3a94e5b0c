from __future__ import annotations

import pytest

from vlmrl.errors import RewardError
from vlmrl.reward_check.run import MEASURES, GateLimit, needs_probe, parse_limits

REPORT = {
    "errors": {"number": 2},
    "broken": {"number": 0},
    "stored": None,
    "dead_groups": {"dead_share": 0.25},
    "parts": {"value": {"mean": 0.5, "correlation": None}, "format": {"mean": 1.0, "correlation": 0.3}},
    "correlations": {
        "length": {"pearson": 0.1, "spearman": 0.7},
        "tokens": None,
        "step": {"pearson": 0.0, "spearman": None},
        "ngrams": {"found": [{}, {}]},
    },
    "disagreements": {"accuracy": 0.5, "agreement": 0.9},
    "diff": {
        "value": {"changed_share": 0.02, "rank_correlation": 0.99},
        "advantages": None,
        "errors": {"number": 1},
    },
    "probes": {
        "a": {"flagged": 1, "warnings": 0, "unsteady": 0, "behaviour": {"milliseconds": {"p99": 4.0}}},
        "b": {"flagged": 2, "warnings": 3, "unsteady": 1, "behaviour": {"milliseconds": {"p99": 1.0}}},
    },
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("errors", True),
        ("errors>1", True),
        ("errors > 2", False),
        ("errors>=2", True),
        ("broken", False),
        ("dead_groups>0.2", True),
        ("dead_groups>30%", False),
        ("dead_groups>20%", True),
        ("dead_groups<0.25", False),
        ("dead_groups<=0.25", True),
        ("corr(length)>0.6", True),
        ("corr(format)>0.5", False),
        ("mean(value)<0.5", False),
        ("mean(format)>=1", True),
        ("ngrams>2", False),
        ("ngrams", True),
        ("accuracy<0.6", True),
        ("agreement<0.9", False),
        ("changed>0.01", True),
        ("rank<0.9", False),
        ("probe", True),
        ("probe>3", False),
        ("warnings>2", True),
        ("unsteady", True),
        ("p99_ms>4", False),
        ("p99_ms>3.5e0", True),
    ],
)
def test_each_condition_by_hand(text, holds):
    (limit,) = parse_limits(text, diff=True)
    assert limit.holds(REPORT) is holds


@pytest.mark.parametrize("text", ["corr(tokens)>0.5", "corr(step)<2", "flipped>0.5", "different", "corr(value)>0"])
def test_what_cannot_be_measured_fails_and_says_so(text):
    (limit,) = parse_limits(text, diff=True)
    assert limit.holds(REPORT) and "cannot be measured here" in limit.told(REPORT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a condition"),
        ("errors>", "is not a condition"),
        ("errors=1", "is not a condition"),
        ("errors>1;probe", "is not a condition"),
        ("errors,", "is not a condition"),
        ("eror", "did you mean `errors`"),
        ("dead_groups>x", "'x' is not a number"),
        ("dead_groups>nan", "is not a number"),
        ("corr>0.5", "is written corr"),
        ("errors(format)", "is written errors"),
        ("changed>0.1", "compares two rewards"),
    ],
)
def test_mistakes_are_told_before_the_work(text, words):
    with pytest.raises(RewardError) as error:
        parse_limits(text, diff=False)
    assert words in str(error.value)


def test_a_part_that_the_reward_does_not_have_is_a_mistake_not_a_failure():
    (limit,) = parse_limits("mean(colour)>0", diff=False)
    with pytest.raises(RewardError, match="the part `colour`, which the reward does not have"):
        limit.holds(REPORT)


def test_several_conditions_and_what_they_need():
    limits = parse_limits("probe, dead_groups>0.5,corr(length)>0.6 ,errors", diff=False)
    assert [str(limit) for limit in limits] == [
        "probe > 0",
        "dead_groups > 0.5",
        "corr(length) > 0.6",
        "errors > 0",
    ]
    assert needs_probe(limits) and not needs_probe(limits[1:]) and limits[3].needs_errors
    assert limits[2].told(REPORT).endswith(": 0.7")


def test_every_name_is_in_the_documentation():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[3] / "docs" / "reward-check.md").read_text("utf-8")
    names = page.split("`--fail-on` takes conditions")[1].split("\n## ")[0]
    assert [name for name in MEASURES if f"`{name}" not in names] == []
    assert isinstance(parse_limits("errors", diff=False)[0], GateLimit)
