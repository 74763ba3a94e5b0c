"""Sources of a recipe with their rows and scorers, and the sets of rows that it evaluates (`eval.sets`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import is_test_split
from vlmrl.rewards.base import NO_PLACE, ServicePlace
from vlmrl.rewards.scoring import Scorer
from vlmrl.store.evaluated_rows import ON_TEST, Role
from vlmrl.tasks.source import Source, open_set, open_source, open_validation, scores_responses, set_label

SEES_TEST = "evaluated on the test split during training"
"""Label of a run that saw test rows, but selected no checkpoint by them."""


@dataclass(frozen=True)
class EvalSet:
    """One of `eval.sets`, or the validation rows of a recipe without that key.

    Args:
        name: in metrics; "" for a recipe without `eval.sets`. That of a file is its name without the ending.
        sources: the sources that have the set, with its rows.
        selects: whether it selects the best checkpoint.
    """

    name: str
    sources: tuple[Source, ...]
    selects: bool

    def role(self, source: Source, trained_splits: Collection[str]) -> Role:
        """Return the role of a source's rows. `trained_splits`: the splits that this source is trained on."""
        if self.selects:
            return "validation"
        if is_test_split(source.split):
            return "test"
        return "training" if source.split in trained_splits else "held out"


def open_eval_sets(recipe: Recipe) -> list[EvalSet]:
    """Return the sets that training evaluates; [] if the recipe does not validate or has no rows for it.

    Raises: DataError and others as `open_source`; DataError for a set that no source has, for two sets with the same
        rows, and for a test split without permission.
    """
    if not recipe.eval.enabled:
        return []
    scored = scores_responses(recipe)
    if not recipe.eval.sets:
        opened = [open_validation(data, recipe.reward, scored=scored) for data in recipe.data]
        usual = tuple(source for source in opened if source is not None)
        for source in usual:
            _check_permission(recipe, source, "choosing a checkpoint by it would spoil the test")
        return [EvalSet("", usual, True)] if usual else []
    sets: list[EvalSet] = []
    is_selected = False
    for name in recipe.eval.sets:
        opened = [open_set(data, recipe.reward, name, scored=scored) for data in recipe.data]
        sources = tuple(source for source in opened if source is not None)
        if not sources:
            raise missing_set(recipe, name)
        for source in sources:
            _check_permission(recipe, source, "the test is spoilt by decisions that are based on it")
        # A source may name its test split as its validation rows: a set never selects by such rows.
        selects = not is_selected and not any(is_test_split(source.split) for source in sources)
        is_selected |= selects
        sets.append(EvalSet(set_label(name), sources, selects))
    _check_distinct(sets)
    return sets


def label_of(sets: Sequence[EvalSet]) -> str:
    """Return the label of a run that sees test rows in training; "" for others."""
    if not any(is_test_split(source.split) for one in sets for source in one.sources):
        return ""
    return SEES_TEST if sets[0].name else ON_TEST


def missing_set(recipe: Recipe, name: str) -> DataError:
    """Return the error for a set that no source has."""
    splits = dict.fromkeys(split for data in recipe.data for split in open_dataset(data).splits)
    return DataError(
        f"`eval.sets` names `{name}`, and no source has such a split",
        hint=f"splits there: {', '.join(splits)}; a table file works, too",
    )


def _check_permission(recipe: Recipe, source: Source, why: str) -> None:
    if is_test_split(source.split) and not recipe.eval.allow_test_split:
        raise DataError(
            f"source `{source.name}` validates on its test split: {why}",
            hint="use a validation split, or set eval.allow_test_split = true (the run is then labelled)",
        )


def _check_distinct(sets: Sequence[EvalSet]) -> None:
    """Raise a DataError if two sets of a source have the same rows, or the same name."""
    seen: dict[tuple[str, str], str] = {}
    for one in sets:
        for source in one.sources:
            before = seen.setdefault((source.name, source.split), one.name)
            if before != one.name:
                raise DataError(
                    f"`eval.sets`: `{before}` and `{one.name}` are both {source.split} of `{source.name}`",
                    hint="leave one of them out",
                )
    names = [one.name for one in sets]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(f"`eval.sets` has two sets called `{name}`", hint="rename one of the files")


def open_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """Return (training sources, sources with the rows of `open_eval_sets`) of a recipe.

    Raises: the errors of `open_source` and `open_eval_sets`.
    """
    return open_training(recipe), [source for one in open_eval_sets(recipe) for source in one.sources]


def open_training(recipe: Recipe) -> list[Source]:
    """Return the training sources of a recipe. Raises: as `open_source`."""
    return [open_source(d, recipe.reward, scored=scores_responses(recipe)) for d in recipe.data]


def make_scorer(source: Source, recipe: Recipe, place: ServicePlace = NO_PLACE) -> Scorer:
    """Return the scorer of a source, with the recipe's limits. `place`: where a service keeps its files."""
    r = recipe.reward
    limits = {"timeout_seconds": r.timeout_seconds, "memory_mb": r.memory_mb, "workers": r.workers}
    return Scorer(source.reward, source.weights, **limits, place=place)
