"""Checks of the truth of a domain's row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.tasks.taxonrl.domain import Domain, Field
from vlmrl.tasks.taxonrl.layouts import DISTANCES, LAYOUTS, contradictions

FORBIDDEN = ";<>\n"
"""Characters that no name may contain, because answers and TaxonRL's layouts use them as separators."""


def truth_problems(domain: Domain, truth: Mapping[str, Any]) -> list[str]:
    """Return every mistake in the truth of a row, in words; [] = there is none.

    `same` must be true or false. A field must hold two names, each None if unknown, and from its vocabulary if that is
    closed. The known names, `same` and `distance` must not contradict each other.
    """
    same = truth.get("same")
    wrong = [] if isinstance(same, bool) else [f"`same` is {same!r}, not true or false"]
    for field in domain.fields:
        wrong += _field_problems(field, truth.get(field.name))
    wrong += _distance_problems(domain, truth.get("distance"))
    return wrong or contradictions(LAYOUTS[domain.layout], truth)


def _field_problems(field: Field, pair: Any) -> list[str]:
    if pair is None:
        return []
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return [f"`{field.name}` is {pair!r}, not two names"]
    wrong = []
    for name in pair:
        if name is None:
            continue
        if not isinstance(name, str) or not name.strip():
            wrong.append(f"`{field.name}` has {name!r}, which is neither a name nor null")
        elif any(c in name for c in FORBIDDEN) or name != name.strip():
            wrong.append(f"`{field.name}` has the name {name!r}, which no answer can hold (; < > or outer blanks)")
        elif field.labels and name not in field.labels:
            wrong.append(f"`{field.name}` has the label {name!r}, which is none of {', '.join(field.labels)}")
    return wrong


def _distance_problems(domain: Domain, distance: Any) -> list[str]:
    if distance is None:
        return []
    if not domain.levels:
        return [f"`distance` is {distance!r}, but `{domain.name}` has no hierarchy"]
    if type(distance) is not int or distance not in range(len(DISTANCES)):
        return [f"`distance` is {distance!r}, not a whole number from 0 to {len(DISTANCES) - 1}"]
    return []
