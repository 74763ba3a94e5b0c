"""Cell of the algorithm table: its facts, declared as a dataclass field, and the conditions under which it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, get_args, get_type_hints

from vlmrl.key_facts import OnResume, Range

T = TypeVar("T")

ALGORITHM = OnResume("asked", "the algorithm")


@dataclass(frozen=True)
class When:
    """Condition under which a cell is read: it depends on the value of another cell.

    Args:
        values: values of the other cell with which this one is read; () = every value but None, 0 and False.
        otherwise: reason for the user why this cell does nothing if the condition does not hold. {row} stands for the
            row's name, {value} for the other cell's value. "" = a text with the other cell and its value.
        hint: advice for the user in this case; "" = remove this cell, or set the other one.
    """

    cell: str
    values: tuple[str, ...] = ()
    otherwise: str = ""
    hint: str = ""

    def holds(self, value: Any) -> bool:
        """Return whether the condition holds for this value of the other cell."""
        return value in self.values if self.values else bool(value)

    def unread(self, row: str, value: Any) -> str:
        """Return the reason why the cell does nothing in this row, with this value of the other cell."""
        shown = f'"{value}"' if isinstance(value, str) else "not set" if value is None else f"{value:g}"
        return self.otherwise.format(row=row, value=value) or f"`algo.{self.cell}` is {shown}"

    @property
    def remedy(self) -> str:
        """Advice for the user if the condition does not hold, so that the cell does nothing."""
        if self.hint:
            return self.hint
        if len(self.values) == 1:
            return f'remove it, or set algo.{self.cell} = "{self.values[0]}"'
        if self.values:
            return f"remove it, or set algo.{self.cell} to {' or '.join(self.values)}"
        return f"set algo.{self.cell}, or remove it"

    @property
    def words(self) -> str:
        """The condition in words, for help texts."""
        if self.values:
            return f"algo.{self.cell} is {_listed(self.values)}"
        return f"algo.{self.cell} is set and not 0"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Facts about one cell.

    Args:
        name: name of the cell, and of the recipe key `algo.<name>`.
        optional: whether a row may leave the cell empty (None).
        default: value in rows that do not set the cell.
        help: text for users about the effect of the cell. `description` adds the choices and the conditions.
        range: bounds of a number; None for other types.
        choices: possible value -> remark ("" = no remark); empty for a number or a boolean.
        open_list: whether the choices are entries of a table in this package that is meant to grow (estimators,
            surrogates ...). If so, the recipe's check refuses an unknown value; else the reading of the recipe does.
        used_when: conditions under which the cell is read. If one of them does not hold, the cell does nothing.
        neutral: value that has no effect under any condition; None = there is no such value.
        of_row: whether a recipe without this key uses the row's value. False = it uses the default, in all rows.
    """

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    optional: bool
    default: Any
    help: str
    range: Range | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    open_list: bool = False
    used_when: tuple[When, ...] = ()
    neutral: Any = None
    on_resume: OnResume = ALGORITHM
    of_row: bool = True

    @property
    def description(self) -> str:
        """Text for users: the help, the choices with their remarks, and the conditions under which the cell is read."""
        texts = [self.help]
        if self.open_list and any(self.choices.values()):
            names = (f"{name} ({remark})" if remark else name for name, remark in self.choices.items())
            texts.append(f"One of: {', '.join(names)}.")
        if self.used_when:
            texts.append(f"Only where {' and '.join(when.words for when in self.used_when)}.")
        return " ".join(texts)


def cell(
    default: T,
    help: str,
    *,
    range: Range | None = None,
    choices: Mapping[str, str] | tuple[str, ...] = (),
    open_list: bool = False,
    used_when: tuple[When, ...] = (),
    neutral: Any = None,
    on_resume: OnResume = ALGORITHM,
    of_row: bool = True,
) -> T:
    """Return a dataclass field that declares a cell. Arguments: see `Cell`. Its type is that of the default."""
    names = choices if isinstance(choices, Mapping) else dict.fromkeys(choices, "")
    facts = {"help": help, "range": range, "choices": names, "open_list": open_list, "used_when": used_when}
    facts |= {"neutral": neutral, "on_resume": on_resume, "of_row": of_row}
    declared: Any = field(default=default, metadata=facts)
    return declared


def cells_of(table: type) -> Iterator[Cell]:
    """Yield the cells that a dataclass declares, in the order of its fields."""
    hints = get_type_hints(table)
    for item in fields(table):
        if item.metadata:
            yield _cell(item, hints[item.name])


def _cell(item: Field[Any], hint: Any) -> Cell:
    alternatives = get_args(hint) or (hint,)
    kind = next(a for a in alternatives if a is not type(None))
    optional = type(None) in alternatives
    return Cell(name=item.name, type=kind, optional=optional, default=item.default, **item.metadata)


def _listed(values: tuple[str, ...]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
