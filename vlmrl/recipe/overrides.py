"""`--set key=value`: one key of a recipe from the command line. Values are TOML; a bare word is a string."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.errors import Problem, RecipeError
from vlmrl.recipe.files import REMOTE_CODE, parse_toml
from vlmrl.recipe.key_fields import key_name
from vlmrl.recipe.renamed import present_name, rename_note
from vlmrl.recipe.toml_lines import Key, dotted, parse_dotted

LISTS_OF_TABLES = ("data", "rewards", "data.rewards")
"""Keys that are lists of tables, without positions: `data.0.path` is the path in the first element."""

MOST_PARTS = 20
"""Maximum number of parts of a key. Code that reads a recipe recurses once per part, and Python's limit is about 1000
levels."""


@dataclass(frozen=True)
class Override:
    """Parsed `--set`: parts of its key, value, and original text."""

    parts: tuple[str, ...]
    value: Any
    text: str


def parse_override(text: str) -> Override | Problem:
    """Parse `algo.clip_high=0.3`.

    The value is read as TOML (`0.3`, `true`, `[1, 2]`, `"quoted"`). A text that is not TOML and does not begin like a
    string, list or table is used as a string, so that `model.path=demo/model` needs no quotes.
    """
    where = f"--set {text}"
    name, equals, value = text.partition("=")
    if not equals:
        return Problem("`--set` needs a key and a value", where, "write --set algo.clip_high=0.3")
    parts = parse_dotted(name.strip())
    if parts and len(parts) > MOST_PARTS:
        return Problem(
            f"the key has {len(parts):,} parts; no key of a recipe has more than {MOST_PARTS}",
            f"--set {dotted(parts[:3])}...",
            "write --set table.key=value, such as algo.clip_high=0.3",
        )
    if not parts:
        return Problem(
            f"`{name.strip()}` is not a key", where, "write --set table.key=value, such as algo.clip_high=0.3"
        )
    parsed = _value(value.strip())
    if parsed is None:
        hint = """quote for the shell as well: --set 'rollout.stop=["a", "b"]'"""
        return Problem(f"the value {value.strip()!r} is not a complete TOML string, list or table", where, hint)
    return Override(parts, parsed[0], text)


def apply_override(raw: dict[str, Any], override: Override) -> Key | Problem:
    """Set the value in `raw`; create missing tables. Return the key of the value, or a problem."""
    where = f"--set {override.text}"
    container: Any = raw
    key: Key = ()
    for i, part in enumerate(override.parts):
        is_last = i == len(override.parts) - 1
        if isinstance(container, list):
            index = _list_index(part, len(container))
            if index is None:
                hint = f"positions count from 0; {dotted(key)} has {len(container)}: --set {dotted(key)}.0.path=..."
                return Problem(f"`{part}` is not a position in the list `{dotted(key)}`", where, hint)
            key = (*key, index)
            if is_last:
                container[index : index + 1] = [override.value]  # replace an element, or append one at the end
                return key
            if index == len(container):
                container.append({})
            container = container[index]
        elif isinstance(container, dict):
            key = (*key, part)
            if is_last:
                container[part] = override.value
                return key
            container = container.setdefault(part, [] if key_name(key) in LISTS_OF_TABLES else {})
        else:
            return Problem(f"`{dotted(key)}` is a single value, not a table", where)
    return Problem("`--set` needs a key", where)


def present_override(override: Override) -> Override:
    """Return a `--set` with the present name of its key (renamed.py)."""
    return replace(override, parts=present_name(override.parts))


def notes_on_overrides(overrides: Sequence[str]) -> list[Problem]:
    """Return a warning for each `--set` that uses the old name of a key."""
    notes = []
    for text in overrides:
        parsed = parse_override(text)
        if not isinstance(parsed, Problem) and (name := present_name(parsed.parts)) != parsed.parts:
            notes.append(rename_note(parsed.parts, name, f"--set {text}"))
    return notes


def refuse_remote_code(values: Mapping[str, Any], overrides: Sequence[str], where: str) -> None:
    """Refuse the settings of a run, maybe a stranger's, that run the code of a model, unless a `--set` repeats it.

    Raises: RecipeError.
    """
    keys = [dotted(parsed.parts) for text in overrides if not isinstance(parsed := parse_override(text), Problem)]
    if values.get("model", {}).get("trust_remote_code") and REMOTE_CODE not in keys:
        raise RecipeError(
            f"the run would execute Python code that its model's folder holds ({REMOTE_CODE} = true)",
            where=where,
            hint=f"a run never turns this on by itself: read that code, then add --set {REMOTE_CODE}=true",
        )


def _list_index(part: str, length: int) -> int | None:
    """Return the list position that `part` denotes; None if it is none. `length` = a new element at the end."""
    return int(part) if part.isascii() and part.isdigit() and len(part) < 6 and int(part) <= length else None


def _value(text: str) -> tuple[Any] | None:
    """Return the value in a tuple of one; None if the text begins like a TOML string, list or table but is invalid."""
    try:
        table = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    dates = (datetime.date, datetime.time, datetime.datetime)
    if set(table) == {"value"} and not isinstance(table["value"], dates):
        return (table["value"],)
    return None if text[:1] in ('"', "'", "[", "{") else (text,)
