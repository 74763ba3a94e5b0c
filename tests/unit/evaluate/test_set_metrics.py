"""Metrics of a whole split: their intervals by resampled units, their paired differences, and where they are shown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Any

import numpy as np
import pytest
from evaluation_builders import row
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.errors import DataError, RecipeError
from vlmrl.evaluate import compare as compare_module
from vlmrl.evaluate import set_metrics as sets
from vlmrl.evaluate.compare import compare, differences, open_side
from vlmrl.evaluate.estimates import Units
from vlmrl.evaluate.metrics import summarise, task_problems
from vlmrl.evaluate.paired import paired_columns
from vlmrl.evaluate.records import Evaluation, read_evaluation, write_evaluation
from vlmrl.evaluate.set_metrics import resamples, row_counts, set_differences, summarise_sets
from vlmrl.report.evaluations import EvalColumn, eval_tables
from vlmrl.store.evaluated_rows import read_summary, set_method_of
from vlmrl.tasks.base import REPLICATES, AccumulatedMetrics, PooledMetrics
from vlmrl.types import RewardInput, Score

Pair = tuple[RewardInput, Score, dict[str, float | None]]


def split(values: Sequence[float], images: Sequence[Sequence[str]] | None = None, shift: float = 0.0):
    """Responses with these scores, each of a row of its own images, and their records."""
    shown = images or [[f"i{k}"] for k in range(len(values))]
    records = [row(f"p{k}", score=value + shift, images=tuple(shown[k])) for k, value in enumerate(values)]
    responses = [(RewardInput(f"{k}"), Score(value + shift, {}), {"accuracy": value}) for k, value in enumerate(values)]
    return responses, records


def mean(responses: Sequence[Any]) -> dict[str, float | None]:
    return {"pooled": fmean(score.value for _, score, _ in responses)}


def pooled_ratio(responses: Sequence[Any]) -> dict[str, float | None]:
    """Hits over answers that are not empty: None where there is none."""
    there = [outcome["accuracy"] for _, _, outcome in responses if outcome["accuracy"] is not None]
    return {"ratio": fmean(there) if sum(there) else None}


def count_hits(graded: Any) -> dict[str, int]:
    accuracy = graded[2]["accuracy"]
    return {"hits": int(accuracy == 1.0), "answers": int(accuracy is not None)}


def ratio_of(sums: Any) -> dict[str, float | None]:
    return {"ratio": sums["hits"] / sums["answers"] if sums["hits"] else None}


POOLED = PooledMetrics(count_hits, ratio_of)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.0]), min_size=1, max_size=30), st.integers(1, 12))
def test_pooled_metrics_are_the_function_over_all_responses(values: list[float], images: int):
    """The same values, intervals and replicates as those of a function that gets every resample's responses."""
    responses, records = split(values, [[f"i{k % images}"] for k in range(len(values))])
    slow = summarise_sets(pooled_ratio, responses, records, num_resamples=50)
    quick = summarise_sets(POOLED, responses, records, num_resamples=50)
    assert quick["set_metrics"].pop("counts") == {"hits": int(sum(values)), "answers": len(values)}
    assert quick == slow


def test_the_replicates_of_a_mean_spread_as_theory_says():
    """The bootstrap's mean has mean x and variance pvariance / N; both within 5 standard errors of 400 draws."""
    values = np.random.default_rng(0).normal(size=60).tolist()
    found = summarise_sets(mean, *split(values))
    drawn = found["set_metrics"]["replicates"]["pooled"]
    expected = math.sqrt(pvariance(values) / 60)
    assert abs(fmean(drawn) - fmean(values)) < 5 * expected / math.sqrt(REPLICATES)
    assert abs(np.std(drawn) / expected - 1) < 5 / math.sqrt(2 * REPLICATES)
    metric = found["metrics"]["pooled"]
    low, high = np.quantile(drawn, (0.025, 0.975))
    assert metric == {
        "value": fmean(values),
        "low": low,
        "high": high,
        "n": 60,
        "clusters": 60,
        "range": None,
    }


def test_rows_that_are_repeated_within_their_units_are_no_evidence():
    values = [0.0, 1.0, 0.5, 0.25, 0.75, 0.0, 1.0, 0.5, 0.25, 0.75]
    once = summarise_sets(mean, *split(values), units=list("abcdefghij"))
    responses, records = split([v for v in values for _ in range(3)])
    thrice = summarise_sets(mean, responses, records, units=[u for u in "abcdefghij" for _ in range(3)])
    for key in ("value", "low", "high", "clusters"):
        assert thrice["metrics"]["pooled"][key] == pytest.approx(once["metrics"]["pooled"][key], abs=1e-12)
    apart = summarise_sets(mean, responses, records)["metrics"]["pooled"]
    joined = thrice["metrics"]["pooled"]
    assert apart["high"] - apart["low"] < joined["high"] - joined["low"], "as if they were independent"


