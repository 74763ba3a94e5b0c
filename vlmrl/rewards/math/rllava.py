r"""Reward for boxed answers that RLLaVA published, and the grader that it and EasyR1 call, with their flaws.

The reward's flaws that are kept: spaces around `<`, `>` and `/` are removed from the whole response, so that `a < b`
changes; an empty thought and several thoughts have the form; the last box counts wherever it stands, also in the
thought; where there is no box, the answer is "None", which is right for the truth `None`; `\frac{x+1}{2}` is x + 1/2.

The grader (`mathruler.grader.grade_answer`, version 0.1.0): two texts are the same if their first forms agree, or their
second forms, or if the difference of their second forms is 0 (elements of tuples one by one; never for a whole number
beside something else, never for two fractions). Differences to the published code:

- It hands the model's text to Python through SymPy. Here a grammar reads it: numbers, `+ - * / ^`, parentheses,
  `sqrt`, `ln`, `pi`, and variables of one letter with implicit products. Anything else in an expression is not equal,
  such as `5!`, `sin(30)`, hexadecimal numbers, and powers whose product is above 10,000.
- LaTeX becomes plain text by a table of the usual commands; others are left out. Environments, fonts, and
  fractions without their two arguments are not known.
- A text of more than 500 characters is compared as a text only.

Runs in workers only: SymPy may need long for an expression.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/math.py:compute_score`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import sympy

from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.types import RewardInput, RewardResult

MOST_CHARS = 500
MOST_POWER = 10_000
"""Largest product of all powers in an expression."""
BOX = "\\boxed{"
NO_ANSWER = "None"
"""Text that the published code takes for the answer where there is no box; the truth `None` is equal to it."""
TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
LARGE = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
UNREAD = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that are not computed."""
BRACKETS = "()[]"
NEARLY = 1e-7
SYMBOLS = {
    "pi": "\u03c0", "infty": "\u221e", "cup": "\u222a", "cap": "\u2229", "cdot": "\u00b7", "times": "\u00d7",
    "div": "\u00f7", "pm": "\u00b1", "mp": "\u2213", "circ": "\u2218", "angle": "\u2220", "leq": "\u2264",
    "le": "\u2264", "geq": "\u2265", "ge": "\u2265", "neq": "\u2260", "approx": "\u2248", "sim": "\u223c",
    "in": "\u2208", "to": "\u2192", "mid": "|", "lvert": "|", "rvert": "|", "parallel": "\u2225", "perp": "\u22a5",
    "cong": "\u2245", "equiv": "\u2261", "prime": "'", "alpha": "\u03b1", "beta": "\u03b2", "gamma": "\u03b3",
    "delta": "\u03b4", "Delta": "\u0394", "theta": "\u03b8", "lambda": "\u03bb", "mu": "\u03bc", "phi": "\u03d5",
    "varphi": "\u03c6", "omega": "\u03c9", "sin": "sin", "cos": "cos", "tan": "tan", "log": "log", "ln": "ln",
    "ldots": "\u2026", "dots": "\u2026", "cdots": "\u22ef", "emptyset": "\u2205", "quad": "  ", "qquad": "    ",
    ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "{": "{", "}": "}", "%": "%", "$": "$", "\\": "\n",
}  # fmt: skip
"""Command -> its text. Commands that are not listed are left out; what stands in their braces stays."""
COMMAND = re.compile(r"\\([A-Za-z]+|.)\s*", re.DOTALL)
NAMES = {"\u221a": "sqrt", "\u03c0": "pi", "\u221e": "inf", "\u222a": "U", "\u00b7": "*", "\u00d7": "*"}


def boxed_text(text: str) -> str:
    r"""Return the content of the last `\boxed{...}` without white space around it; "None" if it is not there."""
    start = text.rfind(BOX)
    if start < 0:
        return NO_ANSWER
    depth = 1
    for mark in re.finditer(r"[{}]", text[start + len(BOX) :]):
        depth += 1 if mark.group() == "{" else -1
        if depth == 0:
            return text[start + len(BOX) :][: mark.start()].strip()
    return NO_ANSWER


def same_answer(given: str, truth: str) -> bool:
    """Return whether the published grader calls an answer right."""
    return _same_short(given, truth) if len(given) <= MOST_CHARS else given.strip() == truth.strip()


@lru_cache(maxsize=8192)
def _same_short(given: str, truth: str) -> bool:
    if first_form(given) == first_form(truth):
        return True
    given, truth = second_form(given), second_form(truth)
    if given == truth:
        return True
    if not given:
        return False
    givens, truths = _elements(given), _elements(truth)
    if len(truths) > 1 and (truth[0] != given[0] or truth[-1] != given[-1]):
        return False
    return len(givens) == len(truths) and all(map(_same_element, givens, truths))


