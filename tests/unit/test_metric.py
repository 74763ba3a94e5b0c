"""Facts about metrics: whose are found first, and what cannot be one."""

from __future__ import annotations

import pytest

from vlmrl.metric import METRICS, UNKNOWN, Metric, metric_facts


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("accuracy", METRICS["accuracy"]),
        ("accuracy/n-3", METRICS["accuracy"]),
        ("pass@16", METRICS["pass@k"]),
        ("maj@8", METRICS["maj@k"]),
        ("mean@4", METRICS["mean@k"]),
        ("loss@x", UNKNOWN),
        ("part/format", METRICS["part"]),
        ("counting_error", UNKNOWN),
    ],
)
def test_a_metric_is_known_by_its_name_or_the_name_before_the_stroke(name, facts):
    assert metric_facts(name) == facts


def test_what_a_task_declares_comes_first():
    own = {"error": Metric("lower", (0.0, 9.0)), "error/far": Metric("neither"), "accuracy": Metric("higher")}
    assert metric_facts("error/near", own) == own["error"] and metric_facts("error/far", own) == own["error/far"]
    assert metric_facts("accuracy/x", own).range is None


@pytest.mark.parametrize(
    "wrong", [{"better": "up"}, {"range": (1.0, 0.0)}, {"range": "ab"}, {"range": 3}, {"range": (float("nan"), 1.0)}]
)
def test_no_other_direction_and_no_other_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Metric(**wrong)
