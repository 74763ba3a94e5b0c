r"""Answers as their text states them: boxes with confidences, or one count; boxes drawn over images.

A count is read as digits (`7`, `7.`, `7.0`, `1,200`) and as an English word up to ninety-nine, alone or in a sentence
("There are seven cubes."), in Markdown, in LaTeX (`\boxed{7}`), and after a sum that adds up (`3 + 4 = 7`). A count
that is stated twice ("seven (7)") counts, and so does a total with its parts ("3 red, 4 blue, 7 in total"). Not read
are several numbers, ranges, bounds ("at least 7"), denials ("not 7"), parts of a number ("7 million", "7%"), multiples
("7 pairs"), dates and whatever looks like a formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from vlmrl.errors import RewardError
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import Box, Match, Plane, answer_plane, check_space, convert, match_boxes
from vlmrl.rewards.boxes.reading import Coordinates, check_order, read_boxes
from vlmrl.rewards.boxes.writing import ANSWER_COLOUR, TRUTH_COLOUR, draw_boxes, write_box
from vlmrl.rewards.text_parsing import BLANKS, UNSEEN, final_answer, form_problem
from vlmrl.tasks.perception.truth import BoxSettings, S, settings_as, size_of, true_boxes
from vlmrl.tasks.positions import SHARES, Mark, Positions
from vlmrl.types import RewardInput, RewardResult

RIGHT = 0.5
"""Least IoU of a box with the true box that it is matched with."""
MOST_BOXES = 100
"""Largest number of boxes in an answer of the right form, for an image with no more objects than this."""
SURE = 1.0
"""Confidence of a box beside which no probability stands."""
_S = r"[ \t\r\n]*"
_N = r"[+-]?[0-9]{1,20}(?:\.[0-9]{0,20})?"
_BOX = rf"(?:\[{_S}{_N}(?:{_S},{_S}{_N}){{3}}{_S}\]|(?:<loc[0-9]{{4}}>){{4}})"
_FIELD = (
    rf"""(?:["'](?:bbox_2d|bbox|box|[Pp]osition)["']{_S}:{_S}{_BOX}"""
    rf"""|["'](?:[Cc]onfidence|score)["']{_S}:{_S}{_N}"""
    rf"""|["']label["']{_S}:{_S}["'][^"'\n{{}}]{{0,100}}["'])"""
)
_ENTRY = rf"\{{{_S}{_FIELD}(?:{_S},{_S}{_FIELD}){{1,2}}{_S}\}}"
_FENCE = re.compile(rf"```(?:json|python)?{_S}(?P<content>[^`]*)```")
LIST = re.compile(rf"\[{_S}(?:{_ENTRY}(?:{_S},{_S}{_ENTRY})*{_S})?\]")
"""Form of the list. An entry has two or three of these: a box, a confidence, a label."""
NONE = re.compile(rf"""\[{_S}\]|["']?(?:no objects?|(?:there (?:are|is) )?none)["']?\.?""", re.IGNORECASE)
"""Statements that there is no object: an empty list, the words of the published prompt, or `none`."""


class Detection(NamedTuple):
    """Box of an answer, and the probability that it is right, in [0, 1]."""

    box: Box
    confidence: float


@dataclass(frozen=True)
class Settings(BoxSettings):
    """Declarations on how an answer is read, and when a box is right.

    Args:
        least: least IoU of a right box, in (0, 1].
    """

    least: float = RIGHT

    def check(self) -> None:
        """Raise a RewardError for a value that is not allowed."""
        super().check()
        if not (isinstance(self.least, (int, float)) and 0 < self.least <= 1):
            raise RewardError(f"least = {self.least!r} is not a number above 0, up to 1")


@dataclass(frozen=True)
class Answer:
    """Boxes of a response, beside the true ones.

    Args:
        plane, truths: plane of the row's truth, and its boxes.
        detections: boxes that were read, in the same plane and in the order of the text. A box that the response states
            several times is there as often.
        is_none: whether the answer states that there is no object.
        problem: what is wrong with the form of the response; "" = nothing.
        note: the problem, or what was mended.
    """

    plane: Plane
    truths: tuple[Box, ...]
    detections: tuple[Detection, ...]
    is_none: bool
    problem: str
    note: str

    @property
    def stated(self) -> tuple[tuple[Box, str], ...]:
        """The boxes that were read, each with its confidence as a label."""
        return tuple((one.box, f"{one.confidence:.2f}") for one in self.detections)

    def matches(self, least: float = RIGHT) -> list[Match]:
        """Return the right boxes with their true ones: the largest sum of IoU, whatever the confidences are.

        Where several choices have this sum, the less confident boxes are taken. So the order of the list has no effect.
        """
        order = sorted(
            range(len(self.detections)), key=lambda i: (self.detections[i].confidence, self.detections[i].box)
        )
        matches = match_boxes([self.detections[i].box for i in order], self.truths, least)
        return sorted(match._replace(answer=order[match.answer]) for match in matches)


def read_answer(x: RewardInput, settings: Settings) -> Answer:
    """Return the answer of a response. Raises: RewardError for a row without true boxes, or an unknown seen size."""
    target, truths = true_boxes(x.truth)
    text, problem = final_answer(x.response)
    if text is None:
        return Answer(target, truths, (), False, problem, problem)
    text = _without_fence(text)
    if NONE.fullmatch(text):
        problem = form_problem(x, settings.thought)
        return Answer(target, truths, (), True, problem, problem)
    plane = answer_plane(x, check_space(settings.space), size_of(x.truth))
    reading = read_boxes(text, plane, order=check_order(settings.order), repeated=True)
    detections, unsure = list[Detection](), 0
    for read in reading.shapes:
        is_probability = read.confidence is not None and 0 <= read.confidence <= 1
        unsure += not is_probability
        confidence = read.confidence if is_probability and read.confidence is not None else SURE
        detections.append(Detection(convert(read.shape, plane, target), confidence))
    problem = reading.problem or (reading.refused[0] if reading.refused else "")
    if not problem and unsure:
        problem = f"{'a box' if unsure == 1 else f'{unsure} boxes'} without a confidence from 0 to 1"
    if not problem and len(detections) > (most := max(MOST_BOXES, len(truths))):
        problem = f"{len(detections)} boxes; the form has at most {most}"
    if not problem and (not LIST.fullmatch(text) or text.count("{") != len(detections)):
        problem = "not only a list of boxes with confidences"
    problem = problem or form_problem(x, settings.thought)
    mended = dict.fromkeys(note for read in reading.shapes for note in read.notes)
    return Answer(target, truths, tuple(detections), False, problem, problem or ", ".join(mended))


def write_answer(detections: Sequence[Detection], plane: Plane) -> str:
    """Return the list as the prompt asks for it; `plane`: that of the boxes."""
    entries = (f'{{"Position": {write_box(box, plane)}, "Confidence": {sure:.2f}}}' for box, sure in detections)
    return f"[{', '.join(entries)}]"


def is_none(text: str) -> bool:
    """Return whether a text states that there is no object."""
    return NONE.fullmatch(_without_fence(text)) is not None


def _without_fence(text: str) -> str:
    text = text.strip(BLANKS)
    match = _FENCE.fullmatch(text)
    return text if match is None else match["content"].strip(BLANKS)


class BoxAnswer(Protocol):
    """Boxes of a response, beside the true ones. All are in one plane."""

    @property
    def plane(self) -> Plane: ...
    @property
    def truths(self) -> Sequence[Box]: ...
    @property
    def stated(self) -> Sequence[tuple[Box, str]]:
        """Boxes of the response, each with a label; "" = none."""
        ...


Read = Callable[[RewardInput, S], BoxAnswer]
"""(Input of the reward, settings) -> the answer. Raises: RewardError for a row without true boxes."""


def positions_as(settings: S, reward: str, read: Read[S], spec: RewardSpec | None) -> Positions:
    """Return the reading of boxes as a reward does it; see `settings_as` for the arguments."""
    settings = settings_as(settings, reward, spec)
    declared = Coordinates(check_space(settings.space), check_order(settings.order))
    return Positions(declared, partial(response_marks, settings, read))


def response_marks(settings: S, read: Read[S], x: RewardInput, read_as: Coordinates) -> Sequence[Mark]:
    """Return the true boxes, and those of a response, read in these coordinates.

    Raises: RewardError without true boxes.
    """
    seen = x.seen_sizes or (size_of(x.truth),)
    answer = read(replace(x, seen_sizes=seen), replace(settings, space=read_as.space, order=read_as.order))
    stated = [Mark("answer", convert(box, answer.plane, SHARES), label) for box, label in answer.stated]
    return [*true_marks(answer.truths, answer.plane), *stated]


def true_marks(boxes: Iterable[Box], plane: Plane) -> list[Mark]:
    """Return the marks of true boxes in a plane."""
    return [Mark("truth", convert(box, plane, SHARES)) for box in boxes]


def with_picture(parts: Mapping[str, Any], x: RewardInput, answer: BoxAnswer) -> RewardResult:
    """Return the parts of a score, with the artifact `boxes` if the image is there: the image with all boxes."""
    if not x.images:
        return RewardResult(parts)
    shapes = [*((box, TRUTH_COLOUR) for box in answer.truths), *((box, ANSWER_COLOUR) for box, _ in answer.stated)]
    return RewardResult(parts, artifacts={"boxes": draw_boxes(x.images[0], answer.plane, shapes)})


NAMES = ("map", "ap50", "ap75")
"""Average precision over all thresholds, and at an IoU of 0.5 and of 0.75."""
OF_CATEGORY = "map/"
"""Beginning of the name of a category's own metric."""


MOST_CHARS = 1000
"""Longest answer that is read."""
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
VALUES = {**{word: n for n, word in enumerate(ONES)}, **{word: 10 * n for n, word in enumerate(TENS, 2)}}
_UNSEEN = re.compile(f"[{UNSEEN}]+")
_MARKUP = re.compile(
    r"\\(?:boxed|fbox|text[a-z]*|math[a-z]+|bf|large|left|right|quad|displaystyle|[()\[\],;:! $])"
    r"|</?(?:b|i|em|strong|p|span|u|br) ?/?>|_"
)
_FORMULA = re.compile(r"[\\^%<>\u2264\u2265\u00b1]")
_NUMBER = re.compile(
    rf"(?<![\w.,])(?P<sign>[+\-\u2212\u2013]?)(?P<digits>[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,15}})(?P<rest>\.[0-9]+)?"
    rf"(?!\w|,[0-9])|\b(?:(?P<tens>{'|'.join(TENS)})(?:[\s-]+(?P<ones>{'|'.join(ONES[1:10])}))?|(?P<word>{'|'.join(ONES)})"
    rf"|(?P<single>(?:^\W*|there is )(?:just |only )?a single(?![\s-]digit))|^\W*nothing(?=\W*$)"
    rf"|none(?! of\b)|there (?:are|were) no|^\W*no(?=(?: [a-z]+){{0,3}} [a-z]+s\W*$))\b"
)
_TERM = rf"(?:[0-9]{{1,6}}|(?:{'|'.join(TENS)})(?:[\s-]+(?:{'|'.join(ONES[1:10])}))?|{'|'.join(ONES)})"
_THING = r"(?: (?!plus|minus|is\b|equals|makes)[a-z]+){0,2}"
"""Words for what is counted, behind a term of a sum."""
_SUM = re.compile(
    rf"(?<![\w.,+\-\u2212\u2013]){_TERM}(?:(?:{_THING}\s*[+\-\u2212\u2013]\s*|{_THING}\s+(?:plus|minus)\s+){_TERM})+{_THING}"
    rf"(?:\s*=\s*|\s+(?:is|equals|makes)\s+)"
    rf"(?P<total>{_TERM})(?!\w|,[0-9])"
)
_MONTHS = r"january|february|march|april|may(?! be)|june|july|august|september|october|november|december"
_BEFORE = re.compile(rf"\b(?:over|under|above|below|beyond|past|minus|max|min|or|twice|double|triple|{_MONTHS})\s*$")
_AFTER = re.compile(
    r"\s*\+|[\s-]*(?:hundred|thousand|million|billion|trillion|dozens?|percent|per cent|plus|or"
    r"|and (?:an?|up|more|some|above|over|beyond|counting)|pairs?|couples?|trios?|times|squared|cubed|[ap]m"
    rf"|o['\u2019]clock|{_MONTHS})\b|\s+[a-hj-z](?![\w'\u2019-])"
)
_JOIN = re.compile(r"[a-z]{2}|\(")
"""Words or a bracket between two statements of one count; an operator, as in `7 x 7`, does not join them."""
_UNCERTAIN = re.compile(
    r"\b(?:not|never|neither|nor|cannot|than|at least|at most|up to|between|minimum|maximum|almost|nearly|half)\b"
    r"|n['\u2019]t\b|\bor (?:so|more|fewer|less)\b|\bexceed|\bno\b(?! [a-z]+s\b)|\bupwards?\b|\bexcept|\bexcluding\b"
    r"|\b(?:nope|nah|false|wrong|incorrect|untrue|hardly|barely|scarcely|doubt|unlikely|impossible|far from)\b"
    r"|\b(?:all|anything|everything) but\b|\b(?:oder|oppure|ou|nicht)\b"
)
_TOTAL_AFTER = re.compile(r"(?: [a-z]+){0,2} (?:in total|in all|total|altogether|overall)\b")
_TOTAL_BEFORE = re.compile(r"\b(?:total|altogether|makes)(?: of| is)?[ :=]*$")


def stated_number(answer: str) -> float | None:
    """Return the only number that an answer states; None if it states none, or no single one."""
    if len(answer) > MOST_CHARS:
        return None
    text = _MARKUP.sub(" ", _UNSEEN.sub("", answer).replace("{,}", ",")).lower()
    text = _SUM.sub(_total, text)
    matches = list(_NUMBER.finditer(text))
    rest = _NUMBER.sub(" ", text)
    if _FORMULA.search(text) or _UNCERTAIN.search(rest) or any(char.isnumeric() for char in rest):
        return None
    if not all(_JOIN.search(text[one.end() : other.start()]) for one, other in pairwise(matches)):
        return None
    if any(_BEFORE.search(text[: one.start()]) or _AFTER.match(text, one.end()) for one in matches):
        return None
    values = [_value(one) for one in matches]
    return values[0] if len({*values}) == 1 else _total_of_parts(text, matches, values)


def _total_of_parts(text: str, matches: list[re.Match[str]], values: list[float]) -> float | None:
    """Return the total that is stated before its parts ("7 cubes: 3 red, 4 blue") or after them, if they add up."""
    if len(values) < 3 or min(values) < 0 or re.search(r"\bto\b", text):
        return None
    if values[0] == sum(values[1:]) and re.search("[:(]", text[matches[0].end() : matches[1].start()]):
        return values[0]
    is_named = _TOTAL_AFTER.match(text, matches[-1].end()) or _TOTAL_BEFORE.search(text[: matches[-1].start()])
    return values[-1] if is_named and values[-1] == sum(values[:-1]) else None


def _value(match: re.Match[str]) -> float:
    if match["digits"]:
        size = float(match["digits"].replace(",", "") + (match["rest"] or ""))
        return size if match["sign"] in ("", "+") else -size
    return 1 if match["single"] else sum(VALUES[match[key]] for key in ("tens", "ones", "word") if match[key])


def _total(match: re.Match[str]) -> str:
    """Return the total of a sum or a difference if it adds up; else the text as it is."""
    *terms, total = _NUMBER.finditer(match[0])
    gaps = [match[0][one.end() : other.start()] for one, other in pairwise([*terms, total])]
    signs = [1, *(-1 if re.search("[-\u2212\u2013]|minus", gap) else 1 for gap in gaps)]
    value = sum(sign * _value(term) for sign, term in zip(signs, terms, strict=False))
    return match["total"] if value == _value(total) and not _UNCERTAIN.search(match[0]) else match[0]
