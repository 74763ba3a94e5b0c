"""The one place that hides secrets: nothing that a run writes about itself goes past it.

Two rules. Texts that people and programs write (code, recipes, command lines, logs, notes, errors) go through
`redact_text`, which knows what a secret looks like. Texts that scores are computed from (prompts, responses, truths in
rollouts and evaluations) go through `hide_known`, which hides only secrets that this process has: values of its
environment, and what `learn` found in the run's own recipe, prompts, reward files and command line. So a riddle about a
password stays as it is, and is scored again to the digit. Token ids stay what they are in any case.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vlmrl.store.secret_shapes import (
    HIDDEN,
    OURS,
    is_basic_auth,
    is_mixed,
    is_number,
    is_placeholder,
    kind_of_name,
    looks_random,
    scanner_shapes,
)
from vlmrl.store.secret_values import Span, assigned

MOST_KNOWN = 1000
"""Secrets that `learn` remembers at most."""

_USERINFO = re.compile(r"(?<=://)([^/\s:@\"'<>]*):([^/\s\"'<>]+)(?=@)|(?<=://)([^/\s:@\"'<>]{12,})(?=@)")
_PARAMETER = re.compile(r"[?&;#]([\w.-]{1,64})=([^&\s\"'`<>#)\]}\\,;]+)")
_IN_ADDRESS = ("token", "sig", "signature", "auth", "jwt", "sas", "session", "hmac")
_HEADER = re.compile(
    r"\bauthorization\\?[\"']?\s*[:=,]\s*\\?[frb]?[\"']?(?:[A-Za-z][\w-]{2,20}[ ]+)([^\s\"',;\\]{6,})", re.IGNORECASE
)
_BEARER = re.compile(r"\b(?:bearer|token)[ ]+([\w.~+/=-]{16,})", re.IGNORECASE)
_BASIC = re.compile(r"\bbasic[ ]+([A-Za-z0-9+/]{8,}={0,2})", re.IGNORECASE)
_USER = re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"'{}$<]+:([^\s\"'{}$<]+)")
_COMMAND = re.compile(r"\bsshpass\s+-p\s*(\S+)|\bmachine\s+\S+\s+(?:(?:login|account)\s+\S+\s+)*password\s+(\S+)")
_CALL = re.compile(
    r"\blogin\s*\(\s*[\"']([^\"'\s]+)[\"']|\b(?:wandb|huggingface-cli|hf|docker|npm)\s+login\s+([\w.+/=~-]+)"
    r"|^[\s#/*+-]*password[ \t]+([^\s\"',;]+)[ \t,;]*$",
    re.MULTILINE,
)
_PEM = re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d")
_PEM_END = re.compile(r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|Private-MAC: \w+")
_PEM_LINE = re.compile(r"[+\- #*>\"'\\nrt]*[A-Za-z0-9+/=]{16,}[\\nrt\"',+ ]*")
MOST_PEM_CHARS = 20_000
_REST = re.compile(r"[\w-]*", re.ASCII)
_learned: frozenset[str] = frozenset()


def redact_text(text: str) -> str:
    """Return the text with every secret hidden: tokens of services, what is assigned to a secret's name, private keys,
    passwords and tokens in addresses and headers, and what `hide_known` hides. Lines stay lines.
    """
    return _replaced(text, secret_spans(text)) if text else text


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets: `--token X`, `--hf-token=X`, `--set a.api_key=X`, and as `redact_text`."""
    result: list[str] = []
    hide_next = False
    for word in map(str, argv):
        name, equals, value = word.partition("=")
        flag = name.startswith("-") and kind_of_name(name.lstrip("-")) != "none"
        if hide_next and not word.startswith("-"):
            result.append(HIDDEN)
        elif equals and value and (flag or _is_secret(name, value)):
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(redact_text(word))
        hide_next = flag and not equals
    return result


