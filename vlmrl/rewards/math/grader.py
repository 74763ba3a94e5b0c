r"""Grader of the math reward: whether two answers are the same under a policy, and the reason. Runs in workers only.

math-verify needs about a second to load, and some answers never end. Final forms are told from others: `1776` is one,
`37\cdot 48` is not, since a question must not be its own answer. Subsets of the real line, such as `(1,2)\cup[2,3]` and
`\mathbb{R}\setminus\{3\}`, are compared as sorted, disjoint intervals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.math.expressions import (
    TooLargeError,
    UnreadableError,
    check_size,
    constant,
    expression,
    same_constants,
    same_expressions,
    warm_up,
)
from vlmrl.rewards.math.latex import BOX, DECIMAL, MOST_ANSWER_CHARS, find_answer, last_box, squeezed
from vlmrl.rewards.math.reading import ANGLE, ANY, COUNT, EQUALS, PERCENT, RADIAN, REGIONS, Item, Reading, Unit, read
from vlmrl.rewards.math.rules import Policy, checked_policy
from vlmrl.rewards.text_parsing import untagged
from vlmrl.rewards.text_rewards import ground_truth, response_parts
from vlmrl.types import RewardInput, RewardResult

_NUMBER = rf"(?:{DECIMAL}|\\frac\{{{DECIMAL}\}}\{{{DECIMAL}\}})"
_START = r"(?:(?<![0-9A-Za-z.)}\]^!\s])|(?<=[-+*/=,]\s))"
"""Place before a number that is not multiplied with something on its left."""
_END = r"(?=\s*(?:$|[-+)\]}=,]))"
"""Place behind a number that is not multiplied with something on its right."""
OPERATION = re.compile(
    rf"{_START}{_NUMBER}\s*[-+]\s*{_NUMBER}{_END}"
    rf"|{_NUMBER}\s*(?:\\cdot|\\times|\\ast|\*)\s*(?!10\^)\(?-?{_NUMBER}(?![0-9.]|\^\{{?(?:\\frac|[0-9]+/|0?\.))"
)
"""Sum, difference, product or quotient of two numbers; `2\\cdot 10^{3}` and a part of `1+2\\sqrt{3}` are none."""


def is_worked_out(answer: str, gold: str) -> bool:
    r"""Return whether no sum, difference, product or quotient of two numbers is left in an answer.

    Powers, roots and functions are final forms, and so is everything where the gold answer has such an operation, too.

    Args:
        answer, gold: tidy texts without units; neither has variables.
    """
    return OPERATION.search(answer) is None or OPERATION.search(gold) is not None


INFINITY = {"\\infty": math.inf, "+\\infty": math.inf, "-\\infty": -math.inf}
End = Fraction | float


class Piece(NamedTuple):
    """Interval between two ends. `has_low`, `has_high`: whether it contains them."""

    low: End
    has_low: bool
    high: End
    has_high: bool


def region(reading: Reading) -> list[Piece] | None:
    """Return the intervals of a set of real numbers, from the lowest on; None where an end has no value."""
    try:
        return _joined(_pieces(reading))
    except UnreadableError:
        return None


def same_regions(one: list[Piece], other: list[Piece]) -> bool:
    """Return whether two regions have the same ends, which belong to both or to neither."""
    return len(one) == len(other) and all(
        _is_same(a.low, b.low) and _is_same(a.high, b.high) and a[1::2] == b[1::2]
        for a, b in zip(one, other, strict=True)
    )


def _pieces(reading: Reading) -> list[Piece]:
    if reading.kind == "tuple" and len(reading.items) == 2:
        (low, high), brackets = map(_end, reading.items), reading.brackets
        return [Piece(low, brackets[0] == "[", high, brackets[1] == "]")]
    if reading.kind in ("set", "value", "list") and not reading.parts:
        return [Piece(value, True, value, True) for value in map(_end, reading.items)]
    if reading.kind == "union":
        return [piece for part in reading.parts for piece in _pieces(part)]
    if reading.kind == "without":
        whole, holes = (_joined(_pieces(part)) for part in reading.parts)
        return _common(whole, _outside(holes))
    if reading.kind == "both":
        first, *others = (_joined(_pieces(part)) for part in reading.parts)
        for other in others:
            first = _common(first, other)
        # `x < 3, x > 5`: a comma means "and", unless nothing would be left.
        is_comma = reading.brackets == ","
        return first or ([piece for part in reading.parts for piece in _pieces(part)] if is_comma else [])
    raise UnreadableError("it is not a set of real numbers")


def _end(item: Item) -> End:
    if item.text in INFINITY:
        return INFINITY[item.text]
    if item.number is not None:
        return item.number.value
    real, imaginary = constant(item.text)
    if imaginary:
        raise UnreadableError("it is not a real number")
    return real


def _is_same(one: End, other: End) -> bool:
    if one == other or isinstance(one, float) or isinstance(other, float):
        return one == other
    return same_constants((Fraction(one), Fraction(0)), (Fraction(other), Fraction(0)))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces in order, with those that touch or overlap as one; empty ones are left out."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.low, not p.has_low)):
        if piece.low > piece.high or (_is_same(piece.low, piece.high) and not (piece.has_low and piece.has_high)):
            continue
        last = joined[-1] if joined else None
        touches = last is not None and _is_same(piece.low, last.high) and (piece.has_low or last.has_high)
        if last is None or not (piece.low < last.high or touches):
            joined.append(piece)
            continue
        if _is_same(piece.high, last.high):
            joined[-1] = last._replace(has_high=last.has_high or piece.has_high)
        elif piece.high > last.high:
            joined[-1] = last._replace(high=piece.high, has_high=piece.has_high)
    return joined


def _outside(pieces: list[Piece]) -> list[Piece]:
    """Return the complement of sorted, disjoint pieces."""
    outside, low, has_low = [], -math.inf, False
    for piece in pieces:
        outside.append(Piece(low, has_low, piece.low, not piece.has_low and piece.low != -math.inf))
        low, has_low = piece.high, not piece.has_high and piece.high != math.inf
    return _joined([*outside, Piece(low, has_low, math.inf, False)])


def _common(one: list[Piece], other: list[Piece]) -> list[Piece]:
    """Return the intersection of two regions."""
    common = []
    for a in one:
        for b in other:
            low, high = max(a.low, b.low), min(a.high, b.high)
            has_low = all(p.has_low for p in (a, b) if _is_same(p.low, low))
            has_high = all(p.has_high for p in (a, b) if _is_same(p.high, high))
            common.append(Piece(low, has_low, high, has_high))
    return _joined(common)


FRACTION = re.compile(r"[+-]?(?:\\frac\{[^{}]*\}\{[^{}]*\}|[0-9.]+\s*/\s*[0-9.]+)")


class Equivalence(NamedTuple):
    """Result of comparing an answer with the gold answer, and its reason in words."""

    is_right: bool
    reason: str


@dataclass(frozen=True)
class Quantity:
    """Value of an item.

    Args:
        value: exact, or computed to 60 digits.
        step: value of the last place of a decimal; None for exact values.
        digits: significant digits of that decimal.
    """

    value: Fraction
    step: Fraction | None = None
    digits: int = 0
    imaginary: Fraction = Fraction(0)


@lru_cache(maxsize=8192)
def judge(gold: str, answer: str, policy: Policy) -> Equivalence:
    """Return whether an answer is the gold answer.

    Args:
        gold, answer: texts without their boxes.
    """
    mixed = policy.mixed == "mixed"
    expected = read(gold, mixed=mixed)
    given = read(answer, mixed=mixed, letters=any(item.unit is not None for item in expected.items))
    return _Judge(policy).compare(expected, given)


@dataclass(frozen=True)
class _Judge:
    policy: Policy

    def compare(self, gold: Reading, answer: Reading) -> Equivalence:
        if answer.kind == "unclear":
            return Equivalence(False, answer.problem)
        if (answer.kind == "denial") != (gold.kind == "denial"):
            return Equivalence(False, "it denies a value")
        if squeezed(answer.text) == squeezed(gold.text):
            return Equivalence(True, "it is the gold answer as text")
        if gold.kind == "denial":
            return Equivalence(False, "it denies something else")
        if gold.kind == "choice":
            return self._choice(gold, answer)
        if answer.kind == "choice" and answer.rest is not None:
            if self.policy.choices == "exact":
                return Equivalence(False, "there is a letter beside the value")
            answer = answer.rest
            if answer.kind in ("unclear", "denial"):
                return Equivalence(False, answer.problem or "it denies a value")
        if gold.kind == "words" or answer.kind in ("words", "choice"):
            if (letters := _letters(gold)) and letters == _letters(answer):
                return Equivalence(True, "the letters agree")
            same = _plain_words(gold.text) == _plain_words(answer.text)
            return Equivalence(same, "the words agree" if same else "the words differ")
        return self._shapes(gold, answer)

    def _choice(self, gold: Reading, answer: Reading) -> Equivalence:
        if answer.kind != "choice":
            return Equivalence(False, f"it is not one of the letters; {gold.letter} is right")
        if answer.rest is not None and self.policy.choices == "exact":
            return Equivalence(False, "there is more than the letter")
        if answer.rest is not None and _has_other_letter(answer.rest, answer.letter):
            return Equivalence(False, "it names several letters")
        same = answer.letter == gold.letter
        return Equivalence(same, f"the letter is {answer.letter}" + ("" if same else f", not {gold.letter}"))

    def _shapes(self, gold: Reading, answer: Reading) -> Equivalence:
        loose = self.policy.sets == "loose"
        bare = ("list", "set")
        if gold.kind in REGIONS or answer.kind in REGIONS:
            one_region, other_region = region(gold), region(answer)
            if one_region is not None and other_region is not None:
                same = same_regions(one_region, other_region)
                return Equivalence(same, "the intervals agree" if same else "the intervals differ")
            if gold.kind != answer.kind or len(gold.parts) != len(answer.parts):
                return Equivalence(False, "one is a union of other intervals")
            return self._matched(gold.parts, answer.parts, "intervals")
        if gold.parts or answer.parts:
            return self._matched(gold.parts, answer.parts, "tuples")
        kinds = {"equation": "value", "value": "value"}
        one, other = (kinds.get(side.kind, side.kind) for side in (gold, answer))
        if "figures" in (one, other):
            return self._figures(gold, answer)
        if one == other == "value":
            return self._values(gold.items[0], answer.items[0])
        if one == other == "matrix" or {one, other} == {"matrix", "tuple"}:
            return self._matrices(gold, answer)
        if one == other == "tuple":
            if gold.name and answer.name and gold.name != answer.name:
                return Equivalence(False, f"it is the point {answer.name}, not {gold.name}")
            if self.policy.intervals != "ends" and gold.brackets != answer.brackets:
                return Equivalence(False, f"its brackets are {answer.brackets}, not {gold.brackets}")
            return self._in_order(gold.items, answer.items)
        if one in bare and other in bare:
            return self._matched(gold.items, answer.items, "values")
        if {one, other} <= {"value", "set"} and len(gold.items) == len(answer.items) == 1:
            return self._values(gold.items[0], answer.items[0])
        if loose and one != "value" and other != "value":
            return self._in_order(gold.items, answer.items)
        return Equivalence(False, f"it is a {_shown(answer.kind)}, not a {_shown(gold.kind)}")

    def _matrices(self, gold: Reading, answer: Reading) -> Equivalence:
        """Return whether two matrices agree value by value. A tuple is a row or a column."""
        sizes = [side.brackets for side in (gold, answer) if side.kind == "matrix"]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            return Equivalence(False, f"it is a matrix of {sizes[1]}, not of {sizes[0]}")
        if len(sizes) == 1 and "1" not in sizes[0].split("x"):
            return Equivalence(False, "one is a matrix, the other a tuple")
        return self._in_order(gold.items, answer.items)

    def _figures(self, gold: Reading, answer: Reading) -> Equivalence:
        """Return whether two dates, times, ranges or ratios are the same. A ratio `3:4` is also the fraction 3/4."""
        if gold.kind != answer.kind:
            figures, single = (gold, answer) if gold.kind == "figures" else (answer, gold)
            is_fraction = single.kind == "value" and FRACTION.fullmatch(single.items[0].text) is not None
            if figures.is_ratio and is_fraction and single.items[0].number is not None:
                same = figures.quotient == single.items[0].number.value
                return Equivalence(same, "the ratios agree" if same else "the ratios differ")
            return Equivalence(False, f"it is a {_shown(answer.kind)}, not a {_shown(gold.kind)}")
        if gold.brackets != answer.brackets:
            return Equivalence(False, f"its numbers are joined by `{answer.brackets}`, not by `{gold.brackets}`")
        if gold.is_ratio and len(answer.items) == 2 and (value := gold.quotient) is not None:
            same = answer.quotient == value
            return Equivalence(same, "the ratios agree" if same else "the ratios differ")
        return self._in_order(gold.items, answer.items)

    def _in_order(self, gold: tuple[Item, ...], answer: tuple[Item, ...]) -> Equivalence:
        if len(gold) != len(answer):
            return Equivalence(False, f"it has {len(answer)} values, not {len(gold)}")
        for number, (one, other) in enumerate(zip(gold, answer, strict=True), 1):
            equivalence = self._values(one, other)
            if not equivalence.is_right:
                return Equivalence(False, f"value {number}: {equivalence.reason}")
        return Equivalence(True, "all values agree in their order")

    def _matched(self, gold: tuple[Item | Reading, ...], answer: tuple[Item | Reading, ...], what: str) -> Equivalence:
        """Return whether each side can be paired with the other, in any order."""
        if len(gold) != len(answer):
            return Equivalence(False, f"it has {len(answer)} {what}, not {len(gold)}")
        left = list(answer)
        for one in gold:
            for other in left:
                if isinstance(one, Item) and isinstance(other, Item):
                    same = self._values(one, other).is_right
                else:
                    same = isinstance(one, Reading) and isinstance(other, Reading) and self.compare(one, other).is_right
                if same:
                    left.remove(other)
                    break
            else:
                return Equivalence(False, f"`{one.text}` is missing among its {what}")
        return Equivalence(True, f"all {what} agree")

    def _values(self, gold: Item, answer: Item) -> Equivalence:
        """Return whether two quantities agree; every value that an answer chains with `=` must."""
        if gold.name and answer.name and _name(gold.name) != _name(answer.name):
            return Equivalence(False, f"it is a value of {answer.name}, not of {gold.name}")
        if gold.about:
            gold = replace(gold, about=())
        chain = (replace(answer, about=()), *answer.about)
        for number, one in enumerate(chain):
            equivalence = self._pair(gold, one)
            if not equivalence.is_right:
                return equivalence if not number else Equivalence(False, f"`{one.text}`: {equivalence.reason}")
        if not any(self._is_worked_out(gold, one) for one in chain):
            return Equivalence(False, "it is a calculation that is not worked out")
        return self._pair(gold, chain[0])

    def _is_worked_out(self, gold: Item, answer: Item) -> bool:
        """Return whether an answer is in a final form; expressions with variables are not looked at."""
        gold, answer = _in_radians(gold, answer)
        if answer.number is not None or squeezed(gold.text) == squeezed(answer.text):
            return True
        if gold.number is None and not _is_constant(gold):
            return True
        text = answer.text.replace("\\cdot\\frac", "\\frac") if self.policy.mixed == "product" else answer.text
        return is_worked_out(text, gold.text)

    def _pair(self, gold: Item, answer: Item) -> Equivalence:
        gold, answer = _in_radians(gold, answer)
        problem = self._unit_problem(gold.unit, answer.unit)
        if problem:
            return Equivalence(False, problem)
        if gold.number is not None and answer.number is not None:
            return self._close(gold, answer, _quantity(gold), _quantity(answer))
        gold, answer = _with_names(gold, answer)
        texts = [squeezed(item.text).removeprefix("+") for item in (gold, answer)]
        if texts[0] == texts[1] and _scale(gold) == _scale(answer):
            return Equivalence(True, "it is the same expression")
        try:
            is_constant = gold.number is not None or _is_constant(gold)
        except UnreadableError as error:
            return Equivalence(False, f"only the same text would be right: in the gold answer, {error}")
        try:
            if not is_constant:
                if _scale(gold) != _scale(answer) and None not in (gold.unit, answer.unit):
                    return Equivalence(False, "its unit has another size")
                return Equivalence(*same_expressions(gold.text, answer.text))
            return self._close(gold, answer, _quantity(gold), _quantity(answer))
        except UnreadableError as error:
            return Equivalence(False, f"it cannot be compared: {error}")

    def _close(self, gold: Item, answer: Item, one: Quantity, other: Quantity) -> Equivalence:
        """Return whether two values agree, exactly or as a rounded decimal; a percent sign may have two readings."""
        for first, second in self._readings(gold, answer, one, other):
            if same_constants((first.value, first.imaginary), (second.value, second.imaginary)):
                return Equivalence(True, "the values agree")
            if first.imaginary or second.imaginary:
                continue
            if self._rounds(first, second, answer.is_rounded):
                return Equivalence(True, "the values agree, rounded")
        return Equivalence(False, "the values differ")

    def _rounds(self, one: Quantity, other: Quantity, is_rounded: bool) -> bool:
        """Return whether one of two values is the other, rounded to the decimal places that it shows.

        Args:
            is_rounded: `other` stands behind an exact value and `about`: it may have few digits, or be an integer.
        """
        least = 1 if is_rounded else self.policy.decimals
        if is_rounded and other.step is None and other.value.denominator == 1:
            other = replace(other, step=Fraction(1), digits=1)
        for shown, exact in ((one, other), (other, one)):
            if shown.step is None or not least or shown.digits < least:
                continue
            is_finer = exact.step is None or exact.step <= shown.step
            if is_finer and abs(exact.value - shown.value) <= shown.step / 2:
                return True
        return False

    def _readings(self, gold: Item, answer: Item, one: Quantity, other: Quantity) -> list[tuple[Quantity, Quantity]]:
        """Return the pairs of values to compare: in base units, and where one side has no unit as they are written."""
        one_percent, other_percent = _is_percent(gold.unit), _is_percent(answer.unit)
        if self.policy.percent == "ignored" or one_percent == other_percent:
            if gold.unit is None or answer.unit is None or one_percent or self._is_ignored(gold.unit):
                return [(one, other)]
            if gold.unit.is_vague or answer.unit.is_vague:
                return [(one, other)]
            return [(_scaled(one, gold.unit.scale), _scaled(other, answer.unit.scale))]
        hundredth = Fraction(1, 100)
        by_value = (_scaled(one, hundredth), other) if one_percent else (one, _scaled(other, hundredth))
        return [by_value] if self.policy.percent == "value" else [(one, other), by_value]

    def _is_ignored(self, unit: Unit) -> bool:
        return self._rule(unit) == "ignored"

    def _rule(self, unit: Unit) -> str:
        rules = {"angle": self.policy.degrees, "money": self.policy.money, "": self.policy.units}
        return rules.get(unit.kind, "optional")

    def _unit_problem(self, gold: Unit | None, answer: Unit | None) -> str:
        """Return why two units do not agree; "" if they do."""
        if (gold is None or self._is_ignored(gold)) and (answer is None or self._is_ignored(answer)):
            return ""
        if gold is None or answer is None:
            unit = gold or answer
            if unit is not None and self._rule(unit) == "required":
                return f"the unit {unit.name} is missing" if answer is None else f"it has the unit {unit.name}"
            return ""
        if gold.powers == answer.powers or _vague(gold, answer):
            return ""
        return f"its unit is {answer.name}, not {gold.name}"


def _vague(one: Unit, other: Unit) -> bool:
    """Return whether one of two units says only its dimensions (`square units`), and they fit."""
    if not (one.is_vague or other.is_vague):
        return False
    return [power for _, power in one.powers] == [power for _, power in other.powers] and not any(
        what not in ("length", ANY) and not what.startswith(COUNT) for unit in (one, other) for what, _ in unit.powers
    )


def _in_radians(gold: Item, answer: Item) -> tuple[Item, Item]:
    """Return both items without units, in one measure, if one is in degrees and the other in radians; else unchanged.

    A bare multiple of pi beside degrees is in radians. A rounded decimal stays as it is, and the other is converted.
    """
    for turned, (side, beside) in enumerate(((gold, answer), (answer, gold))):
        in_radians = _measures(side, RADIAN) or (side.unit is None and "\\pi" in side.text)
        if not (in_radians and _measures(beside, ANGLE)):
            continue
        if beside.number is not None and beside.number.step is not None and side.number is None:
            side = replace(side, text=f"({side.text})\\cdot\\frac{{180}}{{\\pi}}")
        else:
            beside = replace(beside, text=f"({beside.text})\\cdot\\frac{{\\pi}}{{180}}", number=None)
        side, beside = replace(side, unit=None), replace(beside, unit=None)
        return (beside, side) if turned else (side, beside)
    return gold, answer


def _with_names(gold: Item, answer: Item) -> tuple[Item, Item]:
    """Return both items; `y = x + 1` beside another equation as one, with its name."""
    sides = [gold, answer]
    for place, (side, beside) in enumerate(((gold, answer), (answer, gold))):
        if side.name and not beside.name and EQUALS.search(beside.text):
            sides[place] = replace(side, text=f"{side.name}={side.text}", number=None)
    return sides[0], sides[1]


def _measures(item: Item, what: str) -> bool:
    return item.unit is not None and item.unit.powers == ((what, 1),)


def _is_percent(unit: Unit | None) -> bool:
    return unit is not None and unit.powers == ((PERCENT, 1),)


def _scale(item: Item) -> Fraction:
    return item.unit.scale if item.unit is not None else Fraction(1)


def _quantity(item: Item) -> Quantity:
    if item.number is not None:
        return Quantity(item.number.value, item.number.step, item.number.digits)
    real, imaginary = constant(item.text)
    return Quantity(real, imaginary=imaginary)


def _scaled(quantity: Quantity, scale: Fraction) -> Quantity:
    step = None if quantity.step is None else quantity.step * scale
    return replace(quantity, value=quantity.value * scale, imaginary=quantity.imaginary * scale, step=step)


def _is_constant(item: Item) -> bool:
    """Return whether the text of an item is an expression without variables; False for an equation."""
    value = expression(item.text)
    return not value.names and getattr(value.value, "is_number", False) is True


def _name(name: str) -> str:
    """Return a name without the signs of angles and segments, which are often left out."""
    return re.sub(r"\\(?:angle|overline|text|triangle)|[{}\s]|(?<=^)m(?=\\angle)", "", name).removeprefix("m\\angle")


def _letters(reading: Reading) -> str:
    """Return the letters of several options, `AC` or `A, C`, in their order in the alphabet; "" for anything else."""
    letters = re.sub(r"[\s,]", "", reading.text)
    return "".join(sorted(letters)) if len(letters) > 1 and re.fullmatch(r"[A-J]+", letters) else ""


def _plain_words(text: str) -> str:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return " ".join(re.sub(r"[^\w\s]", " ", plain).split()).casefold()


def _has_other_letter(rest: Reading, letter: str) -> bool:
    """Return whether the text after a letter begins with another one: `B, C` or `B. or C`."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", rest.text)
    others = re.findall(r"(?:^|[\s,;/(]|\bor\b|\band\b)\(?([A-J])(?:$|[\s,;.):/])", text)
    return any(other != letter for other in others)


