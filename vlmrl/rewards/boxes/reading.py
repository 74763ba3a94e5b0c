"""Reading of boxes and points from the text of a model, in a declared coordinate space.

Every text gives a result, in linear time and of bounded size. What looks like a box and is none is refused, with the
reason. The forms that are read:

- four numbers in brackets, `[x1, y1, x2, y2]` or `(...)`, or two pairs, `(x1, y1), (x2, y2)`, `[[x1, y1], [x2, y2]]`;
- JSON or Python, in a fence or not, with a list under any key (`bbox_2d`, `box`, `Position`), or with named
  coordinates (`x1`, `xmin`, `left`, `x` and `width`); a key that ends with the order of the numbers (`bbox_xywh`) says
  it; `label` and `confidence` of the same object belong to the box, and a box within a label or a text is none;
- `<box>...</box>` and `<|box_start|>...<|box_end|>` around any of these, or around four bare numbers; `<ref>...</ref>`
  and `<|object_ref_start|>...<|object_ref_end|>` before it hold its label;
- four `<loc0123>` tokens, only in the space `loc`;
- a text that is nothing but four numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from vlmrl.errors import RewardError, unknown
from vlmrl.rewards.boxes.planes import MEANINGS, SPACES, Box, Plane, Space

Kind = Literal["number", "open", "close", "comma", "colon", "name", "text", "ref", "begin", "end", "loc", "other"]
MOST_DIGITS = 20
"""Longest number, in characters; a longer one is read as infinite, so that it is refused."""
MOST_LABEL = 100
NOT_FINITE = {"nan", "inf", "infinity"}
_NUMBER = r"(?:(?<![0-9.])[+-])?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_TEXT = rf'"(?:[^"\\\n]|\\.){{0,{MOST_LABEL}}}"' + rf"|'[^'\\\n]{{0,{MOST_LABEL}}}'"
_REF = r"<ref>(?P<label>[^<]*)</ref>|<\|object_ref_start\|>(?P<label2>[^<]*)<\|object_ref_end\|>"
_PROSE = re.compile(r'"((?:[^"\\\n]|\\.)*)"?|\'((?:[^\'\\\n]|\\.)*)\'?')
"""Quoted text, of any length, to its end or that of the line: what is a text in any case."""
_TOKEN = re.compile(
    rf"<loc(?P<loc>[0-9]{{4}})>|(?P<ref>{_REF})|(?P<begin><box>|<\|box_start\|>)|(?P<end></box>|<\|box_end\|>)"
    rf"|(?P<number>{_NUMBER})|(?P<name>[^\W\d]\w*)|(?P<text>{_TEXT})"
    r"|(?P<open>[\[({])|(?P<close>[\])}])|(?P<comma>[,;])|(?P<colon>[:=])|(?P<other>\S)",
    re.ASCII,
)
POSITION_TOKEN = re.compile(
    r"<\|(?:box|object_ref|point|quad)_(?:start|end)\|>|</?(?:box|ref|point|quad)>|<loc[0-9]{4}>|<seg[0-9]{3}>"
)
"""Tokens with which model families state positions. Some tokenizers call them special; engines keep them in a text."""
_BRACKET, _DIGIT = re.compile(r"[\[\](){}]"), re.compile("[0-9]")


class Token(NamedTuple):
    """Token: its kind, its text (of a reference: the label), and its value if it is a number."""

    kind: Kind
    text: str
    value: float = math.nan


def tokens_of(text: str, is_prose: Callable[[], bool] = lambda: False) -> Iterator[Token]:
    """Yield the tokens of a text; white space is skipped.

    Two numbers without anything between them, such as `1..2` or `1.2.3`, are one number and something else. A quoted
    text with a bracket and a number in it is read as if it had no quotes, because some models put boxes in quotes. The
    time is linear in the length of the text.

    Args:
        is_prose: called at a quoted value; whether it is a label or another text for people, so that a box in it is
            none.
    """
    position, end_of_number, end_of_value, before = 0, -1, -1, ""
    while (match := _TOKEN.search(text, position)) is not None:
        kind, piece, position = match.lastgroup, match.group(), match.end()
        is_value, before = before in ("colon", "open", "comma"), kind
        if is_value and piece[0] in "\"'" and is_prose() and (prose := _PROSE.match(text, match.start())):
            position = prose.end()
            yield Token("text", (prose[1] or prose[2] or "")[:MOST_LABEL])
        elif match.start() == end_of_value and piece[0] in "\"'":  # the closing quote opens no other text
            position = match.start() + 1
            yield Token("other", piece[0])
        elif kind == "loc":
            yield Token("loc", piece, float(match["loc"]))
        elif kind == "ref":
            yield Token("ref", (match["label"] or match["label2"] or "").strip()[:MOST_LABEL])
        elif kind == "number" and match.start() == end_of_number:
            yield Token("other", piece)
        elif kind == "number":
            end_of_number = position
            yield Token("number", piece, float(piece) if len(piece) <= MOST_DIGITS else math.inf)
        elif kind == "name":
            yield Token("number", piece, math.nan) if piece.lower() in NOT_FINITE else Token("name", piece)
        elif kind == "text" and _BRACKET.search(piece) and _DIGIT.search(piece):
            position, end_of_value = match.start() + 1, position - 1 if is_value else end_of_value
            yield Token("other", piece[0])
        elif kind == "text":
            yield Token("text", piece[1:-1])
        else:
            yield Token(kind, piece)  # type: ignore[arg-type]


MOST_CHARS = 20_000
"""Longest text that is read, in characters."""
MOST_DEPTH = 32
"""Largest number of brackets within each other; the scan ends where there are more."""
MOST_SHAPES = 300
MOST_KEPT = 16
"""Largest number of numbers, pairs, or names that are remembered of one group; the others are only counted."""
PAIRS = {"[": "]", "(": ")", "{": "}"}
CORNERS = (
    ("x1", "y1", "x2", "y2"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("x_min", "y_min", "x_max", "y_max"),
    ("left", "top", "right", "bottom"),
)
SIZES = (("x", "y", "width", "height"), ("x", "y", "w", "h"), ("left", "top", "width", "height"))
LABELS = ("label", "name", "class", "category", "object")
CONFIDENCES = ("confidence", "score", "conf")
PROSE = {*LABELS, "labels", "names", "classes", "categories", "text", "caption", "description", "phrase", "expression",
         "sentence", "question", "comment", "note", "reason", "reasoning", "thought", "explanation"}  # fmt: skip
"""Last words of names whose quoted values are for people: a box in them is none."""
Order = Literal["xyxy", "yxyx", "xywh"]
NamedOrder = Order | Literal["cxcywh"]
"""Order that a text can say: also the centre with width and height."""
ORDER_NAMES: Mapping[str, NamedOrder] = {
    "xyxy": "xyxy", "ltrb": "xyxy", "yxyx": "yxyx", "tlbr": "yxyx", "xywh": "xywh", "ltwh": "xywh", "cxcywh": "cxcywh"
}  # fmt: skip
"""Last word of a name, such as `bbox_xywh` -> order of the numbers in its value."""
JOINING = ("to",)
"""Words that may stand between the two corners of a box."""
DENYING = {"not", "never", "isn", "wasn", "nor"}
"""Words that deny a box which follows them, at most one word later."""
_WIDE = str.maketrans("\uff0c\u3001\uff1b\uff1a", ",,;:")
"""Full-width separators, as in Chinese texts. Brackets of full width are none."""
_ONE = re.compile(rf"\s*{_NUMBER}\s*", re.ASCII)
_LISTED = re.compile(r"\s*[-+]?[\d.]+(?:[,;\s]+[-+]?[\d.]+)*\s*", re.ASCII)
"""Text that is nothing but numbers."""


@dataclass(slots=True)
class Candidate:
    """Four numbers of a text.

    Args:
        order: order of the numbers, where their names or tokens say it; None = as the caller declares it.
    """

    numbers: tuple[float, ...]
    label: str = ""
    confidence: float | None = None
    order: NamedOrder | None = None


@dataclass(slots=True)
class _Group:
    """Open bracket, open box tag (`kind` "box"), or the whole text (`kind` "").

    Args:
        start: number of results before the group.
        name: the name before the colon before the group.
        order: order of four numbers that this name, or that of a group around it, says.
        numbers, num_numbers: numbers directly in the group: the first ones, and how many there are.
        pairs, num_pairs: pairs within the group that follow each other without a word between them.
        is_denied: whether a word before it denies it: what is in it is no box.
        is_plain: whether the group holds only numbers, or only pairs, and commas.
        key: the name before a colon whose value has not come yet.
        values: name -> number or text.
    """

    kind: str
    start: int = 0
    name: str = ""
    order: NamedOrder | None = None
    is_denied: bool = False
    numbers: list[float] = field(default_factory=list)
    num_numbers: int = 0
    pairs: list[tuple[float, ...]] = field(default_factory=list)
    num_pairs: int = 0
    is_plain: bool = True
    key: str = ""
    word: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scan:
    """Scan of one text.

    Args:
        locs: whether positions are location tokens; else they are numbers.
    """

    locs: bool
    candidates: list[Candidate] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    label: str = ""
    tokens: list[float] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=lambda: [_Group("")])
    words: list[str] = field(default_factory=list)

    def run(self, text: str) -> None:
        """Scan the text, and collect `candidates` and `reasons`."""
        for token in tokens_of(text, self._is_prose):
            if token.kind == "loc":
                self._loc(token)
                continue
            self._end_locs()
            if not self._step(token):
                break
        self._end_locs()
        while len(self.groups) > 1:
            group = self.groups.pop()
            self._close(group, self.groups[-1], whole=False)
        self._close(self.groups[0], _Group(""), whole=True)

    def _step(self, token: Token) -> bool:
        """Take one token; return whether the scan goes on."""
        group = self.groups[-1]
        if token.kind == "open" or token.kind == "begin":
            if len(self.groups) > MOST_DEPTH:
                self._refuse(f"more than {MOST_DEPTH} brackets within each other")
                return False
            if len(self.candidates) >= MOST_SHAPES:
                self._refuse(f"more than {MOST_SHAPES} boxes or points")
                return False
            if token.kind == "begin":
                self._end_run(group)
            kind, order = "box" if token.kind == "begin" else token.text, ORDER_NAMES.get(_last_word(group.key))
            is_denied = group.is_denied or not DENYING.isdisjoint(self.words[-2:])
            self.groups.append(_Group(kind, len(self.candidates), group.key, order or group.order, is_denied))
        elif token.kind == "close":
            self._close_bracket(token.text)
        elif token.kind == "end":
            self._close_tag()
        elif token.kind == "number":
            self._number(group, token.value)
        elif token.kind == "ref":
            self._end_run(group)
            self.label = token.text
        elif token.kind == "colon":
            group.key, group.word = group.word, ""
            group.is_plain = group.is_plain and not group.key
        elif token.kind in ("name", "text"):
            self._word(group, token)
        elif token.kind == "other":
            group.is_plain = False
            self._end_run(group)
        if token.kind == "name":
            self.words += [token.text.lower()] if token.text != "t" else []
        elif token.text != "'":  # an apostrophe, as in isn't
            self.words.clear()
        return True

    def _is_prose(self) -> bool:
        """Return whether a quoted value at this place is for people: by its own name, or by that of its list."""
        group = self.groups[-1]
        return _last_word(group.key or ("" if group.kind == "{" else group.name)) in PROSE

    def _number(self, group: _Group, value: float) -> None:
        if group.key:
            if len(group.values) < MOST_KEPT:
                group.values[group.key.lower()] = value
            group.key = ""
            return
        self._end_run(group)
        group.num_numbers += 1
        if len(group.numbers) < MOST_KEPT:
            group.numbers.append(value)

    def _word(self, group: _Group, token: Token) -> None:
        if group.key and token.kind == "text":
            if _is_of_box(group.key) and _LISTED.fullmatch(token.text):  # a list that is written as a text
                for one in (Token("open", "["), *tokens_of(token.text), Token("close", "]")):
                    self._step(one)
                return
            if len(group.values) < MOST_KEPT:
                group.values[group.key.lower()] = token.text
            group.key = ""
            return
        is_named = group.name and not _is_of_box(group.name)
        if token.kind == "text" and group.kind in ("[", "(") and _ONE.fullmatch(token.text) and not is_named:
            self._number(group, float(token.text))
            return
        group.word = token.text
        if token.text not in JOINING:
            group.is_plain = False
            self._end_run(group)

    def _loc(self, token: Token) -> None:
        if not self.locs:
            self._refuse("<loc> tokens belong to the space `loc`, which is not the declared one")
        elif len(self.candidates) < MOST_SHAPES:
            self.groups[-1].key = ""  # the tokens are the value of this key
            self.tokens.append(token.value)

    def _end_locs(self) -> None:
        """Turn the location tokens that follow each other into boxes: four each, y first."""
        if not self.tokens:
            return
        if len(self.tokens) % 4:
            self._refuse(f"{len(self.tokens)} <loc> tokens in a row, which are not 4 for each box")
        else:
            for i in range(0, len(self.tokens), 4):
                self._add(Candidate(tuple(self.tokens[i : i + 4]), order="yxyx"), is_loc=True)
        self.tokens = []

    def _close_bracket(self, text: str) -> None:
        group = self.groups[-1]
        if group.kind in ("", "box"):  # a closing bracket without an opening one
            group.is_plain = False
            self._end_run(group)
            return
        self.groups.pop()
        if PAIRS[group.kind] != text:
            self._refuse(f"a bracket `{group.kind}` is closed by `{text}`")
            self.groups[-1].is_plain = False
            return
        self._close(group, self.groups[-1], whole=True)

    def _close_tag(self) -> None:
        """Close the innermost box tag, and the brackets in it that are still open."""
        if not any(group.kind == "box" for group in self.groups):
            return
        while (group := self.groups.pop()).kind != "box":
            self._close(group, self.groups[-1], whole=False)
        self._close(group, self.groups[-1], whole=True)

    def _close(self, group: _Group, parent: _Group, *, whole: bool) -> None:
        """Read a group that ends. `whole`: it was closed; else the text ended within it."""
        parent.key, key = "", parent.key
        parent.is_plain = False
        self._read(group, parent, key, whole=whole)
        if group.is_denied and len(self.candidates) > group.start:
            del self.candidates[group.start :]
            self._refuse("a box that is denied")

    def _read(self, group: _Group, parent: _Group, key: str, *, whole: bool) -> None:
        if whole and group.is_plain and group.num_numbers and not group.num_pairs and not group.values:
            self._plain(group, parent, key)
            return
        if not whole and group.num_numbers and not group.values and group.is_plain:
            self._refuse("a bracket is not closed")
        self._end_run(group)
        if whole:
            self._named(group)
        self._describe(group)

    def _plain(self, group: _Group, parent: _Group, key: str) -> None:
        """Read a group of nothing but numbers."""
        numbers, size = tuple(group.numbers), group.num_numbers
        if size == 2 and group.kind != "":
            if group.kind == "box" or key or group.is_denied:  # a pair with a name or a tag of its own is no corner
                self._end_run(parent)
                self._pairs([numbers], None, whole_list=False)
                return
            parent.num_pairs += 1
            if len(parent.pairs) < 2 * MOST_SHAPES:
                parent.pairs.append(numbers)
            return
        self._end_run(parent)
        if size == 4:
            self._add(Candidate(numbers, order=group.order))
        elif size >= 2:
            self._refuse(f"{size} numbers, which are not a box")

    def _end_run(self, group: _Group) -> None:
        """Turn the pairs that follow each other into boxes."""
        if not group.num_pairs:
            return
        pairs, count = group.pairs, group.num_pairs
        group.pairs, group.num_pairs = [], 0
        if count > len(pairs):
            self._refuse(f"more than {MOST_SHAPES} boxes or points")
        self._pairs(pairs, group.order, whole_list=group.kind in ("[", "("))

    def _pairs(self, pairs: list[tuple[float, ...]], order: NamedOrder | None, *, whole_list: bool) -> None:
        """Add what a run of pairs is. `whole_list`: they stand in brackets of their own, as a polygon would."""
        if len(pairs) == 2 or (len(pairs) % 2 == 0 and not whole_list):
            for i in range(0, len(pairs), 2):
                self._add(Candidate((*pairs[i], *pairs[i + 1]), order=order or "xyxy"))
        elif len(pairs) == 1:
            self._refuse("a point, not a box")
        else:
            self._refuse(f"{len(pairs)} points, not a box")

    def _named(self, group: _Group) -> None:
        """Add the box whose coordinates have names, if there is one."""
        values = group.values
        for names, order in (*((names, "xyxy") for names in CORNERS), *((names, "xywh") for names in SIZES)):
            if all(isinstance(values.get(name), float) for name in names):
                self._add(Candidate(tuple(values[name] for name in names), order=order))  # type: ignore[arg-type]
                return

    def _describe(self, group: _Group) -> None:
        """Give the label and the confidence of an object to the boxes in it that have none."""
        label = next((values for name in LABELS if isinstance(values := group.values.get(name), str)), "")
        confidence = next((v for name in CONFIDENCES if isinstance(v := group.values.get(name), float)), None)
        if confidence is not None and not math.isfinite(confidence):
            confidence = None
        if group.kind != "{":
            return
        for one in self.candidates[group.start :]:
            one.label = one.label or label[:MOST_LABEL]
            one.confidence = confidence if one.confidence is None else one.confidence

    def _add(self, candidate: Candidate, *, is_loc: bool = False) -> None:
        if self.locs and not is_loc:
            self._refuse("numbers, but the declared space `loc` has <loc> tokens")
        elif len(self.candidates) < MOST_SHAPES:
            candidate.label = candidate.label or self.label
            self.candidates.append(candidate)

    def _refuse(self, reason: str) -> None:
        if reason not in self.reasons[:MOST_KEPT] and len(self.reasons) < MOST_KEPT:
            self.reasons.append(reason)


def _last_word(name: str) -> str:
    return name.lower().rsplit("_", 1)[-1]


def _is_of_box(name: str) -> bool:
    return "box" in name.lower() or _last_word(name) in (*ORDER_NAMES, "position", "coordinates")


ORDERS: tuple[Order, ...] = get_args(Order)
"""Orders of a box's four numbers: corners with x first or y first, or the upper left corner with width and height."""


