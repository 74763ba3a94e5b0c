"""Recipe keys that were renamed. Old recipes, old runs and old command lines go on working with the old name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, RecipeError
from vlmrl.recipe.toml_lines import Key, dotted

RENAMED: Mapping[tuple[str, ...], tuple[str, ...]] = {("reward", "on_unavailable"): ("reward", "outage")}
"""Old key -> present key. Both are (table, key), and an old value means under the new key what it meant before."""


def present_name(key: Sequence[str]) -> tuple[str, ...]:
    """Return the present name of a key, which is the same if it was not renamed."""
    table_and_name = tuple(key[:2])
    return RENAMED.get(table_and_name, table_and_name) + tuple(key[2:])


def rename_keys(raw: dict[str, Any], lines: dict[Key, int], file: Path) -> list[Problem]:
    """Rename the old keys of a recipe file in its values and lines. Return a warning for each.

    Raises: RecipeError when the file has both names of a key.
    """
    notes = []
    for old, new in RENAMED.items():
        (table, name), (new_table, new_name) = old, new
        if not isinstance(raw.get(table), dict) or name not in raw[table]:
            continue
        where = f"{file}:{lines.get(old, 1)}"
        if isinstance(raw.get(new_table), dict) and new_name in raw[new_table]:
            raise RecipeError(f"`{dotted(old)}` is the old name of `{dotted(new)}`, and both are set", where=where)
        raw.setdefault(new_table, {})[new_name] = raw[table].pop(name)
        for key in [key for key in lines if key[:2] == old]:
            lines[(*new, *key[2:])] = lines.pop(key)
        notes.append(rename_note(old, new, where))
    return notes


def with_present_names(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `resolved.json` with the present names of its keys, in its values and origins."""
    values, origins = dict(resolved.get("recipe") or {}), dict(resolved.get("origins") or {})
    for (table, name), new in RENAMED.items():
        inner = values.get(table)
        if isinstance(inner, Mapping) and name in inner:
            values[table] = {key: value for key, value in inner.items() if key != name}
            values[new[0]] = {new[1]: inner[name], **(values.get(new[0]) or {})}
        if dotted((table, name)) in origins:
            origins.setdefault(dotted(new), origins.pop(dotted((table, name))))
    return {**resolved, "recipe": values, "origins": origins}


def rename_note(old: Sequence[str], new: Sequence[str], where: str) -> Problem:
    """Return the warning about the old name of a key."""
    message = f"`{dotted(tuple(old))}` is now called `{dotted(tuple(new))}`; the old name still works"
    return Problem(message, where, f"write {dotted(tuple(new))}", "warning")