def _shown(kind: str) -> str:
    names = {"value": "single value", "equation": "single value", "tuple": "tuple or interval"}
    return (names | {"figures": "date, time, range or ratio"}).get(kind, kind)


MOST_SHOWN = 200
"""Maximum length of a text in the detail."""


def make_grader(*, key: str | None = None, parts: Mapping[str, Any] | None = None, **policy: Any) -> Callable[..., Any]:
    """Return the grader for the arguments of `vlmrl.rewards.math.rules.math`, with the parser warmed up."""
    warm_up()
    return partial(_graded, key=key, parts=dict(parts or {}), policy=checked_policy(policy))


def _graded(x: RewardInput, *, key: str | None, parts: Mapping[str, Any], policy: Policy) -> RewardResult:
    golds = [_gold_of(str(one), policy) for one in _accepted(ground_truth(x, key))]
    answer, reason = find_answer(x.answer, place=policy.place, thought=policy.thought)
    detail: dict[str, Any] = {"gold": golds[0][:MOST_SHOWN], "answer": None if answer is None else answer[:MOST_SHOWN]}
    is_right = False
    if answer is not None:
        for gold in golds:
            is_right, reason = judge(gold, answer, policy)
            if is_right:
                detail["gold"] = gold[:MOST_SHOWN]
                break
        mixed = policy.mixed == "mixed"
        detail["gold_value"] = shown(read(detail["gold"], mixed=mixed))
        detail["answer_value"] = shown(read(answer, mixed=mixed))
    grade = "right" if is_right else "wrong" if answer is not None else "no answer"
    detail |= {"verdict": grade, "reason": reason}
    if unread := next(filter(None, (text_alone(gold, policy) for gold in golds)), ""):
        detail["unread"] = unread
    note = "" if is_right else f"{grade}: {reason}"
    return RewardResult({"accuracy": float(is_right), **response_parts(x, **parts)}, note, detail)


