"""Values of a recipe as TOML has them: nested tables and lists, before they are validated."""

from __future__ import annotations

from typing import Any

from vlmrl.recipe.toml_lines import Key


def value_at(raw: dict[str, Any], prefix: Key) -> dict[str, Any]:
    """Return the value of a key. Raises: KeyError or IndexError without one."""
    value: Any = raw
    for part in prefix:
        value = value[part]
    return value


def copy_values(value: Any) -> Any:
    """Return a copy of a value, with copies of all tables and lists in it."""
    if isinstance(value, dict):
        return {name: copy_values(inner) for name, inner in value.items()}
    return [copy_values(inner) for inner in value] if isinstance(value, list) else value


def drop_none(value: Any) -> None:
    """Remove keys whose value is None, because TOML has no null. Then `--set` can add a table that was left out."""
    if isinstance(value, dict):
        for name in [n for n, inner in value.items() if inner is None]:
            del value[name]
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        drop_none(inner)
