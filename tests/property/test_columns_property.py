"""Summaries from columns, against the means over records one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.evaluate.estimates import mean_interval
from vlmrl.evaluate.metrics import LENGTHS, answer_of, as_json, clusters_of, finite, range_holding, range_of_metric
from vlmrl.evaluate.metrics import summarise as summary_of
from vlmrl.evaluate.paired import paired_columns
from vlmrl.evaluate.repeated import maj_at_k, mean_at_k, pass_at_k

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
    metrics = dict(summary_of(rows, {"length": (0.0, 5.0)}, ["shape"])["metrics"])
    for name, pick in picks(rows).items():
        values = [(row, v) for row in rows if (v := pick(row)) is not None]
        if not values:
            assert name not in metrics
            continue
        numbers, clusters = [v for _, v in values], clusters_of([row for row, _ in values])
        declared = range_holding(range_of_metric(name, {"length": (0.0, 5.0)}), numbers)
        expected = as_json(mean_interval(numbers, clusters, declared, length=name in LENGTHS), declared)
        assert metrics.pop(name) == expected, name
    prompts = {}
    for row in (r for r in rows if r["outcome"].get("accuracy") is not None):
        prompts.setdefault(row["prompt_id"], []).append(row)
    for name in list(metrics):
        metric, _, k = name.partition("@")
        values = [estimate(metric, own, int(k)) for own in prompts.values()]
        clusters = clusters_of([own[0] for own in prompts.values()])
        assert metrics.pop(name) == as_json(mean_interval(values, clusters, (0.0, 1.0)), (0.0, 1.0)), name


@settings(max_examples=60, deadline=None)
@given(records(), records())
def test_each_pair_has_the_numbers_of_its_two_records(rows, others):
    columns = paired_columns(rows, others, by=["shape"])
    before = {(r["prompt_id"], r["sample"]): r for r in others}
    pairs = [(r, o) for r in rows if (o := before.get((r["prompt_id"], r["sample"]))) and r["truth"] == o["truth"]]
    for name, pick in picks([r for r, _ in pairs]).items():
        both = [(r, b, a) for r, o in pairs if (a := pick(r)) is not None and (b := pick(o)) is not None]
        if not both:
            assert name not in columns
            continue
        column = columns.pop(name)
        assert (column.before.tolist(), column.after.tolist()) == tuple(
            map(list, zip(*(b[1:] for b in both), strict=True))
        ), name
        own = mean_interval([a for *_, a in both], clusters_of([r for r, *_ in both]))
        assert as_json(mean_interval(column.after, column.clusters)) == as_json(own), name
    assert all("@" in name for name in columns)
    for name, column in columns.items():
        metric, _, k = name.partition("@")
        sides = [{p: [r for r in side if r["prompt_id"] == p and r["outcome"].get("accuracy") is not None]
                  for p in dict.fromkeys(r["prompt_id"] for r, _ in pairs)} for side in (others, rows)]  # fmt: skip
        shared = [p for p, own in sides[1].items() if own and sides[0][p]]
        values = [[estimate(metric, side[p], int(k)) for p in shared] for side in sides]
        assert sorted(zip(column.before, column.after, strict=True)) == sorted(zip(*values, strict=True)), name


def picks(rows):
    """Metric -> function that gives its number of a row, None for none: in plain words what the columns compute."""
    names = {key: dict.fromkeys(n for r in rows for n in r[key]) for key in ("outcome", "parts")}
    picked = {"reward": lambda r: r["score"], "response_tokens": lambda r: r["num_tokens"]}
    picked |= {"truncated": lambda r: float(r["finish"] == "length")}
    picked |= {name: lambda r, name=name: r["outcome"].get(name) for name in names["outcome"]}
    picked |= {f"part/{name}": lambda r, name=name: r["parts"].get(name) for name in names["parts"]}
    right = [r["truth"]["shape"] for r in rows if r["outcome"].get("accuracy") is not None]
    shapes = {shape for shape in right if shape is not None and shape is not True}
    for shape in shapes if len(shapes) > 1 else ():
        picked[f"accuracy/shape-{shape}"] = lambda r, shape=shape: (
            r["outcome"].get("accuracy") if r["truth"]["shape"] == shape else None
        )
    return {name: lambda r, pick=pick: finite(pick(r)) for name, pick in picked.items()}


def estimate(metric, own, k):
    """pass@k, maj@k or mean@k of the graded records of a prompt."""
    accuracies = [r["outcome"]["accuracy"] for r in own]
    if metric == "pass":
        return pass_at_k(len(own), sum(a == 1.0 for a in accuracies), k)
    return mean_at_k(accuracies, k) if metric == "mean" else maj_at_k(list(map(answer_of, own)), accuracies, k)
