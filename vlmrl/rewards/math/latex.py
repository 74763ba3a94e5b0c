"""The answer in a response as tidy LaTeX, and plain numbers as exact values.

The answer is the last box after the thought, or the text of the answer tag. Tidy LaTeX has one spelling for signs,
spaces, fractions, text commands and delimiters; what a text means is not decided here. Every step is linear in the
text's length, and texts are short. Plain numbers are integers, decimals, fractions, mixed numbers and powers of ten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from vlmrl.rewards.text_parsing import find_tags, tagged_text

MONEY = "\\money "
"""Command that stands for an escaped dollar sign."""
_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\uff0d": "-", "\uff0b": "+", "\u00d7": "\\times ",
    "\u00f7": "\\div ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u2217": "*", "\u03c0": "\\pi ",
    "\u03b8": "\\theta ",
    **dict.fromkeys("\u00b0\u00ba\u02da", "^{\\circ}"), "\u00b2": "^{2}", "\u00b3": "^{3}", "\u00bd": "\\frac{1}{2}",
    "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}", "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ",
    "\u2260": "\\ne ", "\u2248": "\\approx ", "\u222a": "\\cup ", "\u00b1": "\\pm ", "\u2208": "\\in ",
    "\uff08": "(", "\uff09": ")", "\uff0c": ",", "\uff05": "%", "\uff1d": "=", "\uff0e": ".", "\u3002": ".",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2032": "'", "\u2033": "''", "\u2019": "'", "\u20ac": "\\euro ",
    "\u00a3": "\\pounds ", "\u00a5": "\\yen ", "\u2220": "\\angle ", "\u5ea6": "^{\\circ}",
    "\u2126": "\\Omega ", "\u03a9": "\\Omega ", "\u211d": "\\mathbb{R}",
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad", ""),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
}  # fmt: skip
SIGNS = str.maketrans(_SIGNS)
ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|([0-9]+(?:\\.[0-9]+)?|[A-Za-z]|\\\\pi))")
RAISED = re.compile(r"\^(-?[0-9]+)\^(?![0-9A-Za-z{(\\-])")
"""Superscript as pandoc writes it: `cm^2^`."""
SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|mathstrut|nolimits|[lL]arge|LARGE"
    r"|huge|Huge|small|tiny|normalsize|footnotesize|scriptsize)(?![A-Za-z])|\\color\{[^{}]*\}(?!\s*\{)"
)
FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
TEXT = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|textrm|textbf|textit|textsf|textnormal|operatorname|mbox|hbox)(?![A-Za-z])\s*"
)
OLD_ROMAN = re.compile(r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}")
ONE_LETTER = re.compile(r"(?<![0-9)}\]])(?<!\\pi)(?<!\\pi )(?<![0-9)}\]] )\\text\s*\{\s*([A-Za-z])\s*\}")
"""A letter as text; behind a value it is a unit, and stays text."""
NO_TEXT = re.compile(r"\\text\s*\{\s*(\(?[A-J]\s*[).:]\s*|[^{}]*(?:=|(?<![A-Za-z])is\s+-?[0-9])[^{}]*)\}")
"""Option or equation as text: `\\text{(B) }`, `\\text{x = 2}`, `\\text{The answer is 5}`."""
ANSWER_IS = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?answer\s+is\s*:?\s*(?=[-0-9\\])", re.I
)
WORD_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
ANGLE = re.compile(r"\\ang\s*\{([^{}]*)\}")
FONTS = re.compile(r"\\(?:mathbf|mathit|mathsf|bm|boldsymbol|underline|(?:text)?color\{[^{}]*\})\s*\{([^{}]*)\}")
NO_WORDS = re.compile(r"\\text\s*\{\s*([-+0-9.,:/()]+)\s*\}")
DEGREES_AS_TEXT = re.compile(r"\\text\s*\{\s*([-+]?[0-9][0-9.,/]*)?\s*\^\{\\circ\}\s*\}")
"""`\\text{27^\\circ}` and `27\\text{^\\circ}`."""
UNIT_AS_TEXT = re.compile(r"\\text\s*\{\s*([-+]?[0-9][0-9.,/]*)\s*((?! )[A-Za-z\u4e00-\u9fff ]{1,31})\}")
"""`\\text{3 cm}`: a number and words in one text command."""
GROUPED = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|,\\!|\{,\}|~)\s*(?=[0-9]{3}(?![0-9]))")
GROUPED_BY_SPACES = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\(?:thinspace|hspace\{[^{}]*\}|phantom\{[^{}]*\})")
AROUND = re.compile(r"\s*([{}^_])\s*")
AFTER_COMMAND = re.compile(r"(\\[A-Za-z]+)\s+(?=[^A-Za-z\s])")
WORD_JOIN = re.compile(r"\\text\{\s*(?:,?\s*)(and|or)\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])")
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
DEGREES = re.compile(
    r"\^\{\\(?:circ|degree)\}|\^\\(?:circ|degree)(?![A-Za-z])|\\(?:degree|textdegree)(?![A-Za-z])|\^\{\\text\{o\}\}"
    r"|\^\\text\{o\}|\\circ(?![A-Za-z])|(?<=[0-9])\^(?:\{o\}|o(?![A-Za-z]))"
)
APART = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
OPENERS, CLOSERS = "([{", ")]}"
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


def tidy(text: str) -> str:
    r"""Return a text of an answer in one spelling.

    Commands of size and space are removed, every text command is `\text{...}`, a degree sign is `^{\circ}`, an
    escaped dollar is `\money`, and delimiters around the whole are removed.
    """
    rows = "\\cr " if "\\begin{" in text else " "  # line breaks separate the rows of a matrix
    text = RAISED.sub(r"^{\1}", text.replace("\\\\", rows).translate(SIGNS))
    text = ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2]}}}", text).replace("\u221a{", "\\sqrt{")
    text = ANGLE.sub(r"\1^{\\circ}", WORD_PI.sub(r"\\pi ", text)).replace("\\div", "/")
    text = FRACTION.sub(r"\\frac", SIZES.sub("", text.replace("**", "").replace("`", "")))
    text = FONTS.sub(r"\1", text).replace("\\varnothing", "\\emptyset").replace("\\checkmark", "")
    text = text.replace("\\colon", ":")
    text = TEXT.sub(r"\\text", OLD_ROMAN.sub(r"\\text{\1}", text)).replace("\\%", "%")
    text = _undelimited(text.replace("\\$", MONEY))
    text = SPACE.sub(" ", GROUPED.sub("", text))
    text = AFTER_COMMAND.sub(r"\1", AROUND.sub(r"\1", " ".join(text.split())))
    text = SHORT_ROOT.sub(r"\\sqrt{\1}", SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    text = DEGREES.sub(lambda _: "^{\\circ}", text)
    text = DEGREES_AS_TEXT.sub(lambda m: f"{m.group(1) or ''}^{{\\circ}}", text)
    text = UNIT_AS_TEXT.sub(r"\1\\text{\2}", text)
    text = NO_WORDS.sub(r"\1", ONE_LETTER.sub(r"\1", NO_TEXT.sub(r"\1 ", text)))
    text = ANSWER_IS.sub("", text.strip().rstrip(".,;: ").strip(), count=1).strip()
    return text.replace(" ", "") if GROUPED_BY_SPACES.fullmatch(text) else text


def _undelimited(text: str) -> str:
    text = re.sub(r"\\[()\[\]](?![A-Za-z])", " ", text) if re.match(r"\s*\\[(\[]", text) else text
    if text.count("$") % 2 == 0:
        return text.replace("$", " ")
    return text.replace("$", MONEY, 1).replace("$", " ")


def split_top(text: str, separators: tuple[str, ...]) -> list[str]:
    r"""Return the pieces between separators that stand outside of all brackets.

    Args:
        separators: characters, or commands such as `\cup`.
    """
    pieces, depth, start = [], 0, 0
    for mark in TOKEN.finditer(text):
        token = mark.group()
        bare = token[1:] if token in ("\\{", "\\}") else token
        if bare in OPENERS or bare in ("\\langle", "\\lbrace"):
            depth += 1
        elif bare in CLOSERS or bare in ("\\rangle", "\\rbrace"):
            depth -= 1
        elif depth == 0 and token in separators:
            pieces.append(text[start : mark.start()].strip())
            start = mark.end()
    return [*pieces, text[start:].strip()]


def depth_of(text: str) -> int:
    """Return how deep the braces of a text are nested; -1 if they do not match."""
    depth = deepest = 0
    for mark in TOKEN.finditer(text):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        deepest = max(deepest, depth)
        if depth < 0:
            return -1
    return deepest if depth == 0 else -1


def squeezed(text: str) -> str:
    """Return the text without the spaces that separate nothing: those not between two letters or digits."""
    return APART.sub("", text)


def plain_thousands(text: str) -> str:
    """Return the text with `1,234,567` as `1234567`. In brackets, commas separate values: `(1,200)` is a point."""
    pieces, depth, start = [], 0, 0
    for place, char in enumerate(text):
        change = (char in "([") - (char in ")]")
        if char in "{}" and text[place - 1 : place] == "\\":
            change = 1 if char == "{" else -1
        if change and (depth == 0 or depth + change == 0):
            part = text[start:place]
            pieces.append(part if depth else THOUSANDS.sub(lambda m: m.group().replace(",", ""), part))
            start = place
        depth += change
    part = text[start:]
    return "".join([*pieces, part if depth else THOUSANDS.sub(lambda m: m.group().replace(",", ""), part)])


def joined_by_commas(text: str) -> str:
    """Return the text with `and`, `or` and `;` as commas."""
    text = WORD_JOIN.sub(",", text).replace(";", ",")
    return re.sub(r",(?:\s*,)+", ",", text)


MOST_ANSWER_CHARS = 500
"""Maximum length of an answer; a longer text is no final answer."""
PLACES = ("box", "tag", "text")
"""Places of an answer: the last box; the `<answer>` tag, with or without a box; the text where there is no box."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?=\s*[{0-9$\\+-]|\s*$)")
"""Box; `\\boxed` before a word or a full stop is only the name of the command."""
DENYING = re.compile(r"(?:\b(?:not|never|nor|anything but)|n['\u2019]t)[ \t]*(?:\$|\*\*|\\[(\[])*[ \t]*\Z", re.I)
"""Words right before a box that deny it. `not 5 but` and `not only` do not."""
ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class AnswerText(NamedTuple):
    """Text of the answer, or the reason why there is none.

    Args:
        text: None if there is no answer.
        reason: "" if there is one.
    """

    text: str | None
    reason: str = ""