def test_a_row_is_in_a_resample_as_often_as_all_of_its_images_were_drawn_together():
    units = Units([["a", "b"], ["b", "c"], ["c"]], 3)  # a and b are in other rows each: three units
    assert row_counts(units, np.array([2, 1, 0])).tolist() == [2, 0, 0]
    assert row_counts(units, np.array([1, 2, 3])).tolist() == [2, 6, 3]


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=2, max_size=8))
def test_each_resample_draws_as_many_units_as_there_are(images):
    units = Units(images, len(images))
    counts = resamples(units, 30)
    assert len(counts) == 30 and all(len(c) == len(images) and c.min() >= 0 for c in counts)
    if units.count == len(images) and len(units.unit_of) == len(images):
        assert all(c.sum() == len(images) for c in counts)


def test_few_units_have_no_interval_and_an_undefined_metric_is_left_out():
    found = summarise_sets(mean, *split([0.0, 1.0], images=[["a"], ["a"]]))
    assert (found["metrics"]["pooled"]["low"], found["metrics"]["pooled"]["clusters"]) == (None, 1)
    for count, there in ((9, False), (10, True)):
        pooled = summarise_sets(mean, *split([k / 7 for k in range(count)]))["metrics"]["pooled"]
        assert (pooled["low"] is not None) == there == (pooled["high"] is not None)
    found = summarise_sets(pooled_ratio, *split([0.0] * 12))
    assert found["metrics"] == {} and found["set_metrics"]["undefined"] == ["ratio"]
    assert set_method_of(found) == ""
    found = summarise_sets(pooled_ratio, *split([1.0, *[0.0] * 11]))
    many = {"set_metrics": {**found["set_metrics"], "names": ["a", "b", "c", "d", "e"]}}
    assert set_method_of(many).startswith("of a, b, c and 2 more: percentiles")
    drawn = found["set_metrics"]["replicates"]["ratio"]
    method = "of ratio: percentiles of 400 resamples of the units that rows share"
    assert found["set_metrics"]["undefined"] == [] and set_method_of(found) == method
    assert None in drawn and found["metrics"]["ratio"]["low"] is not None, "defined on most resamples: 1 - (11/12)^12"
    json.dumps(found, allow_nan=False)


def test_a_resample_that_fails_costs_the_intervals_alone():
    def strict(responses: Sequence[Any]) -> dict[str, float | None]:
        if len({x.response for x, _, _ in responses}) < 12:
            raise RecipeError("`set_metrics` raised ValueError: a response is there twice")
        return mean(responses)

    found = summarise_sets(strict, *split([k / 7 for k in range(12)]))
    pooled = found["metrics"]["pooled"]
    assert pooled["value"] == pytest.approx(fmean(k / 7 for k in range(12))) and pooled["low"] is None
    assert "a response is there twice" in task_problems(found)[0] and "no intervals" in task_problems(found)[0]
    (difference,) = set_differences(found, summarise_sets(mean, *split([k / 7 for k in range(12)]))).values()
    assert (difference["value"], difference["low"]) == (0.0, None)


def test_a_task_may_have_fewer_resamples_or_none():
    values = [k / 7 for k in range(12)]
    few = summarise_sets(mean, *split(values), num_resamples=20)["set_metrics"]
    assert len(few["replicates"]["pooled"]) == 20 and few["method"].startswith("percentiles of 20 resamples")
    none = summarise_sets(mean, *split(values), num_resamples=0)["metrics"]["pooled"]
    assert none["value"] == pytest.approx(fmean(values)) and none["low"] is None


def f1(responses: Sequence[Any]) -> dict[str, float | None]:
    hits, either = (sum(outcome[name] for _, _, outcome in responses) for name in ("hit", "either"))
    return {"f1": 2 * hits / either if either else None}


def labelled(rng: np.random.Generator, images: int, rows: int):
    """Responses to rows of some images, the answers to one image right as often as its own difficulty says."""
    responses, records = [], []
    for image in range(images):
        share = rng.random()
        for k in range(rows):
            true, right = rng.random() < 0.5, rng.random() < share
            said = true == right
            responses.append((None, None, {"hit": float(true and said), "either": float(true) + float(said)}))
            records.append(row(f"{image}-{k}", images=(f"i{image}",)))
    return responses, records


