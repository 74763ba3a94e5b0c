"""Summary of an evaluation from its rows: every metric with a 95% interval and the number of its rows.

A row is one response (`evaluate.run.make_records`). The task decides which numbers there are (`Task.outcome`); here
each is averaged over the rows that have it. Metric names: `reward`, `accuracy`, `accuracy/<level>`,
`accuracy/<field>-<value>` (see `Task.by`), `brier`, `parse_failure`, any other outcome of the task, `auc`, `ece`,
`precision`, `recall`, `f1`, `part/<name>`, `response_tokens`, `truncated`; for several samples per prompt `pass@<k>`,
`maj@<k>` and `mean@<n>` (see `evaluate/repeated.py`).

`auc` to `f1` exist if the answer is a probability (outcomes `label` and `confidence`). They are computed from the
counts of the whole split, never as means of means. An answer that cannot be parsed counts as wrong in each of them:
ranked last, certain of the wrong label, in the wrong cell of the confusion matrix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from vlmrl.evaluate.estimates import auc_interval, ece_interval, mean_interval, ratio_interval
from vlmrl.evaluate.interval import METHOD, UNIT_RANGE, Clusters, Interval, Range, range_of
from vlmrl.evaluate.repeated import PromptSamples, repeated_interval, shown_estimates
from vlmrl.metric import metric_facts
from vlmrl.rewards.accuracy_part import is_binary
from vlmrl.types import INAPPLICABLE

Record = Mapping[str, Any]

NOT_AVERAGED = frozenset({"label", "confidence"})
"""Outcomes that do not measure the quality of an answer: AUC and the baselines are computed from them."""
PROBABILITY_METRICS = ("auc", "ece", "precision", "recall", "f1")
"""Metrics of tasks whose answer is a probability."""
LENGTHS = ("response_tokens",)
"""Metrics that count tokens: Student's t, clipped at the declared range."""
SIGNED_RANGE = (-1.0, 1.0)
ANSWER_KEYS = ("answer_value", "answer")
"""Keys of a reward's detail with the answer that it has read, for maj@k; the first that is not None counts."""
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
        no interval, range if none is declared. pass@k needs accuracies that are right or wrong only, maj@k answers.
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
            declared = range_holding(range_of_metric(name, ranges or {}), values)
            metrics[name] = as_json(mean_interval(values, clusters, declared, length=name in LENGTHS), declared)
    metrics |= _of_repeats(rows)
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


def range_holding(declared: Range | None, values: Sequence[float]) -> Range | None:
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


def prompt_samples(rows: Sequence[Record]) -> dict[str, PromptSamples]:
    """Return prompt id -> its samples that have an accuracy, for pass@k, maj@k and mean@k.

    It is {} if an accuracy is neither a share nor -1, 0 or 1; -1 is wrong and becomes 0.
    """
    groups: dict[str, list[Record]] = {}
    for r in rows:
        if r["outcome"].get("accuracy") is not None:
            groups.setdefault(str(r["prompt_id"]), []).append(r)
    values = [r["outcome"]["accuracy"] for g in groups.values() for r in g]
    if not (is_binary(values) or all(0.0 <= v <= 1.0 for v in values)):
        return {}
    has_answers = any(_has_answer(r) for r in rows)
    return {
        prompt_id: PromptSamples(
            tuple(max(0.0, r["outcome"]["accuracy"]) for r in group),
            tuple(map(answer_of, group)) if has_answers else None,
            tuple(clusters_of(group[:1])[0]),
        )
        for prompt_id, group in groups.items()
    }


def answer_of(row: Record) -> Hashable | None:
    """Return the answer with which a response votes in maj@k; None if there is none.

    It is `answer_value`, else `answer`, in the reward's detail: the first as the reward has read it, in a form in which
    equal answers are equal. White space at the ends and the case of a text do not count.
    """
    for detail in _details(row):
        for key in ANSWER_KEYS:
            answer = detail.get(key)
            if isinstance(answer, str):
                return answer.strip().casefold() or None
            if isinstance(answer, (int, float)):
                return answer if math.isfinite(answer) else None
            if answer is not None:
                return json.dumps(answer, sort_keys=True)
    return None


def _has_answer(row: Record) -> bool:
    return any(key in detail for detail in _details(row) for key in ANSWER_KEYS)


def _details(row: Record) -> list[Mapping[str, Any]]:
    """Return the details of a response's rewards."""
    details = row.get("detail")
    return [d for d in details.values() if isinstance(d, Mapping)] if isinstance(details, Mapping) else []


def _of_repeats(rows: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return pass@k, maj@k and mean@k over prompts, if each prompt has several samples."""
    prompts = list(prompt_samples(rows).values())
    return {
        f"{metric}@{k}": as_json(repeated_interval(prompts, metric, k), UNIT_RANGE)
        for metric, k in shown_estimates(prompts)
    }


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


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
