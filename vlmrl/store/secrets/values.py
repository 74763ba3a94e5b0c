"""Search for values that are assigned to the name of a secret, in any language.

Examples: `api_key: str = "..."`, `{"token": "..."}`, `os.environ["X_API_KEY"] = "..."`, `PASSWORD=...`, `--token ...`,
`<password>...</password>`, lists of keys.

A name is recognised by a word in it. Then the text after the name is parsed: a separator, and string literals, a list
of literals, or a word without quotes. In a Python expression, the literals that can become the value are found:
`"" or "..."`, `str("...")`, `x + "..."`. Code stays unchanged: `password = getpass()`, `key=lambda x: x`,
`api_key: str`, `token = tokens[i]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vlmrl.store.secrets.names import holds_words, is_short_password, kind_of_name
from vlmrl.store.secrets.shapes import HIDDEN, is_mixed, is_number, is_placeholder, looks_random, lowered

Span = tuple[int, int]

MOST_NAME_CHARS = 80
MOST_LIST_CHARS = 4000
_WORD = re.compile(
    r"key|token|secret|passw|passphrase|passcode|pwd|pass|pw|cred|auth|login|bearer|pat|jwt|sig|cookie|session|dsn"
    r"|webhook|sas|mnemonic"
)
"""Pattern of words in names of secrets, for texts in lower case."""
_LEFT = re.compile(r"[\w.-]*\Z", re.ASCII)
_RIGHT = re.compile(r"[\w-]*", re.ASCII)
_BEHIND = re.compile(
    r"(?P<close>\\*[\"'`])?(?:[ \t]*\])*(?P<space>[ \t]*(?(close)(?:\n[ \t#/*+>-]*(?=:))?|))"
    r"(?P<type>:[ \t]*(?:\"[^\"\n]{0,60}\"|'[^'\n]{0,60}'|[A-Za-z_][\w.\[\], |]{0,60}?)(?=[ \t]*=(?!=)))?"
    r"(?P<before>[ \t]*)"
    r"(?P<mark>:=|==|!=|=>|=|:|,|>|\()?(?P<after>[ \t]*)"
)
_LITERAL = re.compile(
    r"(?P<kind>[rbfuRBFU]{0,2})(?:"
    r"\"{3}(?P<a>.{0,4000}?)\"{3}|'{3}(?P<b>.{0,4000}?)'{3}"
    r"|\\+\"(?P<c>[^\"\\\n]*)\\+\"|\\+'(?P<d>[^'\\\n]*)\\+'"
    r"|\"(?P<e>(?:[^\"\\\n]|\\.)*)\"|'(?P<f>(?:[^'\\\n]|\\.)*)'|`(?P<g>[^`\n]*)`)",
    re.DOTALL,
)
_NEXT_LINE = re.compile(r"[ \t]*(?:\\|#[^\n]*)?\n[ \t#/*+>-]*(?=[rbfuRBFU]{0,2}[\"'])")
_ATOM = re.compile(r"[A-Za-z_](?:[\w.]*\w)?|[\d.]+")
_ATTRIBUTE = re.compile(r"\s{0,80}\.([A-Za-z_]\w*)")
_OPERATOR = re.compile(r"(?:[ \t]|\\?\n)*(?P<sign>(?:or|and|if|else)\b|==|!=|[+%])(?:[ \t]|\\?\n)*")
_TEMPLATE = re.compile(r"[ ]?(?:%[sr]|\{[\w!:]{0,20}\})[^\"'\n]{0,80}[\"']\s{0,80}(?:,|%\s{0,9}\(?|\.format\()\s{0,80}")
_TAIL = re.compile(r"(?:[,;][^\s\"'`,;=&)\]}>(\[{<|\\]+)+(?=[,;]?(?:\s|\Z))")
WRAPPERS = re.compile(
    r"str|bytes|bytearray|\w*b(?:64|32|16)decode|[ab]85decode|fromhex|unhexlify|encode|decode|format|join|[lr]?strip"
    r"|(?:un)?quote|SecretStr|SecretBytes"
)
"""Pattern of functions that return their argument in another form."""
LOOKUPS = frozenset(("get", "getenv", "pop", "setdefault", "getattr"))
"""Functions whose second argument is the default value."""
LOGINS = re.compile(r"(?:login|auth|password|passwd)\Z", re.IGNORECASE)
MOST_EXPRESSION_CHARS = 1000
MOST_OPERANDS = 12
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
"""Maximum number of words of a quoted password. A longer value is prose about a password."""
MOST_PHRASE_WORDS = 24
MOST_LOOKED_AT = 300
"""Maximum number of characters of a word without quotes that are examined to decide whether it is a secret."""


@dataclass(frozen=True)
class _Place:
    """Name and the separator between it and its value.

    Args:
        start, end: span of the name.
        sure: whether any value of this name is a secret. If False, only a value that looks random is.
        quoted: whether the name itself is in quotes.
        mark: the separator; "" = only white space.
        tight: whether there is no white space around the separator.
        typed: whether there is a type annotation before the separator.
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
        """Return whether the name is at the beginning of a line or an entry, so that it is a key, not a word."""
        return self.quoted or self.typed or bool(_LINE_START.search(self.text, max(0, self.start - 60), self.start))


