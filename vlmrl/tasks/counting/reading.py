r"""The one count that an answer states, in the forms in which people and models write it.

Read are digits (`7`, `7.`, `7.0`, `1,200`) and English words up to ninety-nine, alone or in a sentence ("There are
seven cubes."), in Markdown, in LaTeX (`\boxed{7}`), and after a sum that adds up (`3 + 4 = 7`). A count that is stated
twice ("seven (7)") counts, and so does a total that is stated with its parts ("3 red, 4 blue, 7 in total"). Not read
are several numbers, ranges, bounds ("at least 7"), denials ("not 7"), parts of a number ("7 million", "7%"), multiples
("7 pairs"), dates and whatever looks like a formula.
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
    rf"|(?P<single>(?:^\W*|there is )(?:just |only )?a single(?![\s-]digit))|^\W*nothing(?=\W*$)"
    rf"|none(?! of\b)|there (?:are|were) no|^\W*no(?=(?: [a-z]+){{0,3}} [a-z]+s\W*$))\b"
)
_TERM = rf"(?:[0-9]{{1,6}}|(?:{'|'.join(TENS)})(?:[\s-]+(?:{'|'.join(ONES[1:10])}))?|{'|'.join(ONES)})"
_SUM = re.compile(
    rf"(?<![\w.,]){_TERM}(?:(?:\s*\+\s*|\s+plus\s+){_TERM})+(?:\s*=\s*|\s+(?:is|equals|makes)\s+)"
    rf"(?P<total>{_TERM})(?!\w|,[0-9])"
)
_MONTHS = r"january|february|march|april|may(?! be)|june|july|august|september|october|november|december"
_BEFORE = re.compile(rf"\b(?:over|under|above|below|beyond|past|minus|max|min|or|twice|double|triple|{_MONTHS})\s*$")
_AFTER = re.compile(
    r"\s*\+|[\s-]*(?:hundred|thousand|million|billion|trillion|dozens?|percent|per cent|plus|or"
    r"|and (?:an?|up|more|some|above|over|beyond|counting)|pairs?|couples?|trios?|times|squared|cubed|[ap]m"
    rf"|o['\u2019]clock|{_MONTHS})\b|\s+[a-hj-z](?![\w'\u2019-])"
)
_JOIN = re.compile(r"[a-z]{2}|\(")
"""Words or a bracket between two statements of one count; an operator, as in `7 x 7`, does not join them."""
_UNCERTAIN = re.compile(
    r"\b(?:not|never|neither|nor|cannot|than|at least|at most|up to|between|minimum|maximum|almost|nearly|half)\b"
    r"|n['\u2019]t\b|\bor (?:so|more|fewer|less)\b|\bexceed|\bno\b(?! [a-z]+s\b)|\bupwards?\b|\bexcept|\bexcluding\b"
    r"|\b(?:nope|nah|false|wrong|incorrect|untrue|hardly|barely|scarcely|doubt|unlikely|impossible|far from)\b"
    r"|\b(?:all|anything|everything) but\b|\b(?:oder|oppure|ou|nicht)\b"
)
_TOTAL_AFTER = re.compile(r"(?: [a-z]+){0,2} (?:in total|in all|total|altogether|overall)\b")
_TOTAL_BEFORE = re.compile(r"\b(?:total|altogether|makes)(?: of| is)?[ :=]*$")


def stated_number(answer: str) -> float | None:
    """Return the only number that an answer states; None if it states none, or no single one."""
    if len(answer) > MOST_CHARS:
        return None
    text = _MARKUP.sub(" ", _UNSEEN.sub("", answer).replace("{,}", ",")).lower()
    text = _SUM.sub(_total, text)
    matches = list(_NUMBER.finditer(text))
    rest = _NUMBER.sub(" ", text)
    if _FORMULA.search(text) or _UNCERTAIN.search(rest) or any(char.isnumeric() for char in rest):
        return None
    if not all(_JOIN.search(text[one.end() : other.start()]) for one, other in pairwise(matches)):
        return None
    if any(_BEFORE.search(text[: one.start()]) or _AFTER.match(text, one.end()) for one in matches):
        return None
    values = [_value(one) for one in matches]
    return values[0] if len({*values}) == 1 else _total_of_parts(text, matches, values)


def _total_of_parts(text: str, matches: list[re.Match[str]], values: list[float]) -> float | None:
    """Return the total that is stated before its parts ("7 cubes: 3 red, 4 blue") or after them, if they add up."""
    if len(values) < 3 or min(values) < 0 or re.search(r"\bto\b", text):
        return None
    if values[0] == sum(values[1:]) and re.search("[:(]", text[matches[0].end() : matches[1].start()]):
        return values[0]
    is_named = _TOTAL_AFTER.match(text, matches[-1].end()) or _TOTAL_BEFORE.search(text[: matches[-1].start()])
    return values[-1] if is_named and values[-1] == sum(values[:-1]) else None


def _value(match: re.Match[str]) -> float:
    if match["digits"]:
        size = float(match["digits"].replace(",", "") + (match["rest"] or ""))
        return size if match["sign"] in ("", "+") else -size
    return 1 if match["single"] else sum(VALUES[match[key]] for key in ("tens", "ones", "word") if match[key])


def _total(match: re.Match[str]) -> str:
    """Return the total of a sum if it adds up; else the sum as it is."""
    *parts, total = (_value(number) for number in _NUMBER.finditer(match[0]))
    return match["total"] if sum(parts) == total else match[0]
