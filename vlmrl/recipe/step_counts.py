"""Numbers of steps that a recipe gives directly, or by a key that they are counted from when a run begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vlmrl.errors import Problem
from vlmrl.recipe.toml_lines import Key, dotted

COUNTED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("train", "steps"): ("train", "epochs"),
    ("optim", "warmup_steps"): ("optim", "warmup_ratio"),
}
"""Key of a number of steps -> key that it is counted from. If the second is set, the first is 0 until it is counted
(recipe/settle.py)."""


def written_in(values: Mapping[Any, Any]) -> set[Key]:
    """Return the keys of both kinds in `COUNTED` that these values of a recipe contain."""
    keys = [*COUNTED, *COUNTED.values()]
    return {(table, name) for table, name in keys if isinstance(t := values.get(table), Mapping) and name in t}


def keep_one(
    raw: dict[str, Any], written: Collection[Key], where: Callable[[Key], str]
) -> tuple[list[Key], list[Problem]]:
    """Keep one key of each pair of `COUNTED` in `raw`: the one written last replaces the other.

    Args:
        raw: values of the recipe; changed in place.
        written: the keys that a file, or all `--set` together, give.
        where: place of a key, for messages.
    Returns: keys that no longer have the value that was written, and an error for each pair of which both are written.
    """
    replaced: list[Key] = []
    problems: list[Problem] = []
    for steps, source in COUNTED.items():
        table = raw.get(steps[0])
        if not isinstance(table, dict):
            continue
        # 0 steps beside the other key are those of a recipe whose steps are not counted yet, and no contradiction.
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
