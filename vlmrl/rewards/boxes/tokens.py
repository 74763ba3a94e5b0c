"""Tokens of a text that may hold coordinates: numbers, brackets, names, box tags."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["number", "open", "close", "comma", "colon", "name", "text", "ref", "begin", "end", "loc", "other"]
MOST_DIGITS = 20
"""Longest number, in characters; a longer one is read as infinite, so that it is refused."""
MOST_LABEL = 100
NOT_FINITE = {"nan", "inf", "infinity"}
_NUMBER = r"(?:(?<![0-9.])[+-])?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_TEXT = rf'"(?:[^"\\\n]|\\.){{0,{MOST_LABEL}}}"' + rf"|'[^'\\\n]{{0,{MOST_LABEL}}}'"
_REF = r"<ref>(?P<label>[^<]*)</ref>|<\|object_ref_start\|>(?P<label2>[^<]*)<\|object_ref_end\|>"
_PROSE = re.compile(r'"((?:[^"\\\n]|\\.)*)"?|\'((?:[^\'\\\n]|\\.)*)\'?')
"""Quoted text, of any length, to its end or that of the line: what is a text in any case."""
_TOKEN = re.compile(
    rf"<loc(?P<loc>[0-9]{{4}})>|(?P<ref>{_REF})|(?P<begin><box>|<\|box_start\|>)|(?P<end></box>|<\|box_end\|>)"
    rf"|(?P<number>{_NUMBER})|(?P<name>[^\W\d]\w*)|(?P<text>{_TEXT})"
    r"|(?P<open>[\[({])|(?P<close>[\])}])|(?P<comma>[,;])|(?P<colon>[:=])|(?P<other>\S)",
    re.ASCII,
)
POSITION_TOKEN = re.compile(
    r"<\|(?:box|object_ref|point|quad)_(?:start|end)\|>|</?(?:box|ref|point|quad)>|<loc[0-9]{4}>|<seg[0-9]{3}>"
)
"""Tokens with which model families state positions. Some tokenizers call them special; engines keep them in a text."""
_BRACKET, _DIGIT = re.compile(r"[\[\](){}]"), re.compile("[0-9]")


class Token(NamedTuple):
    """Token: its kind, its text (of a reference: the label), and its value if it is a number."""

    kind: Kind
    text: str
    value: float = math.nan


def tokens_of(text: str, is_prose: Callable[[], bool] = lambda: False) -> Iterator[Token]:
    """Yield the tokens of a text; white space is skipped.

    Two numbers without anything between them, such as `1..2` or `1.2.3`, are one number and something else. A quoted
    text with a bracket and a number in it is read as if it had no quotes, because some models put boxes in quotes. The
    time is linear in the length of the text.

    Args:
        is_prose: called at a quoted value; whether it is a label or another text for people, so that a box in it is
            none.
    """
    position, end_of_number, end_of_value, before = 0, -1, -1, ""
    while (match := _TOKEN.search(text, position)) is not None:
        kind, piece, position = match.lastgroup, match.group(), match.end()
        is_value, before = before in ("colon", "open", "comma"), kind
        if is_value and piece[0] in "\"'" and is_prose() and (prose := _PROSE.match(text, match.start())):
            position = prose.end()
            yield Token("text", (prose[1] or prose[2] or "")[:MOST_LABEL])
        elif match.start() == end_of_value and piece[0] in "\"'":  # the closing quote opens no other text
            position = match.start() + 1
            yield Token("other", piece[0])
        elif kind == "loc":
            yield Token("loc", piece, float(match["loc"]))
        elif kind == "ref":
            yield Token("ref", (match["label"] or match["label2"] or "").strip()[:MOST_LABEL])
        elif kind == "number" and match.start() == end_of_number:
            yield Token("other", piece)
        elif kind == "number":
            end_of_number = position
            yield Token("number", piece, float(piece) if len(piece) <= MOST_DIGITS else math.inf)
        elif kind == "name":
            yield Token("number", piece, math.nan) if piece.lower() in NOT_FINITE else Token("name", piece)
        elif kind == "text" and _BRACKET.search(piece) and _DIGIT.search(piece):
            position, end_of_value = match.start() + 1, position - 1 if is_value else end_of_value
            yield Token("other", piece[0])
        elif kind == "text":
            yield Token("text", piece[1:-1])
        else:
            yield Token(kind, piece)  # type: ignore[arg-type]
