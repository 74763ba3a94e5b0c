"""The table `[algo]` of a recipe: `name`, and one key for each cell of the algorithm table.

The cells are declared in algo/algo_keys.py, with types, ranges, choices and help. This module makes recipe keys from
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, create_model

from vlmrl.algo.algo_keys import CELLS, KL, Cell
from vlmrl.algo.algorithms import ALGORITHMS, value_in_row
from vlmrl.recipe.key_rules import RL_ONLY
from vlmrl.recipe.table import RecipeTable, bounds


class AlgoRow(RecipeTable):
    """Algorithm of the GRPO family. `name`: a row of the table in algo/algorithms.py; other keys override its cells."""

    name: Annotated[str, KL, RL_ONLY] = "grpo"
    """Row of the algorithm table; `vlmrl recipe list --algos` lists the rows, and how they differ from others' code."""


def values_by_row(cell: str) -> dict[str, Any]:
    """Return row -> value of the cell if a recipe selects the row and does not set the cell; {} for other keys."""
    return {row: value_in_row(row, cell) for row in ALGORITHMS} if cell in CELLS else {}


def _default_words(cell: Cell) -> str:
    """Return the default in words; "" if the type of the key already contains the default."""
    values = {repr(value): value for value in values_by_row(cell.name).values()}
    if not cell.of_row:
        return ""
    if len(values) > 1:
        return "Default: the row's."
    (value,) = values.values()
    if value is None:
        return "Default: none."
    return f"Default: {str(value).lower() if isinstance(value, bool) else format(value, 'g') if cell.range else value}."


def _type(cell: Cell) -> Any:
    """Return the type of the recipe key, with its bounds or choices.

    For an open list of choices the type is a string, and recipe/checks.py compares its value with the choices. The JSON
    Schema lists the choices in both cases.
    """
    if cell.range is not None:
        return Annotated[cell.type, bounds(cell.range)]
    if cell.open_list:
        return Annotated[str, WithJsonSchema({"type": "string", "enum": list(cell.choices)})]
    return Literal[tuple(cell.choices)] if cell.choices else cell.type


def _key(cell: Cell) -> tuple[Any, Any]:
    """Return (type, default) of the recipe key. The default is None if the row determines the value."""
    text = f"{cell.description} {_default_words(cell)}".strip()
    value_type = _type(cell) | None if cell.of_row else _type(cell)
    default = None if cell.of_row else cell.default
    return Annotated[value_type, cell.on_resume, RL_ONLY], Field(default, description=text)


if TYPE_CHECKING:

    class Algo(AlgoRow):
        """The table `[algo]`. Every cell is an attribute: its value in the recipe; None = the row's value is used."""

        def __init__(self, name: str = "grpo", **cells: Any) -> None: ...

        def __getattr__(self, cell: str) -> Any: ...

else:
    Algo = create_model(
        "Algo",
        __base__=AlgoRow,
        __module__=__name__,
        __doc__=AlgoRow.__doc__,
        **{name: _key(cell) for name, cell in CELLS.items()},
    )
