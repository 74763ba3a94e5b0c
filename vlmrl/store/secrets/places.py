"""Search for secrets that are not assigned to a name: in addresses, headers, cookies, commands and error messages.

It also finds pairs of a name and a value in configuration files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vlmrl.store.secrets.names import kind_of_name
from vlmrl.store.secrets.shapes import (
    HIDDEN,
    has_random_part,
    is_basic_auth,
    is_mixed,
    is_number,
    is_placeholder,
    looks_random,
    lowered,
)

Span = tuple[int, int]


def _begin(*words: str) -> str:
    """Return a pattern that matches where one of the words begins. It is fast: only first letters are searched for."""
    return "(?:" + "|".join(rf"{word}(?<!\w{word})" for word in words) + ")"


USERINFO = re.compile(r"(?<=://)([^/\s:@\"'<>]*):([^/\s\"'<>]+)(?=@)|(?<=://)([^/\s:@\"'<>]{12,})(?=@)")
_PARAMETER = re.compile(r"[?&;#]([\w.-]{1,64})=([^&\s\"'`<>#)\]}\\,;]+)")
_IN_ADDRESS = ("token", "sig", "signature", "auth", "jwt", "sas", "session", "hmac", "csrf")
_RANDOM_IN_ADDRESS = ("code", "sid", "state", "nonce")
"""Parameters of addresses whose values are hidden if they look random."""
_HEADER = re.compile(r"authorization\\?[\"']?\s*[:=,]\s*\\?[frb]?[\"']?(?:[a-z][\w-]{2,20}[ ]+)([^\s\"',;\\]{6,})")
_BEARER = re.compile(rf"{_begin('bearer', 'token')}[ ]+([\w.~+/=-]{{16,}})")
_BASIC = re.compile(rf"{_begin('basic')}[ ]+([a-z0-9+/]{{8,}}={{0,2}})")
_COOKIES = re.compile(r"cookie\\?[\"']?[ ]*[:=,][ ]*\\?[\"']?([^\n\"'\\]{8,4000})")
_COOKIE = re.compile(r"[\w.$-]{1,80}=([^\s;,]{8,})")
_SESSION = re.compile(
    r"\b(?:j?sessionid|phpsessid|aspsessionid\w*|asp\.net_sessionid|connect\.sid|sid|(?:csrf|xsrf)[\w-]{0,20})"
    r"=([\w.%:+/=-]{8,})"
)
_USER = re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"'{}$<]+:([^\s\"'{}$<]+)")
_NETRC = re.compile(
    r"\b(?:machine\s+\S+|default)[\s#*+>-]+(?:(?:login|account)\s+\S+[\s#*+>-]+)+password\s+(\S+)"
    r"|\bmachine\s+\S+\.\S+\s+password\s+(\S+)"
)
_WORD = r"[\"']?([^\s\"'|;&<>]{3,})"
_COMMANDS = re.compile(
    r"\b(?:"
    rf"sshpass\s+-p\s*{_WORD}"
    rf"|(?:mysql\w*|mariadb[\w-]*|mycli)\b[^\n|;&]{{0,200}}?[ ]-p{_WORD}"
    r"|(?:docker|podman|nerdctl|buildah|skopeo|helm|az|oc|cf)[ ][^\n|;&]{0,80}?\blogin\b"
    rf"[^\n|;&]{{0,200}}?[ ]-p[ =]?{_WORD}"
    rf"|vault[ ]login[ ](?:-[\w=-]+[ ]+)*(?!-){_WORD}"
    rf"|(?:7z|7za|rar|unrar)[ ][^\n|;&]{{0,200}}?[ ]?-p{_WORD}"
    rf"|(?:zip|unzip|sqlcmd|bcp)[ ](?:[^\n|;&]{{0,200}}?[ ])?-P[ ]?{_WORD}"
    rf"|openssl[ ][^\n|;&]{{0,200}}?[ ]-[kK][ ]{_WORD}"
    rf"|redis-cli[ ](?:[^\n|;&]{{0,200}}?[ ])?-a[ ]{_WORD}"
    rf"|htpasswd[ ]-\w*b\w*[ ]\S+[ ]\S+[ ]{_WORD}"
    rf"|echo[ ]+(?:-n[ ]+)?{_WORD}[ ]*\|[^\n]{{0,120}}?--password-stdin"
    r")"
)
_TOOLS = (
    "sshpass",
    "mysql",
    "mariadb",
    "mycli",
    "login",
    "7z",
    "rar",
    "zip",
    "sqlcmd",
    "bcp",
    "openssl",
    "redis-cli",
    "htpasswd",
    "--password-stdin",
)
_ORACLE = re.compile(r"(?<![\w/])\w{1,60}/([^\s/@\"']{3,80})@//[\w.-]+")
_CALL = re.compile(
    r"\blogin\s*\(\s*[\"']([^\"'\s]+)[\"']|\b(?:wandb|huggingface-cli|hf|docker|npm)\s+login\s+([\w.+/=~-]+)"
)
_ON_ITS_LINE = re.compile(r"^[ \t#/*+-]*password[ \t]+([^\s\"',;]+)[ \t,;]*$", re.MULTILINE)
_KEYS = [f"{first}{gap}key" for first in ("api", "access", "secret", "private", "auth") for gap in (" ", "_", "-", "")]
_SAID = re.compile(
    rf"{_begin('password', 'passwd', 'passphrase', 'token', 'secret', *_KEYS)}[\"'`]?"
    r"(?:[ ](?:is|was|are|provided|given|used|for|not valid|invalid)\b)*[ ]?[:=]?[ ][\"'`]?"
    r"([\w.+/=~!@#$%^&*-]{8,})"
)
_SETTING = re.compile(
    r"(?:^|[\n;&])[ \t#*+>-]*(?:ENV|ARG|setx|set|aws configure set)[ \t]+(?:/\w[ \t]+)?"
    r"([\w.-]{2,80})[ \t]+[\"']?([^\s\"']{4,})"
)
_PAIR = re.compile(
    rf"{_begin('name', 'key', 'variable')}\\?[\"']?[ ]{{0,8}}[:=][ ]{{0,8}}\\?[\"']?([\w.-]{{2,80}})\\?[\"']?"
    r"[ ]{0,8},?[\s#/*+>-]{1,80}\\?[\"']?value\\?[\"']?[ ]{0,8}[:=][ ]{0,8}"
    r"(?:\\?\"([^\"\\\n]{1,2000})\\?\"|'([^'\n]{1,2000})'|([^\s\"'{}\[\],]{3,2000}))"
)


def addresses(text: str) -> Iterator[Span]:
    """Yield the spans of users and passwords in addresses, and of parameter values whose names are those of secrets."""
    if "://" in text:
        for m in USERINFO.finditer(text):
            password, alone = m[2], m[3]
            if (alone is not None and looks_random(alone)) or (
                password is not None and not is_placeholder(password, names=False)
            ):
                yield m.span()
    if "=" in text:
        for m in _PARAMETER.finditer(text):
            if _is_parameter(m[1], m[2]):
                yield m.span(2)


def _is_parameter(name: str, value: str) -> bool:
    if is_number(value) or is_placeholder(value):
        return False
    last = name.lower().rpartition("-")[2].rpartition("_")[2]
    kind = kind_of_name(name)
    if kind == "none":
        return last in _RANDOM_IN_ADDRESS and looks_random(value)
    return kind == "sure" or last in _IN_ADDRESS or is_mixed(value)


def _is_written(value: str) -> bool:
    """Return whether a word of a command is a secret, and not a variable or a placeholder for one."""
    return not is_placeholder(value) and not is_number(value) and value[0] not in "$-%{<" and HIDDEN not in value


@dataclass(frozen=True)
class _Rule:
    """Pattern of a secret for texts in lower case.

    Args:
        shape: the pattern; its last group is the secret.
        needles: the pattern is tried only on texts that contain one of these (for speed).
        fits: function that returns whether the text of the last group is a secret.
    """

    shape: re.Pattern[str]
    needles: tuple[str, ...]
    fits: Callable[[str], bool]


_RULES = (
    _Rule(_HEADER, ("authorization",), lambda value: not is_placeholder(value) and "{" not in value),
    _Rule(_BEARER, ("bearer ", "token "), looks_random),
    _Rule(_BASIC, ("basic ",), is_basic_auth),
    _Rule(_SESSION, ("sid=", "sessid=", "sessionid", "csrf", "xsrf"), looks_random),
    _Rule(_USER, ("-u ", "-u=", "--user", "--proxy-user"), lambda value: is_mixed(value) and not is_placeholder(value)),
    _Rule(_NETRC, ("machine ", "default "), lambda value: not is_placeholder(value)),
    _Rule(_CALL, ("login",), looks_random),
    _Rule(_ON_ITS_LINE, ("password ", "password\t"), looks_random),
    _Rule(_SAID, ("password", "passwd", "passphrase", "token", "secret", "key"), has_random_part),
)


def headers(text: str) -> Iterator[Span]:
    """Yield the secrets of headers, cookies, command lines, and sentences such as `Incorrect API key provided: ...`."""
    low = lowered(text)
    for rule in _RULES:
        if any(needle in low for needle in rule.needles):
            for m in rule.shape.finditer(low):
                start, end = m.span(m.lastindex or 0)
                if rule.fits(text[start:end]):
                    yield start, end
    if any(tool in text for tool in _TOOLS):
        yield from (m.span(m.lastindex or 0) for m in _COMMANDS.finditer(text) if _is_written(m[m.lastindex or 0]))
    if "cookie" in low:
        for m in _COOKIES.finditer(low):
            for cookie in _COOKIE.finditer(text, *m.span(1)):
                if looks_random(cookie[1]):
                    yield cookie.span(1)
    if "@//" in text:
        yield from (m.span(1) for m in _ORACLE.finditer(text) if is_mixed(m[1]))


def pairs(text: str) -> Iterator[Span]:
    """Yield values whose names are beside them: `name: API_TOKEN` above `value: ...`, `ENV API_TOKEN ...`."""
    for m in _SETTING.finditer(text):
        if _is_paired(m[1], m[2], bare=True):
            yield m.span(2)
    low = lowered(text) if "value" in text or "Value" in text else ""
    for m in _PAIR.finditer(low):
        start, end = m.span(m.lastindex or 0)
        if _is_paired(text[slice(*m.span(1))], text[start:end], bare=m[4] is not None):
            yield start, end


def _is_paired(name: str, value: str, *, bare: bool) -> bool:
    kind = kind_of_name(name)
    if kind == "none" or is_number(value) or is_placeholder(value) or value == HIDDEN:
        return False
    return looks_random(value) or (kind == "sure" and (not bare or is_mixed(value)))
