"""Columns of a row that an environment gets, and those that are kept back from it because they repeat the truth.

Whether a column repeats the truth is decided once for all rows of a source, so that no row has other columns than the
next one. The decision belongs to a run's record of its environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import VlmrlError
from vlmrl.types import Row
from vlmrl.untrusted import parse_json

SHARE = 0.5
"""A column repeats a field of the truth if it holds it in this share of the rows where both have a value."""
MOST_ROWS = 1000
"""Number of rows, evenly spread over a split, on which this is decided."""
Repeats = Mapping[str, Sequence[str]]
"""Column -> fields of the truth that it repeats."""


@dataclass
class Repeated:
    """Number of rows in which a column holds a field of the truth, of those where both have a value."""

    rows: int = 0
    both: int = 0


def count_repeats(rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, dict[str, Repeated]]:
    """Return column -> field of the truth -> counts, of those that are repeated.

    A column with the name of a field of the truth is left out: it is always kept back.

    Args:
        rows: (columns, truth) of each row.
    """
    counts: dict[tuple[str, str], Repeated] = {}
    for columns, truth in rows:
        for column, value in columns.items():
            for name, one in truth.items() if column not in truth and not _is_empty(value) else ():
                if not _is_empty(one):
                    count = counts.setdefault((column, name), Repeated())
                    count.both += 1
                    count.rows += _holds(value, one)
    result: dict[str, dict[str, Repeated]] = {}
    for (column, name), count in sorted(counts.items()):
        if count.rows >= max(1, SHARE * count.both):
            result.setdefault(column, {})[name] = count
    return result


def sampled(rows: Sequence[Row]) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (columns, truth) of at most MOST_ROWS rows, always the same ones, without unreadable rows."""
    count = min(len(rows), MOST_ROWS)
    for number in range(count):
        try:
            row = rows[number * len(rows) // count]
        except VlmrlError:
            continue
        yield row.columns, row.truth


def repeats_of(rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Return the columns that repeat the truth, each with the fields that it repeats. `rows`: as `count_repeats`."""
    return {column: list(fields) for column, fields in count_repeats(rows).items()}


def row_fields(
    columns: Mapping[str, Any], truth: Mapping[str, Any], takes: Mapping[str, bool] | None, repeats: Repeats
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the fields of a row that `reset` gets, and those that are kept back: name -> fields that it repeats.

    A truth field, or a column that repeats one, is handed over if `reset` names it as a parameter: that declares the
    need. `**row` alone never gets one, as some tables repeat the truth.

    Args:
        takes: parameters of reset, and whether each is `**row`; None = there is no reset, and `Start` gets what
            `**row` would.
        repeats: of the row's source.
    """
    named = {name for name, is_open in (takes or {}).items() if not is_open}
    takes_all = takes is None or any(takes.values())
    fields = {name: value for name, value in truth.items() if name in named}
    kept_back: dict[str, list[str]] = {name: [] for name in truth if name not in named}
    for name, value in columns.items():
        if name in fields or name in kept_back or not (takes_all or name in named):
            continue
        if name not in named and (repeated := [one for one in repeats.get(name, ()) if one not in named]):
            kept_back[name] = repeated
        else:
            fields[name] = value
    return fields, dict(sorted(kept_back.items()))


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _holds(value: Any, truth: Any) -> bool:
    """Return whether a column's value equals the truth, or contains it at any depth, as a JSON text too."""
    if value is None:
        return False
    if value == truth:
        return True
    if isinstance(value, Mapping):
        return any(_holds(one, truth) for one in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(one, truth) for one in value)
    if not isinstance(value, str):
        return False
    text = value.strip()
    if text == str(truth).strip():
        return True
    try:
        return text.startswith(("{", "[")) and _holds(parse_json(text), truth)
    except ValueError:
        return False
