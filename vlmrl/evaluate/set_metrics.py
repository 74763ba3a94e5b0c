"""Metrics and figures of a whole split (`Task.set_metrics`), with intervals from resampled units.

Such a metric is no mean over rows (average precision, a ratio of pooled counts), so the influence of a row is not
known. It is computed again on `Task.replicates` resamples of the units that rows share. As many units are drawn as
there are, with replacement. A row is in a resample as often as all of its units were drawn together (the product of
their counts). For rows of one unit each this is the cluster bootstrap; for rows that show several images it is Owen's
pigeonhole bootstrap (2007), whose variance is, if anything, too large. The interval is that of the percentiles. In
simulations for an F1 of 10 to 200 units it contains the true value in 92 to 94% of cases; of 5 units in 78%. So fewer
than LEAST_UNITS units have no interval (tests/unit/evaluate/test_set_metrics.py), nor has a metric that is the same on
all resamples. A metric that is biased on few responses has reflected percentiles instead
(`AccumulatedMetrics.reflected`).

The draws depend only on the units, their number and SEED. Two evaluations of the same rows therefore have the same
resamples, and the replicates of a paired difference are the differences of their replicates. So `vlmrl compare` does
not need the task.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrl.dist.world import World
from vlmrl.errors import DataError, VlmrlError
from vlmrl.evaluate.estimates import Clusters, Floats, Interval, Units
from vlmrl.evaluate.metrics import as_json, clusters_of, finite
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.base import REPLICATES, AccumulatedMetrics, GradedResponse, PooledMetrics, SetMetrics, Task
from vlmrl.tasks.figure import figures_to_json
from vlmrl.tasks.source import response_input
from vlmrl.types import Group, RewardInput, Row, Score, ScoredSample

LEAST_UNITS = 10
"""Minimum number of units for an interval. With fewer, percentile intervals are too narrow."""
SEED = 20_070_601
Record = Mapping[str, Any]


def summarise_sets(
    compute: SetMetrics,
    responses: Iterable[GradedResponse],
    records: Sequence[Record],
    units: Sequence[Hashable] | None = None,
    num_resamples: int = REPLICATES,
) -> dict[str, Any]:
    """Return the metrics of a whole split, as a summary holds them.

    Args:
        compute: `Task.set_metrics`.
        responses, records: of the same responses, in the same order. For PooledMetrics, responses are read once.
        units: the unit with which each response is resampled; None = the images that rows share.
        num_resamples: number of resamples for an interval; 0 = no intervals.
    Returns: {"metrics": name -> as `summarise` has them, "set_metrics": {"names", "undefined": names of metrics that
        are None on all of the rows and left out, "method", "key": hash of rows, units and draws, "counts": the sums of
        PooledMetrics by name, "replicates": name -> [num_resamples] values, None if a metric is not defined, "problem":
        why a resample could not be measured; then there is no interval}}.
    Raises: DataError for a metric that is not a number.
    """
    clusters = clusters_of(records) if units is None else [(unit,) for unit in units]
    pooled = CountTable.of(compute, responses) if isinstance(compute, PooledMetrics) else None
    measure = _measure(compute, list(responses)) if pooled is None else pooled.metrics
    values = _numbers(measure(np.ones(len(records), dtype=np.int64)))
    shared = Units(clusters, len(records))
    defined = [name for name, value in values.items() if math.isfinite(value)]
    problem, number = "", num_resamples if shared.count >= LEAST_UNITS else 0
    try:
        replicates = _replicates(measure, shared, defined, number)
    except VlmrlError as error:
        problem, replicates = str(error), _replicates(measure, shared, defined, 0)
    bounds = compute.reflected if isinstance(compute, AccumulatedMetrics) else None
    metrics = {name: as_json(_interval(values[name], drawn_R, shared, bounds)) for name, drawn_R in replicates.items()}
    method = "percentiles" if bounds is None else "reflected percentiles (basic bootstrap)"
    return {
        "metrics": metrics,
        "set_metrics": {
            "names": list(metrics),
            "undefined": [name for name in values if name not in metrics],
            "method": f"{method} of {num_resamples} resamples of the units that rows share",
            "key": _key(records, clusters, num_resamples),
            **({} if pooled is None else {"counts": pooled.sums}),
            **({"problem": problem} if problem else {}),
            "replicates": {name: [finite(v) for v in drawn_R.tolist()] for name, drawn_R in replicates.items()},
        },
    }


@dataclass(frozen=True)
class CountTable:
    """Counts of every response for PooledMetrics: a resample then costs one product.

    Args:
        names: names of the counts, [C].
    """

    pooled: PooledMetrics
    names: Sequence[str]
    count_NC: NDArray[np.int64]

    @classmethod
    def of(cls, pooled: PooledMetrics, responses: Iterable[GradedResponse]) -> CountTable:
        """Return the counts of these responses. Raises: DataError if they do not all have the same names."""
        names: tuple[str, ...] | None = None
        numbers = array("q")
        for graded in responses:
            counts = pooled.count(graded)
            if names is None:
                names = tuple(counts)
            if counts.keys() != set(names):
                message = f"the counts of a response are called {', '.join(counts)}; those of others {', '.join(names)}"
                raise DataError(message, hint="return the same names for every response, with 0 where there is nothing")
            try:
                numbers.extend(counts[name] for name in names)
            except (TypeError, OverflowError) as error:
                wrong = next(n for n in names if not isinstance(counts[n], int) or abs(counts[n]) >= 1 << 63)
                raise DataError(
                    f"the count `{wrong}` of a response is {quoted(counts[wrong], 60)}",
                    hint="return whole numbers that fit in 64 bits",
                ) from error
        width = len(names or ())
        count_NC = np.frombuffer(numbers, dtype=np.int64).reshape(-1, width) if width else np.zeros((0, 0), np.int64)
        return cls(pooled, names or (), count_NC)

    @property
    def sums(self) -> dict[str, int]:
        """Sums over all responses, by name."""
        return self._named(self.count_NC.sum(0))

    def metrics(self, count_N: NDArray[np.int64]) -> Mapping[str, float | None]:
        """Return the metrics of the responses, each taken as often as `count_N` says."""
        return self.pooled.metrics(self._named(count_N @ self.count_NC))  # [N] x [N, C] -> [C]

    def _named(self, sum_C: NDArray[np.int64]) -> dict[str, int]:
        return dict(zip(self.names, sum_C.tolist(), strict=True))


def _measure(compute: SetMetrics, responses: Sequence[GradedResponse]) -> Callable[[NDArray[np.int64]], Any]:
    """Return a function from how often each response is taken, [N], to the metrics."""
    if isinstance(compute, AccumulatedMetrics):
        return compute.accumulate([compute.examine(graded) for graded in responses])

    def of_chosen(count_N: NDArray[np.int64]) -> Any:
        chosen = [responses[i] for i in np.repeat(np.arange(len(responses)), count_N).tolist()]
        return compute(chosen) if chosen else {}

    return of_chosen


def _replicates(
    measure: Callable[[NDArray[np.int64]], Any], units: Units, names: Sequence[str], number: int
) -> dict[str, Floats]:
    """Return name -> the metric on each of so many resamples, NaN if it is not defined; [number] each.

    Args:
        measure: how often each row is in a resample, [N] -> its metrics.
    """
    replicates = {name: np.full(number, math.nan) for name in names}
    for k, count_N in enumerate(resamples(units, number) if number else ()):
        for name, value in _numbers(measure(count_N)).items():
            if name in replicates:
                replicates[name][k] = value
    return replicates


def resamples(units: Units, number: int) -> list[NDArray[np.int64]]:
    """Return how often each row is in each of so many resamples, [N] each."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    drawn_RM = rng.multinomial(units.count, np.full(units.count, 1 / units.count), size=number)
    return [row_counts(units, drawn_M) for drawn_M in drawn_RM]