def redact_value(value: Any, name: str = "") -> Any:
    """Return a JSON value with the strings under secret names hidden, and all others as `redact_text`."""
    if isinstance(value, Mapping):
        return {str(k): redact_value(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(v, name) for v in value]
    if isinstance(value, str):
        return HIDDEN if _is_secret(name, value) else redact_text(value)
    return value


def hide_known(text: str) -> str:
    """Return the text with the secrets of this process hidden, and nothing else changed."""
    pattern = _known_pattern(_secrets())
    return text if pattern is None else pattern.sub(HIDDEN, text)


def learn(texts: Iterable[str]) -> None:
    """Remember the secrets in texts of the run's own (recipe, prompts, reward files), for `hide_known`."""
    for text in texts:
        found = [text[start:end] for start, end in secret_spans(text)]
        # In an address the user's name is hidden with the password, which is the secret.
        _remember([*found, *(value.partition(":")[2] for value in found if f"://{value}@" in text)])


def learn_argv(argv: Sequence[str]) -> None:
    """Remember the secrets of a command line, for `hide_known`."""
    words = list(zip(map(str, argv), redact_argv(argv), strict=True))
    _remember(word.removeprefix(shown.removesuffix(HIDDEN)) for word, shown in words if shown.endswith(HIDDEN))
    learn(word for word, shown in words if word != shown and not shown.endswith(HIDDEN))


def _remember(values: Iterable[str]) -> None:
    global _learned
    found = sorted({value for value in values if _is_distinct(value)} - _learned)
    _learned |= frozenset(found[: MOST_KNOWN - len(_learned)])


def hidden_keys(value: Any, key: str = "") -> list[str]:
    """Return the dotted keys of a JSON value under which something is hidden: what a record cannot give back."""
    if isinstance(value, Mapping):
        return [found for k, v in value.items() for found in hidden_keys(v, f"{key}.{k}" if key else str(k))]
    if isinstance(value, (list, tuple)):
        return [found for i, v in enumerate(value) for found in hidden_keys(v, f"{key}.{i}")]
    return [key] if isinstance(value, str) and HIDDEN in value else []


def secret_spans(text: str) -> list[Span]:
    """Return where the secrets of a text are, as (start, end), in order, without overlaps."""
    found: list[Span] = [m.span() for m in OURS.finditer(text)]
    known = _known_pattern(_secrets())
    found += [m.span() for m in known.finditer(text)] if known is not None else []
    if len(text) >= 20:
        found += [(m.start(), _token_end(text, m.end())) for m in scanner_shapes().finditer(text)]
    found += [*_private_keys(text), *_addresses(text), *_headers(text), *assigned(text)]
    return _merged(found, text)


def _token_end(text: str, end: int) -> int:
    """Where the word ends that a shape of fixed length has matched the beginning of."""
    rest = _REST.match(text, end)
    return rest.end() if rest else end


def _is_secret(name: str, value: str) -> bool:
    """Whether a whole value under a name is hidden, whatever is in it."""
    kind = kind_of_name(name)
    if kind == "none" or not value or is_number(value) or is_placeholder(value) or value == HIDDEN:
        return False
    return kind == "sure" or looks_random(value)


def _private_keys(text: str) -> Iterator[Span]:
    """The lines of private keys between their first and last, each a span; of one without an end all that look so."""
    position, end = 0, _PEM_END.search(text)
    while begin := _PEM.search(text, position):
        while end and end.start() < begin.end():
            end = _PEM_END.search(text, end.end())
        position = begin.end()
        stop = end.start() if end and end.start() < position + MOST_PEM_CHARS else None
        for line in re.finditer(r"[^\n]+", text[position : position + MOST_PEM_CHARS]):
            first, last = position + line.start(), position + line.end()
            if stop is not None:
                last = min(last, stop)
            if (stop is not None and first >= stop) or (stop is None and not _PEM_LINE.fullmatch(line[0])):
                break
            body = re.match(r"[+\- #]*", text[first:last])
            first += body.end() if body else 0
            if text[first:last].strip():
                yield first, last
        position = stop or position


def _addresses(text: str) -> Iterator[Span]:
    if "://" in text:
        for m in _USERINFO.finditer(text):
            password, alone = m[2], m[3]
            if (alone is not None and looks_random(alone)) or (
                password is not None and not is_placeholder(password, names=False)
            ):
                yield m.span()
    if "=" in text:
        for m in _PARAMETER.finditer(text):
            kind = kind_of_name(m[1])
            if kind == "none" or is_number(m[2]) or is_placeholder(m[2]):
                continue
            named = kind == "sure" or m[1].lower().rpartition("-")[2].rpartition("_")[2] in _IN_ADDRESS
            if named or is_mixed(m[2]):
                yield m.span(2)


def _headers(text: str) -> Iterator[Span]:
    for shape, fits in (
        (_HEADER, lambda value: not is_placeholder(value) and "{" not in value),
        (_BEARER, looks_random),
        (_BASIC, is_basic_auth),
        (_USER, lambda value: is_mixed(value) and not is_placeholder(value)),
        (_COMMAND, lambda value: not is_placeholder(value)),
        (_CALL, looks_random),
    ):
        for m in shape.finditer(text):
            if fits(m[m.lastindex or 0]):
                yield m.span(m.lastindex or 0)


def _merged(spans: Iterable[Span], text: str) -> list[Span]:
    """Spans in order, those that overlap as one; a part that is hidden already is left alone."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start < result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start and text[start:end] != HIDDEN:
            result.append((start, end))
    return result


def _replaced(text: str, spans: Sequence[Span]) -> str:
    parts, position = [], 0
    for start, end in spans:
        parts += [text[position:start], HIDDEN]
        position = end
    return "".join([*parts, text[position:]]) if spans else text


def _secrets() -> frozenset[str]:
    """The secrets that this process has: of its environment, and what was learned."""
    named = tuple(sorted((n, v) for n, v in os.environ.items() if kind_of_name(n) != "none" or "://" in v))
    return _of_environment(named) | _learned


@lru_cache(maxsize=8)
def _of_environment(named: tuple[tuple[str, str], ...]) -> frozenset[str]:
    found: set[str] = set()
    for name, value in named:
        if _is_secret(name, value):
            found.add(value)
        if "://" in value:
            found |= {value[start:end].rpartition(":")[2] for start, end in _addresses(value)}
    return frozenset(value for value in found if _is_distinct(value) and not os.path.exists(value))


def _is_distinct(value: str) -> bool:
    """Whether a secret is unlike any other text, so that it can be hidden wherever it stands."""
    return HIDDEN not in value and ((len(value) >= 8 and is_mixed(value)) or looks_random(value))


@lru_cache(maxsize=8)
def _known_pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """A pattern of all these, as they are and as JSON writes them; the longest first."""
    spellings = {s for secret in secrets for s in (secret, json.dumps(secret)[1:-1])}
    if not spellings:
        return None
    return re.compile("|".join(re.escape(s) for s in sorted(spellings, key=lambda s: (-len(s), s))))