def _accepted(truth: Any) -> list[Any]:
    accepted = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    if not accepted:
        raise RewardError("the expected answer is an empty list", hint="repair the row")
    return accepted


@lru_cache(maxsize=8192)
def _gold_of(text: str, policy: Policy) -> str:
    """Return the gold answer: the last box of a solution, what follows `####`, else the whole text or its answer tag.

    Raises: RewardError for a truth that is empty, too long without a box, or too large to compute.
    """
    if policy.place == "tag" or (policy.place == "box" and not BOX.search(text)):
        text = untagged(text)
    if BOX.search(text):
        gold, problem = last_box(text)
    else:
        gold, problem = text.rpartition("####")[2].strip(), ""
    if gold is not None and len(gold) > MOST_ANSWER_CHARS:
        problem = f"it has more than {MOST_ANSWER_CHARS} characters and no box"
    problem = problem or gold_problem(gold or "", policy)
    if problem or gold is None:
        raise RewardError(
            f"the expected answer {quoted(text)} cannot be graded: {problem}",
            hint='name the column with the answer: [reward.args] key = "...", or repair the row',
        )
    return gold


def gold_problem(gold: str, policy: Policy) -> str:
    """Return why a gold answer cannot be compared with anything; "" for a sound one."""
    reading = read(gold, mixed=policy.mixed == "mixed")
    if reading.kind == "unclear":
        return reading.problem
    for item in reading.items if reading.kind != "denial" else ():
        if item.number is None:
            try:
                check_size(item.text)
            except TooLargeError:
                continue  # an answer with the same text is right
            except UnreadableError as error:
                return str(error)
    return ""


