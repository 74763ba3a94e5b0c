r"""Values of expressions such as `6\sqrt{5}` and `x^2+1`, parsed by math-verify's grammar. Runs in workers only.

math-verify's other reader, for expressions outside of LaTeX, evaluates Python and is never used. Its grammar hands
each number to `sympify`, which evaluates Python, too: `number_token` takes its place. Its own clock (SIGALRM) is off:
the worker's clock ends whatever hangs, also inside C code, where no signal handler runs.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt

MOST_CHARS = 300
MOST_EXPONENT_DIGITS = 4
MOST_FACTORIAL_DIGITS = 3
MOST_BITS = 1300
"""Maximum size of a value, as a power of two: about 10^391."""
PRECISION = 60
"""Decimal digits of computed values."""
MOST_PRECISION = 400
SAME = Fraction(1, 10**45)
"""Relative difference below which two computed values are the same."""
TINY = Fraction(1, 10**55)
POINTS = (
    (Fraction(7, 5), Fraction(31, 17), Fraction(5, 11), Fraction(19, 7)),
    (Fraction(47, 5), Fraction(61, 7), Fraction(53, 11), Fraction(29, 3)),
    (Fraction(101, 9), Fraction(17, 2), Fraction(83, 7), Fraction(71, 6)),
    (Fraction(2, 7), Fraction(3, 11), Fraction(5, 13), Fraction(1, 6)),
    (Fraction(-13, 11), Fraction(9, 4), Fraction(-23, 9), Fraction(3, 8)),
    (Fraction(37, 13), Fraction(-2, 7), Fraction(11, 3), Fraction(-29, 6)),
    (Fraction(3, 19), Fraction(17, 6), Fraction(8, 13), Fraction(41, 9)),
)
"""Values of the variables at which two expressions are compared, in the order of the variables' names."""
UNFINISHED = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf|bigcup|bigcap)(?![A-Za-z])")
LONG_DIGITS = re.compile(r"[0-9]{301}")
TOKEN = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
APART = re.compile(r"(?<!_)[0-9.]\s+[0-9.]")
POWER = re.compile(r"\^(?:\{|(\S))")
FACTORIAL = re.compile(r"([0-9]*)\s*(!+)")
NESTED_SIZE = re.compile(r"[)}](?=\s*(?:\^|!))")
"""End of brackets that are raised to a power, or whose factorial is taken."""
BINOMIAL = re.compile(r"\\[dt]?binom\s*\{")
LARGE_GAMMA = re.compile(rf"\\Gamma[^)}}]*(?:[0-9]{{{MOST_EXPONENT_DIGITS + 1}}}|[!^])")
GROWS = re.compile(r"\^|!|\\[dt]?binom")
LONG_NUMBER = re.compile(rf"[0-9]{{{MOST_EXPONENT_DIGITS + 1}}}")
DOUBLE_POWER = re.compile(r"\^[^\s{}\\]\s*\^")
EXPONENT = re.compile(r"\^\{?-?([0-9]{1,9})")
SMALL_TOWER = re.compile(r"[0-9]{1,2}\^(?:[0-2]|\{[0-2]\})")
ANGLE_IN_TERM = re.compile(r"([0-9]+(?:\.[0-9]+)?|\))\^\{\\circ\}")
PLAIN_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{5,}")
CONFIG = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
    ),
)
FORMS = (
    r"\frac{1}{2}", r"6\sqrt{5}", r"-\frac{3\pi}{4}", r"2x+1", r"\frac{1+\sqrt{5}}{2}", r"x^{2}-3", r"\sqrt[3]{2}",
    r"2(3+4)", r"\sin(30)", r"3\cdot 4", r"\frac{a}{b}", r"\ln 2",
)  # fmt: skip
"""Expressions that are parsed before the first response, because the first parse of each construct is slow."""


class UnreadableError(Exception):
    """Text that has no value. The message says why."""


class TooLargeError(UnreadableError):
    """Text whose value is too large to compute, by its form."""


@dataclass(frozen=True)
class Expression:
    """Parsed expression.

    Args:
        value: SymPy object.
        names: names of its variables, sorted.
    """

    value: Any
    names: tuple[str, ...]


def number_token(text: str) -> Any:
    """Return a number of the grammar, digits with a point and commas, as the SymPy number that `sympify` would give.

    Raises: ValueError for any other text.
    """
    digits = text.replace(",", "")
    if not TOKEN.fullmatch(digits):
        raise ValueError(f"{excerpt(repr(text), 40)} is no number")
    return sympy.Integer(int(digits)) if digits.removeprefix("-").isdigit() else sympy.Float(digits)


