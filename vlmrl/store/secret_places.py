"""Places where a secret stands without an assignment: addresses, headers, cookies, commands, sentences of errors, and
pairs of a name and a value in configuration files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from vlmrl.store.secret_names import kind_of_name
from vlmrl.store.secret_shapes import (
    HIDDEN,
    has_random_part,
    is_basic_auth,
    is_mixed,
    is_number,
    is_placeholder,
    looks_random,
)

Span = tuple[int, int]

USERINFO = re.compile(r"(?<=://)([^/\s:@\"'<>]*):([^/\s\"'<>]+)(?=@)|(?<=://)([^/\s:@\"'<>]{12,})(?=@)")
_PARAMETER = re.compile(r"[?&;#]([\w.-]{1,64})=([^&\s\"'`<>#)\]}\\,;]+)")
_IN_ADDRESS = ("token", "sig", "signature", "auth", "jwt", "sas", "session", "hmac", "csrf")
_RANDOM_IN_ADDRESS = ("code", "sid", "state", "nonce")
"""Parameters that are secrets where they look drawn."""
_HEADER = re.compile(
    r"\bauthorization\\?[\"']?\s*[:=,]\s*\\?[frb]?[\"']?(?:[A-Za-z][\w-]{2,20}[ ]+)([^\s\"',;\\]{6,})", re.IGNORECASE
)
_BEARER = re.compile(r"\b(?:bearer|token)[ ]+([\w.~+/=-]{16,})", re.IGNORECASE)
_BASIC = re.compile(r"\bbasic[ ]+([A-Za-z0-9+/]{8,}={0,2})", re.IGNORECASE)
_COOKIES = re.compile(r"\b(?:set-)?cookie\\?[\"']?[ ]*[:=,][ ]*\\?[\"']?([^\n\"'\\]{8,4000})", re.IGNORECASE)
_COOKIE = re.compile(r"[\w.$-]{1,80}=([^\s;,]{8,})")
_SESSION = re.compile(
    r"\b(?:J?SESSIONID|PHPSESSID|ASPSESSIONID\w*|ASP\.NET_SessionId|connect\.sid|sid|(?:csrf|xsrf)[\w-]{0,20})"
    r"=([\w.%:+/=-]{8,})",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"'{}$<]+:([^\s\"'{}$<]+)")
_NETRC = re.compile(
    r"\b(?:machine\s+\S+|default)\s+(?:(?:login|account)\s+\S+\s+)+password\s+(\S+)|\bmachine\s+\S+\.\S+\s+password\s+(\S+)"
)
_WORD = r"[\"']?([^\s\"'|;&<>]{3,})"
_COMMANDS = re.compile(
    r"\b(?:"
    rf"sshpass\s+-p\s*{_WORD}"
    rf"|(?:mysql\w*|mariadb[\w-]*|mycli)\b[^\n|;&]{{0,200}}?[ ]-p{_WORD}"
    rf"|(?:docker|podman|nerdctl|buildah|skopeo|helm|az|oc|cf|kaggle)[ ][^\n|;&]{{0,80}}?\blogin\b[^\n|;&]{{0,200}}?[ ]-p[ =]?{_WORD}"
    rf"|vault[ ]login[ ](?:-[\w=-]+[ ]+)*(?!-){_WORD}"
    rf"|(?:7z|7za|rar|unrar)[ ][^\n|;&]{{0,200}}?[ ]?-p{_WORD}"
    rf"|(?:zip|unzip|sqlcmd|bcp)[ ](?:[^\n|;&]{{0,200}}?[ ])?-P[ ]?{_WORD}"
    rf"|openssl[ ][^\n|;&]{{0,200}}?[ ]-[kK][ ]{_WORD}"
    rf"|redis-cli[ ](?:[^\n|;&]{{0,200}}?[ ])?-a[ ]{_WORD}"
    rf"|htpasswd[ ]-\w*b\w*[ ]\S+[ ]\S+[ ]{_WORD}"
    rf"|echo[ ]+(?:-n[ ]+)?{_WORD}[ ]*\|[^\n]{{0,120}}?--password-stdin"
    r")"
)
_ORACLE = re.compile(r"(?<![\w/])\w{1,60}/([^\s/@\"']{3,80})@//[\w.-]+")
_CALL = re.compile(
    r"\blogin\s*\(\s*[\"']([^\"'\s]+)[\"']|\b(?:wandb|huggingface-cli|hf|docker|npm)\s+login\s+([\w.+/=~-]+)"
    r"|^[\s#/*+-]*password[ \t]+([^\s\"',;]+)[ \t,;]*$",
    re.MULTILINE,
)
_NAMED = r"(?:api|access|secret|private|auth|account)[ _-]?key|password|passwd|passphrase|(?:api |access |auth )?token|secret"
_SAID = re.compile(
    rf"\b(?:{_NAMED})[\"'`]?(?:[ ](?:is|was|are|provided|given|used|for|not valid|invalid))*[ ]?[:=]?[ ][\"'`]?"
    r"([\w.+/=~!@#$%^&*-]{8,})",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(?:^|[\n;&])[ \t]*(?:ENV|ARG|setx|set|aws configure set)[ \t]+(?:/\w[ \t]+)?([\w.-]{2,80})[ \t]+[\"']?([^\s\"']{4,})"
)
_PAIR = re.compile(
    r"(?<![\w-])(?:name|key|variable|var)\\?[\"']?[ ]{0,8}[:=][ ]{0,8}\\?[\"']?([\w.-]{2,80})\\?[\"']?"
    r"[ ]{0,8},?\s{1,80}\\?[\"']?value\\?[\"']?[ ]{0,8}[:=][ ]{0,8}"
    r"(?:\\?\"([^\"\\\n]{1,2000})\\?\"|'([^'\n]{1,2000})'|([^\s\"'{}\[\],]{3,2000}))",
    re.IGNORECASE,
)


def addresses(text: str) -> Iterator[Span]:
    """Yield the user and password of addresses, and the values of parameters with names of secrets."""
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
    """Whether a word of a command is the secret itself, and not a variable or a placeholder."""
    return not is_placeholder(value) and not is_number(value) and value[0] not in "$-%{<" and HIDDEN not in value


_RULES: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = (
    (_HEADER, lambda value: not is_placeholder(value) and "{" not in value),
    (_BEARER, looks_random),
    (_BASIC, is_basic_auth),
    (_SESSION, looks_random),
    (_USER, lambda value: is_mixed(value) and not is_placeholder(value)),
    (_NETRC, lambda value: not is_placeholder(value)),
    (_COMMANDS, _is_written),
    (_CALL, looks_random),
    (_SAID, has_random_part),
)


def headers(text: str) -> Iterator[Span]:
    """Yield the secrets of headers, cookies, command lines, and sentences such as `Incorrect API key provided: ...`."""
    for shape, fits in _RULES:
        for m in shape.finditer(text):
            group = m.lastindex or 0
            if fits(m[group]):
                yield m.span(group)
    if "ookie" in text or "OOKIE" in text:
        for m in _COOKIES.finditer(text):
            for cookie in _COOKIE.finditer(text, *m.span(1)):
                if looks_random(cookie[1]):
                    yield cookie.span(1)
    if "@//" in text:
        for m in _ORACLE.finditer(text):
            if is_mixed(m[1]):
                yield m.span(1)


def pairs(text: str) -> Iterator[Span]:
    """Yield values whose names stand beside them: `name: API_TOKEN` over `value: ...`, `ENV API_TOKEN ...`."""
    shapes = [_SETTING, *([_PAIR] if "value" in text or "Value" in text else [])]
    for shape in shapes:
        for m in shape.finditer(text):
            kind, group = kind_of_name(m[1]), m.lastindex or 0
            value = m[group]
            if kind == "none" or is_number(value) or is_placeholder(value) or value == HIDDEN:
                continue
            bare = shape is _SETTING or m[4] is not None
            if looks_random(value) or (kind == "sure" and (not bare or is_mixed(value))):
                yield m.span(group)
