"""Strict parser of pair responses. It accepts any string, and its time is linear in the length of the text.

A pair response is `<think>...</think><answer>P</answer>`. Inside think it has one `<LEVEL>name 1; name 2</LEVEL>` per
hierarchy level, from coarse to fine; the finest levels may be missing. P is the probability that both images show the
same class. `PairFormat` splits a response at its tags and does not read their content; `two_names` reads the names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from vlmrl.rewards.text_parsing import BLANKS, MAX_NAME_CHARS, VISIBLE, normalise_name, tag_alternatives

MAX_CACHED_PIECES = 100
"""Maximum number of pieces of a response whose parse is cached. No format has this many tags."""
PROBABILITY = re.compile(r"0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?")

Names = tuple[str, str]


class PairText(NamedTuple):
    """Pair response split at its tags.

    Args:
        problem: the first reason why the text does not follow the format, in words; "" if it does.
        confidence: probability of "same" in [0, 1]; None if there is a problem.
        bodies: tag -> the text in it, in the order of the response; empty if there is a problem.
        repair: description of the repaired tags; "" = nothing was repaired, which is always so unless `relaxed`.
    """

    problem: str
    confidence: float | None
    bodies: Mapping[str, str]
    repair: str = ""


class PairFormat:
    """Format of a pair response; see the top of this file.

    Args:
        tags: names of the tags that think may hold, each at most once and in this order; may be empty.
        relaxed: whether a missing slash in the closing tag of think or answer is repaired. A second `<think>` is read
            as `</think>` if there is no `</think>`; the same holds for answer. Nothing else is repaired.
    Raises: ValueError for names that cannot be tags (a programming error, not a bad response).
    """

    def __init__(self, tags: Sequence[str], *, relaxed: bool = False) -> None:
        names = tag_alternatives(("think", "answer", *tags))
        self._pieces = re.compile(f"(</?(?:{names})>)").split
        self._plan = lru_cache(maxsize=1024)(partial(_plan, levels=tuple(tags), relaxed=relaxed))

    def split(self, text: str) -> PairText:
        """Split a response (special tokens removed) at its tags. Never raises; time is linear in its length."""
        pieces = self._pieces(text)
        plan = self._plan if len(pieces) < MAX_CACHED_PIECES else self._plan.__wrapped__
        problem, repair, bodies, gap, answer = plan(tuple(pieces[1::2]))
        confidence = None
        if not problem:
            if pieces[0].strip(BLANKS):
                problem = "text before <think>"
            elif pieces[gap].strip(BLANKS):
                problem = "text between </think> and <answer>"
            elif pieces[-1].strip(BLANKS):
                problem = "text after </answer>"
            elif not bodies and not VISIBLE.search(pieces[2]):
                problem = "<think> is empty"
            else:
                confidence = parse_probability(pieces[answer])
                if confidence is None:
                    problem_words = "is not a number from 0 to 1 with at most 4 decimals"
                    problem = f"the answer {_short(pieces[answer])} {problem_words}"
        if problem:
            return PairText(problem, None, {}, repair)
        return PairText("", confidence, {tag: pieces[at] for tag, at in bodies}, repair)


def parse_probability(text: str) -> float | None:
    """Return a decimal in [0, 1] with at most four places and ASCII digits, blanks around it allowed; else None."""
    text = text.strip(BLANKS)
    return float(text) if PROBABILITY.fullmatch(text) else None


def two_pieces(body: str, tag: str, what: str = "name") -> tuple[Names, str]:
    """Return the two texts in a tag, which `;` separates, and a description of their first error ("" = no error)."""
    first, semicolon, second = body.partition(";")
    if not semicolon or ";" in second:
        return ("", ""), f"<{tag}> does not hold two {what}s separated by `;`"
    first, second = first.strip(BLANKS), second.strip(BLANKS)
    if not VISIBLE.search(first) or not VISIBLE.search(second):
        return ("", ""), f"<{tag}> holds an empty {what}"
    if len(first) > MAX_NAME_CHARS or len(second) > MAX_NAME_CHARS:
        return ("", ""), f"<{tag}> holds a {what} of more than {MAX_NAME_CHARS} characters"
    return (first, second), ""


def two_names(body: str, level: str, aliases: Mapping[str, str] | None = None) -> tuple[Names | None, str]:
    """Return the two names in a level's tag, normalised; or None and the reason why there are not exactly two."""
    (first, second), problem = two_pieces(body, level)
    if problem:
        return None, problem
    return (normalise_name(first, level, aliases), normalise_name(second, level, aliases)), ""


class _Plan(NamedTuple):
    """Result of checking a sequence of tags: its error, or the positions of the pieces to read in the split text."""

    problem: str
    repair: str = ""
    bodies: tuple[tuple[str, int], ...] = ()
    gap: int = 0
    answer: int = 0


def _plan(written: tuple[str, ...], levels: tuple[str, ...], relaxed: bool) -> _Plan:
    """Return the `_Plan` of a sequence of tags. Tag i stands between the pieces 2i and 2i + 2 of the split text."""
    repairs = []
    for name in ("think", "answer") if relaxed else ():
        opening, closing = f"<{name}>", f"</{name}>"
        if written.count(opening) == 2 and closing not in written:
            second = written.index(opening, written.index(opening) + 1)
            written = (*written[:second], closing, *written[second + 1 :])
            repairs.append(f"the second {opening} is read as {closing}")
    repair = "; ".join(repairs)
    problem = _structure_problem(written, levels)
    if problem:
        return _Plan(problem, repair)
    bodies = tuple((tag[1:-1], 2 * i + 2) for i, tag in enumerate(written) if tag[1:-1] in levels)
    close_think = written.index("</think>")
    return _Plan("", repair, bodies, gap=2 * close_think + 2, answer=2 * close_think + 4)


def _structure_problem(written: tuple[str, ...], levels: tuple[str, ...]) -> str:
    """Describe the first error in a sequence of tags; return "" if the sequence follows the format."""
    counts = Counter(written)
    for name in ("think", "answer", *levels):
        for tag in (f"<{name}>", f"</{name}>"):
            if counts[tag] > 1:
                return f"{tag} appears {counts[tag]} times"
            if not counts[tag] and (name not in levels or counts[f"<{name}>"] or counts[f"</{name}>"]):
                return f"no {tag}"
    stated = [tag[1:-1] for tag in written if tag[1:-1] in levels]
    inside = written[1 : written.index("</think>")]
    outside = [tag for tag in written if tag.strip("</>") in levels and tag not in inside]
    if outside and written[0] == "<think>":
        return f"{outside[0]} is not inside <think>"
    pairs = [tag for name in stated for tag in (f"<{name}>", f"</{name}>")]
    expected = ["<think>", *pairs, "</think>", "<answer>", "</answer>"]
    misplaced = [tag for tag, due in zip(written, expected, strict=True) if tag != due]
    if misplaced:
        return f"{misplaced[0]} is out of place"
    if stated != [level for level in levels if level in stated]:
        return f"levels are not in the order {', '.join(levels)}"
    return ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 30 else text[:27] + "...")
