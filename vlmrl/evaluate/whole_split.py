"""Results of a task for all responses of a split together: its set metrics and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from vlmrl.dist.world import World
from vlmrl.errors import VlmrlError
from vlmrl.evaluate.set_metrics import no_clash, summarise_sets
from vlmrl.tasks.base import PooledMetrics, Task, Verdict
from vlmrl.tasks.figure import figures_to_json
from vlmrl.tasks.source import response_input
from vlmrl.types import Group, RewardInput, Row, Score, ScoredSample

Kept = tuple[Verdict, Row, Mapping[str, Any]]
"""(verdict, row, record) of a response."""
NO_FIGURES = next(field.default for field in fields(Task) if field.name == "figures")


class WholeSplit:
    """Verdicts on all responses of a split, for a task that has functions of the whole split.

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
        """Keep the verdicts on the groups of a chunk, if they are needed. `records`: of the same responses."""
        if not self.is_needed:
            return
        left = iter(records)
        self._chunks[chunk] = [[self._kept(group, sample, next(left)) for sample in group.samples] for group in groups]

    def gather(self, world: World) -> None:
        """Put the verdicts of all processes into the order of the rows."""
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
        task, verdicts = self._task, [verdict for verdict, _, _ in self._all]
        whole = {**summary, **self._figures(verdicts)}
        if task.set_metrics is None:
            return whole
        try:
            units = None if task.unit is None else [task.unit(row) for _, row, _ in self._all]
            measured = map(verdict_of, records) if self._counts_records else verdicts
            sets = summarise_sets(task.set_metrics, measured, records, units, task.replicates)
            no_clash(list(sets["metrics"]), whole["metrics"], task.name)
        except VlmrlError as error:
            return whole | {"set_metrics_problem": str(error)}
        for name, metric in sets["metrics"].items():
            metric["n"] = _rows_of(name, records, task.by) or metric["n"]
        return whole | {"metrics": whole["metrics"] | sets["metrics"], "set_metrics": sets["set_metrics"]}

    def _kept(self, group: Group, sample: ScoredSample, record: Mapping[str, Any]) -> Kept:
        return (response_input(group, sample), sample.score, record["outcome"]), group.row, record

    def _figures(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        """Return `figures` of a summary, and `figures_problem` if they cannot be made."""
        try:
            return {"figures": figures_to_json(self._task.figures(list(verdicts)))}
        except VlmrlError as error:
            return {"figures": [], "figures_problem": str(error)}


def _rows_of(name: str, records: Iterable[Mapping[str, Any]], by: Sequence[str]) -> int:
    """Return the number of rows of a metric such as `map/cat`: those whose truth has this value in a field of `by`.

    It is 0 for a metric of all rows.
    """
    value = name.partition("/")[2]
    return sum(any(str(r["truth"].get(field)) == value for field in by) for r in records) if value else 0


def verdict_of(record: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a response from its record: without the row's columns, its media and its token ids."""
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
