"""Options of `vlmrl prep` from the parameters of a function: their names, types and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from vlmrl.errors import RecipeError

PLAIN = (int, float, str, bool, Path)
"""Types of a value. An option whose type is a list of one of them may be given several times."""
TYPES = "give it one of the types int, float, str, bool and pathlib.Path, and a default"


@dataclass(frozen=True)
class Option:
    """Facts about a parameter: `Annotated[int, Option("Training rows.", min=2)]`.

    A text in place of the Option is used as the help.

    Args:
        help: a sentence for `--help`.
        flag: name on the command line; "" = the parameter's name, with `-` for `_`.
        min, max: bounds of a number, inclusive; None = no bound.
        positional: whether the value is given without the option's name.
    """

    help: str = ""
    flag: str = ""
    min: float | None = None
    max: float | None = None
    positional: bool = False


@dataclass(frozen=True)
class Parameter:
    """Parameter that is an option. If `default` is `inspect.Parameter.empty`, the option is required."""

    name: str
    kind: Any
    default: Any
    option: Option


@dataclass(frozen=True)
class PrepCommand:
    """Command `vlmrl prep` of a task.

    Args:
        run: makes the dataset, and returns a `Prepared`; its parameters are the options, except `limits` and `force`.
        help: help text: the first paragraph describes the dataset, the others the accepted sources, with an example.
        keeps: options -> whether an interrupted run with these options is continued.
    """

    run: Callable[..., Any]
    help: str
    keeps: Callable[[Mapping[str, Any]], bool] = lambda options: True


def parameters_of(function: Callable[..., Any], where: str = "") -> list[Parameter]:
    """Return the parameters of a function as options; `limits` and `force` are left out.

    Raises: RecipeError for a parameter that is no number, text, path or yes/no: no option can set it.
    """
    try:
        hints, parameters = hints_of(function), inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise RecipeError(f"the parameters of `prep` cannot be read: {error}", where=where, hint=TYPES) from error
    options = []
    for name, parameter in parameters.items():
        if name in ("limits", "force"):
            continue
        kind, option = _annotation(hints.get(name), parameter.default)
        plain = [one for one in get_args(kind) if one is not type(None)] or [kind]
        plain = [get_args(one)[0] if get_origin(one) is list else one for one in plain]
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if not named or len(plain) > 1 or plain[0] not in PLAIN:
            raise RecipeError(f"the parameter `{name}` of `prep` cannot be an option", where=where, hint=TYPES)
        options.append(Parameter(name, kind, parameter.default, option))
    return options


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters of a function or `functools.partial`. Raises: NameError or TypeError."""
    return get_type_hints(getattr(function, "func", function), include_extras=True)


def _annotation(hint: Any, default: Any) -> tuple[Any, Option]:
    """Return the type of a parameter, and its `Option`. Without an annotation, the type of the default is used."""
    option = Option()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        option = next((note if isinstance(note, Option) else Option(str(note)) for note in notes), option)
    if hint is None:
        hint = type(default) if default not in (None, inspect.Parameter.empty) else str
    return hint, option
