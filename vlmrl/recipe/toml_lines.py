"""File and line that set a recipe key, for error messages, because tomllib returns values without lines.

The text must be valid TOML: the scanner in this module relies on that and does not check it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

Key = tuple["str | int", ...]
"""Key of a recipe as a tuple: names of tables and keys, and positions in lists. Example: ("data", 0, "path")."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_ESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


def key_lines(text: str) -> dict[Key, int]:
    """Return the line (from 1) on which each table, key and list element of a TOML text first appears.

    Args:
        text: TOML that `tomllib.loads` accepts.
    Returns: key -> line. A table with a header has the header's line. A table that exists only through dotted keys has
        the line of the first of these keys.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


def parse_dotted(text: str) -> tuple[str, ...] | None:
    """Return the parts of a dotted TOML key (`a.b`, `a."b.c"`), or None if the text is not one."""
    scanner = _Scanner(text)
    try:
        parts = scanner.key()
    except IndexError:
        return None
    return parts if scanner.at == len(text) else None


def dotted(key: Key) -> str:
    """Return a key as a user types it, such as `data.0.path`; parts that are not bare TOML keys are quoted."""
    return ".".join(str(p) if isinstance(p, int) or _BARE_KEY.fullmatch(p) else f'"{p}"' for p in key)


class _Scanner:
    """Scanner that reads the text once, from start to end.

    Attributes:
        at: the position in the text.
        lines: key -> line, for all keys so far.
        counts: key of a list of tables -> number of its elements so far.
    """

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[Key, int] = {}
        self.counts: dict[Key, int] = {}
        self._counted_at, self._line = 0, 1

    def document(self) -> None:
        table: Key = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)
            self._skip(_BLANK)

    def key(self) -> tuple[str, ...]:
        """Read a dotted key at the position. Raises: IndexError if there is none, such as at the end of the text."""
        parts = []
        while True:
            self._skip(_SPACE)
            quote = self.text[self.at]
            if quote in "\"'":
                parts.append(self._string(quote))
            else:
                match = _BARE_KEY.match(self.text, self.at)
                if match is None:
                    raise IndexError(self.at)
                parts.append(match.group())
                self.at = match.end()
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return tuple(parts)
            self.at += 1

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted_at, self.at)
        self._counted_at = self.at
        return self._line

    def _header(self, brackets: int) -> Key:
        line = self._line_here()
        self.at += brackets
        place = self._indexed(self.key(), last_too=brackets == 1)
        self.at += brackets
        if brackets == 2:
            self.lines.setdefault(place, line)
            number = self.counts.get(place, 0)
            self.counts[place] = number + 1
            place = (*place, number)
        self.lines.setdefault(place, line)
        self._name_parents(place, line)
        return place

    def _indexed(self, parts: tuple[str, ...], *, last_too: bool) -> Key:
        """Return the key of a header, with the newest position inserted after each list of tables in it."""
        place: Key = ()
        for i, part in enumerate(parts):
            place = (*place, part)
            if place in self.counts and (last_too or i < len(parts) - 1):
                place = (*place, self.counts[place] - 1)
        return place

    def _pair(self, table: Key) -> None:
        line = self._line_here()
        place = (*table, *self.key())
        self.lines.setdefault(place, line)
        self._name_parents(place, line)
        self.at += 1  # the equals sign
        self._value(place)

    def _name_parents(self, place: Key, line: int) -> None:
        for length in range(1, len(place)):
            self.lines.setdefault(place[:length], line)

    def _value(self, place: Key) -> None:
        self._skip(_SPACE)
        first = self.text[self.at]
        if first in "\"'":
            self._string(first)
        elif first == "[":
            self._array(place)
        elif first == "{":
            self._inline_table(place)
        else:
            self._skip(_SCALAR)

    def _array(self, place: Key) -> None:
        self.at += 1
        number = 0
        while True:
            self._skip(_BLANK)
            if self.text[self.at] == "]":
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self.lines.setdefault((*place, number), self._line_here())
            self._value((*place, number))
            number += 1

    def _inline_table(self, place: Key) -> None:
        self.at += 1
        while True:
            self._skip(_BLANK)
            if self.text[self.at] == "}":
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self._pair(place)

    def _string(self, quote: str) -> str:
        """Read a string of any of the four kinds. Its value is used only for keys, which are on one line."""
        if self.text.startswith(quote * 3, self.at):
            return self._long_string(quote)
        start = self.at + 1
        end = start
        while self.text[end] != quote:
            end += 2 if quote == '"' and self.text[end] == "\\" else 1
        self.at = end + 1
        raw = self.text[start:end]
        return _ESCAPE.sub(_unescape, raw) if quote == '"' else raw

    def _long_string(self, quote: str) -> str:
        end = start = self.at + 3
        while not self.text.startswith(quote * 3, end):
            end += 2 if quote == '"' and self.text[end] == "\\" else 1
        while self.text.startswith(quote, end + 3):  # up to two quotes may directly precede the closing three
            end += 1
        self.at = end + 3
        return self.text[start:end]


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)


AUTO_ORIGIN = "auto: "
"""Prefix of the origin of a value that the recipe left open (recipe/auto_values.py). The reason for the value follows
it."""


@dataclass(frozen=True)
class KeyPlace:
    """Place where a value is set: a line of a file, or a `--set`."""

    file: Path | None
    line: int = 0
    override: str = ""

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "--set"

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"--set {self.override}"
