"""The strict parsers of response formats. Total (any string in, a result out) and linear in the length of the text.

A pair response is `<think>...</think><answer>P</answer>`: inside think one `<LEVEL>name 1; name 2</LEVEL>` a hierarchy
level, from coarse to fine, as far down as the writer went; P is the probability that both images show the same class.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

BLANKS = " \t\r\n"
"""What counts as white space around tags: ASCII only, so that no invisible character passes."""
MAX_NAME_CHARS = 200
PROBABILITY = re.compile(r"0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?")
LEVEL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

Names = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PairResponse:
    """What a pair response says.

    Args:
        ok: the whole text follows the format. Only then may anything be earned.
        problem: the first reason why it does not, in words; empty when ok.
        confidence: probability of "same" in [0, 1]; from the last readable answer when not ok; None when there is none.
        names: level -> the two names, normalised, image 1 first; None where the level is not stated (or not readable).
        think: text inside think, tags included; empty when there is no closed think.
    """

    ok: bool
    problem: str
    confidence: float | None
    names: Mapping[str, Names | None]
    think: str


class Tag(NamedTuple):
    """One tag in a text: `name`, whether it closes, and where it stands."""

    name: str
    closes: bool
    start: int
    end: int

    def __str__(self) -> str:
        return f"</{self.name}>" if self.closes else f"<{self.name}>"


def parse_pair_response(text: str, levels: Sequence[str], aliases: Mapping[str, str] | None = None) -> PairResponse:
    """Read a pair response. Never raises on a text; time is linear in its length.

    Args:
        text: the response, special tokens removed.
        levels: tag names of the hierarchy, coarse -> fine; may be empty.
        aliases: other spelling -> name, both normalised before use.
    Raises: ValueError for level names that cannot be tags (a programming error, not a bad response).
    Example: `<think><genus>Corvus; Pica</genus></think><answer>0.1</answer>` -> ok, 0.1, {"genus": ("corvus", "pica")}.
    """
    levels = tuple(levels)
    tags = find_tags(text, ("think", "answer", *levels))
    spans = _closed_spans(tags)
    names: dict[str, Names | None] = dict.fromkeys(levels)
    name_problem = ""
    for level in levels:
        if level in spans:
            names[level], found = _two_names(text[slice(*spans[level])], level, aliases)
            name_problem = name_problem or found
    answer = text[slice(*spans["answer"])] if "answer" in spans else None
    confidence = parse_probability(answer) if answer is not None else None
    think = text[slice(*spans["think"])] if "think" in spans else ""
    problem = _structure_problem(text, tags, levels) or name_problem
    if not problem and not think.strip(BLANKS):
        problem = "<think> is empty"
    if not problem and confidence is None:
        problem = f"the answer {_short(answer or '')} is not a number from 0 to 1 with at most 4 decimals"
    return PairResponse(not problem, problem, confidence, names, think)


def parse_probability(text: str) -> float | None:
    """A decimal in [0, 1] with at most four places, ASCII digits only, blanks around it allowed; None for all else."""
    text = text.strip(BLANKS)
    return float(text) if PROBABILITY.fullmatch(text) else None


def normalise_name(name: str, level: str = "", aliases: Mapping[str, str] | None = None) -> str:
    """The form in which names are compared: NFKC, case folded, `-`, `_` and blanks alike, quotes and end points gone.

    A leading rank word equal to `level` is dropped ("Order Passeriformes" -> "passeriformes"). Text over 200 characters
    is only case folded: it cannot be a name, and NFKC is not linear.
    """
    if len(name) > MAX_NAME_CHARS:
        return name.casefold()
    plain = _plain(name)
    rank = _plain(level)
    if rank and plain.startswith(rank + " "):
        plain = plain[len(rank) + 1 :]
    if aliases:
        plain = _plain_aliases(tuple(aliases.items())).get(plain, plain)
    return plain


def find_tags(text: str, names: Sequence[str]) -> list[Tag]:
    """Every `<name>` and `</name>` of the given names, exactly so spelt, in order."""
    pattern = _tag_pattern(tuple(names))
    return [Tag(m.group(2), bool(m.group(1)), m.start(), m.end()) for m in pattern.finditer(text)]


def tagged_text(text: str, name: str) -> tuple[str | None, str]:
    """The text of the one `<name>...</name>`. Returns (text or None, problem or "")."""
    tags = find_tags(text, (name,))
    if not tags:
        return None, f"no <{name}> tag"
    if [t.closes for t in tags] != [False, True]:
        return None, f"not exactly one closed <{name}> tag"
    return text[tags[0].end : tags[1].start], ""


@lru_cache(maxsize=64)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    for name in names:
        if not LEVEL_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be a tag: letters, digits, `-` and `_` only, a letter first")
    if len(set(names)) < len(names):
        raise ValueError(f"tag names must be unique and differ from think and answer: {', '.join(names)}")
    return re.compile(rf"<(/?)({'|'.join(re.escape(n) for n in names)})>")


def _closed_spans(tags: Sequence[Tag]) -> dict[str, tuple[int, int]]:
    """Tag name -> (start, end) of the text in its last opening and the next closing tag after it."""
    spans: dict[str, tuple[int, int]] = {}
    opened: dict[str, int] = {}
    for tag in tags:
        if not tag.closes:
            opened[tag.name] = tag.end
        elif tag.name in opened:
            spans[tag.name] = (opened.pop(tag.name), tag.start)
    return spans


def _structure_problem(text: str, tags: Sequence[Tag], levels: tuple[str, ...]) -> str:
    """The first way in which the tags and the text outside them break the format; "" when they do not."""
    counts = Counter(str(tag) for tag in tags)
    for name in ("think", "answer", *levels):
        for written in (f"<{name}>", f"</{name}>"):
            if counts[written] > 1:
                return f"{written} appears {counts[written]} times"
            if not counts[written] and (name not in levels or counts[f"<{name}>"] or counts[f"</{name}>"]):
                return f"no {written}"
    stated = [tag.name for tag in tags if not tag.closes and tag.name in levels]
    close_think = next(i for i, tag in enumerate(tags) if str(tag) == "</think>")
    outside = [tag for i, tag in enumerate(tags) if tag.name in levels and not 0 < i < close_think]
    if outside and str(tags[0]) == "<think>":
        return f"{outside[0]} is not inside <think>"
    wanted = [
        "<think>",
        *(w for name in stated for w in (f"<{name}>", f"</{name}>")),
        "</think>",
        "<answer>",
        "</answer>",
    ]
    if [str(tag) for tag in tags] != wanted:
        wrong = next(str(tag) for tag, want in zip(tags, wanted, strict=True) if str(tag) != want)
        return f"{wrong} is out of place"
    if stated != [level for level in levels if level in stated]:
        return f"levels are not in the order {', '.join(levels)}"
    last = len(tags) - 1
    gaps = (
        ("before <think>", text[: tags[0].start]),
        ("between </think> and <answer>", text[tags[close_think].end : tags[close_think + 1].start]),
        ("after </answer>", text[tags[last].end :]),
    )
    return next((f"text {place}" for place, gap in gaps if gap.strip(BLANKS)), "")


def _two_names(text: str, level: str, aliases: Mapping[str, str] | None) -> tuple[Names | None, str]:
    """The two names of a level tag, or the reason why there are not exactly two."""
    pieces = [piece.strip(BLANKS) for piece in text.split(";", 3)]
    if len(pieces) != 2:
        return None, f"<{level}> does not hold two names separated by `;`"
    if not all(pieces):
        return None, f"<{level}> holds an empty name"
    if any(len(piece) > MAX_NAME_CHARS for piece in pieces):
        return None, f"<{level}> holds a name of more than {MAX_NAME_CHARS} characters"
    return (normalise_name(pieces[0], level, aliases), normalise_name(pieces[1], level, aliases)), ""


@lru_cache(maxsize=8192)
def _plain(name: str) -> str:
    folded = unicodedata.normalize("NFKC", name).casefold()
    spaced = re.sub(r"[-_\s]+", " ", folded).strip(" \"'`*")
    return spaced.rstrip(".,:!? \"'`*") or folded.strip()


@lru_cache(maxsize=64)
def _plain_aliases(items: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {_plain(other): _plain(name) for other, name in items}


def _short(text: str) -> str:
    return repr(text if len(text) <= 30 else text[:27] + "...")
