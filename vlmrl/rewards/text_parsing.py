"""Strict parsing of responses: tags and names.

Every string gives a result, and the time is linear in the text's length.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

BLANKS = " \t\r\n"
"""White space around tags: ASCII only, so that no invisible character is accepted."""
MAX_NAME_CHARS = 200
UNSEEN = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Characters without a visible form: Unicode's Default_Ignorable_Code_Point, and the annotation marks."""
VISIBLE = re.compile(rf"[^\s\x00-\x1f\x7f-\x9f\u2800\ud800-\udfff{UNSEEN}]")
LEVEL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class Tag(NamedTuple):
    """Tag in a text: `name`, whether it closes, and its position."""

    name: str
    closes: bool
    start: int
    end: int

    def __str__(self) -> str:
        return f"</{self.name}>" if self.closes else f"<{self.name}>"


def normalise_name(name: str, level: str = "", aliases: Mapping[str, str] | None = None) -> str:
    """Return the form in which names are compared.

    It is NFKC and case folded; `-`, `_` and white space are alike; quotes, final points and invisible characters are
    removed. A leading rank word equal to `level` is removed too: "Order Passeriformes" and "order: Passeriformes" are
    "passeriformes". Text over 200 characters is only case folded: it cannot be a name, and NFKC is not linear.
    """
    if len(name) > MAX_NAME_CHARS:
        return name.casefold()
    if name.isascii() and name.isalnum():
        plain = name.lower()  # for most names, the rules below give this
    else:
        plain = _plain(name)
        rank = _plain(level)
        if rank and plain.startswith((f"{rank} ", f"{rank}:")):
            plain = plain[len(rank) + 1 :].lstrip()
    if aliases:
        plain = _plain_aliases(tuple(aliases.items())).get(plain, plain)
    return plain


def find_tags(text: str, names: Sequence[str]) -> list[Tag]:
    """Return every `<name>` and `</name>` of the given names, in exactly this spelling, in order."""
    pattern = _tag_pattern(tuple(names))
    return [Tag(m.group(2), bool(m.group(1)), m.start(), m.end()) for m in pattern.finditer(text)]


def tagged_text(text: str, name: str) -> tuple[str | None, str]:
    """Return (the text of the only `<name>...</name>`, ""), or (None, the problem)."""
    tags = find_tags(text, (name,))
    if not tags:
        return None, f"no <{name}> tag"
    if [t.closes for t in tags] != [False, True]:
        return None, f"not exactly one closed <{name}> tag"
    return text[tags[0].end : tags[1].start], ""


@lru_cache(maxsize=64)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"<(/?)({tag_alternatives(names)})>")


def tag_alternatives(names: tuple[str, ...]) -> str:
    """Return a regular expression that matches any of these tag names.

    Raises: ValueError for a name that cannot be a tag, or is repeated.
    """
    for name in names:
        if not LEVEL_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be a tag: letters, digits, `-` and `_` only, a letter first")
    if len(set(names)) < len(names):
        raise ValueError(f"tag names must be unique and differ from think and answer: {', '.join(names)}")
    return "|".join(re.escape(name) for name in names)


_UNSEEN = re.compile(f"[{UNSEEN}]+")


@lru_cache(maxsize=8192)
def _plain(name: str) -> str:
    folded = unicodedata.normalize("NFKC", _UNSEEN.sub("", name)).casefold()
    spaced = re.sub(r"[-_\s]+", " ", folded).strip(" \"'`*")
    return spaced.rstrip(".,:!? \"'`*") or folded.strip()


@lru_cache(maxsize=64)
def _plain_aliases(items: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {_plain(other): _plain(name) for other, name in items}
