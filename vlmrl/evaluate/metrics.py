"""Summary of an evaluation from its rows: every metric with a 95% interval and the number of its rows.

A row is one response (`evaluate.run.make_records`). The task decides which numbers there are (`Task.outcome`); here
each is averaged over the rows that have it. Metric names: `reward`, `accuracy`, `accuracy/<level>`,
`accuracy/<field>-<value>` (see `Task.by`), `brier`, `parse_failure`, any other outcome of the task, `auc`, `ece`,
`precision`, `recall`, `f1`, `part/<name>`, `response_tokens`, `truncated`, `pass@<k>` for several samples per prompt.

`auc` to `f1` exist if the answer is a probability (outcomes `label` and `confidence`). They are computed from the
counts of the whole split, never as means of means. An answer that cannot be parsed counts as wrong in each of them:
ranked last, certain of the wrong label, in the wrong cell of the confusion matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmrl.evaluate.estimates import auc_interval, difference_interval, ece_interval, mean_interval, ratio_interval
from vlmrl.evaluate.interval import METHOD, UNIT_RANGE, Clusters, Interval, Range, range_of
from vlmrl.metric import metric_facts
from vlmrl.rewards.accuracy_part import RIGHT, is_binary
from vlmrl.types import INAPPLICABLE

Record = Mapping[str, Any]

NOT_AVERAGED = frozenset({"label", "confidence"})
"""Outcomes that do not measure the quality of an answer: AUC and the baselines are computed from them."""
PROBABILITY_METRICS = ("auc", "ece", "precision", "recall", "f1")
"""Metrics of tasks whose answer is a probability."""
LENGTHS = ("response_tokens",)
"""Metrics that count tokens: Student's t, clipped at the declared range."""
SIGNED_RANGE = (-1.0, 1.0)
MAX_VALUES = 20
"""Maximum number of different values of a field that groups rows. With more, it is a measurement or a name."""
OLD_BY = ("distance",)
"""`by` of summaries without it: earlier versions knew only this field."""
FAILED_POSITIVE, FAILED_NEGATIVE = -math.inf, math.inf
"""Score for AUC of a row without a confidence: ranked last, so that a failure counts as wrong."""


