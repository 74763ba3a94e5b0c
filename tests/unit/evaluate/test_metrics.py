"""Summaries of rows: every number by hand."""

from __future__ import annotations

import json
import math

import pytest
from evaluation_builders import row
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.evaluate.metrics import (
    baselines,
    metric_value,
    summarise,
)
from vlmrl.evaluate.paired import joined_by, paired_columns, paired_differences

FOUR = [
    row("p0", score=1.0, label=1.0, confidence=0.9, images=("a", "b"), distance=0),
    row("p1", score=0.0, label=0.0, confidence=0.8, images=("b", "c"), distance=1, level=0.0),
    row("p2", score=0.5, label=0.0, confidence=0.1, images=("c", "d"), distance=2, level=None),
    row("p3", score=0.1, label=1.0, confidence=None, images=("d", "a"), distance=0, finish="length"),
]


def values(summary: dict) -> dict[str, float]:
    return {name: round(m["value"], 12) for name, m in summary["metrics"].items()}


def test_every_metric_of_four_rows_by_hand():
    # accuracy: right, wrong, right, failed. brier: 0.01, 0.64, 0.01, 1. The level is not due in row 2.
    # auc: positives 0.9 and a failure (last), negatives 0.8 and 0.1: (1 + 1 + 0 + 0) / 4.
    # ece: four bins of one row, the failure counts as a certain 0: (|1 - 0.9| + |0 - 0.8| + |0 - 0.1| + |1 - 0|) / 4.
    # "the same" is said to rows 0 and 1, of the positives 0 and 3: 1 hit, 1 false alarm, 1 miss.
    assert values(summarise(FOUR, by=["distance"])) == {
        "reward": 0.4,
        "accuracy": 0.5,
        "accuracy/digit": round(2 / 3, 12),
        "accuracy/distance-0": 0.5,
        "accuracy/distance-1": 0.0,
        "accuracy/distance-2": 1.0,
        "brier": 0.415,
        "parse_failure": 0.25,
        "auc": 0.5,
        "ece": 0.5,
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
        "part/format": 1.0,
        "response_tokens": 5.0,
        "truncated": 0.25,
    }


def test_each_metric_says_how_many_rows_it_is_made_of():
    metrics = summarise(FOUR, by=["distance"])["metrics"]
    assert metrics["accuracy"]["n"] == 4
    assert metrics["accuracy/digit"]["n"] == 3
    assert metrics["accuracy/distance-0"]["n"] == 2


def test_accuracy_by_a_field_of_the_truth_has_two_to_twenty_values():
    def names(truths, *by):
        rows = [{**FOUR[0], "prompt_id": str(i), "truth": truth} for i, truth in enumerate(truths)]
        return [n for n in summarise(rows, by=by)["metrics"] if n.startswith("accuracy/") and n != "accuracy/digit"]

    truths = [{"n": n, "shape": "disc", "same": n > 1, "size": n / 10, "id": str(n)} for n in range(10, 0, -1)]
    assert names(truths, "n") == [f"accuracy/n-{n}" for n in range(1, 11)]
    assert names(truths, "id")[:2] == ["accuracy/id-1", "accuracy/id-10"]
    assert names(truths, "shape", "same", "size", "none") == names([{"n": n} for n in range(21)], "n") == []
    assert summarise(FOUR)["by"] == [] and "accuracy/distance-0" not in summarise(FOUR)["metrics"]


def test_differences_are_by_the_fields_that_both_summaries_have():
    one, old = summarise(FOUR, by=["distance", "genus"]), {"metrics": {}}
    assert joined_by(one, old) == ["distance"] == joined_by(old, old)
    assert joined_by(one, summarise(FOUR)) == []


def test_counts_of_rows_prompts_samples_and_images():
    summary = summarise([*FOUR, row("p0", sample=1)])
    assert [summary[k] for k in ("rows", "prompts", "samples", "images")] == [5, 4, 2, 4]


def test_a_failed_reward_is_counted_and_never_a_zero():
    summary = summarise([row("p0", score=0.8), row("p1", score=None, error="ZeroDivisionError")])
    assert summary["reward_errors"] == 1
    assert summary["metrics"]["reward"]["value"] == 0.8
    assert summary["metrics"]["reward"]["n"] == 1


def test_a_failed_answer_of_a_negative_pair_is_ranked_wrong_too():
    rows = [row("p0", label=1.0, confidence=0.2), row("p1", label=0.0, confidence=None)]
    assert summarise(rows)["metrics"]["auc"]["value"] == 0.0


def test_auc_is_left_out_when_all_pairs_are_of_one_kind():
    assert "auc" not in summarise([row("p0"), row("p1")])["metrics"]


def test_a_summary_is_json_even_for_one_row():
    text = json.dumps(summarise(FOUR[:1]), allow_nan=False)
    assert json.loads(text)["metrics"]["reward"] == {
        "value": 1.0,
        "low": None,
        "high": None,
        "n": 1,
        "clusters": 1,
        "range": None,
    }


def test_rows_without_outcomes_still_have_reward_parts_and_length():
    plain = row("p0", outcome={}, truth={})
    assert list(summarise([plain])["metrics"]) == ["reward", "part/format", "response_tokens", "truncated"]


def test_the_baselines_are_what_one_gets_without_looking():
    rows = [row(f"p{i}", label=float(i != 3)) for i in range(4)]
    found = baselines(rows)
    assert found["accuracy"]["value"] == 0.75
    assert found["brier"]["value"] == 0.1875
    assert found["f1"]["value"] == pytest.approx(2 * 0.75 / 1.75) and found["precision"]["value"] == 0.75
    assert baselines([row("p", outcome={})]) == {}


