"""Summaries from columns, against the means over records one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.evaluate.estimates import mean_interval
from vlmrl.evaluate.metrics import (
    LENGTHS,
    as_json,
    clusters_of,
    picks,
    prompt_samples,
    range_holding,
    range_of_metric,
    summarise,
)
from vlmrl.evaluate.repeated import repeated_interval, shown_estimates

NUMBER = st.none() | st.sampled_from([0.0, 0.25, 1.0, -1.0, 3.5])
ACCURACY = st.none() | st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def records(draw):
    rows = []
    for prompt in range(draw(st.integers(1, 5))):
        truth = {"shape": draw(st.sampled_from(["disc", "ring", 3, None, True])), "answer": "x"}
        images = [{"sha256": key} for key in draw(st.lists(st.sampled_from("abc"), max_size=2))]
        for sample in range(draw(st.integers(1, 4))):
            outcome = draw(st.fixed_dictionaries({}, optional={"accuracy": ACCURACY, "brier": NUMBER}))
            rows.append(
                {
                    "prompt_id": f"p{prompt}",
                    "sample": sample,
                    "score": draw(NUMBER),
                    "parts": draw(st.fixed_dictionaries({}, optional={"format": NUMBER, "length": NUMBER})),
                    "outcome": outcome,
                    "truth": truth,
                    "finish": draw(st.sampled_from(["stop", "length"])),
                    "num_tokens": draw(st.none() | st.integers(1, 9)),
                    "images": images,
                    "error": draw(st.sampled_from([None, None, "a bug"])),
                    "status": "ok",
                    "detail": draw(st.none() | st.sampled_from([{"r": {"answer": "A"}}, {"r": {"answer": 1}}])),
                }
            )
    return rows


@settings(max_examples=60, deadline=None)
@given(records())
def test_each_metric_is_the_mean_over_the_records(rows):
    metrics = dict(summarise(rows, {"length": (0.0, 5.0)}, ["shape"])["metrics"])
    for name, pick in picks(rows, ["shape"]).items():
        values = [(row, v) for row in rows if (v := pick(row)) is not None]
        if not values:
            assert name not in metrics
            continue
        numbers, clusters = [v for _, v in values], clusters_of([row for row, _ in values])
        declared = range_holding(range_of_metric(name, {"length": (0.0, 5.0)}), numbers)
        expected = as_json(mean_interval(numbers, clusters, declared, length=name in LENGTHS), declared)
        assert metrics.pop(name) == expected, name
    prompts = list(prompt_samples(rows).values())
    for metric, k in shown_estimates(prompts):
        assert metrics.pop(f"{metric}@{k}") == as_json(repeated_interval(prompts, metric, k), (0.0, 1.0))
    assert not metrics
