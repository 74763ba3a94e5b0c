"""Summary of an evaluation from its graded rows: every metric with a 95% interval and the number of its rows.

A row is one response (`evaluate.run.make_records`). The task decides which numbers there are (`Task.outcome`); here
each is averaged over the rows that have it. Metric names: `reward`, `accuracy`, `accuracy/<level>`,
`accuracy/<field>-<value>` (see `Task.by`), `brier`, `parse_failure`, any other outcome of the task, `auc`, `ece`,
`precision`, `recall`, `f1`, `part/<name>`, `response_tokens`, `truncated`; for several samples per prompt `pass@<k>`,
`maj@<k>` and `mean@<n>` (see repeated.py).

`auc` to `f1` exist if the answer is a probability (outcomes `label` and `confidence`). They are computed from the
counts of the whole split, never as means of means. An answer that cannot be parsed counts as wrong in each of them:
ranked last, certain of the wrong label, in the wrong cell of the confusion matrix.

Numbers are kept column by column, about 8 bytes per number and id, and texts are not. So an evaluation of any size can
be summarised while its records go to disk.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrl.evaluate.estimates import (
    METHOD,
    UNIT_RANGE,
    Clusters,
    Floats,
    Integers,
    Interval,
    Range,
    RowKeys,
    Units,
    as_numbers,
    auc_interval,
    ece_interval,
    mean_interval,
    range_of,
    ratio_interval,
)
from vlmrl.evaluate.record_table import coordinate_problems
from vlmrl.evaluate.repeated import NO_ANSWER, SampleTable, in_common
from vlmrl.metric import metric_facts
from vlmrl.rewards.base import is_binary
from vlmrl.store.evaluated_rows import refused_words
from vlmrl.types import INAPPLICABLE, hash64, is_cut

Record = Mapping[str, Any]

ANSWER_KEYS = ("answer_value", "answer")
"""Keys of a reward's detail with the answer that it has read, for maj@k; the first that is not None counts."""
MAX_VALUES = 20
"""Maximum number of different values of a field that groups rows. With more, it is a measurement or a name."""
ODD = 0x1E3779B97F4A7C15
"""Distance between the numbers of equal rows."""
OTHER = -1
"""Code of a row that has no accuracy, or a value that cannot group rows."""


