"""RLLaVA's We-Math reward and metrics: equal to its published code, flaws included; the reward we_math has no flaw.

tests/golden/rllava/we_math.json and we_math_metrics.json hold what `examples/reward_function/wemath.py` of
TinyLoopX/RLLaVA at 4753d4a computed: [response, truth, overall, accuracy, format], [[[ID, key, right], ...], metrics].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.base import UNSCORED, combine
from vlmrl.tasks.we_math.rewards import rllava_we_math, we_math
from vlmrl.tasks.we_math.task import set_metrics
from vlmrl.types import RewardInput

FOLDER = Path(__file__).parents[2] / "golden" / "rllava"
GOLDEN = json.loads((FOLDER / "we_math.json").read_text("utf-8"))
METRICS = json.loads((FOLDER / "we_math_metrics.json").read_text("utf-8"))
PUBLISHED, FIXED = rllava_we_math(format_weight=0.5), we_math()
GOOD = "<think>a</think><answer>{}</answer>"
OPTIONS = "A. 1; B. 2; C. 3"


def earned(spec: Any, response: str, truth: dict[str, Any]) -> float:
    return combine(spec(RewardInput(response, truth)), spec.weights)[0]


def test_scores_are_those_of_the_published_code_to_the_digit() -> None:
    assert len(GOLDEN) > 350
    assert sum(case[3] == 1 for case in GOLDEN) > 100 and sum(0 < case[3] < 1 for case in GOLDEN) > 50
    for response, answer, overall, accuracy, form in GOLDEN:
        parts: Any = PUBLISHED(RewardInput(response, {"answer": answer}))
        assert (parts["accuracy"], parts["format"]) == (accuracy, form), (response, answer)
        assert earned(PUBLISHED, response, {"answer": answer}) == overall


def test_metrics_are_those_of_the_published_code() -> None:
    for rows, expected in METRICS:
        responses = []
        for name, key, is_right in rows:
            num_steps = int(key[0]) if key.endswith("multi") else 1
            truth = {"set": name, "step": key.partition("_")[2], "num_steps": num_steps}
            responses.append((RewardInput("", truth), UNSCORED, {"accuracy": float(is_right)}))
        for name, value in set_metrics(responses).items():
            assert (0.0 if value is None else value) == expected[f"wemath_{name}"], name  # 0 / 0 is 0 there


# (flaw, response, truth, what the published reward earns, what `we_math` earns)
FLAWS = [
    ("the first letter is the option", GOOD.format("Because"), {"answer": "B", "options": OPTIONS}, 1.0, 0.0),
    (
        "the last letter of a thought is an option",
        "I think of A, then B",
        {"answer": "B", "options": OPTIONS},
        0.5,
        0.0,
    ),
    ("two options", GOOD.format("B or C"), {"answer": "B", "options": OPTIONS}, 1.0, 0.0),
    ("a list of numbers", GOOD.format("1 2 3 4 5 6 7 8 9 10"), {"answer": "8, 6, 7"}, 1.0, 0.1),
    ("values in any order", GOOD.format("7, 8, 6"), {"answer": "8, 6, 7"}, 1.0, 0.1),
    ("a part of the values", GOOD.format("8"), {"answer": "8, 6"}, 0.75, 0.1),
    ("two answers, the first counts", GOOD.format("5") + "<answer>6</answer>", {"answer": "5"}, 1.0, 0.0),
    ("a form without an answer", "<think></think><answer></answer>", {"answer": "5"}, 0.5, 0.0),
    ("no tag at all", "5", {"answer": "5"}, 0.5, 0.0),
]


@pytest.mark.parametrize(("response", "truth", "published", "fixed"), [flaw[1:] for flaw in FLAWS], ids=lambda v: None)
def test_flaws_are_kept_by_the_published_reward_alone(
    response: str, truth: dict[str, Any], published: float, fixed: float
) -> None:
    assert earned(PUBLISHED, response, truth) == published
    assert earned(FIXED, response, truth) == pytest.approx(fixed, abs=1e-12)


def test_the_scripts_train_on_the_accuracy_alone() -> None:
    assert earned(rllava_we_math(), "5", {"answer": "5"}) == 1.0
    with pytest.raises(RewardError, match="format_weight"):
        rllava_we_math(format_weight=-1.0)


def test_hostile_responses_are_linear() -> None:
    for text in ("<answer>" * 50_000, "</think>" + " " * 400_000, "<think></think><answer>" + "4 " * 100_000):
        assert earned(PUBLISHED, text, {"answer": "8 6"}) == 0.0
        assert earned(FIXED, text, {"answer": "8 6"}) == 0.0
