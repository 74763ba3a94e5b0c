"""Values that a recipe leaves to the machine, the model or the data: chosen once, when a run begins.

A recipe may leave a key of `OPEN` open (`rollout.engine = "auto"`). Before a run begins, `choose` chooses a value for
each open key, and `fill_open_keys` puts it into the recipe. `resolved.json` then contains the value, and its origin:
`auto: ` with the reason. A resumed run keeps these values (`keep_choices`), even on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.errors import Problem, RecipeError
from vlmrl.recipe.load import COUNTED, LoadedRecipe, leaves
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import AUTO
from vlmrl.recipe.toml_lines import AUTO_ORIGIN, dotted

OPEN: Mapping[str, Callable[[Recipe], bool]] = {
    "eval.metric": lambda recipe: recipe.kind == "sft" and recipe.eval.metric == AUTO,
    "eval.goal": lambda recipe: recipe.kind == "sft" and recipe.eval.by_loss and recipe.eval.goal == "max",
    "train.steps": lambda recipe: recipe.train.epochs is not None and recipe.train.steps == 0,
    "optim.warmup_steps": lambda recipe: recipe.optim.warmup_ratio is not None and recipe.optim.warmup_steps == 0,
    "model.dtype": lambda recipe: recipe.model.dtype == "auto",
    "model.compile": lambda recipe: recipe.model.compile == "auto",
    "rollout.engine": lambda recipe: recipe.rollout.engine == "auto",
    "teacher.checkpoint": lambda recipe: recipe.teacher is not None and recipe.teacher.checkpoint == AUTO,
    "model.gradient_checkpointing": lambda recipe: recipe.model.gradient_checkpointing == "auto",
}
"""Key -> function that returns whether a recipe leaves it open. Values are chosen in this order, because a later choice
may depend on an earlier one."""


@dataclass(frozen=True)
class Choice:
    """Value of a key that the recipe left open.

    Args:
        key: dotted name of the key.
        value: chosen value, a JSON value that the schema allows.
        reason: reason for the value, as text for the user; it becomes the value's origin.
        problem: warning for the user about the choice; None = no warning.
    """

    key: str
    value: Any
    reason: str
    problem: Problem | None = None


Chooser = Callable[[Recipe], Choice]


def open_keys(recipe: Recipe) -> list[str]:
    """Return the keys that the recipe leaves open, in the order in which they are chosen."""
    return [key for key, is_open in OPEN.items() if is_open(recipe)]


def choose(recipe: Recipe, choosers: Mapping[str, Chooser]) -> list[Choice]:
    """Choose a value for every open key. Each chooser gets the recipe with all earlier choices.

    Args:
        choosers: key of `OPEN` -> function that chooses its value.
    """
    choices: list[Choice] = []
    for key, is_open in OPEN.items():
        if is_open(recipe):
            choices.append(choosers[key](recipe))
            recipe = with_values(recipe, choices[-1:])
    return choices


def with_values(recipe: Recipe, choices: Iterable[Choice]) -> Recipe:
    """Return the recipe with the chosen values in it."""
    for choice in choices:
        table, _, name = choice.key.partition(".")
        changed = getattr(recipe, table).model_copy(update={name: choice.value})
        recipe = recipe.model_copy(update={table: changed})
    return recipe


def fill_open_keys(loaded: LoadedRecipe, choices: Sequence[Choice]) -> LoadedRecipe:
    """Return the loaded recipe with the chosen values in it; their reasons become their origins."""
    return _changed(loaded, choices, {c.key: f"{AUTO_ORIGIN}{c.reason}" for c in choices})


def keep_choices(loaded: LoadedRecipe, before: Mapping[str, Any]) -> LoadedRecipe:
    """Return the recipe with the run's earlier values for open keys, except those that `--set` sets.

    A key that was not written then and is not written now also keeps its earlier value if its default has changed.

    Args:
        before: the run's `resolved.json`.
    """
    values, origins = before["recipe"], before.get("origins") or {}
    choices = _earlier_defaults(loaded, values, origins)
    for key in open_keys(loaded.recipe):
        table, _, name = key.partition(".")
        is_new = loaded.origins.get(key) == "--set"
        source = COUNTED.get((table, name))
        if source is not None:  # the number of epochs has changed: count the steps again
            is_new = getattr(getattr(loaded.recipe, table), source[1]) != (values.get(table) or {}).get(source[1])
        if not is_new and name in (values.get(table) or {}):
            choice = Choice(key, values[table][name], "")
            if not OPEN[key](with_values(loaded.recipe, [choice])):
                choices.append(choice)
    return _changed(loaded, choices, {c.key: str(origins.get(c.key, "default")) for c in choices})


def _earlier_defaults(loaded: LoadedRecipe, values: Mapping[str, Any], origins: Mapping[str, Any]) -> list[Choice]:
    """Return the defaults of unwritten keys with which a run began, if they differ from the present defaults.

    Args:
        values, origins: values and origins in the run's `resolved.json`.
    """
    choices: list[Choice] = []
    for key, value in leaves(loaded.resolved["recipe"]):
        name = dotted(key)
        if len(key) != 2 or name in OPEN or not loaded.origins.get(name) == origins.get(name) == "default":
            continue
        table = values.get(str(key[0])) or {}
        if key[1] in table and table[key[1]] != value:
            choices.append(Choice(name, table[key[1]], ""))
    return choices


def require_filled(recipe: Recipe) -> None:
    """Raise a RecipeError if a key is still open: a run needs all values."""
    keys = open_keys(recipe)
    if keys:
        raise RecipeError(
            f"{', '.join(f'`{key}`' for key in keys)} must be chosen before a run begins",
            hint="vlmrl.setup.auto_choice.fill_for_run does it",
        )


def _changed(loaded: LoadedRecipe, choices: Sequence[Choice], origins: Mapping[str, str]) -> LoadedRecipe:
    if not choices:
        return loaded
    recipe = with_values(loaded.recipe, choices)
    all_origins = {**loaded.origins, **origins}
    resolved = {**loaded.resolved, "recipe": recipe.model_dump(mode="json"), "origins": all_origins}
    return replace(loaded, recipe=recipe, origins=all_origins, resolved=resolved)
