"""Hiding of secrets. Every text that a run writes about itself passes through this module.

There are two rules. Texts by people and programs (code, recipes, command lines, logs, notes, errors) go through
`redact_text`, which recognises forms of secrets. Texts from which scores are computed (prompts, responses, truths in
rollouts and evaluations) go through `hide_known`. It hides only the secrets of this process: values of its environment,
and those that `learn` found in the run's own recipe, prompts, reward files and command line. So a riddle about a
password stays unchanged, and scoring it later gives exactly the same score. Token ids never change. Output of user code
for the terminal goes through `redact_said`, which recognises known values and typical shapes, but no names; errors go
through `redact_text`.

Not every secret is found. Some are not hidden, because harmless text looks the same: words and plain numbers as secrets
(a PIN) away from the place where they are assigned, passwords of five words and more, random characters without a name
or a known beginning, arguments of functions with a general name (`connect("host", "me", "...")`), and values that code
assembles from parts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vlmrl.redaction.secrets import (
    HIDDEN,
    Span,
    addresses,
    assigned,
    has_random_part,
    is_mixed,
    is_open,
    is_path,
    kind_of_name,
    known_places,
    looks_random,
    private_keys,
    scanner_shapes,
    service_tokens,
)

MOST_KNOWN = 1000
"""Maximum number of secrets that `learn` remembers."""
LEAST_PIECE = 8
"""A piece of a known secret, from its beginning or to its end, is hidden from this length on, once it looks random."""
CUT_MARGIN = 20_000
"""Number of characters around an excerpt in which secrets are searched for."""
NAME_MARGIN = 256
"""Number of characters before a secret that may be the reason why it is one, such as its name."""
SAID_BY_CODE = ("note", "error", "output")
"""Keys of a result whose values are texts that a reward returned, raised as an error, or printed."""

_EDGE = re.compile(r"[^\s,;\"'`<>(){}|]+")

_learned: frozenset[str] = frozenset()
_learned_passwords: frozenset[str] = frozenset()
"""Passwords of addresses that are plain words. They are hidden only in addresses (`:word@`)."""
_environment: dict[bytes, bytes] | None = None
_named: tuple[tuple[str, str], ...] = ()
"""Variables of `_environment` that can hold a secret."""


def redact_text(text: str) -> str:
    """Return the text with all recognised secrets hidden; line ends stay.

    These are hidden: tokens of services, values that are assigned to names of secrets, private keys, passwords and
    tokens in addresses and headers, and everything that `hide_known` hides.
    """
    return _replaced(text, secret_spans(text)) if text else text


def excerpt(
    text: str, most: int, *, mark: str = "", end: bool = False, hide: Callable[[str], str] = redact_text
) -> str:
    """Return the beginning of a text, at most `most` characters. Secrets are hidden before the text is cut.

    All code that shortens a text which people may see calls it: a key that was cut in two is not recognised any more.

    Args:
        mark: text that stands for what was left out; it counts.
        end: whether to return the end of the text instead.
        hide: `redact_text`, or `redact_said` for responses.
    """
    near = most + CUT_MARGIN  # text further away does not get into the excerpt
    window, left_out = text[-near:] if end else text[:near], len(text) > near
    if left_out:  # a token that is cut in two at the edge might not be recognised, and get into a text full of tokens
        edge = _EDGE.match(window if end else window[::-1])
        cut = edge.end() if edge is not None and edge.end() < len(window) // 2 else 0
        window = window[cut:] if end else window[: len(window) - cut]
    text = hide(window)
    if len(text) <= most and not left_out:
        return text
    size = max(0, most - len(mark))
    return mark + text[len(text) - min(size, len(text)) :] if end else text[:size] + mark


def quoted(value: object, most: int = 80, *, mark: str = "") -> str:
    """Return the beginning of the `repr` of a value of a user, for a message."""
    try:
        return excerpt(repr(value), most, mark=mark)
    except (RecursionError, ValueError):  # nested too deeply; an integer of more than 4300 digits
        return f"a {type(value).__name__} that is too large to show"


def redact_beginning(text: str) -> tuple[str, str]:
    """Return the beginning of a long text with secrets hidden, and the rest, to be redacted with what follows it.

    No secret is cut in two or separated from its name, and the lines of a private key stay together. The rest has about
    CUT_MARGIN characters; it is empty if the text is short or has secrets everywhere.
    """
    spans = secret_spans(text)
    for margin in (NAME_MARGIN, 0):
        cut = _gap_before(text, len(text) - CUT_MARGIN)
        for start, end in reversed(spans):
            if start - margin < cut < end:
                cut = _gap_before(text, start - margin)
        if cut > len(text) // 4:
            return _replaced(text[:cut], [span for span in spans if span[1] <= cut]), text[cut:]
    return _replaced(text, spans), ""


def _gap_before(text: str, place: int) -> int:
    """Return the place after the last white space shortly before a place, or the place itself if there is none."""
    first = max(0, place - CUT_MARGIN // 4)
    return first + max((m.end() for m in re.finditer(r"\s", text[first : max(0, place)])), default=place - first)


def first_line(error: BaseException, most: int = 200) -> str:
    """Return an excerpt of the first line of an error's text; its class name if it has no text."""
    return excerpt((str(error).strip().splitlines() or [type(error).__name__])[0], most)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line with secrets hidden: `--token X`, `--hf-token=X`, `--set a.api_key=X` and the like."""
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
    """Return a JSON value without secrets.

    Strings whose key is the name of a secret are hidden. Other strings go through `redact_text`, keys through
    `redact_said`.
    """
    if isinstance(value, Mapping):
        return {redact_said(str(k)): redact_value(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(v, name) for v in value]
    if isinstance(value, str):
        return HIDDEN if _is_secret(name, value) else redact_text(value)
    return value


def hide_known(text: str) -> str:
    """Return the text with only the secrets of this process hidden."""
    return _replaced(text, _merged(_known_spans(text), text))


def redact_said(text: str) -> str:
    """Return output of user code or a model with secrets hidden, for the terminal. It takes microseconds.

    These are hidden: the secrets of this process, and those with a typical shape or place: tokens of services, private
    keys, passwords in addresses, headers and commands.
    """
    return _replaced(text, _merged(_by_look(text), text)) if text else text


def redact_result(value: Any, name: str = "") -> Any:
    """Hide secrets in a JSON value for the terminal: notes and errors by `redact_text`, the rest by `redact_said`."""
    if isinstance(value, Mapping):
        return {redact_said(k) if isinstance(k, str) else k: redact_result(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_result(v, name) for v in value]
    if isinstance(value, str):
        return redact_text(value) if name in SAID_BY_CODE else redact_said(value)
    return value


def learn(texts: Iterable[str]) -> None:
    """Remember the secrets in the run's own texts (recipe, prompts, reward files), so that `hide_known` hides them."""
    for text in texts:
        secrets = [text[start:end] for start, end in secret_spans(text)]
        # In an address, `user:password` is hidden as a whole, but the password is the secret.
        passwords = [value.partition(":")[2] for value in secrets if f"://{value}@" in text]
        remember([*secrets, *passwords], passwords)


