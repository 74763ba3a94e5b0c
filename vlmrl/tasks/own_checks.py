"""Checks of a user's own task: the types of its fields, and the values that its functions return.

A wrong value of a function would often fail much later, in other code. Each value is therefore checked where it is
returned, and the error names the function. Valid values are converted: numbers of NumPy and torch become floats,
iterators become lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice
from typing import Any, get_args

from vlmrl.data.doctor import Verdict
from vlmrl.errors import DataError, RecipeError
from vlmrl.metric import Metric
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.attack import Attack, Kind
from vlmrl.tasks.base import Outcome, Task
from vlmrl.tasks.figure import MAX_FIGURES
from vlmrl.tasks.overlay import Mark
from vlmrl.tasks.positions import Positions
from vlmrl.tasks.response_file import NoFile, ResponseFile
from vlmrl.tasks.truth_kinds import RowKind, TruthForm
from vlmrl.types import Message

ALWAYS = ("validate", "outcome", "attacks", "figures")
"""Functions that every task must have. The other functions may be None."""
FUNCTIONS = (*ALWAYS, "set_metrics", "messages", "trace", "unit", "outcome_as", "prep", "positions")
MOST_ATTACKS = 1000
MOST_NUMBERS = 1000
"""Maximum number of metrics per response, and of metrics per split."""


def check_fields(task: Task, where: str) -> None:
    """Raise a RecipeError if a field of a task has a wrong type."""
    for key in FUNCTIONS:
        value = getattr(task, key)
        if not callable(value) and (value is not None or key in ALWAYS):
            raise RecipeError(f"`{key}` of the task is {quoted(value)}, not a function", where=where)
    for key, (is_sound, words) in FIELDS.items():
        if not is_sound(value := getattr(task, key)):
            raise RecipeError(f"`{key}` of the task is {quoted(value)}", where=where, hint=words)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_text, value))


def _named(value: Any, is_sound: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and is_sound(v) for k, v in value.items())


def _is_profile(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list)) and len(value) == 2 and _is_text(value[0]) and _named(value[1], lambda _: True)
    )


FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "summary": (_is_text, 'a line of text: summary="count the squares"'),
    "template": (_is_text, 'a text: template="How many squares are there? <image>"'),
    "template_file": (_is_text, "a text: the place of `template`, for messages"),
    "variables": (lambda v: _named(v, lambda _: True), 'names with values: variables={"most": 9}'),
    "profiles": (lambda v: _named(v, _is_profile), 'rewards with arguments: profiles={"default": (":score", {})}'),
    "metrics": (
        lambda v: _named(v, lambda m: isinstance(m, Metric)),
        'metrics={"error": vlmrl.Metric("lower", (0.0, 1.0))}',
    ),
    "replicates": (lambda v: type(v) is int and v >= 0, "a number of resamples, 0 = no intervals"),
    "by": (_are_texts, 'names of fields of the truth: by=("count",)'),
    "variant": (_is_text, "leave it out: a user's own task has no variants"),
    "variants": (_are_texts, "leave it out: a user's own task has no variants"),
    "trace_sees": (lambda v: type(v) is bool, "True if `trace` takes the sizes of the images as its third argument"),
    "truths": (lambda v: v is None or isinstance(v, TruthForm), "a vlmrl.tasks.truth_kinds.TruthForm, or None"),
    "kind": (lambda v: v is None or isinstance(v, RowKind), "a vlmrl.tasks.truth_kinds.RowKind, or None"),
    "file": (lambda v: v is None or isinstance(v, ResponseFile), 'vlmrl.ResponseFile("SVG code", ".svg", code_of)'),
}


def _measures(returned: Any) -> Outcome:
    """Return the outcome of one answer as floats. None stays None: the metric does not apply to the answer.

    Raises: DataError for anything but a mapping of names to finite numbers.
    """
    return {_name(k): None if v is None else _number(k, v) for k, v in _mapping(returned).items()}


def _whole(returned: Any) -> Outcome:
    """Return the metrics of a split. NaN, such as NumPy's mean of an empty list, becomes None: not defined."""
    numbers = {_name(k): math.nan if v is None else _number(k, v, nan=True) for k, v in _mapping(returned).items()}
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}


def _sums(returned: Any) -> dict[str, int]:
    """Return the counts of a response as integers."""
    numbers = {_name(k): _number(k, v) for k, v in _mapping(returned).items()}
    if fractions := [name for name, number in numbers.items() if number != int(number)]:
        raise DataError(f"the count `{fractions[0]}` is {numbers[fractions[0]]!r}, not a whole number")
    return {name: int(number) for name, number in numbers.items()}


def _mapping(returned: Any) -> Mapping[Any, Any]:
    if not isinstance(returned, Mapping):
        raise DataError(
            f"it returned {_shown(returned)}, not a mapping of names to numbers", hint='return {"accuracy": 1.0}'
        )
    if len(returned) > MOST_NUMBERS:
        raise DataError(f"it returned {len(returned):,} numbers; at most {MOST_NUMBERS:,} are allowed")
    return returned


