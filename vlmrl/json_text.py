"""Parser for JSON from files that may be damaged (by a crash, a disk or a person). All such files are parsed here."""

from __future__ import annotations

import json
from typing import Any

from vlmrl.redaction.redact import excerpt

MOST_LEVELS = 200
"""Maximum depth of nested arrays and objects. vlmrl's own files are far below it. Recursive functions over a value call
themselves once per level, and Python stops a recursion at about 1000 calls."""


def parse_json(text: str | bytes, *, unique_keys: bool = False, most_levels: int = MOST_LEVELS) -> Any:
    """Return the value of a JSON text.

    Args:
        unique_keys: whether an object with a repeated key is an error; if not, the last value of the key is used.
        most_levels: maximum depth of nested arrays and objects.
    Raises: ValueError for a text that is no JSON, no UTF-8, nested too deeply, or (with `unique_keys`) has a repeated
        key.
    """
    too_deep = ValueError(f"it nests more than {most_levels} levels of JSON")
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise too_deep from None
    if _openings(text) > most_levels and _is_deep(value, most_levels):
        raise too_deep
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key `{excerpt(twice, 100)}` occurs more than once")
    return value


def _openings(text: str | bytes) -> int:
    """Return the number of opening brackets in a text, including those in strings.

    A text has at most this many levels.
    """
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_deep(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return bool(level)