class Coordinates(NamedTuple):
    """Space and order in which a box is stated: what its four numbers mean."""

    space: Space
    order: Order = "xyxy"

    @property
    def name(self) -> str:
        """The space, and the order unless it is the usual one. Example: `thousand yxyx`."""
        return self.space if self.order == "xyxy" else f"{self.space} {self.order}"

    @property
    def words(self) -> str:
        """Example: the space `pixels` (pixels of the image as it is stored), in the order yxyx."""
        order = "" if self.order == "xyxy" else f", in the order {self.order}"
        return f"the space `{self.space}` ({MEANINGS[self.space]}){order}"


COORDINATES: tuple[Coordinates, ...] = tuple(
    Coordinates(space, order) for space in SPACES for order in (ORDERS if space != "loc" else ORDERS[:1])
)
"""All meanings that four numbers can have. The tokens of `loc` have an order of their own."""
MOST_REASONS = 8
LARGEST = 1e6
"""Largest size of a coordinate; a larger one is refused."""
SWAPPED, CUT = "corners in reverse order", "cut at the edge of the image"
"""Notes on a box that was mended: its corners were exchanged, or the part beyond the image was cut off."""


@dataclass(frozen=True, slots=True)
class Read:
    """Box of an answer, in the numbers of the plane: x1 < x2 and y1 < y2, within the image.

    Args:
        label: the label beside it, at most 100 characters; "" = none.
        confidence: the confidence beside it, as it is written; None = none, or no finite number.
        notes: what was mended; see `SWAPPED` and `CUT`.
    """

    shape: Box
    label: str = ""
    confidence: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of reading a text.

    Args:
        shapes: boxes in the order of the text, each once (see `read_boxes`).
        refused: reasons, for what looks like a box or a point and is none; at most 8, the first ones.
        unusable: how many of these have as many numbers as a box, such as a box outside of the image.
    """

    shapes: tuple[Read, ...]
    refused: tuple[str, ...] = ()
    unusable: int = 0

    @property
    def problem(self) -> str:
        """Reason why nothing was read; "" if something was read."""
        if self.shapes:
            return ""
        return self.refused[0] if self.refused else "no box and no point"


def check_order(order: str) -> Order:
    """Return the order. Raises: RewardError with the nearest name for an unknown one."""
    if order not in ORDERS:
        raise unknown("order of a box's numbers", str(order), ORDERS, error=RewardError)
    return order


def read_boxes(text: str, plane: Plane, *, order: Order = "xyxy", repeated: bool = False) -> Reading:
    """Return the boxes of a text.

    Args:
        plane: the declared plane of the numbers. Nothing is concluded from their size.
        order: order of four numbers without names. Two pairs are always two opposite corners.
        repeated: whether a box that the text states several times is in the result as often; else it is there once.
    """
    if len(text) > MOST_CHARS:
        return Reading((), (f"a text of more than {MOST_CHARS:,} characters",))
    scan = Scan(locs=plane.space == "loc")
    scan.run(text.translate(_WIDE))
    candidates, reasons = [_box(one, plane, order) for one in scan.candidates], scan.reasons
    boxes: list[Read] = []
    for one in candidates:
        if isinstance(one, str):
            reasons.append(one)
        elif len(boxes) >= MOST_SHAPES:
            reasons.append(f"more than {MOST_SHAPES} boxes or points")
        elif repeated or all(one.shape != other.shape or one.label != other.label for other in boxes):
            boxes.append(one)
    unusable = sum(isinstance(one, str) for one in candidates)
    return Reading(tuple(boxes), tuple(dict.fromkeys(reasons))[:MOST_REASONS], unusable)


def only_box(reading: Reading) -> tuple[Read | None, str]:
    """Return (the only box, ""), or (None, the reason): a text with several boxes commits itself to none of them."""
    count = len(reading.shapes) + reading.unusable
    if len(reading.shapes) == count == 1:
        return reading.shapes[0], ""
    return None, reading.problem or f"{count} boxes, where one is expected"


def _box(candidate: Candidate, plane: Plane, order: Order) -> Read | str:
    """Return a box within the image, or the reason why the numbers are none."""
    if reason := _unusable(candidate.numbers):
        return reason
    a, b, c, d = candidate.numbers
    stated = candidate.order or order
    if stated == "yxyx":
        a, b, c, d = b, a, d, c
    elif stated in ("xywh", "cxcywh"):
        if c < 0 or d < 0:
            return "a negative width or height"
        if stated == "cxcywh":
            a, b = a - c / 2, b - d / 2
        c, d = a + c, b + d
    x1, x2, y1, y2 = min(a, c), max(a, c), min(b, d), max(b, d)
    if x1 == x2 or y1 == y2:
        return "a box without area"
    notes = (SWAPPED,) if (x1, y1) != (a, b) else ()
    box = Box(max(x1, 0.0), max(y1, 0.0), min(x2, plane.width), min(y2, plane.height))
    if box.x1 >= box.x2 or box.y1 >= box.y2:
        return f"a box outside of the image ({plane.width:g} x {plane.height:g} in the space `{plane.space}`)"
    notes += (CUT,) if box != (x1, y1, x2, y2) else ()
    return Read(box, candidate.label, candidate.confidence, notes)


def _unusable(numbers: Sequence[float]) -> str:
    if any(math.isnan(number) for number in numbers):
        return "a coordinate is not a number"
    if any(abs(number) > LARGEST for number in numbers):
        return f"a coordinate beyond {LARGEST:,.0f}"
    return ""
