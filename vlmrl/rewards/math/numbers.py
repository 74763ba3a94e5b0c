"""Plain numbers: integers, decimals, fractions, mixed numbers and powers of ten, as exact values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MOST_DIGITS = 300
"""Maximum number of digits of a number, and maximum exponent of ten."""
DECIMAL = rf"(?:[0-9]{{1,{MOST_DIGITS}}}(?:\.[0-9]{{0,{MOST_DIGITS}}})?|\.[0-9]{{1,{MOST_DIGITS}}})"
SIGNED = re.compile(rf"([+-]?)\s*({DECIMAL})")
SCIENTIFIC = re.compile(
    rf"([+-]?)\s*({DECIMAL})?\s*(?:(?:\\times|\\cdot|\*|x)?\s*10\^(?:\{{([+-]?[0-9]{{1,3}})\}}|([0-9]))|[eE]([+-]?[0-9]{{1,3}}))"
)
RATIO = re.compile(
    rf"([+-]?)\s*(?:\\frac\{{([+-]?{DECIMAL})\}}\{{([+-]?{DECIMAL})\}}|({DECIMAL})\s*/\s*([+-]?{DECIMAL}))"
)
MIXED = re.compile(
    r"([+-]?)\s*([0-9]{1,30})\s*(?:\\frac\{([0-9]{1,30})\}\{([0-9]{1,30})\}|\s([0-9]{1,30})/([0-9]{1,30}))"
)
REPEATING = re.compile(r"([+-]?)([0-9]{0,30})\.([0-9]{0,30})(?:\\overline|\\bar|\\dot)\{([0-9]{1,30})\}")


@dataclass(frozen=True)
class Number:
    """Exact value of a number as written.

    Args:
        step: value of the last decimal place of a decimal, such as 1/100 for 3.14; None for what is exact: integers,
            fractions, repeating decimals.
        digits: significant digits of a decimal.
    """

    value: Fraction
    step: Fraction | None = None
    digits: int = 0


def read_number(text: str, *, mixed: bool = True) -> Number | None:
    r"""Return the number that a tidy text is as a whole; None for any other text.

    Args:
        mixed: whether `2\frac{1}{2}` is two and a half; otherwise it is no plain number.
    """
    text = text.strip()
    if match := SIGNED.fullmatch(text):
        return _decimal(match.group(1), match.group(2))
    if match := RATIO.fullmatch(text):
        sign, top, bottom, first, second = match.groups()
        below = Fraction(_plain(bottom or second))
        return Number(_signed(sign, Fraction(_plain(top or first)) / below)) if below else None
    if mixed and (match := MIXED.fullmatch(text)):
        sign, whole, *rest = match.groups()
        top, bottom = (int(digits) for digits in rest if digits)
        return Number(_signed(sign, int(whole) + Fraction(top, bottom))) if 0 < top < bottom else None
    if match := SCIENTIFIC.fullmatch(text):
        sign, factor, *powers = match.groups()
        if factor is None and powers[2] is not None:
            return None
        power = int(next(p for p in powers if p is not None))
        number = _decimal(sign, factor or "1")
        scale = Fraction(10) ** power
        return Number(number.value * scale, None if number.step is None else number.step * scale, number.digits)
    if match := REPEATING.fullmatch(text):
        sign, whole, first, again = match.groups()
        repeated = Fraction(int(again), 10 ** len(first) * (10 ** len(again) - 1))
        return Number(_signed(sign, Fraction(f"{whole or 0}.{first or 0}") + repeated))
    return None


def _decimal(sign: str, digits: str) -> Number:
    value = _signed(sign, Fraction(_plain(digits)))
    _, point, places = digits.partition(".")
    if not point or not places:
        return Number(value)
    shown = digits.replace(".", "").lstrip("0")
    return Number(value, Fraction(1, 10 ** len(places)), len(shown))


def _plain(digits: str) -> str:
    """Return a decimal as `Fraction` reads it: with a digit before the point."""
    sign, digits = (digits[0], digits[1:]) if digits[0] in "+-" else ("", digits)
    return f"{sign}0{digits.rstrip('.')}"


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