class EvalColumns:
    """Columns of an evaluation. NaN stands for a number that a response does not have.

    Args:
        by: see `Task.by`.
        records: as `evaluate.run.make_records` makes them; more can be added later.

    Attributes:
        outcomes, parts: names of the outcomes and of the reward's parts, in order of first appearance.
        applying: which parts apply (name, whether it is a number), once per pattern, of responses with a score.
        has_answers: whether a reward's detail has a key for an answer.
        by_values: field -> its values that group rows, with their codes in `codes`; only fields with few values.
    """

    def __init__(self, by: Sequence[str] = (), records: Iterable[Record] = ()) -> None:
        self.by = tuple(by)
        self.count = self.max_sample = self.reward_errors = self.unavailable = 0
        self.outcomes: dict[str, None] = {}
        self.parts: dict[str, None] = {}
        self.applying: set[frozenset[tuple[str, bool]]] = set()
        self.has_answers = False
        self._numbers: dict[tuple[str, str], array[float]] = {}
        self._has_confidence, self._truncated = array("b"), array("b")
        self._prompts, self._samples, self._answers = array("q"), array("q"), array("q")
        self._image_starts, self._images = array("q", [0]), array("q")
        self.by_values: dict[str, dict[Any, int]] = {field: {} for field in self.by}
        self._codes: dict[str, array[int]] = {field: array("h") for field in self.by}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add the numbers of one response."""
        outcome, error = record["outcome"], record.get("error")
        self._put("", "reward", record["score"])
        self._put("", "response_tokens", record["num_tokens"])
        for name, value in outcome.items():
            self.outcomes.setdefault(name)
            self._put("outcome", name, value)
        for name, value in record["parts"].items():
            self.parts.setdefault(name)
            self._put("part", name, value)
        if error is None:
            self.applying.add(frozenset((name, value is not None) for name, value in record["parts"].items()))
        self._has_confidence.append("confidence" in outcome)
        self._truncated.append(is_cut(record["finish"], record.get("ending")))
        self._prompts.append(hash64(record["prompt_id"]))
        self._samples.append(record["sample"])
        self._images.extend(hash64(key) for key in image_ids(record))
        self._image_starts.append(len(self._images))
        has_key = any(key in detail for detail in _details(record) for key in ANSWER_KEYS)
        self.has_answers = self.has_answers or has_key
        answer = answer_of(record)
        if answer is None:
            self._answers.append(NO_ANSWER)
        elif isinstance(answer, str):
            self._answers.append(hash64(answer))
        else:  # equal numbers have one text, whatever their type
            self._answers.append(hash64("number", _number_text(answer)))
        self._add_truth(record["truth"], outcome.get("accuracy") is not None)
        unavailable = record.get("status") == "unavailable"
        self.unavailable += unavailable
        self.reward_errors += error not in (None, INAPPLICABLE) and not unavailable
        self.max_sample = max(self.max_sample, record["sample"] + 1)
        self.count += 1

    def number(self, kind: str, name: str) -> Floats:
        """Return a column, [N].

        Args:
            kind: "outcome", "part", or "" for `reward` and `response_tokens`.
        """
        column = self._numbers.get((kind, name), array("d"))
        values_N = np.full(self.count, math.nan)
        values_N[: len(column)] = column
        return values_N

    def truncated(self) -> Floats:
        """Return 1 for each response that was cut at the token limit, else 0, [N]."""
        return np.frombuffer(self._truncated, dtype=np.int8).astype(np.float64)

    def has_confidence(self) -> NDArray[np.bool_]:
        """Return whether the task measures a confidence on each response, [N]."""
        return np.frombuffer(self._has_confidence, dtype=np.int8).astype(bool)

    def codes(self, field: str) -> NDArray[np.int16]:
        """Return the code of each row's value of a field of `by`, OTHER for none, [N]."""
        return np.frombuffer(self._codes[field], dtype=np.int16)

    def prompts(self) -> Integers:
        """Return the hash of each response's prompt id, [N]."""
        return as_numbers(self._prompts)

    def rows(self) -> Integers:
        """Return a number of each response's row, [N]: that of its prompt, unless an equal row came before."""
        prompts_N, samples_N = self.prompts(), as_numbers(self._samples)
        order_N, occurrence_N = np.lexsort((samples_N, prompts_N)), np.arange(self.count)
        is_first_N = (np.diff(prompts_N[order_N], prepend=-1) != 0) | (np.diff(samples_N[order_N], prepend=-1) != 0)
        begin_N = np.maximum.accumulate(np.where(is_first_N, occurrence_N, 0))
        occurrence_N[order_N] = occurrence_N - begin_N
        return prompts_N + occurrence_N * ODD

    def answers(self) -> Integers:
        """Return the hash of each response's answer, NO_ANSWER for none, [N]."""
        return as_numbers(self._answers)

    @property
    def scored_parts(self) -> list[str]:
        """Names of the parts of responses that have a score."""
        return sorted({name for pattern in self.applying for name, _ in pattern}, key=list(self.parts).index)

    @property
    def num_images(self) -> int:
        return len(np.unique(as_numbers(self._images)))

    def clusters(self) -> RowKeys:
        """Return the clusters of the responses: the images that they show, or the prompt of one without images."""
        starts_N1, images = as_numbers(self._image_starts), as_numbers(self._images)
        without_N = np.diff(starts_N1) == 0
        if not without_N.any():
            return RowKeys(starts_N1, images)
        counts_N = np.where(without_N, 1, np.diff(starts_N1))
        all_starts = np.concatenate([[0], np.cumsum(counts_N)])
        keys = np.empty(int(counts_N.sum()), dtype=np.int64)
        is_prompt = np.repeat(without_N, counts_N)
        keys[is_prompt], keys[~is_prompt] = self.prompts()[without_N], images
        return RowKeys(all_starts, keys)

    def _put(self, kind: str, name: str, value: Any) -> None:
        column = self._numbers.setdefault((kind, name), array("d"))
        if len(column) < self.count:
            column.extend([math.nan] * (self.count - len(column)))
        number = finite(value)
        column.append(math.nan if number is None else number)

    def _add_truth(self, truth: Mapping[str, Any], has_accuracy: bool) -> None:
        for field, codes in self._codes.items():
            values, value = self.by_values[field], truth.get(field)
            usable = has_accuracy and isinstance(value, (int, str)) and not isinstance(value, bool)
            if usable and len(values) <= MAX_VALUES:
                codes.append(values.setdefault(value, len(values)))
            else:
                codes.append(values.get(value, OTHER) if usable else OTHER)


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
            if isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer)):
                return answer
            if isinstance(answer, float):
                return None
            if answer is not None:
                return json.dumps(answer, sort_keys=True)
    return None