def _same_element(given: str, truth: str) -> bool:
    if FRACTION.search(truth) and FRACTION.search(given):
        return truth == given
    if _is_whole(truth) != _is_whole(given):
        return False
    return _is_zero(f"({truth})-({given})")


def first_form(text: str) -> str:
    """Return a text without spaces, degrees, percent signs, a unit after it, and a short name before `=`."""
    text = _inner_text(text.strip()).strip()
    try:
        return _without_signs(text)
    except (IndexError, ValueError):  # the published code then takes the text as it is
        return text


def _without_signs(text: str) -> str:
    for mark in ("\n", "\\!"):
        text = text.replace(mark, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for mark in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(mark, "")
    if "\\text{ " in text:
        text, _ = text.split("\\text{ ")
    for mark, other in (("\\%", ""), ("%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(mark, other)
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    return _as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _braced_roots(text: str) -> str:
    first, *others = text.split("\\sqrt")
    for other in others:
        first += f"\\sqrt{other}" if other[0] == "{" else f"\\sqrt{{{other[0]}}}{other[1:]}"
    return first


def _braced_fractions(text: str) -> str:
    whole, *others = text.split("\\frac")
    for other in others:
        if other[0] == "{":
            whole += f"\\frac{other}"
        elif len(other) < 2:
            return text
        elif other[1] == "{":
            whole += f"\\frac{{{other[0]}}}{other[1:]}"
        else:
            whole += f"\\frac{{{other[0]}}}{{{other[1]}}}{other[2:]}"
    return whole


def _as_fraction(text: str) -> str:
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        above, below = int(sides[0]), int(sides[1])
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text


def second_form(text: str) -> str:
    """Return a text in lower case, without units, percent signs, spaces and braces; LaTeX as plain text."""
    text = _inner_text(text)
    for mark, other in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        text = text.replace(mark, other)
    for word, power in LARGE.items():
        text = text.replace(word, power)
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (number := _float(text)) is not None and abs(number - round(number)) <= NEARLY:
        text = str(round(number))
    if "\\" in text:
        text = plain_text(text)
    text = re.sub("- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)
    for mark in " {}":
        text = text.replace(mark, "")
    text = text.lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def plain_text(text: str) -> str:
    r"""Return LaTeX as the plain text that the published code compares: `\frac{x+1}{2}` is `x+1/2`."""
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    plain, end = "", 0
    while end < len(text):  # a brace too many ends the text before it, and is left out
        try:
            piece, end = _plain(text, end)
        except (IndexError, RecursionError):  # a command without its argument: the published code leaves the text, too
            return text
        plain += piece
    for symbol, name in NAMES.items():
        plain = plain.replace(symbol, name)
    return plain.strip()


def _plain(text: str, start: int) -> tuple[str, int]:
    """Return (plain text from `start` to the brace that closes it, else to the end; the place behind it)."""
    pieces: list[str] = []
    place = start
    while place < len(text):
        if text[place] == "}":
            return "".join(pieces), place + 1
        piece, place = _piece(text, place)
        pieces.append(piece)
    return "".join(pieces), place


def _piece(text: str, place: int) -> tuple[str, int]:
    """Return the plain text of a group, a command with its arguments, or a character, and the place behind it."""
    if text[place] == "{":
        return _plain(text, place + 1)
    command = COMMAND.match(text, place) if text[place] == "\\" else None
    if command is None:
        return {"\\": "", "$": "", "~": "\u00a0"}.get(text[place], text[place]), place + 1
    name, place = command[1], command.end()
    if name == "frac":
        above, place = _argument(text, place)
        below, place = _argument(text, place)
        return f"{above}/{below}", place
    if name == "sqrt":
        if text[place] == "[":
            place = text.index("]", place) + 1 if "]" in text[place:] else place
        under, place = _argument(text, place)
        return f"\u221a({under})", place
    if name == "mbox":
        return "", _argument(text, place)[1]
    return SYMBOLS.get(name, ""), place


def _argument(text: str, place: int) -> tuple[str, int]:
    while text[place] == " ":
        place += 1
    return _piece(text, place)


def _inner_text(text: str) -> str:
    match = TEXT.search(text)
    return match["text"] if match is not None else text


def _elements(text: str) -> list[str]:
    text = _without_thousands(text)
    if len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS and not set(text[1:-1]) & set(BRACKETS):
        return [piece.strip() for piece in text[1:-1].split(",")]
    return [text] if text else []


def _without_thousands(text: str) -> str:
    while (shorter := THOUSANDS.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


def _float(text: str) -> float | None:
    try:
        number = float(text)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _is_whole(text: str) -> bool:
    number = _float(_without_thousands(text))
    return number is not None and abs(number - round(number)) <= NEARLY


def _is_zero(text: str) -> bool:
    """Return whether an expression is 0. At most two letters may be in it besides `sqrt`."""
    letters = {char for char in text.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    if len(letters) > 2 or UNREAD.search(text):
        return False
    try:
        return bool(sympy.simplify(_Expression(text).read()) == 0)
    except NOT_READ:  # the published code calls it wrong, too
        return False


class UnreadError(Exception):
    """Text that is no expression of the grammar."""


NOT_READ = (UnreadError, RecursionError, TypeError, ValueError)
"""Exceptions for a text whose value is not known: RecursionError for hundreds of nested parentheses, TypeError for a
power of 0 / 0, ValueError for digits that Python does not read, such as a superscript two."""


TOKEN = re.compile(r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+))|(?P<name>[^\W\d_]\w*)|(?P<sign>\*\*|[-+*/^()])")


class _Expression:
    """Parser of an expression. Precedence as in Python; a product may be written without a sign."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None or match.lastgroup is None:
                raise UnreadError(text)
            self.tokens.append((match.lastgroup, match.group()))
            place = match.end()
        self.next = 0
        self.powers: Any = 1

    def read(self) -> Any:
        value = self._sum()
        if self.next < len(self.tokens):
            raise UnreadError(self.tokens[self.next][1])
        return value

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.next] if self.next < len(self.tokens) else ("end", "")

    def _take(self, *signs: str) -> str:
        """Return the next sign and go past it if it is one of these; else ""."""
        kind, text = self._peek()
        if kind != "sign" or text not in signs:
            return ""
        self.next += 1
        return text

    def _sum(self) -> Any:
        value = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> Any:
        value = self._signed()
        while True:
            if sign := self._take("*", "/"):
                other = self._signed()
                value = value * other if sign == "*" else value / other
            elif self._peek()[0] in ("number", "name") or self._peek()[1] == "(":
                value = value * self._power()
            else:
                return value

    def _signed(self) -> Any:
        if sign := self._take("+", "-"):
            return self._signed() if sign == "+" else -self._signed()
        return self._power()

    def _power(self) -> Any:
        base = self._atom()
        if not self._take("^", "**"):
            return base
        exponent = self._signed()
        if exponent.is_number:
            self.powers *= max(1, abs(exponent))
            if not self.powers <= MOST_POWER:
                raise UnreadError("a large power")
        return base**exponent

    def _atom(self) -> Any:
        kind, text = self._peek()
        self.next += 1
        if kind == "number":
            if text.isdigit() and len(text) > 1 and text[0] == "0" and text.strip("0"):
                raise UnreadError(text)  # Python has no such numbers
            return sympy.Integer(text) if text.isdigit() else sympy.Float(text)
        if text == "(":
            value = self._sum()
            if not self._take(")"):
                raise UnreadError("a parenthesis is not closed")
            return value
        if kind == "name":
            return self._name(text)
        raise UnreadError(text)

    def _name(self, name: str) -> Any:
        """Return the value of a function or a constant, else the product of the letters and digits of a name."""
        if name in ("sqrt", "ln") and self._peek()[1] == "(":
            argument = self._atom()
            return sympy.sqrt(argument) if name == "sqrt" else sympy.log(argument)
        if name == "pi":
            return sympy.pi
        if "_" in name:
            return sympy.Symbol(name)
        product = sympy.Integer(1)
        for piece in re.findall(r"[0-9]+|[^0-9]", name):
            product *= sympy.Integer(piece) if piece.isdigit() else sympy.Symbol(piece)
        return product


SIGN = re.compile(r"([<>/])\s*")
MOST_SHOWN = 200


def make_grader(*, key: str | None = None) -> Callable[..., Any]:
    """Return the grader for the arguments of `vlmrl.rewards.math.rules.rllava_math`, with SymPy warmed up."""
    same_answer("2x+1", "1+2x")
    return partial(graded, key=key)


def graded(x: RewardInput, *, key: str | None) -> RewardResult:
    """Return the published parts of a response."""
    response, truth = without_blanks(x.response), str(ground_truth(x, key))
    answer = boxed_text(response)
    is_right = same_answer(answer, truth)
    detail = {"gold": truth[:MOST_SHOWN], "answer": answer[:MOST_SHOWN], "verdict": "right" if is_right else "wrong"}
    return RewardResult({"accuracy": float(is_right), "format": float(has_form(response))}, "", detail)


def without_blanks(response: str) -> str:
    """Return a response without white space around `<`, `>` and `/`. The time is linear."""
    *before, last = SIGN.split(response)  # texts and signs take turns; a text ends with what stands before its sign
    return "".join(piece.rstrip() for piece in before) + last


def has_form(response: str) -> bool:
    """Return whether a response is a thought, then something with a box in it, as the published pattern reads it."""
    thought = response.find("</think>", len("<think>")) if response.startswith("<think>") else -1
    box = response.find(BOX, thought + len("</think>")) if thought >= 0 else -1
    return box >= 0 and response.find("}", box + len(BOX)) >= 0
