"""Results of the functions of a task of one's own, checked where the functions are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from vlmrl.tasks.attack import Attack, Kind

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function of the user's so that what it raises is named with its line."""


class WrongResultError(Exception):
    """A result that a task's function must not return; the message says what it is and what is expected."""


def checked(key: str, result: Any, guard: Guard) -> Any:
    """Return the result of a task's function in the form that its callers expect.

    Args:
        key: the field of `Task`.    guard: for functions inside the result.
    Raises: WrongResultError.
    """
    check = _CHECKS.get(key)
    return result if check is None else check(result, guard)


def _problems(result: Any, guard: Guard) -> list[str]:
    if not isinstance(result, (list, tuple)) or not all(isinstance(one, str) for one in result):
        raise WrongResultError(f"returned {_shown(result)}, not a list of texts (empty for a sound truth)")
    return list(result)


def _numbers(result: Any, guard: Guard) -> dict[str, float | None]:
    if not isinstance(result, Mapping):
        raise WrongResultError(f"returned {_shown(result)}, not a mapping of names to numbers")
    found: dict[str, float | None] = {}
    for name, value in result.items():
        if not isinstance(name, str):
            raise WrongResultError(f"names a measure {_shown(name)}, which is no text")
        found[name] = None if value is None else _number(name, value)
    return found


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise WrongResultError(f"returned {_shown(value)} for `{name}`, not a finite number or None (does not apply)")
    return number


def _unit(result: Any, guard: Guard) -> Hashable:
    try:
        hash(result)
    except TypeError:
        raise WrongResultError(f"returned {_shown(result)}, which cannot be hashed: return a text or a tuple") from None
    return result


def _text(result: Any, guard: Guard) -> str:
    if not isinstance(result, str):
        raise WrongResultError(f"returned {_shown(result)}, not a text")
    return result


def _attacks(result: Any, guard: Guard) -> Sequence[Attack]:
    if not isinstance(result, (list, tuple)) or not all(isinstance(one, Attack) for one in result):
        raise WrongResultError(f"returned {_shown(result)}, not a list of vlmrl.Attack")
    for attack in result:
        if attack.kind not in get_args(Kind):
            raise WrongResultError(
                f"gave the attack `{attack.name}` the kind {attack.kind!r}; kinds: {', '.join(get_args(Kind))}"
            )
    return [
        replace(attack, make=guard(attack.make), turned=None if attack.turned is None else guard(attack.turned))
        for attack in result
    ]


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


_CHECKS: Mapping[str, Callable[[Any, Guard], Any]] = {
    "validate": _problems, "outcome": _numbers, "set_metrics": _numbers, "unit": _unit, "trace": _text,
    "attacks": _attacks,
}  # fmt: skip