def _name(key: Any) -> str:
    if not isinstance(key, str) or not key.strip() or not key.isprintable():
        raise DataError(f"a metric is called {quoted(key)}; its name is a text on one line", hint='such as "accuracy"')
    return str(key)


def _number(name: str, value: Any, *, nan: bool = False) -> float:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    try:
        if isinstance(value, (str, bytes, bytearray)) or kind not in "biuf":
            raise TypeError("no real number")
        number = float(value.item() if getattr(value, "shape", ()) or hasattr(value, "is_complex") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"the metric `{name}` is {quoted(value)}, not a number or None") from error
    if not (math.isfinite(number) or (nan and math.isnan(number))):
        hint = "None says that it does not apply"
        raise DataError(f"the metric `{name}` is {quoted(value)}, not a finite number or None", hint=hint)
    return number


def _texts(returned: Any) -> list[str]:
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise DataError(f"it returned {_shown(returned)}, not a list of texts", hint="an empty list means: no problem")
    texts = list(islice(returned, MOST_NUMBERS))
    if not all(map(_is_text, texts)):
        raise DataError("it returned a list with a value that is no text", hint="return the problems in words")
    return texts


def _turns(returned: Any) -> tuple[Message, ...]:
    turns = tuple(returned) if isinstance(returned, (tuple, list)) else ()
    if not turns or not all(isinstance(turn, Message) for turn in turns):
        raise DataError(f"it returned {_shown(returned)}, not a tuple of vlmrl.types.Message")
    return turns


def response_of(returned: Any) -> str | None:
    """Return the text of a trick's response; None = the trick cannot be used on the row.

    Raises: DataError for any other value.
    """
    return None if returned is None else _trace(returned)


def content_of(returned: Any) -> str | NoFile:
    """Return the content of a response's file, or why there is none. Raises: DataError for any other value."""
    if isinstance(returned, (str, NoFile)):
        return returned
    raise DataError(f"it returned {_shown(returned)}, not a text or a vlmrl.NoFile")


def positions_of(returned: Any) -> Positions:
    if not isinstance(returned, Positions):
        raise DataError(f"it returned {_shown(returned)}, not vlmrl.tasks.positions.Positions")
    return returned


def marks_of(returned: Any) -> list[Mark]:
    marks: list[Any] = list(islice(returned, MOST_NUMBERS)) if isinstance(returned, Iterable) else [None]
    if not all(isinstance(mark, Mark) for mark in marks):
        raise DataError(f"it returned {_shown(returned)}, not a list of vlmrl.tasks.overlay.Mark")
    return marks


def _trace(returned: Any) -> str:
    if not isinstance(returned, str):
        raise DataError(f"it returned {_shown(returned)}, not the text of a response")
    return returned


def _attacks(returned: Any) -> list[Attack]:
    attacks: list[Any] = list(islice(returned, MOST_ATTACKS)) if isinstance(returned, Iterable) else [None]
    if not all(isinstance(attack, Attack) for attack in attacks):
        raise DataError(f"it returned {_shown(returned)}, not a list of vlmrl.Attack")
    for attack in attacks:
        if attack.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise DataError(f"the attack `{attack.name}` has the kind {quoted(attack.kind)}", hint=f"kinds: {known}")
    return attacks


def _unit(returned: Any) -> Hashable:
    try:
        hash(returned)
    except TypeError as error:
        raise DataError(f"it returned {_shown(returned)}, which cannot be a key", hint="a text, or a number") from error
    return returned


def _figures(returned: Any) -> list[Any]:
    """Return the figures as a list, cut after one figure more than allowed; figure.py then reports too many figures."""
    if not isinstance(returned, Iterable):
        raise DataError(f"it returned {_shown(returned)}, not a list of figures")
    return list(islice(returned, MAX_FIGURES + 1))


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {quoted(value)}"


def _notes(returned: Any) -> dict[str, tuple[Verdict, str]]:
    notes: dict[Any, Any] = dict(returned) if isinstance(returned, Mapping) else {"": None}
    for name, note in notes.items():
        is_note = isinstance(note, tuple) and len(note) == 2 and note[0] in get_args(Verdict)
        if not (isinstance(name, str) and is_note and isinstance(note[1], str)):
            kinds = ", ".join(get_args(Verdict))
            raise DataError(f"it returned {_shown(returned)}, not a mapping of names to ({kinds}; a text)")
    return notes


RETURNS: Mapping[str, Callable[[Any], Any]] = {
    "validate": _texts,
    "outcome": _measures,
    "set_metrics": _whole,
    "messages": _turns,
    "trace": _trace,
    "attacks": _attacks,
    "unit": _unit,
    "figures": _figures,
    "notes": _notes,
}
"""Name of a task's function -> the check of its results, which returns them converted."""
POOLED_RETURNS: Mapping[str, Callable[[Any], Any]] = {"count": _sums, "metrics": _whole}
"""Name of a function of PooledMetrics -> the check of its results, in the order of the fields."""
