"""Known tricks against a grader of boxed mathematical answers; tried where a reward pays for a box."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from vlmrl.rewards.math.latex import tidy
from vlmrl.rewards.math.numbers import read_number
from vlmrl.rewards.math.units import split_unit
from vlmrl.tasks.answer_forms import AnswerForm
from vlmrl.tasks.attack import Attack, Kind, Make, says
from vlmrl.types import RewardInput

BOX = "\\boxed"
OTHER_UNITS = {"cm": "in", "m": "ft", "km": "mi", "mm": "cm", "in": "cm", "ft": "m"}
"""Unit -> one that measures the same and has another size."""


def math_attacks(form: AnswerForm, known: Sequence[str]) -> list[Attack]:
    """Return the tricks for answers in boxes. `known`: the answers of all rows."""
    answer = form.text

    def wrong(x: RewardInput) -> str:
        return form.wrong(x, known)

    def miss(name: str, idea: str, change: Callable[[str, str], str | None], kind: Kind = "miss") -> Attack:
        def make(x: RewardInput) -> str | None:
            changed = change(answer(x), wrong(x)) if answer(x) else None
            return None if changed is None else form.around(changed)

        return Attack(name, idea, kind, make)

    def boxed(template: str) -> Make:
        return lambda x: template % f"{BOX}{{{answer(x)}}}" if answer(x) else None

    return [
        miss("denied in the box", "not equal to the right answer", lambda t, _: f"\\neq {t}"),
        miss("contradiction in the box", "the right answer = a wrong one", lambda t, w: f"{t} = {w}"),
        miss("wrong, then = right", "a wrong answer = the right one", lambda t, w: f"{w} = {t}"),
        miss("or in the box", "the right answer or a wrong one", lambda t, w: f"{t} \\text{{ or }} {w}"),
        miss("more or less", "the right answer, plus or minus one", lambda t, _: f"{t} \\pm 1"),
        miss("power", "the right number to the power of 3", _power),
        miss("a hundred times", "100 times the right number", lambda t, _: _scaled(t, Fraction(100))),
        miss("a hundredth", "a hundredth of the right number", lambda t, _: _scaled(t, Fraction(1, 100))),
        miss("nearly", "0.01 more than the right integer", _nearly, "loose"),
        miss("other unit", "the right number with another unit", _other_unit),
        miss("tuple for a set", "round brackets around a set's elements", _as_tuple),
        Attack("everything", "an interval with every number in it", "guess", says(f"{BOX}{{(-\\infty, \\infty)}}")),
        Attack("variable", "a box with an x", "void", says(f"{BOX}{{x}}")),
        Attack("empty box", "a box without an answer", "void", says(f"{BOX}{{}}")),
        Attack("words in the box", "a box that calls itself right", "void", says(f"{BOX}{{\\text{{correct}}}}")),
        Attack("code in the box", "Python in a box", "void", says(f"{BOX}{{__import__('os').getpid()}}")),
        Attack("power tower", "a number that takes a computer years, in a box", "void",
               says(f"{BOX}{{9^{{9^{{9^{{9}}}}}}}}"), most=1),
        Attack("box in the thought", "the right box in the thought, none after it", "loose",
               boxed("<think>%s</think> I cannot tell.")),
        Attack("box, then cut off", "the right box, then half of another one", "loose", boxed("%s or \\boxed{")),
        Attack("taken back", "the right box, then a wrong one", "loose",
               lambda x: f"{BOX}{{{answer(x)}}}. No, it is {BOX}{{{wrong(x)}}}." if answer(x) else None),
        Attack("blanks in the box", "blanks around the right answer", "fair", lambda x: form.around(f" {answer(x)} ")),
        Attack("more after the box", "a sentence that says `boxed` after the right answer", "fair",
               lambda x: f"{form.around(answer(x))}. I hope that this boxed answer helps."),
    ]  # fmt: skip


def _power(text: str, _: str) -> str | None:
    number = read_number(tidy(split_unit(tidy(text))[0]))
    return None if number is None or number.value in (0, 1) else f"{split_unit(tidy(text))[0]}^3"


def _scaled(text: str, factor: Fraction) -> str | None:
    number = read_number(tidy(text))
    if number is None or not number.value:
        return None
    value = number.value * factor
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _nearly(text: str, _: str) -> str | None:
    return f"{text}.01" if re.fullmatch(r"[0-9]+", text) else None


def _other_unit(text: str, _: str) -> str | None:
    value, unit = split_unit(tidy(text))
    other = OTHER_UNITS.get(unit.name) if unit is not None else None
    return None if other is None else f"{value}\\text{{ {other}}}"


def _as_tuple(text: str, _: str) -> str | None:
    match = re.fullmatch(r"\\\{(.*,.*)\\\}", text)
    return f"({match.group(1)})" if match else None
