"""Values that a recipe leaves to the machine, the model or the data: chosen once, when a run begins.

A key of `OPEN` may be left open (`rollout.engine = "auto"`). Before a run begins, `choose` finds a value for each
open key, and `settle` puts it into the recipe. `resolved.json` then holds the value, and as its origin `auto: ` with
the reason. A resumed run keeps its values (`keep_settled`), on another machine too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.errors import Problem, RecipeError
from vlmrl.recipe.key_place import AUTO_ORIGIN
from vlmrl.recipe.load import LoadedRecipe, leaves
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.step_counts import COUNTED
from vlmrl.recipe.toml_lines import dotted

OPEN: Mapping[str, Callable[[Recipe], bool]] = {
    "train.steps": lambda recipe: recipe.train.epochs is not None and recipe.train.steps == 0,
    "optim.warmup_steps": lambda recipe: recipe.optim.warmup_ratio is not None and recipe.optim.warmup_steps == 0,
    "model.dtype": lambda recipe: recipe.model.dtype == "auto",
    "rollout.engine": lambda recipe: recipe.rollout.engine == "auto",
}
"""Key -> function that returns whether a recipe leaves it open. The order is that of the choices: a later choice may
depend on an earlier one."""


@dataclass(frozen=True)
class Choice:
    """Value of a key that the recipe left open.

    Args:
        key: dotted.
        value: a JSON value that the schema allows.
        reason: why, in words for the user; it becomes the origin of the value.
        problem: warning about it for the user; None = no warning.
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
    """Choose a value for every open key. Each chooser gets the recipe with the earlier choices in it.

    Args:
        choosers: key of `OPEN` -> the function that chooses its value.
    """
    choices: list[Choice] = []
    for key in open_keys(recipe):
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


def settle(loaded: LoadedRecipe, choices: Sequence[Choice]) -> LoadedRecipe:
    """Return the loaded recipe with the chosen values in it; their reasons become their origins."""
    return _changed(loaded, choices, {c.key: f"{AUTO_ORIGIN}{c.reason}" for c in choices})


def keep_settled(loaded: LoadedRecipe, before: Mapping[str, Any]) -> LoadedRecipe:
    """Return the recipe with the values that a run began with for the keys that are open now and not set by `--set`.

    A key that is not written, neither then nor now, keeps its earlier value too if its default has changed since.

    Args:
        before: the run's `resolved.json`.
    """
    values, origins = before["recipe"], before.get("origins") or {}
    choices = _earlier_defaults(loaded, values, origins)
    for key in open_keys(loaded.recipe):
        table, _, name = key.partition(".")
        is_new = loaded.origins.get(key) == "--set"
        source = COUNTED.get((table, name))
        if source is not None:  # another number of epochs: the steps are counted anew
            is_new = getattr(getattr(loaded.recipe, table), source[1]) != (values.get(table) or {}).get(source[1])
        if not is_new and name in (values.get(table) or {}):
            choice = Choice(key, values[table][name], "")
            if not OPEN[key](with_values(loaded.recipe, [choice])):
                choices.append(choice)
    return _changed(loaded, choices, {c.key: str(origins.get(c.key, "default")) for c in choices})


def _earlier_defaults(loaded: LoadedRecipe, values: Mapping[str, Any], origins: Mapping[str, Any]) -> list[Choice]:
    """Return the defaults that a run began with and that differ from today's, for keys that are not written.

    Args:
        values, origins: of the run's `resolved.json`.
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


def require_settled(recipe: Recipe) -> None:
    """Raise a RecipeError if a value is still open: a run needs them all."""
    keys = open_keys(recipe)
    if keys:
        raise RecipeError(
            f"{', '.join(f'`{key}`' for key in keys)} must be chosen before a run begins",
            hint="vlmrl.setup.open_values.settle_for_run does it",
        )


def _changed(loaded: LoadedRecipe, choices: Sequence[Choice], origins: Mapping[str, str]) -> LoadedRecipe:
    if not choices:
        return loaded
    recipe = with_values(loaded.recipe, choices)
    all_origins = {**loaded.origins, **origins}
    resolved = {**loaded.resolved, "recipe": recipe.model_dump(mode="json"), "origins": all_origins}
    return replace(loaded, recipe=recipe, origins=all_origins, resolved=resolved)