@pytest.mark.slow
@pytest.mark.parametrize(("images", "rows"), [(12, 1), (20, 4)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(images, rows):
    rng = np.random.default_rng(images)
    worlds, held = 150, 0
    for _ in range(150):
        metric = summarise_sets(f1, *labelled(rng, images, rows), num_resamples=200)["metrics"]["f1"]
        if metric["low"] is None:  # no answer is right: all resamples are 0
            worlds -= 1
            continue
        held += metric["low"] <= 0.5 <= metric["high"]  # half of the answers are right, whatever the label
    assert 0.86 <= held / worlds <= 0.99


def test_a_paired_difference_is_that_of_the_same_resamples():
    values = np.random.default_rng(1).normal(size=30).tolist()
    before, after = (summarise_sets(mean, *split(values, shift=shift)) for shift in (0.0, 0.125))
    (found,) = set_differences(after, before).values()
    assert [found[key] for key in ("value", "low", "high")] == pytest.approx([0.125] * 3, abs=1e-12)
    assert (found["a"], found["b"]) == pytest.approx((fmean(values), fmean(values) + 0.125))
    apart = after["metrics"]["pooled"]
    assert apart["high"] - apart["low"] > 0.5, "each alone is far less sure"


def test_other_rows_units_or_truths_are_no_pair():
    values = [k / 7 for k in range(12)]
    mine = summarise_sets(mean, *split(values))
    shared = [["a"], ["b"], ["b"], *([f"i{k}"] for k in range(3, 12))]
    assert set_differences(mine, summarise_sets(mean, *split(values, images=shared))) == {}
    assert set_differences(mine, summarise_sets(mean, *split([*values, 1.0]))) == {}
    assert set_differences(mine, summarise_sets(mean, *split(values), num_resamples=20)) == {}
    responses, records = split(values)
    assert set_differences(mine, summarise_sets(mean, responses, [{**r, "truth": {"other": 1}} for r in records])) == {}
    assert set_differences(mine, {"metrics": {}}) == {} == set_differences({"metrics": {}}, mine)


@pytest.mark.parametrize(
    ("returned", "told"),
    [({"ap": "0.5"}, "`ap` of the task is '0.5', not a number"), ([0.5], "a list, not names"), ({"ap": []}, "`ap`")],
)
def test_what_is_no_number_is_an_error(returned, told):
    with pytest.raises(DataError, match=told):
        summarise_sets(lambda responses: returned, *split([0.0, 1.0]))


def evaluated(folder, shift: float, better: str | None) -> None:
    responses, records = split(np.random.default_rng(2).normal(size=20).tolist(), shift=shift)
    summary = summarise(records)
    found = summarise_sets(mean, responses, records)
    found["metrics"]["pooled"]["better"] = better
    summary |= {"metrics": summary["metrics"] | found["metrics"], "set_metrics": found["set_metrics"]}
    folder.parents[1].mkdir(parents=True, exist_ok=True)
    write_evaluation(folder, Evaluation(records, summary), {"split": "test", "source": "s"})


@pytest.mark.parametrize(("better", "said"), [("higher", "better"), ("lower", "worse"), (None, "differs")])
def test_compare_needs_no_task_for_it(tmp_path, better, said):
    for name, shift in (("a", 0.0), ("b", 0.25)):
        evaluated(tmp_path / name / "eval" / "test", shift, better)
    sides = [open_side(tmp_path, str(tmp_path / name / "eval" / "test")) for name in "ab"]
    (found,) = compare(*sides)["evaluations"]
    (pooled,) = [m for m in found["metrics"] if m["metric"] == "pooled"]
    assert (pooled["difference"], pooled["verdict"]) == (pytest.approx(0.25), said)
    before, after = (read_evaluation(tmp_path / name / "eval" / "test") for name in "ab")
    assert differences(after, before)[1]["pooled"]["value"] == pytest.approx(0.25)
    assert sets.set_metrics_of(after.summary) == ["pooled"]


def test_compare_and_the_report_match_the_rows_of_a_pair_once(tmp_path, monkeypatch):
    for name, shift in (("a", 0.0), ("b", 0.25)):
        evaluated(tmp_path / name / "eval" / "test", shift, None)
    folders = [tmp_path / name / "eval" / "test" for name in "ab"]
    passes = []
    monkeypatch.setattr(compare_module, "paired_columns", lambda *args: passes.append(args) or paired_columns(*args))
    compare(*(open_side(tmp_path, str(folder)) for folder in folders))
    assert len(passes) == 1
    columns = [EvalColumn(folder.parts[-3], 0, read_summary(folder), folder) for folder in folders]
    (table,) = eval_tables(columns)
    assert table["differences"] and len(passes) == 2


def test_a_reflected_metric_that_is_the_same_on_all_resamples_has_no_interval():
    def accumulate(results):
        return lambda count_N: {"none": 0.0 * count_N.sum()}

    compute = AccumulatedMetrics(lambda graded: None, accumulate, reflected=(0.0, 1.0))
    found = summarise_sets(compute, [(None, None, {})] * 20, [row(f"r{i}", images=(f"i{i}",)) for i in range(20)])
    assert (found["metrics"]["none"]["low"], found["metrics"]["none"]["high"]) == (None, None)
