"""JSON of files that a crash, a disk or a person may have damaged: every file is parsed by the one function here."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 200
"""Arrays and objects inside each other. No file of vlmrl comes near; readers that walk a value call themselves once a
level, and Python stops them at about 1000."""


def parse_json(text: str | bytes, *, unique_keys: bool = False, most_levels: int = MOST_LEVELS) -> Any:
    """Return the value of a JSON text.

    Args:
        unique_keys: refuse an object that has a key twice; Python keeps the last value without a word.
        most_levels: arrays and objects inside each other, at most.
    Raises: ValueError when it is no JSON, no UTF-8, has a repeated key where it must not, or is nested deeper.
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
        raise ValueError(f"the key `{twice[:100]}` is there more than once")
    return value


def _openings(text: str | bytes) -> int:
    """Return how many brackets a text opens, those within strings too: at least as many as it has levels."""
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
