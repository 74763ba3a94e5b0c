"""Finding what is assigned to the name of a secret, in whatever language: `api_key: str = "..."`, `{"token": "..."}`,
`os.environ["X_API_KEY"] = "..."`, `PASSWORD=...`, `--token ...`, `<password>...</password>`, lists of keys.

A name is found by a word in it, then what stands behind it is read: a separator, and string literals, a list of them,
or a bare word. Code stays as it is: `password = getpass()`, `key=lambda x: x`, `api_key: str`, `token = tokens[i]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vlmrl.store.secret_shapes import HIDDEN, is_mixed, is_number, is_placeholder, kind_of_name, looks_random

Span = tuple[int, int]

MOST_NAME_CHARS = 80
MOST_LIST_CHARS = 4000
_WORD = re.compile(
    r"key|token|secret|passw|passphrase|passcode|pwd|pass|pw|cred|auth|login|bearer|pat|jwt|sig|cookie|session|dsn"
    r"|webhook|sas",
    re.IGNORECASE,
)
_LEFT = re.compile(r"[\w.-]*\Z", re.ASCII)
_RIGHT = re.compile(r"[\w-]*", re.ASCII)
_BEHIND = re.compile(
    r"(?P<close>\\*[\"'`])?(?:[ \t]*\])*(?P<space>[ \t]*)"
    r"(?P<type>:[ \t]*[A-Za-z_][\w.\[\], |]{0,60}?(?=[ \t]*=(?!=)))?(?P<before>[ \t]*)"
    r"(?P<mark>:=|==|!=|=>|=|:|,|>|\()?(?P<after>[ \t]*)"
)
_LITERAL = re.compile(
    r"(?P<kind>[rbfuRBFU]{0,2})(?:"
    r"\"{3}(?P<a>.{0,4000}?)\"{3}|'{3}(?P<b>.{0,4000}?)'{3}"
    r"|\\+\"(?P<c>[^\"\\\n]*)\\+\"|\\+'(?P<d>[^'\\\n]*)\\+'"
    r"|\"(?P<e>(?:[^\"\\\n]|\\.)*)\"|'(?P<f>(?:[^'\\\n]|\\.)*)'|`(?P<g>[^`\n]*)`)",
    re.DOTALL,
)
_JOINED = re.compile(r"(?:\s|\+|\\\n)+")
_BARE = re.compile(r"[^\s\"'`,;&)\]}>(\[{<|\\]+")
_KEY_END = re.compile(r"\s*:")
_COMMA = re.compile(r"\s*,\s*")
_ELEMENT = re.compile(r"[^<>\n]*>([^<>\s]{3,500})</")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_.]*")
_LINE_START = re.compile(
    r"(?:^|[\n{(,;])[\s+\-#/*>\"'`\\]*(?:(?:export|set|let|const|var|env|arg)[ \t]+)?\Z", re.IGNORECASE
)
_UNPACKED = re.compile(r"[\w.]+[ \t]*,[ \t]*\Z")
_PLAIN = re.compile(r"[^\[\](){}\"'`,\\rbfuRBFU]*")
_OPENING, _CLOSING = tuple("[({"), tuple("])}")
MOST_DEPTH = 6
MOST_WORDS = 4
"""A quoted value of more words than this is prose about a password, not one."""


@dataclass(frozen=True)
class _Place:
    """A name and what separates it from its value.

    Args:
        start, end: of the name.    sure: whether whatever it holds is a secret; else only what looks random is.
        quoted: whether the name itself is in quotes.    mark: the separator; "" = white space alone.
        tight: whether nothing stands around the separator.    typed: whether an annotation stands before it.
    """

    text: str
    start: int
    end: int
    sure: bool
    quoted: bool
    mark: str
    tight: bool
    typed: bool

    @property
    def name(self) -> str:
        return self.text[self.start : self.end]

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("-")

    @property
    def begins_line(self) -> bool:
        """Whether it is a key, at the beginning of a line or an entry, and not a word in a sentence."""
        return self.quoted or self.typed or bool(_LINE_START.search(self.text, max(0, self.start - 60), self.start))


def assigned(text: str) -> Iterator[Span]:
    """Yield the span of every value that is a secret because of its name."""
    done = 0
    for word in _WORD.finditer(text):
        if word.start() < done:
            continue
        left = _LEFT.search(text, max(0, word.start() - MOST_NAME_CHARS), word.start())
        right = _RIGHT.match(text, word.end(), word.end() + MOST_NAME_CHARS)
        start, end = left.start() if left else word.start(), right.end() if right else word.end()
        done = end
        kind = kind_of_name(text[start:end])
        if kind == "none":
            continue
        if start and text[start - 1] == "<":
            yield from _in_element(text, end, kind == "sure")
            continue
        yield from _values(text, start, end, kind == "sure")


def _in_element(text: str, end: int, sure: bool) -> Iterator[Span]:
    """The text of an XML element: `<password>...</password>`."""
    value = _ELEMENT.match(text, end)
    if value and not is_placeholder(value[1]) and (is_mixed if sure else looks_random)(value[1]):
        yield value.span(1)


def _values(text: str, start: int, end: int, sure: bool) -> Iterator[Span]:
    behind = _BEHIND.match(text, end)
    assert behind is not None
    quote = text[start - 1] if start and text[start - 1] in "\"'`" else ""
    closed = bool(behind["close"]) and behind["close"][-1] == quote
    mark, at = behind["mark"] or "", behind.end()
    if behind["close"] and not closed:  # the name ends a longer text
        return
    spaced = bool(behind["space"] or behind["before"] or behind["after"])
    place = _Place(text, start, end, sure, closed, mark, not spaced, bool(behind["type"]))
    flag = place.is_flag and spaced and not closed
    if mark == ">" or (mark == "" and not flag) or (mark == "," and not closed):
        return
    literal = _LITERAL.match(text, at)
    if literal and not (quote and not closed and literal[0].startswith(quote)):
        yield from _literals(place, literal)
    elif at < len(text) and text[at] in _OPENING and mark in ("=", ":", ":=", "=>"):
        yield from _listed(place, at)
    elif (mark in ("=", ":", ":=", "==") or (mark == "" and place.is_flag)) and (bare := _BARE.match(text, at)):
        yield from _bare(place, bare)


def _literals(place: _Place, literal: re.Match[str]) -> Iterator[Span]:
    """The string literals behind the mark: one, or several that are joined, or as many as names are unpacked."""
    text = place.text
    unpacked = place.mark == "=" and _UNPACKED.search(text, max(0, place.start - 80), place.start)
    found: list[re.Match[str]] = []
    following: re.Match[str] | None = literal
    while following is not None and len(found) < 50:
        found.append(following)
        gap = (_COMMA if unpacked else _JOINED).match(text, following.end())
        joins = gap is not None and place.mark not in (",", "", "(")
        following = _LITERAL.match(text, gap.end()) if gap and joins else None
    whole = "".join(_content(m)[1] for m in found)
    if not unpacked and len(found) > 1 and _is_quoted_secret(place, whole, ""):
        yield from (_content(m)[0] for m in found if _content(m)[1])
        return
    for m in found:
        span, content = _content(m)
        fits = is_mixed if place.sure else looks_random
        if (
            (fits(content) and not is_placeholder(content))
            if unpacked
            else _is_quoted_secret(place, content, m["kind"])
        ):
            yield span


def _is_quoted_secret(place: _Place, value: str, kind: str) -> bool:
    if "f" in kind.lower() and "{" in value:
        value = re.sub(r"\{[^{}]*\}", "", value)
        return is_mixed(value) if place.sure else looks_random(value)
    if not value or HIDDEN in value or is_number(value) or is_placeholder(value):
        return False
    if place.mark == "(" or not place.sure:
        return looks_random(value)
    if place.mark == ",":  # names stand in lists too
        return is_mixed(value) and len(value) >= 8 and kind_of_name(value) == "none"
    if len(value.split()) > MOST_WORDS:
        return False
    return is_mixed(value) if place.mark == ":" and not place.begins_line else True


def _listed(place: _Place, at: int) -> Iterator[Span]:
    """The literals in brackets behind the mark, but the keys of a mapping."""
    text, depth, first, several = place.text, 0, at, False
    found: list[tuple[Span, str]] = []
    while at < min(len(text), first + MOST_LIST_CHARS) and depth <= MOST_DEPTH:
        plain = _PLAIN.match(text, at)
        at = plain.end() if plain else at
        literal = _LITERAL.match(text, at)
        if literal:
            is_key = _KEY_END.match(text, literal.end())
            found += [] if is_key else [_content(literal)]
            at = literal.end()
            continue
        mark, at = text[at : at + 1], at + 1
        depth += (mark in _OPENING) - (mark in _CLOSING)
        several |= mark == ","
        if depth == 0:
            break
    fits = is_mixed if place.sure else looks_random
    if text[first] == "(" and not several:  # one text in several literals
        whole = "".join(content for _, content in found)
        found = found if _is_quoted_secret(place, whole, "") else []
        fits = bool
    for span, content in found:
        if fits(content) and not is_placeholder(content) and not is_number(content):
            yield span


def _bare(place: _Place, bare: re.Match[str]) -> Iterator[Span]:
    """A word without quotes, as environment files, shells, YAML and logs have it."""
    text, value = place.text, bare[0].rstrip(".:")
    following = text[bare.end() : bare.end() + 1]
    if following in (*_OPENING, "<") or len(value) < 3 or value[0] in "$%{*@" or HIDDEN in value:
        return
    if is_number(value) or is_placeholder(value) or (kind_of_name(value) != "none" and not looks_random(value)):
        return
    if _NAME.fullmatch(value):  # an expression, but for `NAME=value` of a shell
        before = text[place.start - 1 : place.start]
        shell = place.tight and place.mark == "=" and place.name.isupper() and before in ("", " ", "\n", "\t", "'", '"')
        fits = shell and place.sure and following in ("", " ", "\n", "\t", "'", '"', ";")
    else:
        fits = is_mixed(value) if place.sure else looks_random(value)
    if fits:
        yield bare.start(), bare.start() + len(value)


def _content(literal: re.Match[str]) -> tuple[Span, str]:
    """(span, text) of what is within the quotes."""
    group = next(name for name in "abcdefg" if literal[name] is not None)
    return literal.span(group), literal[group]
