"""Strict parser of pair responses, and the answer form by which correct answers and attacks are written.

A pair response is `<think>...</think><answer>P</answer>`. Inside think it has one `<LEVEL>name 1; name 2</LEVEL>` per
hierarchy level, from coarse to fine; the finest levels may be missing. P is the probability that both images show the
same class. `PairFormat` splits a response at its tags and does not read their content; `parse_pair_response` also reads
the names. Any string is accepted, and the time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from vlmrl.rewards.text_parsing import BLANKS, MAX_NAME_CHARS, VISIBLE, normalise_name, tag_alternatives
from vlmrl.tasks.attack import THOUGHT
from vlmrl.types import RewardInput

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


NAMED = re.compile(r"image ?([12])[ \t]*[=:][ \t]*(.*)", re.DOTALL | re.IGNORECASE | re.ASCII)


def two_pieces(body: str, tag: str, what: str = "name", *, named: bool | None = None) -> tuple[Names, str]:
    """Return the two texts in a tag, which `;` separates, and a description of their first error ("" = no error).

    Args:
        named: whether `Image1=` and `Image2=` stand before the texts and are removed; None: they may stand there.
    """
    first, semicolon, second = body.partition(";")
    if not semicolon or ";" in second:
        return ("", ""), f"<{tag}> does not hold two {what}s separated by `;`"
    first, second = first.strip(BLANKS), second.strip(BLANKS)
    matches = [NAMED.fullmatch(first), NAMED.fullmatch(second)]
    if named or (named is None and any(matches)):
        if [match and match[1] for match in matches] != ["1", "2"]:
            return ("", ""), f"<{tag}> does not read `Image1={what}; Image2={what}`"
        first, second = (match[2] for match in matches if match)
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


Kind = Literal["answer", "names", "agreements", "labels", "named_labels"]
"""Form of a response inside think.

answer: reasoning without tags. names: two names per level. agreements: Same, Different or Uncertain per level. labels:
two labels `a; b`. named_labels: two labels `Image1=a; Image2=b`.
"""
Pair = tuple[str, str]


@dataclass(frozen=True)
class FormField:
    """Truth field that an answer states.

    Args:
        tag: name of its tag in answers.
        labels: the names that it may hold; () = any name.
        level: whether it is a level of the hierarchy: two different names mean two different classes.
    """

    name: str
    tag: str
    labels: tuple[str, ...] = ()
    level: bool = True


@dataclass(frozen=True)
class AnswerForm:
    """Form `<think>...</think><answer>P</answer>` with one tag per field inside think.

    Args:
        fields: the fields in the order of their tags.
    """

    kind: Kind
    fields: tuple[FormField, ...]

    def stated(self, names: Mapping[str, Pair | None]) -> list[tuple[FormField, Pair]]:
        """Return the fields that an answer states, with their names: the known ones, down to the first that differs."""
        fields: list[tuple[FormField, Pair]] = []
        for field in self.fields:
            pair = names.get(field.name)
            if pair is None:
                continue
            fields.append((field, pair))
            if field.level and pair[0] != pair[1]:
                break
        return fields

    def value(self, pair: Pair) -> str:
        """Return the text of the tag that states these two names."""
        if self.kind == "agreements":
            return "Same" if pair[0] == pair[1] else "Different"
        return f"Image1={pair[0]}; Image2={pair[1]}" if self.kind == "named_labels" else f"{pair[0]}; {pair[1]}"

    def tags(self, names: Mapping[str, Pair | None]) -> str:
        """Return the tags of an answer that states these names."""
        return "".join(f"\n<{f.tag}>{self.value(pair)}</{f.tag}>\n" for f, pair in self.stated(names))

    def write(self, names: Mapping[str, Pair | None], p: float | str) -> str:
        """Return a whole, well-formed answer."""
        return f"<think>\n{THOUGHT}{self.tags(names) or ' '}</think>\n<answer>{four(p)}</answer>"

    def names_of(self, x: RewardInput) -> dict[str, Pair | None]:
        """Return field -> the two true names of a row; None where a name is not known."""
        return {field.name: _pair(x.truth.get(field.name)) for field in self.fields}

    def commonest(self, rows: Sequence[RewardInput]) -> dict[str, Pair | None]:
        """Return field -> the most frequent name of image 1 and of image 2: the best guess without the images."""
        guess: dict[str, Pair | None] = {}
        for field in self.fields:
            pairs = [pair for x in rows if (pair := _pair(x.truth.get(field.name))) is not None]
            made_up = (field.labels[0], field.labels[0]) if field.labels else ("Alpha", "Alpha")
            sides = [Counter(pair[side] for pair in pairs).most_common(1) for side in (0, 1)]
            guess[field.name] = (sides[0][0][0], sides[1][0][0]) if pairs else made_up
        return guess

    def others(self, x: RewardInput, rows: Sequence[RewardInput]) -> dict[str, Pair | None]:
        """Return wrong names for a row: equal where the true names differ, and different where these are equal."""
        names: dict[str, Pair | None] = {}
        for field in self.fields:
            pair = _pair(x.truth.get(field.name))
            known = {name for y in rows for name in _pair(y.truth.get(field.name)) or ()} | {*field.labels}
            free = [*sorted(known - set(pair or ())), "Falsum", "Errorum"]
            same = pair is not None and pair[0] == pair[1]
            names[field.name] = (free[0], free[1]) if same else (free[0], free[0])
        return names


def form_of(levels: Sequence[str]) -> AnswerForm:
    """Return the form of answers with two names per level. Without levels, the form has no tags inside think."""
    return AnswerForm("names" if levels else "answer", tuple(FormField(name, name) for name in levels))


def four(p: float | str) -> str:
    """Return a probability with four decimals."""
    return p if isinstance(p, str) else f"{p:.4f}"


def _pair(value: Any) -> Pair | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    first, second = value
    return (first, second) if isinstance(first, str) and isinstance(second, str) and first and second else None