def learn_argv(argv: Sequence[str]) -> None:
    """Remember the secrets of a command line, so that `hide_known` hides them."""
    words = list(zip(map(str, argv), redact_argv(argv), strict=True))
    remember(word.removeprefix(shown.removesuffix(HIDDEN)) for word, shown in words if shown.endswith(HIDDEN))
    learn(word for word, shown in words if word != shown and not shown.endswith(HIDDEN))


def remember(values: Iterable[str], passwords: Iterable[str] = ()) -> None:
    """Remember secrets, such as an endpoint's key, so that `hide_known` hides them; words and short ones are left."""
    global _learned, _learned_passwords
    new_values = sorted({value for value in values if _is_distinct(value)} - _learned)
    _learned |= frozenset(new_values[: MOST_KNOWN - len(_learned)])
    words = sorted(set(filter(_is_address_password, passwords)) - _learned - _learned_passwords)
    _learned_passwords |= frozenset(words[: MOST_KNOWN - len(_learned_passwords)])


def hidden_keys(value: Any, key: str = "") -> list[str]:
    """Return the dotted keys in a JSON value whose values are hidden and therefore lost."""
    if isinstance(value, Mapping):
        return [hidden for k, v in value.items() for hidden in hidden_keys(v, f"{key}.{k}" if key else str(k))]
    if isinstance(value, (list, tuple)):
        return [hidden for i, v in enumerate(value) for hidden in hidden_keys(v, f"{key}.{i}")]
    return [key] if isinstance(value, str) and HIDDEN in value else []