def text_alone(gold: str, policy: Policy) -> str:
    """Return why only an answer with the same text can be right: a value that the parser cannot read; "" for none."""
    reading = read(gold, mixed=policy.mixed == "mixed")
    for item in reading.items if reading.kind != "denial" else ():
        if item.number is None and item.text not in INFINITY:
            warm_up()
            try:
                expression(item.text)
            except UnreadableError as error:
                return str(error)
    return ""


def shown(reading: Reading) -> str:
    """Return what was read of an answer, in one line; of a single value also the number."""
    if reading.kind in ("unclear", "denial", "words"):
        return f"{reading.kind}: {reading.problem or reading.text}"[:MOST_SHOWN]
    if reading.kind == "choice":
        return f"choice {reading.letter}"
    if reading.parts:
        return " with ".join(shown(part) for part in reading.parts)[:MOST_SHOWN]
    if reading.kind in ("value", "equation"):
        return _shown_item(reading.items[0], reading.kind == "value")[:MOST_SHOWN]
    values = ", ".join(_shown_item(item, False) for item in reading.items)
    if reading.kind == "figures":
        return reading.text[:MOST_SHOWN]
    if reading.kind == "tuple":
        return f"{reading.brackets[0]}{values}{reading.brackets[1]}"[:MOST_SHOWN]
    return f"{reading.kind} of {values}"[:MOST_SHOWN]


def _shown_item(item: Item, computed: bool) -> str:
    """Return an item in words. `computed`: with the value of an expression; the comparison has computed it, too."""
    text = item.text
    if item.number is not None:
        text = text if item.number.step is not None else str(item.number.value)
    elif computed:
        with suppress(UnreadableError, OverflowError):  # the reason says why there is no value
            real, imaginary = constant(item.text)
            text = text if imaginary else f"{text} = {float(real):.12g}"
    unit = f" {item.unit.name}" if item.unit is not None else ""
    return f"{item.name + ' = ' if item.name else ''}{text}{unit}"