def assigned(text: str) -> Iterator[Span]:
    """Yield the span of every value that is a secret because of its name."""
    done = 0
    for word in _WORD.finditer(lowered(text)):
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
    """Yield the span of the text of an XML element: `<password>...</password>`."""
    value = _ELEMENT.match(text, end)
    if value and not is_placeholder(value[1]) and (is_mixed if sure else looks_random)(value[1]):
        yield value.span(1)


def _values(text: str, start: int, end: int, sure: bool) -> Iterator[Span]:
    behind = _BEHIND.match(text, end)
    assert behind is not None
    quote = text[start - 1] if start and text[start - 1] in "\"'`" else ""
    closed = bool(behind["close"]) and behind["close"][-1] == quote
    mark, at = behind["mark"] or "", behind.end()
    if behind["close"] and not closed:  # the name is only the end of a longer quoted text
        return
    following = _NEXT_LINE.match(text, at) if mark in ("=", ":=", ",") or (mark == ":" and closed) else None
    at = following.end() if following else at
    sure = sure and not (mark == "," and following)  # in lists of names, each name has its own line
    spaced = bool(behind["space"] or behind["before"] or behind["after"])
    place = _Place(text, start, end, sure, closed, mark, not spaced, bool(behind["type"]))
    flag = place.is_flag and spaced and not closed
    if mark == ">" or (mark == "" and not flag) or (mark == "," and not closed):
        return
    if mark == "(":
        yield from _arguments(place, behind.start("mark"))
    literal = _LITERAL.match(text, at)
    if literal and not (quote and not closed and literal[0].startswith(quote)):
        yield from _literals(place, literal)
    elif at < len(text) and text[at] in _OPENING and mark in ("=", ":", ":=", "=>"):
        yield from _listed(place, at)
    elif template := _TEMPLATE.match(text, behind.end("mark")) if mark in ("=", ":") and not closed else None:
        yield from _inserted(place, template.end())
    elif (mark in ("=", ":", ":=", "==") or (mark == "" and place.is_flag)) and (bare := _BARE.match(text, at)):
        yield from _bare(place, bare)
    if mark in ("=", ":=") or (mark == ":" and closed):
        yield from _operands(place, at)


def _literals(place: _Place, literal: re.Match[str]) -> Iterator[Span]:
    """Yield the string literals after the separator: one, several that Python joins, or one per unpacked name."""
    text = place.text
    unpacked = place.mark == "=" and _UNPACKED.search(text, max(0, place.start - 80), place.start)
    literals: list[re.Match[str]] = []
    following: re.Match[str] | None = literal
    while following is not None and len(literals) < 50:
        literals.append(following)
        gap = (_COMMA if unpacked else _JOINED).match(text, following.end())
        joins = gap is not None and place.mark not in (",", "", "(")
        following = _LITERAL.match(text, gap.end()) if gap and joins else None
    whole = "".join(_content(m)[1] for m in literals)
    if not unpacked and len(literals) > 1 and _is_quoted_secret(place, whole, ""):
        yield from (_content(m)[0] for m in literals if _content(m)[1])
        return
    for m in literals:
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
        return looks_random(value) or (place.mark in ("=", ":", ":=") and _is_short(place, value))
    if place.mark == ",":  # lists also contain names
        return is_mixed(value) and len(value) >= 8 and kind_of_name(value) == "none"
    if len(value.split()) > (MOST_PHRASE_WORDS if holds_words(place.name) else MOST_WORDS):
        return False
    return is_mixed(value) if place.mark == ":" and not place.begins_line else True


def _is_short(place: _Place, value: str) -> bool:
    """Return whether a value of `pwd` is a password, and not a word or a path."""
    return is_short_password(place.name) and is_mixed(value) and not {"/", "\\"} & set(value)


def _fits(place: _Place, value: str) -> bool:
    """Return whether a literal that is not assigned directly is the secret. Ordinary words never are."""
    if is_placeholder(value) or is_number(value) or HIDDEN in value:
        return False
    return is_mixed(value) if place.sure else looks_random(value)


@dataclass(frozen=True)
class _Enclosed:
    """Literals in a pair of brackets.

    Each is (span, text, number of the argument, whether it is the whole argument and is passed by position).
    """

    literals: list[tuple[Span, str, int, bool]]
    several: bool
    end: int


def _enclosed(text: str, at: int, most: int = MOST_LIST_CHARS) -> _Enclosed:
    """Return the literals in the bracket that opens at `at`, except the keys of a mapping."""
    depth, first, commas = 0, at, 0
    several, begins = False, False
    literals: list[tuple[Span, str, int, bool]] = []
    while at < min(len(text), first + most) and depth <= MOST_DEPTH:
        plain = _PLAIN.match(text, at)
        begins = begins and not (plain and plain[0].strip())
        at = plain.end() if plain else at
        literal = _LITERAL.match(text, at)
        if literal:
            span, content = _content(literal)
            literals += [] if _KEY_END.match(text, literal.end()) else [(span, content, commas, begins and depth == 1)]
            at, begins = literal.end(), False
            continue
        mark, at = text[at : at + 1], at + 1
        depth += (mark in _OPENING) - (mark in _CLOSING)
        several |= mark == ","
        commas += mark == "," and depth == 1
        begins = (mark == "," or mark in _OPENING) and depth == 1
        if depth == 0:
            break
    return _Enclosed(literals, several, at)


