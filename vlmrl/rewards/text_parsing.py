"""Strict parsing of responses: tags, names, and the form of one thought and then one answer.

Every string gives a result, and the time is linear in the text's length.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from vlmrl.errors import RewardError
from vlmrl.types import RewardInput

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


def untagged(truth: Any, name: str | None = "answer") -> Any:
    """Return an expected answer as that of a response is read: the text of its only `<name>...</name>`, or itself."""
    text = tagged_text(truth, name)[0] if isinstance(truth, str) and name else None
    return truth if text is None else text


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


REQUIRED, OPTIONAL = "required", "optional"
THOUGHTS = (REQUIRED, OPTIONAL)


def check_thought(thought: str) -> None:
    """Raise a RewardError unless this is one of THOUGHTS."""
    if thought not in THOUGHTS:
        raise RewardError(f"thought = {thought!r} is unknown", hint=f"one of: {', '.join(THOUGHTS)}")


def format_weights(format_weight: float) -> dict[str, float]:
    """Return the weights of the parts `accuracy` and `format`, which add up to 1.

    Raises: RewardError for a weight of the format that is not in [0, 1].
    """
    if not (isinstance(format_weight, (int, float)) and 0 <= format_weight <= 1):
        raise RewardError(f"format_weight = {format_weight!r} is not a number from 0 to 1")
    return {"accuracy": 1.0 - format_weight, "format": float(format_weight)}


def final_answer(response: str) -> tuple[str | None, str]:
    """Return (the text of the only `<answer>`, ""), or (None, the problem). An answer within the thought is none."""
    text, problem = tagged_text(response, "answer")
    if text is not None:
        order = [(tag.name, tag.closes) for tag in find_tags(response, ("think", "answer"))]
        place = order.index(("answer", False))
        if ("think", False) in order[:place] and ("think", True) in order[place:]:
            return None, "the answer stands within the thought"
    return text, problem


def form_problem(
    x: RewardInput, thought: str, *, tagged: bool = True, step: str = "answer", steps: Sequence[str] = ("answer",)
) -> str:
    """Return what is wrong with the form of a response that has one answer; "" if nothing is.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: one of THOUGHTS.
        tagged: whether the answer stands in `<answer>`; else it is the text after the thought.
        step, steps: tag that takes the place of `answer`, and all tags of which it must be the only one.
    """
    if x.finish == "length":
        return "ended by a limit" if x.turns else "cut off at the token limit"
    names = ("think", step) if tagged else ("think",)
    tags = find_tags(x.response, ("think", *steps) if tagged else names)
    order = [(tag.name, tag.closes) for tag in tags]
    whole = [(name, closes) for name in names for closes in (False, True)]
    if order != whole and not (thought == OPTIONAL and order == whole[2:]):
        return f"not exactly one thought, then one {step}" if thought == REQUIRED else f"not exactly one {step}"
    edges = [0, *(edge for tag in tags for edge in (tag.start, tag.end)), len(x.response)]
    texts = [x.response[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    outside = texts[::2] if tagged else texts[:1] if tags else []
    if any(text.strip(BLANKS) for text in outside):
        return "text outside of the tags"
    if order == whole and not VISIBLE.search(texts[1]):
        return "an empty thought"
    return ""
