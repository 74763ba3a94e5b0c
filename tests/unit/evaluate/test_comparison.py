"""What a paired difference says, and the sentence that answers whether B is better than A."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.evaluate.paired import comparison, conclude
from vlmrl.store.evaluated_rows import LABELS

NO_DIFFERENCE = "no difference shown"


def difference(value: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "a": 0.5, "b": 0.5 + value}


@pytest.mark.parametrize(
    ("metric", "found", "expected"),
    [
        ("reward", difference(0.1, 0.05, 0.2), "better"),
        ("reward", difference(-0.1, -0.2, -0.05), "worse"),
        ("brier", difference(-0.1, -0.2, -0.05), "better"),
        ("parse_failure", difference(0.1, 0.05, 0.2), "worse"),
        ("accuracy/easy", difference(0.1, 0.05, 0.2), "better"),
        ("response_tokens", difference(9.0, 5.0, 12.0), "differs"),
        ("counting_error", difference(0.1, 0.05, 0.2), "differs"),
        ("counting_error", difference(0.1, 0.05, 0.2) | {"better": "lower"}, "worse"),
        ("counting_error", difference(0.1, 0.05, 0.2) | {"better": "neither"}, "differs"),
        ("pass@4", difference(0.1, 0.05, 0.2), "better"),
        ("reward", difference(-0.1, -0.2, 0.01), "not clear"),
        ("reward", difference(0.1, None, None), "not clear"),
        ("reward", difference(0.0, -0.358, 0.358), "no difference shown"),
    ],
)
def test_a_difference_is_better_or_worse_only_where_its_interval_excludes_zero(metric, found, expected):
    assert comparison(metric, found) == expected


@pytest.mark.parametrize(("p", "expected"), [(0.05, "worse"), (0.125, "not clear")])
def test_with_few_rows_the_test_decides_too(p, expected):
    """4 of 16 rows fell: the interval [-0.468, -0.004] excludes 0, and the exact test gives p = 0.125."""
    assert comparison("accuracy", difference(-0.25, -0.468, -0.004), test={"p": p}) == expected


@pytest.mark.parametrize("metric", ["reward", "part/format"])
def test_scores_of_different_rewards_are_never_better_or_worse(metric: str):
    assert comparison(metric, difference(1.9, 1.8, 2.0), scored_alike=False) == "other reward"
    assert comparison("accuracy", difference(0.1, 0.05, 0.2), scored_alike=False) == "better"


@pytest.mark.parametrize("metric", ["accuracy", "accuracy/digit", "pass@4"])
def test_an_accuracy_that_is_a_part_of_the_reward_is_not_compared_across_rewards(metric: str):
    fell = difference(-0.29, -0.4, -0.2)
    assert comparison(metric, fell, scored_alike=False, accuracy_of_reward=True) == "other reward"
    assert comparison(metric, fell, scored_alike=True, accuracy_of_reward=True) == "worse"
    assert comparison("truncated", difference(0.1, 0.0, 0.2), False, True) == "not clear"


def test_the_sentence_says_first_that_the_rewards_differ():
    one = evaluation("t", reward=(-0.2, "other reward"), accuracy=(-0.3, "other reward"), scored_alike=False)
    found = conclude([one | {"accuracy_of_reward": True}])
    assert found["answer"] == "not known"
    assert found["text"].startswith("A and B were scored by different rewards, and their accuracy is a part of these")
    measured = evaluation("t", reward=(-0.2, "other reward"), accuracy=(-0.3, "worse"), scored_alike=False)
    text = conclude([measured])["text"]
    assert text.startswith("A and B were scored by different rewards, so only the task's own accuracy counts. B is ")
    assert "reward -0.2" not in text


def evaluation(name: str, role: str = "test", *, scored_alike: bool = True, **metrics: tuple[float, str]):
    rows = [
        {
            "metric": metric,
            "a": 0.5,
            "b": 0.5 + value,
            "difference": value,
            "low": value - 0.1,
            "high": value + 0.1,
            "verdict": told,
            "n": 8,
            "clusters": 4,
        }
        for metric, (value, told) in metrics.items()
    ]
    return {
        "name": name,
        "a": "x",
        "b": "y",
        "role": role,
        "label": LABELS[role],
        "scored_alike": scored_alike,
        "one_text": ["", ""],
        "refused": ["", ""],
        "evaluated_with": [],
        "accuracy_of_reward": False,
        "rows_paired": 8,
        "metrics": rows,
    }


def test_the_sentence_says_whose_answers_are_all_alike():
    alike = evaluation("test-digits", reward=(0.25, "better")) | {"one_text": ["", "all 16 answers are one text"]}
    assert conclude([alike])["text"].endswith("(4 clusters). B: all 16 answers are one text.")


def test_the_sentence_has_the_answer_the_interval_and_the_rows():
    found = conclude([evaluation("test-digits", reward=(0.25, "better"))])
    assert found["answer"] == "better" and found["evaluations"] == ["test-digits"]
    assert found["text"] == (
        "B is better than A: reward +0.250 [+0.150, +0.350] (0.500 -> 0.750), paired on 8 responses of test-digits "
        "(4 clusters)."
    )
    equal = conclude([evaluation("test-digits", reward=(0.0, NO_DIFFERENCE))])["text"]
    assert equal.startswith("No difference between A and B is shown: reward +0.000 [-0.100, +0.100]")


@pytest.mark.parametrize(
    ("evaluations", "answer"),
    [
        ([evaluation("t", reward=(0.2, "better"), accuracy=(0.0, "not clear"))], "better"),
        ([evaluation("t", reward=(0.2, "better"), accuracy=(-0.2, "worse"))], "mixed"),
        ([evaluation("t", reward=(0.05, "not clear"), brier=(-0.2, "better"))], "not clear"),
        ([evaluation("t", reward=(0.0, NO_DIFFERENCE), accuracy=(0.0, NO_DIFFERENCE))], NO_DIFFERENCE),
        ([evaluation("t", reward=(0.2, "better"), scored_alike=False)], "not known"),
        ([evaluation("t", reward=(0.2, "better"), accuracy=(-0.2, "worse"), scored_alike=False)], "worse"),
        ([evaluation("v", "validation", reward=(0.2, "better")), evaluation("t", reward=(-0.2, "worse"))], "worse"),
        ([], "not known"),
    ],
)
def test_the_rows_that_say_most_about_new_ones_decide_and_a_different_reward_decides_nothing(evaluations, answer):
    assert conclude(evaluations)["answer"] == answer


def test_rows_of_two_roles_are_labelled_as_what_they_are_for_each():
    mixed = evaluation("v", "validation", reward=(0.2, "better")) | {
        "label": "validation rows for A and training rows for B"
    }
    text = conclude([mixed])["text"]
    assert text.endswith("These are validation rows for A and training rows for B.")


def test_rows_that_chose_the_checkpoint_are_labelled_and_missing_ones_named_with_the_command():
    text = conclude([evaluation("v", "validation", reward=(0.2, "better"))])["text"]
    assert text.endswith("These are rows that training validated on: they were used to choose its checkpoint.")
    assert "(make them: vlmrl eval a)" in conclude([], "make them: vlmrl eval a")["text"]
