"""Scan of a text for groups of numbers that may be boxes, with the labels beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmrl.rewards.boxes.tokens import MOST_LABEL, Token, tokens_of

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
            self._refuse(f"{size} numbers, which are no box")

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
            self._refuse("a point, which is no box")
        else:
            self._refuse(f"{len(pairs)} points, which are no box")

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
