r"""The one count that an answer states, in the forms in which people and models write it.

Read are digits (`7`, `7.`, `7.0`, `1,200`) and English words up to ninety-nine, alone or in a sentence ("There are
seven cubes."), in Markdown, in LaTeX (`\boxed{7}`), and after a sum that adds up (`3 + 4 = 7`). A count that is stated
twice ("seven (7)") counts. Not read are several numbers, ranges, bounds ("at least 7"), denials ("not 7"), parts of a
number ("7 million", "7%") and whatever looks like a formula.
"""

from __future__ import annotations

import re
from itertools import pairwise

from vlmrl.rewards.text_parsing import UNSEEN

MOST_CHARS = 1000
"""Longest answer that is read."""
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
VALUES = {**{word: n for n, word in enumerate(ONES)}, **{word: 10 * n for n, word in enumerate(TENS, 2)}}
_UNSEEN = re.compile(f"[{UNSEEN}]+")
_MARKUP = re.compile(
    r"\\(?:boxed|fbox|text[a-z]*|math[a-z]+|bf|large|left|right|quad|displaystyle|[()\[\],;:! $])"
    r"|</?(?:b|i|em|strong|p|span|u|br) ?/?>|_"
)
_FORMULA = re.compile(r"[\\^%<>\u2264\u2265\u00b1]")
_NUMBER = re.compile(
    rf"(?<![\w.,])(?P<sign>[+\-\u2212\u2013]?)(?P<digits>[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,15}})(?P<rest>\.[0-9]+)?"
    rf"(?!\w|,[0-9])|\b(?:(?P<tens>{'|'.join(TENS)})(?:[\s-]+(?P<ones>{'|'.join(ONES[1:10])}))?|(?P<word>{'|'.join(ONES)})"
    rf"|none(?! of\b)|there (?:are|were) no|^\W*no(?=(?: [a-z]+){{0,3}} [a-z]+s\W*$))\b"
)
_SUM = re.compile(r"(?<![\w.,])[0-9]{1,6}(?:\s*\+\s*[0-9]{1,6})+\s*=\s*(?P<total>[0-9]{1,6})(?![\w,])")
_BEFORE = re.compile(r"\b(?:over|under|above|below|beyond|past|minus|max|min|or)\s*$")
_AFTER = re.compile(
    r"\s*\+|[\s-]*(?:hundred|thousand|million|billion|trillion|dozens?|percent|per cent|plus|or|and an?)\b"
)
_JOIN = re.compile(r"[a-z]{2}|\(")
"""Words or a bracket between two statements of one count; an operator, as in `7 x 7`, does not join them."""
_UNCERTAIN = re.compile(
    r"\b(?:not|never|neither|nor|cannot|than|at least|at most|up to|between|minimum|maximum|almost|nearly|half)\b"
    r"|n['\u2019]t\b|\bor (?:so|more|fewer|less)\b|\bexceed"
)


def stated_number(answer: str) -> float | None:
    """Return the only number that an answer states; None if it states none, or no single one."""
    if len(answer) > MOST_CHARS:
        return None
    text = _MARKUP.sub(" ", _UNSEEN.sub("", answer).replace("{,}", ",")).lower()
    text = _SUM.sub(_total, text)
    if _FORMULA.search(text) or _UNCERTAIN.search(text):
        return None
    matches = list(_NUMBER.finditer(text))
    if any(char.isnumeric() for char in _NUMBER.sub("", text)):
        return None
    if not all(_JOIN.search(text[one.end() : other.start()]) for one, other in pairwise(matches)):
        return None
    if any(_BEFORE.search(text[: one.start()]) or _AFTER.match(text, one.end()) for one in matches):
        return None
    values = {_value(one) for one in matches}
    return values.pop() if len(values) == 1 else None


def _value(match: re.Match[str]) -> float:
    if match["digits"]:
        size = float(match["digits"].replace(",", "") + (match["rest"] or ""))
        return size if match["sign"] in ("", "+") else -size
    return sum(VALUES[word] for word in (match["tens"], match["ones"], match["word"]) if word)


def _total(match: re.Match[str]) -> str:
    """Return the total of a sum if it adds up; else the sum as it is."""
    parts = match[0].partition("=")[0].split("+")
    return match["total"] if sum(map(int, parts)) == int(match["total"]) else match[0]