def _comma_number(text: str) -> Any:
    """Return a number with commas as the grammar reads it: `1,000` is a thousand, `0,111` a decimal."""
    return number_token(text.strip().replace(",", ".", 1) if text.strip().startswith("0") else text.strip())


def warm_up() -> None:
    """Make the grammar read numbers by `number_token`, silence the warning that its clock is off, parse all `FORMS`."""
    if not (hasattr(latex2sympy2._Latex2Sympy, "parse_number") and hasattr(latex2sympy2, "convert_number")):
        raise RewardError(
            "this version of latex2sympy2-extended reads numbers in a way that vlmrl does not know",
            hint="install math-verify 0.9.0",
        )
    latex2sympy2._Latex2Sympy.parse_number = lambda self, text: number_token(text)
    latex2sympy2.convert_number = _comma_number
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for form in FORMS:
        expression(form)
        if not expression(form).names:
            constant(form)


def check_size(text: str) -> None:
    """Check by its form that a text can be computed.

    Raises: TooLargeError if its value would be too large, UnreadableError if it is too long or not worked out.
    """
    if len(text) > MOST_CHARS:
        raise UnreadableError(f"it has more than {MOST_CHARS} characters")
    if LONG_DIGITS.search(text):
        raise UnreadableError("it has a number of more than 300 digits")
    if UNFINISHED.search(text):
        raise UnreadableError("it is a calculation that is not worked out")
    for match in FACTORIAL.finditer(text):
        if len(match.group(2)) > 1 or len(match.group(1)) > MOST_FACTORIAL_DIGITS:
            raise TooLargeError("its factorial is too large")
    for match in NESTED_SIZE.finditer(text):
        before = text[max(0, _opened(text, match.start())) : match.start()]
        is_factorial = text[match.end() :].lstrip().startswith("!")
        if (is_factorial or "!" in before or "binom" in before) and (
            GROWS.search(before) or LONG_NUMBER.search(before)
        ):
            raise TooLargeError("it is a power or factorial of one")
        if "^" in before and prod(map(int, EXPONENT.findall(text))) >= 10**MOST_EXPONENT_DIGITS:
            raise TooLargeError("it is a power of a power")
    for match in BINOMIAL.finditer(text):
        inside = _braced(text, match.end())
        if GROWS.search(inside) or LONG_NUMBER.search(inside):
            raise TooLargeError("its binomial coefficient is too large")
    if LARGE_GAMMA.search(text):
        raise TooLargeError("its gamma function is too large")
    if text.count("\\exp") > 1 or DOUBLE_POWER.search(text):
        raise TooLargeError("its exponent is too large")
    for match in POWER.finditer(text):
        exponent = match.group(1) or _braced(text, match.end())
        if SMALL_TOWER.fullmatch(exponent):
            continue
        if re.search(rf"[0-9]{{{MOST_EXPONENT_DIGITS + 1}}}", exponent) or GROWS.search(exponent):
            raise TooLargeError("its exponent is too large")


def _opened(text: str, end: int) -> int:
    """Return the place of the bracket that closes at `end`; -1 if there is none."""
    depth = 0
    for place in range(end, -1, -1):
        depth += (text[place] in ")}") - (text[place] in "({")
        if depth == 0:
            return place
    return -1


@lru_cache(maxsize=8192)
def expression(text: str) -> Expression:
    """Return the parsed expression of a tidy text.

    Raises: UnreadableError when the grammar does not accept it, or it is too large.
    """
    check_size(text)
    if "$" in text or "boxed" in text or APART.search(text):
        raise UnreadableError("two numbers stand side by side, or it holds another formula")
    if word := PLAIN_WORD.search(text):
        raise UnreadableError(f"it holds the word `{excerpt(word.group(), 40)}`")
    text = ANGLE_IN_TERM.sub(r"\1\\cdot\\frac{\\pi}{180}", text)
    try:
        parsed = parse(f"${text}$", [CONFIG], "no_fallback", "first_match", parsing_timeout=0, raise_on_error=True)  # type: ignore[arg-type]
    except Exception as error:  # of the library, for this text: it becomes the reason of the `Equivalence`
        raise UnreadableError(f"the parser failed: {type(error).__name__}: {excerpt(str(error), 100)}") from error
    if not parsed or parsed[0] is None or isinstance(parsed[0], str):
        raise UnreadableError("the parser does not know such an expression")
    value = parsed[0]
    if isinstance(value, sympy.Expr):  # the grammar takes the imaginary unit for a variable
        value = value.xreplace({symbol: sympy.I for symbol in value.free_symbols if str(symbol) == "i"})
    return Expression(value, tuple(sorted(str(symbol) for symbol in getattr(value, "free_symbols", ()))))


