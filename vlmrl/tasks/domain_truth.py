"""What is wrong with the truth of a domain's row, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.rewards.layouts import DISTANCES, LAYOUTS, distance_bounds
from vlmrl.tasks.domain import Domain, Field, names_agree

FORBIDDEN = ";<>\n"
"""What a name cannot hold, neither in an answer nor in TaxonRL's layouts."""


def truth_problems(domain: Domain, truth: Mapping[str, Any]) -> list[str]:
    """Every mistake in the truth of a row; empty when it is sound.

    `same` must be true or false; a field two names, each None where unknown, of its vocabulary where that is closed.
    Names, `same` and `distance` must not contradict each other, as far as they are known.
    """
    same = truth.get("same")
    wrong = [] if isinstance(same, bool) else [f"`same` is {same!r}, not true or false"]
    for field in domain.fields:
        wrong += _field_problems(field, truth.get(field.name))
    return wrong or _contradictions(domain, truth)


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


def _contradictions(domain: Domain, truth: Mapping[str, Any]) -> list[str]:
    agree = {field.name: names_agree(truth.get(field.name), field.name) for field in domain.fields}
    wrong = [
        f"`same` is true but `{field.name}` differs: {' and '.join(truth[field.name])}"
        for field in domain.fields
        if truth["same"] and (field.level or field.fixed) and agree[field.name] is False
    ]
    if not truth["same"] and domain.levels and agree.get("species") and agree["genus"] is not False:
        wrong.append(f"`same` is false but both are {truth['species'][0]}")
    return wrong or _distance_problems(domain, truth, agree)


def _distance_problems(domain: Domain, truth: Mapping[str, Any], agree: Mapping[str, bool | None]) -> list[str]:
    distance, known = truth.get("distance"), range(len(DISTANCES))
    if not domain.levels:
        return [] if distance is None else [f"`distance` is {distance!r}, but `{domain.name}` has no hierarchy"]
    low, high = distance_bounds(truth["same"], agree)
    if low > high:
        ranks = LAYOUTS[domain.layout].ranks
        fine = next(rank for rank in ranks if agree[rank])
        coarse = next(rank for rank in reversed(ranks) if agree[rank] is False)
        return [f"`{coarse}` differs but the finer `{fine}` is the same: {truth[fine][0]}"]
    if distance is None or (low <= distance <= high and type(distance) is int):
        return []
    if type(distance) is not int or distance not in known:
        return [f"`distance` is {distance!r}, not a whole number from 0 to {known[-1]}"]
    made = str(low) if low == high else f"one from {low} to {high}"
    return [f"`distance` is {distance}; `same` and the names make it {made}"]