def secret_spans(text: str) -> list[Span]:
    """Return the spans of the secrets in a text as (start, end), in order, without overlaps."""
    spans = [*_by_look(text), *assigned(text)]
    if len(text) >= 20:
        spans += [m.span() for m in scanner_shapes().finditer(text)]
    return _merged(spans, text)


def _by_look(text: str) -> list[Span]:
    """Return the spans of secrets that are recognised without a name: known values, typical shapes and places."""
    return [*_known_spans(text), *service_tokens(text), *private_keys(text), *addresses(text), *known_places(text)]


def _is_secret(name: str, value: str) -> bool:
    """Return whether the whole value is hidden because of its name."""
    kind = kind_of_name(name)
    if kind == "none" or is_open(value) or is_path(name, value):
        return False
    return kind == "sure" or looks_random(value)


def _merged(spans: Iterable[Span], text: str) -> list[Span]:
    """Return the spans in order, with overlapping ones joined. Spans of text that is already hidden are left out."""
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


def _known() -> tuple[frozenset[str], frozenset[str]]:
    """Return (secrets of this process, from its environment and `learn`; passwords of addresses that are words)."""
    global _environment, _named
    raw: dict[bytes, bytes] = os.environ._data  # pyright: ignore[reportAttributeAccessIssue]
    if raw != _environment:  # to decode all variables for every string took a tenth of a small run
        _environment = dict(raw)
        _named = tuple(sorted((n, v) for n, v in os.environ.items() if kind_of_name(n) != "none" or "://" in v))
    secrets, passwords = _of_environment(_named)
    return secrets | _learned, passwords | _learned_passwords


@lru_cache(maxsize=8)
def _of_environment(named: tuple[tuple[str, str], ...]) -> tuple[frozenset[str], frozenset[str]]:
    secret_values: set[str] = set()
    passwords: set[str] = set()
    for name, value in named:
        if _is_secret(name, value):
            secret_values.add(value)
        if "://" in value:
            passwords |= {value[start:end].rpartition(":")[2] for start, end in addresses(value)}
    secrets = frozenset(
        value for value in secret_values | passwords if _is_distinct(value) and not os.path.exists(value)
    )
    return secrets, frozenset(filter(_is_address_password, passwords)) - secrets


def _is_address_password(value: str) -> bool:
    return len(value) >= 4 and not is_open(value)


def _is_distinct(value: str) -> bool:
    """Return whether a secret differs from ordinary text, so that it can be hidden wherever it occurs."""
    return HIDDEN not in value and ((len(value) >= 8 and is_mixed(value)) or looks_random(value))


def _known_spans(text: str) -> Iterator[Span]:
    """Yield the secrets of this process, also those of which a cut has left only the beginning or the end."""
    pattern, by_edge = _known_pattern(*_known())
    for m in pattern.finditer(text) if pattern is not None else ():
        start, end = m.span()
        for secret in by_edge.get(m[0], ()):
            if secret.startswith(m[0]):
                end = max(end, m.start() + _shared(secret, text[m.start() : m.start() + len(secret)]))
            else:
                before = text[max(0, m.end() - len(secret)) : m.end()]
                start = min(start, m.end() - _shared(secret[::-1], before[::-1]))
        yield start, end


def _shared(a: str, b: str) -> int:
    """Return the number of characters with which both texts begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@lru_cache(maxsize=8)
def _known_pattern(
    secrets: frozenset[str], passwords: frozenset[str]
) -> tuple[re.Pattern[str] | None, Mapping[str, Sequence[str]]]:
    """Return a pattern of the edges of these values, unchanged and as JSON writes them, and the values of each edge."""
    by_edge: dict[str, list[str]] = {}
    for secret in sorted({spelled for s in secrets for spelled in (s, json.dumps(s)[1:-1])}):
        sizes = range(LEAST_PIECE, len(secret))
        head = next((secret[:size] for size in sizes if has_random_part(secret[:size])), secret)
        tail = next((secret[-size:] for size in sizes if has_random_part(secret[-size:])), secret)
        for edge in sorted({head, tail}):
            by_edge.setdefault(edge, []).append(secret)
    longest = [re.escape(edge) for edge in sorted(by_edge, key=lambda edge: (-len(edge), edge))]
    words = [f"(?<=:){re.escape(word)}(?=@)" for word in sorted(passwords)]
    return re.compile("|".join([*longest, *words])) if longest or words else None, by_edge
