"""Sources of a recipe: their rows, and the scorers of their rewards."""

from __future__ import annotations

from vlmrl.errors import DataError
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.several_scorer import RewardScorer, open_scorer
from vlmrl.tasks.source import Source, open_source, open_validation, scores_responses


def open_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """Return (training sources, validation sources) of a recipe; the latter are empty if it does not validate.

    Raises: DataError and others as `open_source`; DataError when validation is on the test split without permission.
    """
    sources = [open_source(d, recipe.reward, scored=scores_responses(recipe)) for d in recipe.data]
    validates = recipe.data if recipe.eval.enabled else []
    validation = [v for v in (open_validation(d, recipe.reward) for d in validates) if v is not None]
    for v in validation:
        if v.split == "test" and not recipe.eval.allow_test_split:
            raise DataError(
                f"source `{v.name}` validates on its test split: choosing a checkpoint by it would spoil the test",
                hint="use a validation split, or set eval.allow_test_split = true (the run is then labelled)",
            )
    return sources, validation


def make_scorer(source: Source, recipe: Recipe) -> RewardScorer:
    """Return the scorer of a source, with the recipe's limits."""
    r = recipe.reward
    return open_scorer(
        source.reward, source.weights, timeout_seconds=r.timeout_seconds, memory_mb=r.memory_mb, workers=r.workers
    )
