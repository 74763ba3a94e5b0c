"""Check of the judge's tables: a wrong key or value gets a message with a hint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vlmrl.errors import Problem, ProblemsError, RecipeError, did_you_mean
from vlmrl.redaction.redact import excerpt
from vlmrl.untrusted import one_line

MOST_VALUE_CHARS = 60
NEVER_SHOWN = {
    "key_env": "the name of an environment variable in capital letters, such as GEMINI_API_KEY",
    "endpoint": "an address",
}
"""Key whose wrong value may be a secret -> what it should be."""
_BRANCHES = ("constrained-str", "str", "literal[")


Table = TypeVar("Table", bound=BaseModel)


def read_table(kind: type[Table], values: Mapping[str, Any], where: str) -> Table:
    """Return a checked table.

    Args:
        where: name of the table or of its file, for messages.
    Raises: RecipeError with all that is wrong.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # The members of a union each have a finding for the same key: the first one speaks for all.
        findings = {_place(finding): finding for finding in reversed(error.errors(include_url=False))}
    problems = [_problem(kind, place, findings[place], where) for place in reversed(findings)]
    if len(problems) == 1:
        raise RecipeError(problems[0].message, where=where, hint=problems[0].hint)
    raise ProblemsError(problems)


def _place(finding: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of a finding, without pydantic's names for the members of a union."""
    return tuple(part for part in finding["loc"] if not str(part).startswith(_BRANCHES))


def _problem(kind: type[BaseModel], place: tuple[Any, ...], finding: Mapping[str, Any], where: str) -> Problem:
    name = ".".join(str(part + 1) if isinstance(part, int) else one_line(part) for part in place)
    if finding["type"] == "extra_forbidden":
        keys = list(_table_at(kind, place[:-1]).model_fields)
        hint = did_you_mean(str(place[-1]), keys, f"known keys: {', '.join(keys)}")
        return Problem(f"unknown key `{name}`", where, hint)
    if finding["type"] == "missing":
        return Problem(f"`{name}` is missing", where, f"add a line: {place[-1]} = ...")
    if finding["type"] == "value_error":
        message, _, hint = str(finding["ctx"]["error"]).partition("; ")
        return Problem(message, where, hint or None)
    if place and place[-1] in NEVER_SHOWN:
        return Problem(f"`{name}` is not {NEVER_SHOWN[place[-1]]}", where, _help(kind, place))
    value = excerpt(one_line(repr(finding.get("input"))), MOST_VALUE_CHARS)
    words = finding["msg"].replace("Input should be", "it must be")
    return Problem(f"`{name}` is {value}; {words}", where, _help(kind, place))


def _table_at(kind: type[BaseModel], place: Sequence[Any]) -> type[BaseModel]:
    """Return the class of a table inside a table; `place` may contain positions in lists."""
    for part in place:
        field = kind.model_fields.get(part) if isinstance(part, str) else None
        inner = _table_in(field.annotation) if field else None
        kind = inner or kind
    return kind


def _table_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for inner in map(_table_in, getattr(annotation, "__args__", ())) if inner), None)


def _help(kind: type[BaseModel], place: Sequence[Any]) -> str | None:
    names = [part for part in place if isinstance(part, str)]
    field = _table_at(kind, names[:-1]).model_fields.get(names[-1]) if names else None
    return f"`{names[-1]}`: {' '.join(field.description.split())}" if field and field.description else None