def after_thought(response: str) -> AnswerText:
    """Return the part of a response after its last `</think>`; all of it without such a tag."""
    tags = find_tags(response, ("think",))
    if not tags:
        return AnswerText(response)
    if not tags[-1].closes:
        return AnswerText(None, "the thought is not closed")
    return AnswerText(response[tags[-1].end :])


def last_box(text: str) -> AnswerText:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, of the inner one where boxes are nested."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return AnswerText(None, "there is no box")
    start = boxes[-1].end()
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    if text[start : start + 1] != "{":
        return AnswerText(None, "the last box has no braces")
    depth = 0
    for mark in ESCAPE_OR_BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            content = text[start + 1 : mark.start()].strip()
            return AnswerText(content) if content else AnswerText(None, "the last box is empty")
    return AnswerText(None, "the last box is not closed")


def is_denied(text: str) -> bool:
    """Return whether the words right before the last box of a text deny it."""
    start = max((box.start() for box in BOX.finditer(text)), default=0)
    return DENYING.search(text[max(0, start - 40) : start]) is not None


def find_answer(response: str, *, place: str = "box", thought: str = "skip") -> AnswerText:
    """Return the text of the final answer.

    Args:
        place: one of PLACES.
        thought: "skip": an answer in the thought does not count; "read": the whole response is read.
    """
    text, reason = after_thought(response) if thought == "skip" else AnswerText(response)
    if text is None:
        return AnswerText(None, reason)
    if place == "tag":
        text, reason = tagged_text(text, "answer")
        if text is None:
            return AnswerText(None, reason)
    answer = last_box(text)
    if place != "box" and answer.text is None and not BOX.search(text):
        answer = AnswerText(text.strip()) if text.strip() else AnswerText(None, "the answer is empty")
    if answer.text is None and place == "box" and thought == "skip" and text != response and BOX.search(response):
        return AnswerText(None, f"{answer.reason} after the thought")
    if is_denied(text):
        return AnswerText(None, "the words before the last box deny it")
    if answer.text is not None and len(answer.text) > MOST_ANSWER_CHARS:
        return AnswerText(None, f"the answer has more than {MOST_ANSWER_CHARS} characters")
    return answer


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
