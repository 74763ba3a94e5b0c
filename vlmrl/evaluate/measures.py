"""Measures of a task (`Task.measures`), as a recipe asks for them, in the records and the summary of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import RecipeError
from vlmrl.recipe.schema import Recipe
from vlmrl.tasks.base import CEILING, VALID, Measurer, MeasureSettings, Task
from vlmrl.tasks.source import Source, response_input
from vlmrl.types import Group

Cell = Mapping[str, Any]
"""Metric as a summary has it: value, low, high, n."""


@dataclass(frozen=True)
class MeasureLine:
    """Measure in a summary, three ways; a cell is None if the evaluation has no such metric.

    Args:
        every: over all responses, with the worst value for those that cannot be measured.
        valid: over those that can be measured.
        ceiling: of the truth beside itself, over the same rows.
        share: `every` / `ceiling`; None if this says nothing: the ceiling is 0, or lower is better.
    """

    name: str
    every: Cell
    valid: Cell | None
    ceiling: Cell | None
    share: float | None


def add_measures(records: Sequence[dict[str, Any]], groups: Sequence[Group], measurer: Measurer) -> list[str]:
    """Add the measures to the outcomes of records of the same groups. Return why responses were not measured."""
    before = len(measurer.problems)
    inputs = [response_input(group, sample) for group in groups for sample in group.samples]
    for record, numbers in zip(records, measurer.measure(inputs), strict=True):
        record["outcome"] = {**record["outcome"], **numbers}
        record.update(numbers)
    return list(measurer.problems[before:])


def measures_record(task: Task, measurer: Measurer, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return `measures` of a summary: `names` in order, `absent` name -> why, `unasked` names."""
    known = () if task.measures is None else task.measures.names
    names = [name for name in known if name in metrics]
    unasked = [name for name in known if name not in metrics and name not in measurer.absent]
    return {"names": names, "absent": dict(measurer.absent), "unasked": unasked}


def measured_names(summary: Mapping[str, Any]) -> set[str]:
    """Return the names of all metrics of a summary that are measures of the task."""
    names = (summary.get("measures") or {}).get("names") or ()
    return {full for name in names for full in (name, f"{name}/{VALID}", f"{name}/{CEILING}")}


def measure_lines(summary: Mapping[str, Any]) -> list[MeasureLine]:
    """Return the measures of a summary, in order."""
    metrics = summary["metrics"]
    names = [name for name in (summary.get("measures") or {}).get("names") or () if name in metrics]
    lines = []
    for name in names:
        every, ceiling = metrics[name], metrics.get(f"{name}/{CEILING}")
        use = ceiling is not None and ceiling["value"] and every["value"] is not None and every.get("better") != "lower"
        share = every["value"] / ceiling["value"] if use and ceiling is not None else None
        lines.append(MeasureLine(name, every, metrics.get(f"{name}/{VALID}"), ceiling, share))
    return lines


def absent_words(summary: Mapping[str, Any]) -> list[str]:
    """Return in words which measures an evaluation lacks, and why; [] if it lacks none."""
    record = summary.get("measures") or {}
    reasons: dict[str, list[str]] = {}
    for name, reason in (record.get("absent") or {}).items():
        reasons.setdefault(str(reason), []).append(str(name))
    lines = [f"absent: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if unasked := record.get("unasked"):
        lines.append(f"not asked for: {', '.join(map(str, unasked))} (eval.measures, eval.weights)")
    return lines


def chosen_measures(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """Return the measures that the recipe asks for; () if the task has none.

    Raises: RecipeError for measures that the task does not have.
    """
    task = source.task
    if task.measures is not None:
        return task.measures.chosen(recipe.eval.measures, recipe.eval.weights, task.name)
    if recipe.eval.measures or recipe.eval.weights:
        raise RecipeError(f"task `{task.name}` has no measures", where="eval.measures", hint="leave the key out")
    return ()


@contextmanager
def open_measurer(recipe: Recipe, source: Source) -> Iterator[Measurer | None]:
    """Context manager that gives the measurer of a source; None if nothing is to be measured.

    Raises: as `chosen_measures`.
    """
    names, r = chosen_measures(recipe, source), recipe.reward
    if source.task.measures is None or not names:
        yield None
        return
    settings = MeasureSettings(
        names, recipe.eval.weights, recipe.model.device, r.timeout_seconds, r.memory_mb, r.workers
    )
    measurer = source.task.measures.open(settings)
    try:
        yield measurer
    finally:
        measurer.close()
