"""Rules about validation: the direction in which its metric is better, the keys that depend on it, and its rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vlmrl.errors import Problem
from vlmrl.metric import Metric, metric_facts
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.files import TABLE_ENDINGS
from vlmrl.recipe.tables import TEST_SPLITS, is_test_split

NEEDS_VALIDATION = ("train.stop_above", "eval.patience")
"""Keys that end a run according to the result of a validation."""
USELESS_WITHOUT_VALIDATION = (
    "eval.every_steps",
    "eval.every_epochs",
    "eval.at_start",
    "eval.metric",
    "eval.goal",
    "eval.allow_test_split",
    "checkpoint.keep_best",
)
"""Keys that have no effect without validation; setting them is then reported."""


def _validation(loaded: LoadedRecipe) -> Iterator[Problem]:
    settings = loaded.recipe.eval
    yield from wrong_goal(loaded, metric_facts(settings.selecting[1]))
    if settings.by_loss and loaded.recipe.kind != "sft":
        message = f"`eval.metric` is {settings.metric}, which only `vlmrl sft` measures"
        yield Problem(message, loaded.where(("eval", "metric")), "name another metric, such as reward")
    if settings.patience and not settings.validates_between:
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
            n for n in USELESS_WITHOUT_VALIDATION if loaded.is_set(tuple(n.split("."))) and loaded.origins[n] != "--set"
        ]
        # If --set turns validation off for one run, the recipe may keep its keys about validation for other runs.
        if set_here and loaded.origins.get("eval.enabled") != "--set":
            keys, where = "`, `".join(set_here), loaded.where(tuple(set_here[0].split(".")))
            verb = "does" if len(set_here) == 1 else "do"
            yield Problem(
                f"`{keys}` {verb} nothing: `eval.enabled` is false", where, "remove one or the other", "warning"
            )
    elif train.stop_above is not None and not settings.validates_between:
        message = f"`train.stop_above` is {train.stop_above}, but `eval.every_steps` is 0: no step is validated"
        yield Problem(message, loaded.where(("train", "stop_above")), "set eval.every_steps", "warning")


def _test_split(loaded: LoadedRecipe) -> Iterator[Problem]:
    for i, data in enumerate(loaded.recipe.data):
        if is_test_split(data.split) and not loaded.recipe.eval.allow_test_split:
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


def _sets(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find sets that cannot be evaluated, or that no checkpoint may be selected by."""
    recipe = loaded.recipe
    settings, where = recipe.eval, loaded.where(("eval", "sets"))
    for i, name in enumerate(settings.sets):
        if name in settings.sets[:i]:
            yield Problem(f"`eval.sets` has `{name}` twice", where, "name each set once")
        if is_test_split(name) and not settings.allow_test_split:
            hint = "leave it to `vlmrl eval` at the end; eval.allow_test_split = true allows it and labels the run"
            yield Problem(f"`eval.sets` evaluates the test split `{name}` during training", where, hint)
        if names_table(name) and len(recipe.data) > 1:
            hint = "give a set of this name to a source with [[data]] validation, or prepare a dataset with the split"
            message = f"`eval.sets` names the file {name}: a file has the rows of one source, and there are several"
            yield Problem(message, where, hint)
        elif names_table(name) and not Path(name).exists():
            yield Problem(f"`eval.sets` names the file {name}, which does not exist", where)
        if not name:
            yield Problem("`eval.sets` has an empty name", where, "name a split or a table file")
    selecting = next((name for name in settings.sets if not is_test_split(name)), None)
    if selecting is not None and any(data.split == selecting for data in recipe.data):
        message = f"`eval.sets`: `{selecting}` selects the best checkpoint, and training draws from that split"
        yield Problem(message, where, "put a split that is not trained on in front of it")
    if settings.sets and selecting is None:
        for name, value in zip(NEEDS_VALIDATION, (recipe.train.stop_above, settings.patience), strict=True):
            if value is not None:
                message = f"`{name}` needs a set that selects checkpoints, and `eval.sets` has test splits alone"
                yield Problem(message, loaded.where(tuple(name.split("."))), "add a validation set in front")


def names_table(name: str) -> bool:
    """Return whether a set is a table file and not a split."""
    return Path(name).suffix.lower() in TABLE_ENDINGS


def _settings(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find settings that contradict themselves, and a selecting metric that its setting does not have."""
    settings = loaded.recipe.eval
    for name, setting in settings.settings.items():
        key = ("eval", "settings", name)
        if setting.temperature == 0 and setting.samples > 1:
            message = f"`eval.settings.{name}` takes {setting.samples} samples at temperature 0: they would be equal"
            yield Problem(message, loaded.where((*key, "samples"), key), "set its temperature, such as 1.0")
        if setting.temperature == 0 and (setting.top_p < 1 or setting.top_k):
            message = f"`eval.settings.{name}` is greedy (temperature 0): its top_p and top_k do nothing"
            yield Problem(message, loaded.where((*key, "top_p"), (*key, "top_k"), key), None, "warning")
        if re.search(r"(^|-)step-\d", name):
            message = f"`eval.settings.{name}`: names like this belong to the steps of a run"
            yield Problem(message, loaded.where(key), "choose another name")
        if re.fullmatch(r"part|[a-z_]*accuracy", name):
            message = f"`eval.settings.{name}`: metrics have names that begin with `{name}/`"
            yield Problem(message, loaded.where(key), "choose another name")
        k = re.fullmatch(r"(?:pass|maj|mean)[@_-]?(\d+)", name)
        if k is not None and int(k[1]) > setting.samples:
            message = f"`eval.settings.{name}` has {setting.samples} samples per prompt, too few for k = {k[1]}"
            yield Problem(message, loaded.where((*key, "samples"), key), f"set samples = {k[1]}", "warning")
    name, metric = settings.selecting
    samples = settings.named_settings[name].samples
    k = re.fullmatch(r"(?:pass|maj|mean)@(\d+)", metric)
    if k is not None and (samples == 1 or int(k[1]) > samples):
        of = f"`eval.settings.{name}`" if name else "validation"
        message = f"`eval.metric` is {settings.metric}, but {of} takes {samples} sample{'s' * (samples > 1)} per prompt"
        yield Problem(message, loaded.where(("eval", "metric")), f"set samples = {k[1]} in [eval.settings.<name>]")


EVAL_RULES = (_validation, _validation_off, _test_split, _sets, _settings)