def _listed(place: _Place, at: int) -> Iterator[Span]:
    """Yield the literals of the bracketed list that follows the separator, except the keys of a mapping."""
    enclosed = _enclosed(place.text, at)
    literals = enclosed.literals
    fits = is_mixed if place.sure else looks_random
    if place.text[at] == "(" and not enclosed.several:  # one text that is written as several literals
        whole = "".join(content for _, content, _, _ in literals)
        literals = literals if _is_quoted_secret(place, whole, "") else []
        fits = bool
    for span, content, _, _ in literals:
        if fits(content) and not is_placeholder(content) and not is_number(content):
            yield span


def _arguments(place: _Place, at: int) -> Iterator[Span]:
    """Yield secrets in a call of `login`, `set_password` and so on: literals that look random, and a last password."""
    literals = [item for item in _enclosed(place.text, at, MOST_EXPRESSION_CHARS).literals if item[3]]
    for span, content, number, _ in literals:
        last = number > 0 and span == literals[-1][0] and LOGINS.search(place.name) is not None
        if not is_placeholder(content) and (looks_random(content) or (last and is_mixed(content))):
            yield span


def _inserted(place: _Place, at: int) -> Iterator[Span]:
    """Yield the literals that are inserted into a template: `"token=%s", "..."`."""
    for _ in range(MOST_WORDS):
        literal = _LITERAL.match(place.text, at)
        if not literal:
            return
        span, content = _content(literal)
        if _fits(place, content):
            yield span
        comma = _COMMA.match(place.text, literal.end())
        if not comma:
            return
        at = comma.end()


def _operands(place: _Place, at: int) -> Iterator[Span]:
    """Yield the literals of a Python expression that can become the value.

    These are operands of `or`, `else`, `+` and `%`, and arguments of functions that return their argument.
    """
    if not place.begins_line:
        return
    text, last, sign = place.text, min(len(place.text), at + MOST_EXPRESSION_CHARS), "="
    for _ in range(MOST_OPERANDS):
        if literal := _LITERAL.match(text, at):
            span, content = _content(literal)
            words = sign in ("or", "else") and _is_quoted_secret(place, content, literal["kind"])
            if words or (sign in ("or", "else", "and", "+", "%") and _fits(place, content)):
                yield span
            callee, at = "", literal.end()
        elif atom := _ATOM.match(text, at):
            callee, at = atom[0].rpartition(".")[2], atom.end()
        elif text[at : at + 1] == "(" and sign != "=":
            callee = "str"
        else:
            return
        while at < last:
            if attribute := _ATTRIBUTE.match(text, at):
                callee, at = attribute[1], attribute.end()
            elif text[at] in "([":
                enclosed = _enclosed(text, at, last - at)
                first = 0 if WRAPPERS.fullmatch(callee) else 1 if callee in LOOKUPS else len(text)
                if text[at] == "(":
                    yield from (span for span, value, n, _ in enclosed.literals if n >= first and _fits(place, value))
                at, callee = enclosed.end, ""
            else:
                break
        operator = _OPERATOR.match(text, at)
        if not operator or at >= last:
            return
        at, sign = operator.end(), operator["sign"]


def _bare(place: _Place, bare: re.Match[str]) -> Iterator[Span]:
    """Yield the span of a word without quotes, as in environment files, shells, YAML and logs."""
    text, value = place.text, bare[0].rstrip(".:")
    if place.sure and place.tight and place.mark == "=" and (tail := _TAIL.match(text, bare.end())):
        value = text[bare.start() : tail.end()].rstrip(".:")
    following = text[bare.end() : bare.end() + 1]
    if following in (*_OPENING, "<") or len(value) < 3 or value[0] in "$%{*@" or HIDDEN in value:
        return
    start = value[:MOST_LOOKED_AT]
    if is_number(start) or is_placeholder(start) or (kind_of_name(start) != "none" and not looks_random(start)):
        return
    if _NAME.fullmatch(value):  # an expression, except in `NAME=value` of a shell
        before = text[place.start - 1 : place.start]
        shell = place.tight and place.mark == "=" and place.name.isupper() and before in ("", " ", "\n", "\t", "'", '"')
        fits = shell and place.sure and following in ("", " ", "\n", "\t", "'", '"', ";")
    else:
        fits = is_mixed(start) if place.sure else looks_random(start) or _is_short(place, start)
    if fits:
        yield bare.start(), bare.start() + len(value)


def _content(literal: re.Match[str]) -> tuple[Span, str]:
    """Return (span, text) of the content of the quotes."""
    group = next(name for name in "abcdefg" if literal[name] is not None)
    return literal.span(group), literal[group]
