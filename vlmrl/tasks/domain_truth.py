"""What is wrong with the truth of a domain's row, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.tasks.domain import Domain, Field, names_agree, truth_distance

FORBIDDEN = ";<>\n"
"""Characters that the answer format and TaxonRL's layouts cannot hold in a name."""


def truth_problems(domain: Domain, truth: Mapping[str, Any]) -> list[str]:
    """Every mistake in the truth of a row, in words; empty when it is sound.

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
        if not isinstance(name, str) or not name:
            wrong.append(f"`{field.name}` has {name!r}, which is neither a name nor null")
        elif any(c in name for c in FORBIDDEN) or name != name.strip():
            wrong.append(f"`{field.name}` has the name {name!r}, which no answer can hold (; < > or outer blanks)")
        elif field.labels and name not in field.labels:
            wrong.append(f"`{field.name}` has the label {name!r}, which is none of {', '.join(field.labels)}")
    return wrong


def _contradictions(domain: Domain, truth: Mapping[str, Any]) -> list[str]:
    wrong = []
    for field in domain.fields:
        if truth["same"] and (field.level or field.fixed) and names_agree(truth.get(field.name), field.name) is False:
            first, second = truth[field.name]
            wrong.append(f"`same` is true but `{field.name}` differs: {first}, {second}")
    distance, made = truth.get("distance"), truth_distance(domain, truth)
    if not wrong and distance is not None and made is not None and distance != made:
        wrong.append(f"`distance` is {distance!r}; the names make it {made}")
    return wrong