def _braced(text: str, start: int) -> str:
    """Return the text from a place behind an opening brace to its end."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place]
    return text[start:]


@lru_cache(maxsize=8192)
def constant(text: str) -> tuple[Fraction, Fraction]:
    """Return the real and imaginary part of an expression without variables, to 60 digits.

    Raises: UnreadableError as `expression`; when it has variables, is no number, or is too large.
    """
    parsed = expression(text)
    if parsed.names:
        raise UnreadableError(f"it has the variable {parsed.names[0]}")
    return _number(parsed.value, {})


def _number(value: Any, at: dict[Any, Any]) -> tuple[Fraction, Fraction]:
    if not isinstance(value, sympy.Expr):
        raise UnreadableError("it is not a number")
    try:
        exact: Any = value.xreplace({one: sympy.Rational(str(one)) for one in value.atoms(sympy.Float)})
        if not at:  # the odd root of a negative number is real, as taught: `\\sqrt[3]{-8}` is -2
            exact = exact.replace(_is_odd_root, lambda root: (-1) ** root.exp.p * (-root.base) ** root.exp)
        computed = exact.evalf(PRECISION, subs=at, maxn=MOST_PRECISION)
        real, imaginary = computed.as_real_imag()
        return _fraction(real), _fraction(imaginary)
    except UnreadableError:
        raise
    except Exception as error:  # of the library, for this value: it becomes the reason of the `Equivalence`
        raise UnreadableError(f"it cannot be computed: {type(error).__name__}: {excerpt(str(error), 100)}") from error


def _is_odd_root(value: Any) -> bool:
    return bool(
        value.is_Pow and value.exp.is_Rational and value.exp.q % 2 and value.exp.q > 1 and value.base.is_negative
    )


def _fraction(number: Any) -> Fraction:
    if not number.is_number or not number.is_finite:
        raise UnreadableError("it has no finite value")
    if number.is_zero or (number.is_Float and number._prec == 1):  # terms that cancel: no digit but zeros is known
        return Fraction(0)
    number = number if number.is_Float else sympy.Float(number, PRECISION)
    if not -MOST_BITS < mpmath.mag(number) < MOST_BITS:
        raise UnreadableError("its value is too large or too small")
    return Fraction(str(number))


def same_constants(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction]) -> bool:
    """Return whether two computed values are the same to 45 digits."""
    size = max(*(abs(part) for part in (*one, *other)))
    return size < TINY or all(abs(a - b) <= SAME * size for a, b in zip(one, other, strict=True))


def same_expressions(gold: str, answer: str) -> tuple[bool, str]:
    """Return whether two expressions with variables, or two equations, are the same, and the reason.

    Expressions are compared at several points, with positive and negative values. Where a side has no real value (a
    root or a logarithm of a negative number) the point says nothing. math-verify decides for equations, and where fewer
    than two points have a value.

    Raises: UnreadableError when the answer cannot be parsed.
    """
    left, right = expression(gold), expression(answer)
    if left.names != right.names:
        return False, f"its variables are {', '.join(right.names) or 'none'}, not {', '.join(left.names) or 'none'}"
    if isinstance(left.value, sympy.Expr) and isinstance(right.value, sympy.Expr) and len(left.names) <= len(POINTS[0]):
        compared = [_same_at(left, right, point) for point in POINTS]
        if False in compared:
            return False, "it has another value where the variables have numbers"
        if compared.count(True) >= 2:
            return True, "it has the same value at several points"
    try:
        right_one = verify(left.value, right.value, timeout_seconds=0, raise_on_error=True)
    except Exception as error:  # of the library, for these expressions: it becomes the reason of the `Equivalence`
        return False, f"the comparison failed: {type(error).__name__}: {excerpt(str(error), 100)}"
    return right_one, "math-verify says that they are the same" if right_one else "math-verify says that they differ"


def _same_at(left: Expression, right: Expression, point: tuple[Fraction, ...]) -> bool | None:
    """Return whether both have the same value at a point; None where one has no value."""
    values = []
    for side in (left, right):
        symbols = sorted(side.value.free_symbols, key=str)
        at = {s: sympy.Rational(p.numerator, p.denominator) for s, p in zip(symbols, point, strict=False)}
        try:
            values.append(_number(side.value, at))
        except UnreadableError:
            return None
    if any(imaginary for _, imaginary in values) and not any(side.value.has(sympy.I) for side in (left, right)):
        return None
    return same_constants(values[0], values[1])
