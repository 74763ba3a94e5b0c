"""Sources of a recipe: their rows, and the scorers of their rewards."""

from __future__ import annotations

from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.several_scorer import RewardScorer, open_scorer
from vlmrl.rewards.worker_code import NO_PLACE, ServicePlace
from vlmrl.setup.eval_sets import open_eval_sets
from vlmrl.tasks.source import Source, open_source, scores_responses


def open_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """Return (training sources, sources with the rows of `open_eval_sets`) of a recipe.

    Raises: the errors of `open_source` and `open_eval_sets`.
    """
    return open_training(recipe), [source for one in open_eval_sets(recipe) for source in one.sources]


def open_training(recipe: Recipe) -> list[Source]:
    """Return the training sources of a recipe. Raises: as `open_source`."""
    return [open_source(d, recipe.reward, scored=scores_responses(recipe)) for d in recipe.data]


def make_scorer(source: Source, recipe: Recipe, place: ServicePlace = NO_PLACE) -> RewardScorer:
    """Return the scorer of a source, with the recipe's limits. `place`: where a service keeps its files."""
    r = recipe.reward
    limits = {"timeout_seconds": r.timeout_seconds, "memory_mb": r.memory_mb, "workers": r.workers}
    return open_scorer(source.reward, source.weights, **limits, place=place)