def _number_text(number: Any) -> str:
    """Return one text for equal numbers, and another for others. `hash` would not do: hash(-1) == hash(-2)."""
    exact = Fraction(number)
    return f"{exact.numerator:x}/{exact.denominator:x}"


def _details(row: Record) -> list[Mapping[str, Any]]:
    """Return the details of a response's rewards."""
    details = row.get("detail")
    return [d for d in details.values() if isinstance(d, Mapping)] if isinstance(details, Mapping) else []


def image_ids(row: Record) -> tuple[str, ...]:
    """Return the content hashes of a row's images."""
    return tuple(image["sha256"] for image in row["images"])


def finite(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, and for an integer that is too large for a float."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:
        return None


NOT_AVERAGED = frozenset({"label", "confidence"})
"""Outcomes that do not measure the quality of an answer: AUC and the baselines are computed from them."""
LENGTHS = ("response_tokens",)
"""Metrics that count tokens: Student's t, clipped at the declared range."""
SIGNED_RANGE = (-1.0, 1.0)
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
    return summarise_columns(EvalColumns(by, rows), ranges)


def summarise_columns(columns: EvalColumns, ranges: Mapping[str, Range] | None = None) -> dict[str, Any]:
    """Return the summary of an evaluation from its columns: see `summarise`."""
    metrics: dict[str, dict[str, Any]] = {}
    clusters = columns.clusters()
    units = Units(clusters, columns.count)  # most metrics are means over all rows
    probability_metrics = {
        name: as_json(interval, UNIT_RANGE)
        for name, interval in _of_probabilities(columns, clusters).items()
        if interval.n
    }
    for name, values_N in averaged(columns).items():
        if name.startswith(("part/", "response_tokens")):
            metrics |= probability_metrics
        has_value_N = ~np.isnan(values_N)
        if has_value_N.any():
            values = values_N[has_value_N]
            own = units if has_value_N.all() else clusters.take(has_value_N)
            declared = range_holding(range_of_metric(name, ranges or {}), values)
            metrics[name] = as_json(mean_interval(values, own, declared, length=name in LENGTHS), declared)
    if samples := sample_table(columns):
        shown = samples.shown_estimates()
        metrics |= {f"{metric}@{k}": as_json(samples.interval(metric, k), UNIT_RANGE) for metric, k in shown}
    label_N = columns.number("outcome", "label")
    return {
        "rows": columns.count,
        "prompts": len(np.unique(columns.prompts())),
        "samples": columns.max_sample,
        "images": columns.num_images,
        "reward_errors": columns.reward_errors,
        **({"reward_unavailable": columns.unavailable} if columns.unavailable else {}),
        "by": list(columns.by),
        "intervals": METHOD,
        "metrics": metrics,
        "baselines": _baselines(label_N[~np.isnan(label_N)].tolist()),
    }


def task_problems(summary: Mapping[str, Any]) -> list[str]:
    """Return in words what an endpoint refused, what the task failed to measure, and boxes in other coordinates."""
    texts = list(filter(None, [refused_words(summary)]))
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
    return texts + coordinate_problems(summary)


def range_of_metric(name: str, ranges: Mapping[str, Range]) -> Range | None:
    """Return the declared range of a metric: that of `ranges`, else that of `metric_facts`, else None."""
    return ranges.get(name) or metric_facts(name).range


def range_holding(declared: Range | None, values: Sequence[float] | Floats) -> Range | None:
    """Return the declared range if it contains all values, else None; [-1, 1] if rewards use -1 and 1.

    The accuracy of a user's reward need not be a share: it may be -1 for wrong and 1 for right.
    """
    if declared is None or range_of(declared, values) == declared:
        return declared
    return SIGNED_RANGE if declared == UNIT_RANGE and is_binary(np.unique(values).tolist()) else None


def averaged(columns: EvalColumns, like: EvalColumns | None = None) -> dict[str, Floats]:
    """Return metric name -> its number of each row, NaN if the row has none; [N]. All metrics that are means, in order.

    Args:
        like: columns of the same rows in another evaluation, which name the metrics; None = the columns themselves.
    Example: truths with a `shape` of "disc" or "ring", by = ["shape"] -> also accuracy/shape-disc, accuracy/shape-ring,
        because the field has 2 to MAX_VALUES different values.
    """
    named = like or columns
    outcomes = _in_order(named.outcomes)
    values = {"reward": columns.number("", "reward")}
    values |= {name: columns.number("outcome", name) for name in outcomes if name.startswith("accuracy")}
    for field, codes in named.by_values.items():
        accuracy_N, code_N = columns.number("outcome", "accuracy"), named.codes(field)
        if 1 < len(codes) <= MAX_VALUES:
            for value in sorted(codes, key=lambda v: (isinstance(v, str), v)):
                values[f"accuracy/{field}-{value}"] = np.where(code_N == codes[value], accuracy_N, math.nan)
    values |= {name: columns.number("outcome", name) for name in outcomes if not name.startswith("accuracy")}
    values |= {f"part/{name}": columns.number("part", name) for name in named.parts}
    return values | {"response_tokens": columns.number("", "response_tokens"), "truncated": columns.truncated()}


class Aligned(NamedTuple):
    """Values of a metric on the N rows, or prompts, on which all of E evaluations have it; [E, N]."""

    value_EN: Floats
    clusters: RowKeys
    declared: Range | None


def aligned(columns: Sequence[EvalColumns], ranges: Mapping[str, Range]) -> dict[str, Aligned]:
    """Return metric name -> its values in several evaluations of the same rows. The first one names the metrics.

    Args:
        columns: of the same rows, in the same order.
    """
    clusters, every = columns[0].clusters(), [averaged(one, columns[0]) for one in columns]
    values_by_metric = {}
    for name in every[0]:
        value_EN = np.stack([values[name] for values in every])
        has_value_N = ~np.isnan(value_EN.sum(axis=0))
        if has_value_N.any():
            value_EN = value_EN[:, has_value_N]
            declared = range_holding(range_of_metric(name, ranges), value_EN.ravel())
            values_by_metric[name] = Aligned(value_EN, clusters.take(has_value_N), declared)
    return values_by_metric


def aligned_prompts(columns: Sequence[EvalColumns]) -> dict[str, Aligned]:
    """Return pass@k, maj@k and mean@k of the prompts that all evaluations have, for the k that all show."""
    tables = [table for one in columns if (table := sample_table(one))]
    tables = in_common(tables) if len(tables) == len(columns) else []
    shown = [table.shown_estimates() for table in tables]
    return {
        f"{metric}@{k}": Aligned(np.stack([t.values(metric, k) for t in tables]), tables[0].clusters_P, UNIT_RANGE)
        for metric, k in (shown[0] if shown else ())
        if all((metric, k) in own for own in shown)
    }


def _in_order(outcomes: Iterable[str]) -> list[str]:
    """Return the outcomes that are averaged, accuracies first."""
    names = [name for name in outcomes if name not in NOT_AVERAGED]
    return sorted(names, key=lambda n: (not n.startswith("accuracy"), n != "accuracy"))


def metric_value(summary: Mapping[str, Any], name: str) -> float:
    """Return the value of a metric of a summary; NaN if the rows do not have it."""
    metric = summary["metrics"].get(name)
    return math.nan if metric is None or metric["value"] is None else float(metric["value"])


def clusters_of(rows: Sequence[Record]) -> Clusters:
    """Return the clusters of rows: the images that they show, or the prompt of a row without images."""
    return [image_ids(r) or (str(r["prompt_id"]),) for r in rows]


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
    return _baselines([v for r in rows if (v := r["outcome"].get("label")) is not None])


def _baselines(labels: Sequence[float]) -> dict[str, dict[str, Any]]:
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


def sample_table(columns: EvalColumns) -> SampleTable | None:
    """Return the responses that have an accuracy, by prompt, for pass@k, maj@k and mean@k.

    It is None if an accuracy is neither a share nor -1, 0 or 1; -1 is wrong and becomes 0.
    """
    accuracy_N = columns.number("outcome", "accuracy")
    has_accuracy_N = ~np.isnan(accuracy_N)
    accuracy_S = accuracy_N[has_accuracy_N]
    if not (is_binary(np.unique(accuracy_S).tolist()) or bool(((accuracy_S >= 0) & (accuracy_S <= 1)).all())):
        return None
    answer_S = columns.answers()[has_accuracy_N] if columns.has_answers else None
    clusters_S = columns.clusters().take(has_accuracy_N)
    return SampleTable(columns.rows()[has_accuracy_N], np.maximum(0.0, accuracy_S), answer_S, clusters_S)


def _of_probabilities(columns: EvalColumns, clusters: RowKeys) -> dict[str, Interval]:
    """Return AUC, ECE, precision, recall and F1 of rows whose answer is a probability of the label 1; EMPTY: n = 0."""
    label_N = columns.number("outcome", "label")
    has_label_N = ((label_N == 0) | (label_N == 1)) & columns.has_confidence()
    own, label_L = clusters.take(has_label_N), label_N[has_label_N]
    confidence_L = columns.number("outcome", "confidence")[has_label_N]
    failed_L = np.isnan(confidence_L)
    scores = np.where(failed_L, np.where(label_L == 1, FAILED_POSITIVE, FAILED_NEGATIVE), confidence_L)
    probabilities = np.where(failed_L, 1.0 - label_L, confidence_L)
    return {
        "auc": auc_interval(label_L, scores, own),
        "ece": ece_interval(label_L, probabilities, own),
        **_of_counts(label_L, probabilities, own),
    }


def _of_counts(label_L: Floats, probability_L: Floats, clusters: RowKeys) -> dict[str, Interval]:
    """Return precision, recall and F1 of the label 1. A probability of 0.5 is wrong, whatever the label."""
    answered_one = np.where(label_L == 1, probability_L > 0.5, probability_L >= 0.5).astype(np.float64)
    hit = answered_one * label_L
    both = label_L + answered_one  # 2 TP + FP + FN = positives + answers with the label 1
    return {
        "precision": ratio_interval(hit, answered_one, clusters),
        "recall": ratio_interval(hit, label_L, clusters),
        "f1": ratio_interval(2 * hit, both, clusters),
    }
