"""Measures of a source's task, as a recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vlmrl.errors import RecipeError
from vlmrl.recipe.schema import Recipe
from vlmrl.tasks.base import Measurer
from vlmrl.tasks.source import Source


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
    from vlmrl.tasks.base import MeasureSettings

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