def summarise(
    rows: Sequence[Record], ranges: Mapping[str, Range] | None = None, by: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the summary of an evaluation.

    Args:
        rows: records with `score`, `parts`, `outcome`, `truth`, `finish`, `num_tokens`, `images`, `prompt_id`.
        ranges: metric -> declared range of its value; they go before those of `metric_facts`.
        by: see `Task.by`.
    Returns: {"rows", "prompts", "samples", "images", "by", "reward_errors", "reward_unavailable" (if there are any),
        "intervals": name of the method, "metrics": name -> {"value", "low", "high", "n", "clusters", "range"},
        "baselines": name -> {"value", "what"}}. A metric that no row has is left out. low and high are None if there is
        no interval, range if none is declared. pass@k needs accuracies that are right or wrong only.
    """
    metrics: dict[str, dict[str, Any]] = {}
    probability_metrics = {
        name: as_json(interval, UNIT_RANGE) for name, interval in _of_probabilities(rows).items() if interval.n
    }
    for name, pick in picks(rows, by).items():
        if name.startswith(("part/", "response_tokens")):
            metrics |= probability_metrics
        rows_with_value = [(r, v) for r in rows if (v := pick(r)) is not None]
        if rows_with_value:
            clusters, values = clusters_of([r for r, _ in rows_with_value]), [v for _, v in rows_with_value]
            declared = _holding(range_of_metric(name, ranges or {}), values)
            metrics[name] = as_json(mean_interval(values, clusters, declared, length=name in LENGTHS), declared)
    metrics |= _pass_at_k(rows)
    prompts = {r["prompt_id"] for r in rows}
    unavailable = sum(r.get("status") == "unavailable" for r in rows)
    return {
        "rows": len(rows),
        "prompts": len(prompts),
        "samples": max((r["sample"] for r in rows), default=-1) + 1,
        "images": len({key for r in rows for key in image_ids(r)}),
        "reward_errors": sum(r.get("error") not in (None, INAPPLICABLE) for r in rows) - unavailable,
        **({"reward_unavailable": unavailable} if unavailable else {}),
        "by": list(by),
        "intervals": METHOD,
        "metrics": metrics,
        "baselines": baselines(rows),
    }


def task_problems(summary: Mapping[str, Any]) -> list[str]:
    """Return in words what the task failed to measure of an evaluation: [] if it measured everything."""
    texts = []
    if problem := summary.get("outcome_problems"):
        texts.append(
            f"the task could not measure {problem['rows']:,} of {summary['rows']:,} answers: {problem['first']}"
        )
    if problem := summary.get("set_metrics_problem"):
        texts.append(f"the metrics of the whole split are missing: {problem}")
    if problem := (summary.get("set_metrics") or {}).get("problem"):
        texts.append(
            f"the metrics of the whole split have no intervals, because one of their resamples failed: {problem}"
        )
    if problem := summary.get("figures_problem"):
        texts.append(f"the figures are missing: {problem}")
    return texts


def range_of_metric(name: str, ranges: Mapping[str, Range]) -> Range | None:
    """Return the declared range of a metric: that of `ranges`, else that of `metric_facts`, else None."""
    return ranges.get(name) or metric_facts(name).range


def _holding(declared: Range | None, values: Sequence[float]) -> Range | None:
    """Return the declared range if it contains all values, else None; [-1, 1] if rewards use -1 and 1.

    The accuracy of a user's reward need not be a share: it may be -1 for wrong and 1 for right.
    """
    if declared is None or range_of(declared, values) == declared:
        return declared
    return SIGNED_RANGE if declared == UNIT_RANGE and is_binary(values) else None


def picks(rows: Sequence[Record], by: Sequence[str] = ()) -> dict[str, Callable[[Record], float | None]]:
    """Return metric name -> function that gives its number of a row, or None if the row has none.

    These are all metrics that are a mean over rows, in order.
    """
    outcomes = [n for n in _names(rows, "outcome") if n not in NOT_AVERAGED]
    outcomes.sort(key=lambda n: (not n.startswith("accuracy"), n != "accuracy"))
    pick_by_name: dict[str, Callable[[Record], float | None]] = {"reward": lambda r: _finite(r["score"])}
    for name in [n for n in outcomes if n.startswith("accuracy")]:
        pick_by_name[name] = lambda r, name=name: _finite(r["outcome"].get(name))
    right = [r["truth"] for r in rows if r["outcome"].get("accuracy") is not None]
    for name, (field, value) in accuracies_by(right, by).items():
        pick_by_name[name] = lambda r, field=field, value=value: (
            _finite(r["outcome"].get("accuracy")) if r["truth"].get(field) == value else None
        )
    for name in [n for n in outcomes if not n.startswith("accuracy")]:
        pick_by_name[name] = lambda r, name=name: _finite(r["outcome"].get(name))
    for name in _names(rows, "parts"):
        pick_by_name[f"part/{name}"] = lambda r, name=name: _finite(r["parts"].get(name))
    pick_by_name["response_tokens"] = lambda r: _finite(r["num_tokens"])
    pick_by_name["truncated"] = lambda r: float(r["finish"] == "length")
    return pick_by_name


def metric_value(summary: Mapping[str, Any], name: str) -> float:
    """Return the value of a metric of a summary; NaN if the rows do not have it."""
    metric = summary["metrics"].get(name)
    return math.nan if metric is None or metric["value"] is None else float(metric["value"])


def clusters_of(rows: Sequence[Record]) -> Clusters:
    """Return the clusters of rows: the images that they show, or the prompt of a row without images."""
    return [image_ids(r) or (str(r["prompt_id"]),) for r in rows]


def image_ids(row: Record) -> tuple[str, ...]:
    """Return the content hashes of a row's images."""
    return tuple(image["sha256"] for image in row["images"])


def as_json(interval: Interval, declared: Range | None = None) -> dict[str, Any]:
    """Return {"value", "low", "high", "n", "clusters", "range"}; NaN becomes None, as JSON has no NaN."""
    value, low, high = (x if math.isfinite(x) else None for x in (interval.mean, interval.low, interval.high))
    return {
        "value": value,
        "low": low,
        "high": high,
        "n": interval.n,
        "clusters": interval.clusters,
        "range": None if declared is None else list(declared),
    }


def baselines(rows: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return the metrics of blind baselines: always the majority label, always the base rate. Empty without labels.

    Example: labels 1, 1, 1, 0 -> accuracy 0.75, brier 0.1875.
    """
    labels = [v for r in rows if (v := r["outcome"].get("label")) is not None]
    if not labels:
        return {}
    rate = math.fsum(labels) / len(labels)
    return {
        "accuracy": {"value": max(rate, 1 - rate), "what": "always the commoner answer"},
        "brier": {"value": rate * (1 - rate), "what": "always the base rate"},
        "auc": {"value": 0.5, "what": "any answer that ignores the images"},
        "ece": {"value": 0.0, "what": "always the base rate"},
        "precision": {"value": rate, "what": "always the label 1"},
        "f1": {"value": 2 * rate / (1 + rate), "what": "always the label 1"},
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that one or more of k samples, drawn without replacement from n, are correct.

    It is 1 - C(n - c, k) / C(n, k), unbiased for the chance with k fresh samples (Chen et al. 2021, eq. 1).

    Raises: ValueError unless 1 <= k <= n and 0 <= c <= n.
    Example: n = 4, c = 1, k = 2 -> 1 - 3/6 = 0.5.
    """
    n, c = num_samples, num_correct
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} correct among {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _pass_at_k(rows: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return pass@1, 2, 4, ... and n over prompts, if each has several samples and accuracy is right or wrong only."""
    groups: dict[str, list[Record]] = {}
    for r in rows:
        if r["outcome"].get("accuracy") is not None:
            groups.setdefault(str(r["prompt_id"]), []).append(r)
    if not is_binary([r["outcome"]["accuracy"] for g in groups.values() for r in g]):
        return {}
    smallest = min((len(g) for g in groups.values()), default=0)
    if smallest < 2:
        return {}
    metrics = {}
    for k in sorted({2**i for i in range(smallest.bit_length()) if 2**i <= smallest} | {smallest}):
        values = [pass_at_k(len(g), sum(r["outcome"]["accuracy"] == RIGHT for r in g), k) for g in groups.values()]
        clusters = clusters_of([g[0] for g in groups.values()])
        metrics[f"pass@{k}"] = as_json(mean_interval(values, clusters, UNIT_RANGE), UNIT_RANGE)
    return metrics


def _of_probabilities(rows: Sequence[Record]) -> dict[str, Interval]:
    """Return the PROBABILITY_METRICS of rows whose answer is a probability of the label 1; EMPTY ones have n = 0."""
    rows_with_label = [r for r in rows if r["outcome"].get("label") in (0.0, 1.0) and "confidence" in r["outcome"]]
    clusters, labels = clusters_of(rows_with_label), [float(r["outcome"]["label"]) for r in rows_with_label]
    confidences = [r["outcome"]["confidence"] for r in rows_with_label]
    scores, probabilities = [], []
    for label, confidence in zip(labels, confidences, strict=True):
        failure_score = FAILED_POSITIVE if label else FAILED_NEGATIVE
        scores.append(failure_score if confidence is None else float(confidence))
        probabilities.append(1.0 - label if confidence is None else float(confidence))
    return {
        "auc": auc_interval(labels, scores, clusters),
        "ece": ece_interval(labels, probabilities, clusters),
        **_of_counts(labels, probabilities, clusters),
    }


def _of_counts(labels: Sequence[float], probabilities: Sequence[float], clusters: Clusters) -> dict[str, Interval]:
    """Return precision, recall and F1 of the label 1. A probability of 0.5 is wrong, whatever the label."""
    cells = [(y, (p > 0.5) if y else (p >= 0.5)) for y, p in zip(labels, probabilities, strict=True)]
    hit = [float(y == 1 and answer) for y, answer in cells]
    answered_one = [float(answer) for _, answer in cells]
    both = [y + float(answer) for y, answer in cells]  # 2 TP + FP + FN = positives + answers with the label 1
    return {
        "precision": ratio_interval(hit, answered_one, clusters),
        "recall": ratio_interval(hit, labels, clusters),
        "f1": ratio_interval([2 * h for h in hit], both, clusters),
    }


def _names(rows: Sequence[Record], field: str) -> list[str]:
    """Return the keys of a mapping of the rows, in order of first appearance."""
    return list(dict.fromkeys(name for r in rows for name in r[field]))


def accuracies_by(truths: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return `accuracy/<field>-<value>` -> (field, value), for fields with 2 to MAX_VALUES different values.

    Example: truths with a `shape` of "disc" or "ring", by = ["shape"] -> accuracy/shape-disc, accuracy/shape-ring.
    """
    names: dict[str, tuple[str, Any]] = {}
    for field in by:
        values = {v for t in truths if isinstance(v := t.get(field), (int, str)) and not isinstance(v, bool)}
        if 1 < len(values) <= MAX_VALUES:
            ordered = sorted(values, key=lambda v: (isinstance(v, str), v))
            names |= {f"accuracy/{field}-{value}": (field, value) for value in ordered}
    return names


def paired_differences(
    rows: Sequence[Record],
    others: Sequence[Record],
    ranges: Mapping[str, Range] | None = None,
    by: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return the mean of (rows - others) for every number that both have, on the rows they share.

    Rows are the same if their prompt id, sample and truth are: an answer to another question is no pair.

    Args:
        ranges, by: as of `summarise`.
    Returns: metric name -> {"value", "low", "high", "n", "clusters", "range" (of the metric), "a", "b": the means of
        `others` and of `rows` on these rows}; names as in `summarise`. Empty when no row is shared.
    """
    pairs, _ = shared_rows(rows, others)
    differences = {}
    for name, pick in picks([r for r, _ in pairs], by).items():
        both = [(r, a, b) for r, o in pairs if (a := pick(r)) is not None and (b := pick(o)) is not None]
        if not both:
            continue
        mine, theirs = [x for _, x, _ in both], [x for _, _, x in both]
        declared = _holding(range_of_metric(name, ranges or {}), [*mine, *theirs])
        clusters = clusters_of([r for r, _, _ in both])
        difference = difference_interval(mine, theirs, clusters, declared, length=name in LENGTHS)
        means = {"a": math.fsum(theirs) / len(both), "b": math.fsum(mine) / len(both)}
        differences[name] = as_json(difference, declared) | means
    return differences


def shared_rows(rows: Sequence[Record], others: Sequence[Record]) -> tuple[list[tuple[Record, Record]], int]:
    """Return (pairs of a row and the other's row with the same prompt, sample and truth; number with another truth)."""
    before = {(r["prompt_id"], r["sample"]): r for r in others}
    pairs = [(r, o) for r in rows if (o := before.get((r["prompt_id"], r["sample"]))) is not None]
    same = [(r, o) for r, o in pairs if r["truth"] == o["truth"]]
    return same, len(pairs) - len(same)


def declared_ranges(summary: Mapping[str, Any]) -> dict[str, Range]:
    """Return the declared ranges of a summary's metrics. Older evaluations have none."""
    return {n: (float(r[0]), float(r[1])) for n, m in summary["metrics"].items() if (r := m.get("range"))}


def joined_ranges(*summaries: Mapping[str, Any]) -> dict[str, Range]:
    """Return the widest range of each metric for which all of these summaries declare one."""
    ranges_of_summaries = [declared_ranges(s) for s in summaries]
    names = set.intersection(*(set(ranges) for ranges in ranges_of_summaries)) if ranges_of_summaries else set()
    return {
        n: (min(ranges[n][0] for ranges in ranges_of_summaries), max(ranges[n][1] for ranges in ranges_of_summaries))
        for n in names
    }


def joined_by(*summaries: Mapping[str, Any]) -> list[str]:
    """Return the fields of the truth by which all of these summaries also average accuracy."""
    fields_of_summaries = [s.get("by", OLD_BY) for s in summaries]
    return [field for field in fields_of_summaries[0] if all(field in others for others in fields_of_summaries)]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
