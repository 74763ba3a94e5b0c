"""RLLaVA's counting reward: equal to its published code, flaws included; the reward `count` has none of them.

tests/golden/rllava/counting.json holds what `examples/reward_function/r1v.py:compute_score` of TinyLoopX/RLLaVA at
4753d4a, with mathruler 0.1.0, computed: [response, truth, overall, accuracy, format].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine
from vlmrl.tasks.perception.reward import count
from vlmrl.tasks.perception.rewards import rllava_count
from vlmrl.types import RewardInput

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rllava" / "counting.json").read_text("utf-8"))
PUBLISHED, FIXED = rllava_count(), count()


def earned(spec: Any, response: str, answer: int) -> float:
    return combine(spec(RewardInput(response, {"answer": answer})), spec.weights)[0]


def test_scores_are_those_of_the_published_code_to_the_digit() -> None:
    assert len(GOLDEN) > 300
    assert 50 < sum(case[3] for case in GOLDEN) < len(GOLDEN) - 50
    for response, answer, overall, accuracy, form in GOLDEN:
        parts = PUBLISHED(RewardInput(response, {"answer": answer}))
        assert (parts["accuracy"], parts["format"]) == (accuracy, form), response
        assert earned(PUBLISHED, response, answer) == overall


# (flaw, response, truth, what the published reward earns, what `count` earns)
FLAWS = [
    ("a form without an answer", "<think></think><answer></answer>", 4, 0.5, 0.0),
    ("nonsense in the form", "<think>a</think><answer>banana</answer>", 4, 0.5, 0.0),
    ("two answers, the first counts", "<think>a</think><answer>4</answer><answer>5</answer>", 4, 1.0, 0.0),
    ("an answer within the thought", "<think><answer>4</answer></think><answer>5</answer>", 4, 1.0, 0.0),
    ("no answer tag", "4", 4, 0.5, 0.0),
    ("percent signs are removed", "<think>a</think><answer>4%</answer>", 4, 1.0, 0.0),
    ("nearly whole numbers", "<think>a</think><answer>3.99999999</answer>", 4, 1.0, 0.0),
    ("digits of another script", "<think>a</think><answer>\u0664</answer>", 4, 1.0, 0.0),
]


@pytest.mark.parametrize(("response", "answer", "published", "fixed"), [flaw[1:] for flaw in FLAWS], ids=lambda v: None)
def test_flaws_are_kept_by_the_published_reward_alone(
    response: str, answer: int, published: float, fixed: float
) -> None:
    assert earned(PUBLISHED, response, answer) == published
    assert earned(FIXED, response, answer) == fixed


def test_without_the_format_the_weight_is_the_accuracys() -> None:
    assert earned(rllava_count(format_weight=0.0), "4", 4) == 1.0
    with pytest.raises(RewardError, match="format_weight"):
        rllava_count(format_weight=2.0)


def test_hostile_responses_are_linear() -> None:
    for text in ("<answer>" * 50_000, "</think>" + " " * 400_000, "<think></think><answer>" + "4 " * 100_000):
        assert earned(PUBLISHED, text, 4) == 0.0