def test_the_value_of_a_metric_that_is_not_there_is_nan():
    summary = summarise(FOUR)
    assert metric_value(summary, "accuracy") == 0.5
    assert math.isnan(metric_value(summary, "accuracy/species"))


def test_several_samples_a_prompt_give_pass_at_1_2_4_and_n():
    rows = [row("p0", sample=k, confidence=0.9 if k == 0 else 0.1) for k in range(5)]
    rows += [row("p1", sample=k, confidence=0.9, images=("c",)) for k in range(5)]
    found = {k: v["value"] for k, v in summarise(rows)["metrics"].items() if k.startswith("pass@")}
    # p0 has 1 of 5 right: pass@1 0.2, pass@2 0.4, pass@4 0.8, pass@5 1; p1 always 1.
    assert found == pytest.approx({"pass@1": 0.6, "pass@2": 0.7, "pass@4": 0.9, "pass@5": 1.0})


def test_greedy_answers_have_no_pass_at_k():
    assert not any(name.startswith("pass@") for name in summarise(FOUR)["metrics"])


def test_paired_differences_use_the_rows_that_both_have():
    after = [row("p0", score=0.9), row("p1", score=0.7), row("new", score=0.0)]
    before = [row("p1", score=0.2), row("p0", score=0.5), row("gone", score=1.0)]
    found = paired_differences(paired_columns(after, before))
    assert found["reward"]["value"] == pytest.approx(0.45, abs=1e-12)
    assert found["reward"]["n"] == 2
    assert found["accuracy"]["value"] == 0.0


def test_rows_in_which_one_side_has_no_number_are_not_compared():
    found = paired_differences(
        paired_columns([row("p0", level=None), row("p1", level=1.0)], [row("p0"), row("p1", level=0.0)])
    )
    assert found["accuracy/digit"] == {
        "value": 1.0,
        "low": None,
        "high": None,
        "n": 1,
        "clusters": 1,
        "range": [0.0, 1.0],
        "a": 0.0,
        "b": 1.0,
    }
    assert found["accuracy"]["n"] == 2


def test_without_common_rows_there_is_no_difference():
    assert paired_columns([row("p0")], [row("p1")]) == {}


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 10)), min_size=2, max_size=40))
def test_confusion_metrics_are_those_of_scikit_learn_over_the_whole_split(drawn: list[tuple[bool, int | None]]):
    from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score

    rows = [
        row(f"p{i}", label=float(same), confidence=None if tenths is None else tenths / 10, images=(str(i),))
        for i, (same, tenths) in enumerate(drawn)
    ]
    found = values(summarise(rows))
    truth = [int(same) for same, _ in drawn]
    # A failed answer and one of exactly 0.5 are wrong: on the other side than the label.
    said = [int(tenths > 5) if tenths not in (None, 5) else int(not same) for same, tenths in drawn]
    expected = {"accuracy": sum(a == b for a, b in zip(truth, said, strict=True)) / len(truth)}
    if any(said):
        expected["precision"] = precision_score(truth, said)
    if any(truth):
        expected["recall"] = recall_score(truth, said)
    if any(truth) or any(said):
        expected["f1"] = f1_score(truth, said)
    if len(set(truth)) == 2:
        # Behind everything: a positive that failed below, a negative that failed above all others.
        ranks = [(-1 if same else 11) if tenths is None else tenths for same, tenths in drawn]
        expected["auc"] = roc_auc_score(truth, ranks)
    for name in ("accuracy", "precision", "recall", "f1", "auc"):
        assert found.get(name) == (pytest.approx(expected[name], abs=1e-9) if name in expected else None), name


def test_confusion_metrics_are_not_means_of_per_row_values():
    # Five same and five different pairs, all right: per-row F1 would be 0 for every different pair, 0.5 in the mean.
    rows = [row(f"p{i}", label=float(i < 5), confidence=0.9 if i < 5 else 0.1, images=(str(i),)) for i in range(10)]
    found = values(summarise(rows))
    assert (found["precision"], found["recall"], found["f1"], found["auc"]) == (1.0, 1.0, 1.0, 1.0)


def test_parse_failures_stay_in_every_denominator():
    # One right answer and nine that cannot be parsed, all pairs the same.
    rows = [row(f"p{i}", confidence=0.9 if i == 0 else None, images=(str(i),)) for i in range(10)]
    found = values(summarise(rows))
    assert (found["accuracy"], found["parse_failure"], found["recall"]) == (0.1, 0.9, 0.1)
    assert found["f1"] == pytest.approx(2 * 0.1 / 1.1)  # 1 hit, 9 misses, no false alarm
    assert found["ece"] == pytest.approx((0.1 + 9 * 1.0) / 10)


@pytest.mark.parametrize("tokens", [1, 4])
def test_responses_of_one_length_are_no_evidence_of_other_lengths(tokens: int):
    alike = [row(f"p{i}") | {"num_tokens": tokens} for i in range(8)]
    ranges = {"response_tokens": (0.0, 200.0)}
    found = summarise(alike, ranges)["metrics"]["response_tokens"]
    assert (found["value"], found["low"], found["high"]) == (tokens, None, None)
    apart = paired_differences(paired_columns(alike, alike, ranges))["response_tokens"]
    assert (apart["value"], apart["low"], apart["high"]) == (0.0, None, None)


def test_a_length_has_students_t_interval_clipped_at_its_range():
    # Lengths 1, 3: mean 2, standard error 1, t of 1 degree of freedom 12.706.
    pair = [row("p0") | {"num_tokens": 1}, row("p1", images=("z",)) | {"num_tokens": 3}]
    found = summarise(pair)["metrics"]["response_tokens"]
    assert (found["low"], found["high"]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    found = summarise(pair, {"response_tokens": (0.0, 10.0)})["metrics"]["response_tokens"]
    assert (found["low"], found["high"]) == (0.0, 10.0)
