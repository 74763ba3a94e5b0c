"""Metrics of reflection in a report: which of a run's metrics they are, and their titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.tasks.reflection import COUNT, PREFIX, PREFIXES, RATE, WORD


def is_reflection(name: str) -> bool:
    """Return whether a metric is one of reflection, in training or below a set of an evaluation."""
    return name.startswith(PREFIX) or f"/{PREFIX}" in name


def reflection_names(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return (ratios and rates, counts of the words that occur) among the metrics of training lines, in their order.

    Both are empty if none of the words ever occurs.
    """
    values = {name: value for line in lines for name, value in line.items() if name.startswith(PREFIX) and value}
    names = dict.fromkeys(
        n for line in lines for n, value in line.items() if n.startswith(PREFIX) and value is not None
    )
    words = [name for name in names if f"/{WORD}" in name and name in values]
    if not any(RATE in name or name in words for name in values):
        return [], []
    return [name for name in names if f"/{WORD}" not in name and f"/{COUNT}" not in name], words


def reflection_title(name: str) -> str:
    """Return a title such as "Reflection ratio in correct answers (maye)"."""
    profiles = sorted(PREFIXES, key=lambda profile: -len(PREFIXES[profile]))
    profile = next(profile for profile in profiles if name.startswith(PREFIXES[profile]))
    words = name.removeprefix(PREFIXES[profile]).removeprefix(WORD).replace("_", " ")
    title = f'"{words}"' if f"/{WORD}" in name else words.capitalize()
    return title if profile == "default" else f"{title} ({profile})"
