"""Numbers of steps that a recipe sets directly, or by another key from which they are counted when a run begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vlmrl.errors import Problem
from vlmrl.recipe.toml_lines import Key, dotted

COUNTED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("train", "steps"): ("train", "epochs"),
    ("optim", "warmup_steps"): ("optim", "warmup_ratio"),
    ("eval", "every_steps"): ("eval", "every_epochs"),
}
"""Key of a number of steps -> key from which it is counted. If the second key is set, the first one is 0 until the
steps are counted (recipe/settle.py); `eval.every_steps` stays 0, because its steps need not be evenly spaced."""


def written_in(values: Mapping[Any, Any]) -> set[Key]:
    """Return the keys in `COUNTED`, from both sides of it, that these values of a recipe contain."""
    keys = [*COUNTED, *COUNTED.values()]
    return {(table, name) for table, name in keys if isinstance(t := values.get(table), Mapping) and name in t}


def keep_one(
    raw: dict[str, Any], written: Collection[Key], where: Callable[[Key], str]
) -> tuple[list[Key], list[Problem]]:
    """Keep only one key of each pair in `COUNTED`: the one that is written last replaces the other one.

    Args:
        raw: values of the recipe; changed in place.
        written: keys that one file, or all `--set` together, set.
        where: function that returns the place of a key, for messages.
    Returns: (keys whose written value is replaced, an error for each pair of which `written` contains both keys).
    """
    replaced: list[Key] = []
    problems: list[Problem] = []
    for steps, source in COUNTED.items():
        table = raw.get(steps[0])
        if not isinstance(table, dict):
            continue
        # 0 steps together with the other key are no contradiction: the steps of this recipe are not counted yet.
        if source in written and steps in written and table.get(steps[1]) != 0:
            message = f"`{dotted(steps)}` and `{dotted(source)}` are both set, but each gives the number of steps alone"
            problems.append(Problem(message, where(source), "leave one of the two out"))
        elif source in written:
            table[steps[1]] = 0
            replaced.append(steps)
        elif steps in written and source[1] in table:
            del table[source[1]]
            replaced.append(source)
    return replaced, problems
