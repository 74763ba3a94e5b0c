"""Cells of Arrow tables that Python cannot hold: dates after the year 9999, unknown time zones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrl.errors import DataError


def unreadable_cell(rows: Any, places: Sequence[str]) -> DataError:
    """Return the error that names the first cell which Python cannot hold.

    Args: rows: Arrow rows (table or record batch) of which `to_pylist` raised; places: where each of them is.
    """
    for index, place in enumerate(places):
        for name in rows.schema.names:
            try:
                rows.slice(index, 1).select([name]).to_pylist()
            except (ValueError, OverflowError, KeyError) as error:
                kind = rows.schema.field(name).type
                return DataError(
                    f"a value of type {kind} cannot be read: {str(error).strip() or type(error).__name__}",
                    where=f"{place}, column `{name}`", hint="store it as text, or take the column out",
                )  # fmt: skip
    return DataError("the rows cannot be read", where=places[0] if places else None)
