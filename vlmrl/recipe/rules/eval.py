"""Rules about validation: the direction in which its metric is better, the keys that depend on it, and its rows."""

from __future__ import annotations

from collections.abc import Iterator

from vlmrl.errors import Problem
from vlmrl.metric import Metric, metric_facts
from vlmrl.recipe.load import LoadedRecipe

TEST_SPLITS = ("test", "testing")
NEEDS_VALIDATION = ("train.stop_above", "eval.patience")
"""Keys that end a run according to the result of a validation."""
USELESS_WITHOUT_VALIDATION = (
    "eval.every_steps",
    "eval.at_start",
    "eval.metric",
    "eval.goal",
    "eval.allow_test_split",
    "checkpoint.keep_best",
)
"""Keys that have no effect without validation; setting them is then reported."""


def _validation(loaded: LoadedRecipe) -> Iterator[Problem]:
    settings = loaded.recipe.eval
    yield from wrong_goal(loaded, metric_facts(settings.metric))
    if settings.patience and not settings.every_steps:
        message = f"`eval.patience` is {settings.patience}, but `eval.every_steps` is 0: no validation is counted"
        where = loaded.where(("eval", "patience"))
        yield Problem(message, where, "set eval.every_steps, or leave eval.patience out")


def wrong_goal(loaded: LoadedRecipe, metric: Metric) -> Iterator[Problem]:
    """Yield a problem if `eval.goal` is not the direction in which `eval.metric` is better."""
    settings = loaded.recipe.eval
    goal = {"higher": "max", "lower": "min"}.get(metric.better or "", settings.goal)
    if goal != settings.goal:
        where = loaded.where(("eval", "goal"), ("eval", "metric"))
        message = f"`eval.metric` {settings.metric} is better when {metric.better}, but `eval.goal` is {settings.goal}"
        yield Problem(message, where, f'set eval.goal = "{goal}"')


def _validation_off(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find keys that need validation, in a recipe without validation or with none before the end."""
    settings, train = loaded.recipe.eval, loaded.recipe.train
    if not settings.enabled:
        for name, value in zip(NEEDS_VALIDATION, (train.stop_above, settings.patience), strict=True):
            if value is not None:
                message = f"`{name}` is {value}, but `eval.enabled` is false: it would never be used"
                yield Problem(message, loaded.where(tuple(name.split("."))), "leave one of the two out")
        set_here = [
            n for n in USELESS_WITHOUT_VALIDATION if loaded.origins.get(n, "default") not in ("default", "--set")
        ]
        # If --set turns validation off for one run, the recipe may keep its keys about validation for other runs.
        if set_here and loaded.origins.get("eval.enabled") != "--set":
            keys, where = "`, `".join(set_here), loaded.where(tuple(set_here[0].split(".")))
            verb = "does" if len(set_here) == 1 else "do"
            yield Problem(
                f"`{keys}` {verb} nothing: `eval.enabled` is false", where, "remove one or the other", "warning"
            )
    elif train.stop_above is not None and not settings.every_steps:
        message = f"`train.stop_above` is {train.stop_above}, but `eval.every_steps` is 0: no step is validated"
        yield Problem(message, loaded.where(("train", "stop_above")), "set eval.every_steps", "warning")


def _test_split(loaded: LoadedRecipe) -> Iterator[Problem]:
    for i, data in enumerate(loaded.recipe.data):
        if data.split in TEST_SPLITS and not loaded.recipe.eval.allow_test_split:
            hint = "train on another split; eval.allow_test_split = true forces it and labels the run"
            yield Problem(f"`data.{i}.split` trains on the test split", loaded.where(("data", i, "split")), hint)
        if data.validation in TEST_SPLITS and not loaded.recipe.eval.allow_test_split:
            hint = "validate on another split; eval.allow_test_split = true forces it and labels the run"
            message = f"`data.{i}.validation` chooses checkpoints on the test split"
            yield Problem(message, loaded.where(("data", i, "validation")), hint)
        if data.validation == data.split:
            message = f"`data.{i}` validates on the split it trains on (`{data.split}`)"
            yield Problem(
                message, loaded.where(("data", i, "validation")), "name another split or file, or leave it out"
            )


EVAL_RULES = (_validation, _validation_off, _test_split)