def row_counts(units: Units, drawn_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each row is in a resample: the product of the counts of its units. [N]."""
    count_N = np.ones(units.num_rows, dtype=np.int64)
    np.multiply.at(count_N, units.rows_in, drawn_M[units.unit_of])
    return count_N


def set_differences(summary: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the paired differences (summary - other) of the metrics of a whole split that both have.

    Returns: as `paired.paired_differences`; {} unless both have the same rows, units and draws.
    """
    mine, theirs = (s.get("set_metrics") or {} for s in (summary, other))
    if not mine or mine.get("key") != theirs.get("key"):
        return {}
    differences = {}
    for name, drawn in mine["replicates"].items():
        a, b = other["metrics"].get(name), summary["metrics"].get(name)
        if name not in theirs["replicates"] or a is None or b is None:
            continue
        before = theirs["replicates"][name]
        pairs = (
            zip(drawn, before, strict=True) if len(drawn) == len(before) else ()
        )  # () if one of them has no intervals
        drawn_R = np.array([math.nan if None in pair else pair[0] - pair[1] for pair in pairs], dtype=np.float64)
        low, high = _ends(drawn_R)
        value = b["value"] - a["value"]
        difference = Interval(value, low, high, b["n"], b["clusters"])
        differences[name] = as_json(difference) | {"a": a["value"], "b": b["value"]}
    return differences


def set_metrics_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the names of a summary's metrics of the whole split."""
    return list((summary.get("set_metrics") or {}).get("names") or ())


def _interval(value: float, drawn_R: Floats, units: Units, bounds: tuple[float, float] | None) -> Interval:
    """Return the interval of a metric.

    Args:
        bounds: range of a metric whose interval is reflected (`AccumulatedMetrics.reflected`): from 2 * value - high to
            2 * value - low. None = not reflected.
    Source: the basic bootstrap interval, Davison and Hinkley (1997), equation 5.6.
    """
    low, high = _ends(drawn_R)
    if bounds is not None and math.isfinite(low):
        low, high = max(bounds[0], 2 * value - high), min(bounds[1], 2 * value - low)
    return Interval(value, min(low, value), max(high, value), units.num_rows, units.count)


def _ends(drawn_R: Floats) -> tuple[float, float]:
    """Return the 2.5th and the 97.5th percentile.

    NaN unless more than half of the replicates are defined, and if all of those are equal: resamples of units that are
    all alike do not show what other units would give.
    """
    defined = drawn_R[np.isfinite(drawn_R)]
    if 2 * len(defined) <= len(drawn_R) or np.ptp(defined) == 0:
        return math.nan, math.nan
    low, high = np.quantile(defined, (0.025, 0.975))
    return float(low), float(high)


def _numbers(returned: Any) -> dict[str, float]:
    """Return a task's set metrics as names with numbers, NaN if one is not defined."""
    if not isinstance(returned, Mapping):
        raise DataError(f"the set metrics of the task are a {type(returned).__name__}, not names with numbers")
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        if value is not None and (isinstance(value, str) or not hasattr(value, "__float__")):
            raise DataError(f"the set metric `{name}` of the task is {quoted(value)}, not a number or None")
        numbers[str(name)] = math.nan if value is None else float(value)
    return numbers


def _key(records: Sequence[Record], clusters: Clusters, num_resamples: int) -> str:
    """Return a hash of everything that resamples depend on: the rows with their truths, their units, the draws."""
    digest = hashlib.sha256(json.dumps([SEED, num_resamples]).encode())
    for record, ids in zip(records, clusters, strict=True):
        row = [record["prompt_id"], record["sample"], record["truth"], [str(unit) for unit in ids]]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


Kept = tuple[GradedResponse, Row, Mapping[str, Any]]
"""(graded, row, record) of a response."""
NO_FIGURES = next(field.default for field in fields(Task) if field.name == "figures")


class WholeSplit:
    """All graded responses of a split, for a task that has functions of the whole split.

    They stay in memory, because these functions get all of them at once. For other tasks nothing is kept. For
    PooledMetrics, counts are made from the records when all are graded.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._chunks: dict[int, list[list[Kept]]] = {}
        self._all: list[Kept] = []

    @property
    def is_needed(self) -> bool:
        """Return whether the task has figures, or set metrics that cannot be measured on records one by one."""
        has_sets = self._task.set_metrics is not None and not self._counts_records
        return has_sets or self._task.figures is not NO_FIGURES

    @property
    def _counts_records(self) -> bool:
        return isinstance(self._task.set_metrics, PooledMetrics) and self._task.unit is None

    def add(self, chunk: int, groups: Sequence[Group], records: Sequence[Mapping[str, Any]]) -> None:
        """Keep the responses to the groups of a chunk, if they are needed. `records`: of the same responses."""
        if not self.is_needed:
            return
        left = iter(records)
        self._chunks[chunk] = [[self._kept(group, sample, next(left)) for sample in group.samples] for group in groups]

    def gather(self, world: World) -> None:
        """Put the responses of all processes into the order of the rows."""
        for chunk in range(max(world.gather(max(self._chunks, default=-1))) + 1):
            groups = world.interleave(self._chunks.get(chunk, []))
            self._all += [kept for group in groups for kept in group]
        self._chunks = {}

    def add_to(self, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a summary with the task's results for the whole split.

        The answers exist, and may have taken an hour. So a failure of the task is recorded, not raised.

        Args:
            records: all records, in the order of the rows.
        """
        task, responses = self._task, [graded for graded, _, _ in self._all]
        whole = {**summary, **self._figures(responses)}
        if task.set_metrics is None:
            return whole
        try:
            units = None if task.unit is None else [task.unit(row) for _, row, _ in self._all]
            measured = map(graded_of, records) if self._counts_records else responses
            sets = summarise_sets(task.set_metrics, measured, records, units, task.replicates)
            if clash := next((name for name in sets["metrics"] if name in whole["metrics"]), None):
                message = f"task `{task.name}` has a set metric `{clash}`, but a metric of its rows has this name too"
                raise DataError(message, hint="give it another name")
        except VlmrlError as error:
            return whole | {"set_metrics_problem": str(error)}
        for name, metric in sets["metrics"].items():
            metric["n"] = _rows_of(name, records, task.by) or metric["n"]
        return whole | {"metrics": whole["metrics"] | sets["metrics"], "set_metrics": sets["set_metrics"]}

    def _kept(self, group: Group, sample: ScoredSample, record: Mapping[str, Any]) -> Kept:
        return (response_input(group, sample), sample.score, record["outcome"]), group.row, record

    def _figures(self, responses: Sequence[GradedResponse]) -> dict[str, Any]:
        """Return `figures` of a summary, and `figures_problem` if they cannot be made."""
        try:
            return {"figures": figures_to_json(self._task.figures(list(responses)))}
        except VlmrlError as error:
            return {"figures": [], "figures_problem": str(error)}


def _rows_of(name: str, records: Iterable[Mapping[str, Any]], by: Sequence[str]) -> int:
    """Return the number of rows of a metric such as `map/cat`: those whose truth has this value in a field of `by`.

    It is 0 for a metric of all rows.
    """
    value = name.partition("/")[2]
    return sum(any(str(r["truth"].get(field)) == value for field in by) for r in records) if value else 0


def graded_of(record: Mapping[str, Any]) -> GradedResponse:
    """Return a graded response from its record: without the row's columns, its media and its token ids."""
    value = record["score"]
    x = RewardInput(
        record["text"],
        record["truth"],
        finish=record["finish"],
        num_tokens=record["num_tokens"] or 0,
        prompt_id=record["prompt_id"],
        sample=record["sample"],
    )
    score = Score(
        math.nan if value is None else value,
        record["parts"],
        record["note"] or "",
        error=record["error"],
        status=record["status"] or "ok",
        detail=record["detail"],
    )
    return x, score, record["outcome"]
