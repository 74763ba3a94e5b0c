"""Numbers of steps that a recipe gives outright, or as something to count them from when a run begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vlmrl.errors import Problem
from vlmrl.recipe.toml_lines import Key, dotted

COUNTED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("train", "steps"): ("train", "epochs"),
    ("optim", "warmup_steps"): ("optim", "warmup_ratio"),
}
"""Key of a number of steps -> key that it is counted from. Where the second is set, 0 stands for the first until it is
counted (recipe/settle.py)."""


def written_in(values: Mapping[Any, Any]) -> set[Key]:
    """Return the keys of `COUNTED`, of both kinds, that stand in these values of a recipe."""
    keys = [*COUNTED, *COUNTED.values()]
    return {(table, name) for table, name in keys if isinstance(t := values.get(table), Mapping) and name in t}


def keep_one(
    raw: dict[str, Any], written: Collection[Key], where: Callable[[Key], str]
) -> tuple[list[Key], list[Problem]]:
    """Let what was written last replace the other of each pair, in `raw`.

    Args: written: the keys that a file, or all `--set` together, give.      where: place of a key, for messages.
    Returns: keys that are no longer as they were written, and an error for each pair of which both are written.
    """
    replaced: list[Key] = []
    problems: list[Problem] = []
    for steps, source in COUNTED.items():
        table = raw.get(steps[0])
        if not isinstance(table, dict):
            continue
        if source in written and steps in written and table.get(steps[1]) != 0:
            message = f"`{dotted(steps)}` and `{dotted(source)}` are both set, and each alone says how many steps"
            problems.append(Problem(message, where(source), "leave one of the two out"))
        elif source in written:
            table[steps[1]] = 0
            replaced.append(steps)
        elif steps in written and source[1] in table:
            del table[source[1]]
            replaced.append(source)
    return replaced, problems
