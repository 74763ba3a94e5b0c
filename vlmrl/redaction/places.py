"""Search for secrets by the place where they are: in addresses, cookies, commands, and beside the name of a secret.

After a name such as `api_key`, a value is searched for: a string literal or a word. No language is parsed. The search
ends where the statement ends, as far as brackets, commas and line ends show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from vlmrl.redaction.names import kind_of_name, words_of
from vlmrl.redaction.shapes import (
    HIDDEN,
    Span,
    has_random_part,
    is_mixed,
    is_open,
    is_placeholder,
    looks_random,
    lowered,
)

USERINFO = re.compile(r"(?<=://)([^/\s:@\"'<>]*):([^/\s\"'<>]+)(?=@)|(?<=://)([^/\s:@\"'<>]{12,})(?=@)")
_IN_ADDRESS = frozenset(("token", "sig", "signature", "auth", "jwt", "sas", "session"))
"""Last words of parameters of addresses whose values are hidden even if they are words."""
_COOKIE = re.compile(r"[\w.$-]{1,80}=([^\s;,]{8,})")
_WORD = r"[\"']?([^\s\"'|;&<>]{3,})"
_TOOLS = (
    "sshpass", "mysql", "mariadb", "mycli", "login", "7z", "rar", "zip", "sqlcmd", "bcp", "openssl", "redis-cli",
    "htpasswd",
)  # fmt: skip


def _written(value: str) -> bool:
    """Return whether a word of a command is a secret, and not an option, a variable or a placeholder for one."""
    return not is_open(value) and value[0] not in "$-%{<"


_PLACES: tuple[tuple[tuple[str, ...], re.Pattern[str], Callable[[str], bool]], ...] = (
    (
        ("authorization",),
        re.compile(r"authorization\\?[\"']?\s*[:=,]\s*\\?[frb]?[\"']?(?:[a-z][\w-]{2,20}[ ]+)([^\s\"',;\\]{6,})"),
        lambda value: not is_placeholder(value) and "{" not in value,
    ),
    (
        ("sid=", "sessid=", "sessionid", "csrf", "xsrf", "?code", "&code", "state=", "nonce="),
        re.compile(
            r"(?:\b(?:j?sessionid|phpsessid|aspsessionid\w*|asp\.net_sessionid|connect\.sid|sid|[cx]srf[\w-]{0,20})"
            r"|[?&](?:code|state|nonce))=([\w.%:+/=-]{8,})"
        ),
        looks_random,
    ),
    (
        ("-u ", "-u=", "--user", "--proxy-user"),
        re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"'{}$<]+:([^\s\"'{}$<]+)"),
        lambda value: is_mixed(value) and not is_placeholder(value),
    ),
    (
        ("machine ", "default "),
        re.compile(
            r"\b(?:machine\s+\S+|default)[\s#*+>-]+(?:(?:login|account)\s+\S+[\s#*+>-]+)+password\s+(\S+)"
            r"|\bmachine\s+\S+\.\S+\s+password\s+(\S+)"
        ),
        lambda value: not is_placeholder(value),
    ),
    (("@//",), re.compile(r"(?<![\w/])\w{1,60}/([^\s/@\"']{3,80})@//[\w.-]+"), is_mixed),
    (
        _TOOLS,
        re.compile(
            rf"\b(?:sshpass[ ]+-p[ ]*{_WORD}|htpasswd[ ]-\w*b\w*[ ]\S+[ ]\S+[ ]{_WORD}"
            r"|(?:(?:mysql|mariadb)[\w-]*|mycli|7za?|rar|unrar|zip|unzip|sqlcmd|bcp|openssl|redis-cli"
            r"|(?:docker|podman|nerdctl|buildah|skopeo|helm|az|oc|cf)[ ][^\n|;&]{0,80}?\blogin)\b"
            rf"[^\n|;&<]{{0,200}}?[ ]-(?:p[ =]?|[ka][ ]){_WORD}"
            rf"|echo[ ]+(?:-n[ ]+)?{_WORD}(?=[ ]*\|[^\n]{{0,120}}?--password-stdin))"
        ),
        _written,
    ),
)
"""(words of which one is in the text, for speed; pattern for texts in lower case; what its last group must fulfil)."""


def addresses(text: str) -> Iterator[Span]:
    """Yield the spans of users and passwords in addresses."""
    for m in USERINFO.finditer(text) if "://" in text else ():
        if (m[3] and looks_random(m[3])) or (m[2] and not is_placeholder(m[2], names=False)):
            yield m.span()


def known_places(text: str) -> Iterator[Span]:
    """Yield the secrets of headers, cookies and command lines."""
    low = lowered(text)
    for needles, shape, fits in _PLACES:
        for m in shape.finditer(low) if any(needle in low for needle in needles) else ():
            start, end = m.span(m.lastindex or 0)
            if fits(text[start:end]):
                yield start, end
    for line in re.finditer(r"cookie\\?[\"']?[ ]*[:=,][ ]*\\?[\"']?([^\n\"'\\]{8,4000})", low):
        yield from (m.span(1) for m in _COOKIE.finditer(text, *line.span(1)) if looks_random(m[1]))


MOST_NAME_CHARS = 80
MOST_LIST_CHARS, MOST_STATEMENT_CHARS = 4000, 400
"""Maximum number of characters behind a name that are looked at: of a list, and of any other statement."""
MOST_DEPTH = 6
MOST_WORDS, MOST_PHRASE_WORDS = 4, 24
"""Maximum number of words of a quoted password, and of a passphrase. A longer value is prose about a password."""
_NAME_WORD = re.compile(
    r"key|token|secret|passw|passphrase|passcode|pwd|pass|pw|cred|auth|login|bearer|basic|pat|jwt|sig|cookie|session|dsn"
    r"|webhook|sas|mnemonic"
)
"""Pattern of words in names of secrets, for texts in lower case."""
_LEFT, _RIGHT = re.compile(r"[\w.-]*\Z", re.ASCII), re.compile(r"[\w-]*", re.ASCII)
_MARK = re.compile(
    r"(?P<close>\\*[\"'`])?(?:[ \t]*\])*"
    r"(?:,?[\s#/*+>-]{1,80}\\?[\"']?[vV]alue\\?[\"']?(?=[ ]{0,8}[:=]))?"
    r"(?P<space>[ \t]*(?(close)(?:\n[ \t#/*+>-]*(?=:))?|))"
    r"(?P<type>:[ \t]*(?:\"[^\"\n]{0,60}\"|'[^'\n]{0,60}'"
    r"|[A-Za-z_][\w.]{0,40}(?:\[[\w.\[\], |]{0,60}\])?(?: \| ?[\w.]{1,40})*)"
    r"(?=[ \t]*=(?!=)))?"
    r"[ \t]*(?P<mark>:=|[=!]=|=>|=|:(?!=)|,|\()?[ \t]*"
)
"""Pattern of the text between a name and its value."""
_LITERAL = (
    r"(?P<kind>[rbfuRBFU]{0,2})(?:\"{3}(?P<a>.{0,4000}?)\"{3}|'{3}(?P<b>.{0,4000}?)'{3}"
    r"|\\+\"(?P<c>[^\"\\\n]*)\\+\"|\\+'(?P<d>[^'\\\n]*)\\+'"
    r"|\"(?P<e>(?:[^\"\\\n]|\\.)*)\"|'(?P<f>(?:[^'\\\n]|\\.)*)'|`(?P<g>[^`\n]*)`)"
)
_STEP = re.compile(
    rf"{_LITERAL}|(?P<open>[\[({{])|(?P<shut>[\])}}])|(?P<end>[,;\n])"
    r"|(?P<on>(?:\b(?:or|and|else|if)\b|[%+\\])[ \t]*\n?[ \t]*)|(?P<test>[=!]=[ \t]*)"
    rf"|(?P<word>\w+|{HIDDEN})|[^\w\"'`\[\](){{}},;\n=!%+\\<]+|.",
    re.DOTALL,
)
"""Pattern of the next piece of a statement: a literal, a bracket, a possible end, an operator, a word, a sign."""
_NEXT_LINE = re.compile(r"[ \t]*(?:\\|#[^\n]*)?\n[ \t#/*+>-]*(?=[rbfuRBFU]{0,2}[\"'])")
_ELEMENT = re.compile(r"[^<>\n]*>([^<>\s]{3,500})</")
_BARE = re.compile(r"[^\s\"'`,;&)\]}>(\[{<|\\]+")
_TAIL = re.compile(r"(?:[,;][^\s\"'`,;=&)\]}>(\[{<|\\]+)+(?=[,;]?(?:\s|\Z))")
_SAID = re.compile(
    r"(?:[ ](?:is|was|are|provided|given|used|for|not valid|invalid)\b)*[ ]?[:=]?[ \t]+[\"'`]?([\w.+/=~!@#$%^&*-]{6,})"
)
_SETTING = re.compile(r"(?:ENV|ARG|setx?|aws configure set)[ \t]+(?:/\w[ \t]+)?\Z")
_TEMPLATE = re.compile(r"[ ]?(?:%[sr]|\{[\w!:]{0,20}\})[^\"'\n]{0,80}[\"']\s{0,80}(?:,|%|\.format(?=\())\s{0,80}")
_LINE_START = re.compile(
    r"(?:^|[\n{(,;])[\s+\-#/*>\"'`\\]*(?:(?:export|set|let|const|var|env|arg)[ \t]+)?\Z", re.IGNORECASE
)
_KEY_END, _CALLED, _QUOTE = re.compile(r"\s*:"), re.compile(r"[\w\])]\Z"), re.compile("[\"'`]")
_UNPACKED = re.compile(r"[\w.]+[ \t]*,[ \t]*\Z")
_THROUGH = re.compile(
    r"(?:^|\W|_)(?:str|bytes|bytearray|\w*decode|fromhex|unhexlify|encode|format|join|[lr]?strip|quote|get"
    r"|getenv|pop|setdefault|getattr|Secret(?:Str|Bytes))\Z"
)
"""Pattern of functions that return an argument, such as a default value, in the same or another form."""


@dataclass(frozen=True)
class _Place:
    """Name of a secret and what separates it from its value.

    Args:
        start, end: span of the name.
        sure: whether any value of this name is a secret. If False, only a value that looks random is.
        mark: the separator; "" = only white space.
        closed: whether the name itself is in quotes.
        starts: whether the name is at the beginning of a line or an entry, so that it is a key, not a word of prose.
        at: position behind the separator.
    """

    text: str
    start: int
    end: int
    sure: bool
    mark: str
    closed: bool
    starts: bool
    at: int

    @property
    def name(self) -> str:
        return self.text[self.start : self.end]

    def fits(self, value: str) -> bool:
        """Return whether a value that is not assigned directly is the secret. Ordinary words never are."""
        value = re.sub(r"\{[^{}]*\}", "", value)
        return not is_open(value) and (is_mixed if self.sure else looks_random)(value)

    def is_secret(self, value: str) -> bool:
        """Return whether a literal that is assigned directly is the secret."""
        if not self.sure or (self.mark == ":" and not self.starts) or "{" in value:
            return self.fits(value)
        phrase = words_of(self.name)[-1] in ("passphrase", "mnemonic")
        words = len(value.split()) <= (MOST_PHRASE_WORDS if phrase else MOST_WORDS)
        return words and not is_open(value) and not is_path(self.name, value)


def is_path(name: str, value: str) -> bool:
    """Return whether a value of `pwd` is a folder and not a password."""
    return name.lower().endswith("pwd") and value[:1] in "/~." and not looks_random(value)


def assigned(text: str) -> Iterator[Span]:
    """Yield the span of every value that is a secret because of its name."""
    done = 0
    for word in _NAME_WORD.finditer(lowered(text)):
        if word.start() < done:
            continue
        left = _LEFT.search(text, max(0, word.start() - MOST_NAME_CHARS), word.start())
        right = _RIGHT.match(text, word.end(), word.end() + MOST_NAME_CHARS)
        start, done = left.start() if left else word.start(), right.end() if right else word.end()
        kind = kind_of_name(text[start:done])
        if kind != "none" or word[0] == "basic":
            yield from _values(text, start, done, kind == "sure")


def _values(text: str, start: int, end: int, sure: bool) -> Iterator[Span]:
    behind = _MARK.match(text, end)
    assert behind is not None
    said = _SAID.match(text, end + len(behind["close"] or ""))
    if said and not is_open(said[1]):
        set_here = sure and _SETTING.search(text, max(0, start - 40), start)
        if looks_random(said[1]) or has_random_part(said[1]) or (set_here and is_mixed(said[1])):
            yield said.span(1)
    quote = text[start - 1] if start and text[start - 1] in "\"'`" else ""
    closed = bool(behind["close"]) and behind["close"][-1] == quote
    starts = closed or bool(behind["type"] or _LINE_START.search(text, max(0, start - 60), start))
    place = _Place(text, start, end, sure, behind["mark"] or "", closed, starts, behind.end())
    element = _ELEMENT.match(text, end) if start and text[start - 1] == "<" else None
    if element and place.fits(element[1]):
        yield element.span(1)
    if element or (behind["close"] and not closed):
        return
    if place.mark == "(":
        login = words_of(place.name)[-1] in ("login", "auth", "password", "passwd")
        yield from _statement(replace(place, sure=login), place.at, depth=1)
    elif place.mark == "," and closed:
        yield from _neighbour(place)
    elif place.mark in ("=", ":", ":=", "==", "!=", "=>") or text[start] == "-":
        yield from _value(place)


def _value(place: _Place) -> Iterator[Span]:
    """Yield the value behind the separator, and the literals that the statement can put in its place."""
    text = place.text
    following = _NEXT_LINE.match(text, place.at)
    at = following.end() if following and (place.mark != ":" or place.closed) else place.at
    literal = _literal(text, at)
    unpacked = place.mark == "=" and _UNPACKED.search(text, max(0, place.start - 80), place.start) is not None
    before = text[place.start - 1 : place.start]
    if template := _TEMPLATE.match(text, place.at) if not place.closed else None:
        yield from _statement(place, template.end(), commas=True)
    elif literal and not place.closed and before and literal[0].startswith(before):
        return  # the quote that seems to open a literal closes the one that the name is in
    elif place.starts or text[at : at + 1] in tuple("[({"):
        if literal and not unpacked and place.is_secret(_content(literal)[1]):
            yield _content(literal)[0]
        yield from _statement(place, literal.end() if literal and not unpacked else at, commas=unpacked)
    elif literal and place.is_secret(_content(literal)[1]):
        yield _content(literal)[0]
    if not literal:
        yield from _bare(place, at)


def _literal(text: str, at: int) -> re.Match[str] | None:
    """Return the match of a string literal that begins here."""
    step = _STEP.match(text, at)
    return step if step and step["kind"] is not None else None


def _content(literal: re.Match[str]) -> tuple[Span, str]:
    group = next(name for name in "abcdefg" if literal[name] is not None)
    return literal.span(group), literal[group]


def _statement(place: _Place, at: int, *, depth: int = 0, commas: bool = False) -> Iterator[Span]:
    """Yield the secrets among the literals up to the end of a statement.

    Args:
        depth: number of brackets that are open here.
        commas: whether a comma outside of brackets does not end it.
    """
    text, sign, operand = place.text, "", False
    last = at + (MOST_LIST_CHARS if text[at : at + 1] in tuple("[({") else MOST_STATEMENT_CHARS)
    if _QUOTE.search(text, at, last) is None or text.startswith(HIDDEN, at):
        return
    # For the statement and each open bracket: whether literals in it can become the value.
    counts = [True] * (1 + depth)
    while at < last and (step := _STEP.match(text, at)):
        at = step.end()
        if step["kind"] is not None:
            span, value = _content(step)
            is_key = len(counts) > 1 and _KEY_END.match(text, at)
            chosen = sign in ("or", "else") and place.is_secret(value)
            if counts[-1] and sign not in ("==", "!=") and not is_key and (chosen or place.fits(value)):
                yield span
        elif step["open"]:
            before = text[max(0, step.start() - 40) : step.start()]
            passes = step[0] == "(" and _THROUGH.search(before) is not None
            counts.append(counts[-1] and (passes or not _CALLED.search(before)))
        elif step["shut"]:
            counts.pop()
        elif step["word"] and operand and len(counts) == 1:  # two words in sequence: prose, or another setting
            return
        ends = step["end"] is not None and len(counts) == 1 and not (commas and step[0] == ",")
        if ends or not counts or len(counts) > MOST_DEPTH:
            return
        sign = (step["on"] or step["test"] or "").strip()
        operand = bool(step["kind"] is not None or step["word"] or step["shut"] or (operand and step[0].isspace()))


def _neighbour(place: _Place) -> Iterator[Span]:
    """Yield the literal beside a name in quotes: `"API_KEY", "..."`. In lists of names, each name has its own line."""
    following = _NEXT_LINE.match(place.text, place.at)
    literal = _literal(place.text, following.end() if following else place.at)
    place = replace(place, sure=place.sure and not following)
    if literal and place.fits(_content(literal)[1]) and kind_of_name(_content(literal)[1]) == "none":
        yield _content(literal)[0]


def _bare(place: _Place, at: int) -> Iterator[Span]:
    """Yield the span of a word without quotes, as in environment files, shells, YAML, logs and addresses."""
    text, bare = place.text, _BARE.match(place.text, at)
    tight = place.mark == "=" and at == place.end + 1
    if bare is None or (place.mark == "" and place.text[place.start] != "-"):
        return
    value = bare[0]
    if place.sure and tight and (tail := _TAIL.match(text, bare.end())):
        value = text[bare.start() : tail.end()]
    value, following = value.rstrip(".:"), text[bare.end() : bare.end() + 1]
    before = text[place.start - 1 : place.start]
    if in_address := before in tuple("?&;#") and tight:
        value = value.partition("#")[0]
    start = value[:300]
    if following in tuple("[({<") or len(value) < 3 or value[0] in "$%{*@":  # an expression, or a variable
        return
    other_name = re.fullmatch(r"[\w.-]+", start) and kind_of_name(start) != "none" and not looks_random(start)
    if other_name or is_open(start) or is_path(place.name, value):
        return
    if in_address:
        fits = place.sure or is_mixed(start) or words_of(place.name)[-1] in _IN_ADDRESS
    elif re.fullmatch(r"[A-Za-z_][A-Za-z_.]*", value):  # an expression, except in `NAME=value` of a shell
        fits = place.sure and tight and place.name.isupper() and (before + following).strip(" \n\t'\";") == ""
    else:
        fits = (is_mixed if place.sure else looks_random)(start)
    if fits:
        yield bare.start(), bare.start() + len(value)
