r"""Shape of an answer: one value, a list, a set, a tuple or interval, a union, an option, words, or a denial.

`read` is total: every text has a shape. Whether a value can be computed is asked later (expressions.py), and only where
the shapes agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from vlmrl.rewards.math.latex import depth_of, joined_by_commas, plain_thousands, split_top, tidy
from vlmrl.rewards.math.numbers import Number, read_number
from vlmrl.rewards.math.units import Unit, split_unit

Kind = Literal[
    "value", "figures", "list", "set", "tuple", "union", "without", "both", "matrix", "equation", "choice", "words",
    "denial", "unclear",
]  # fmt: skip
REGIONS = ("union", "without", "both")
"""Kinds that are subsets of the real line, besides an interval."""
MOST_ITEMS = 50
MOST_DEPTH = 10
MOST_LOW = 6
"""Largest number of subscripts in a text: the parser needs exponential time for chains of them."""
DENIED = re.compile(
    r"\\n(?:e|eq|ot)(?![A-Za-z])|\\text\{[^{}]*\bnot\b[^{}]*\}|(?<![A-Za-z\\])not(?![A-Za-z])|!=|n't(?![A-Za-z])", re.I
)
CHOICE = re.compile(
    r"(?:(?:the\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*)?"
    r"(?:\(\s*([A-J])\s*\)|([A-J])(?=\s*(?:[.):]|$)))\s*[.):]?\s*(.*)",
    re.I | re.S,
)
WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
NAME = r"(?:m?\\?angle\s*)?(?:\\[A-Za-z]+|[A-Za-z]{1,3})(?:_(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9]))?'?(?:\([A-Za-z0-9]\))?"
NAMED = re.compile(
    rf"(?:\\text\{{[^{{}}]*\}}\s*)?({NAME}|m?\\angle\s*[0-9]{{1,2}}|\\overline\{{[A-Z]{{2}}\}}|"
    r"[A-Za-z]+(?: [A-Za-z]+){0,4})\s*(=|\\(?:approx|simeq|sim)(?![A-Za-z]))\s*(?!=)(.+)",
    re.S,
)
LEAD_IN = re.compile(
    r"(?:\\approx|\\simeq|\\sim|\\doteq|\\text\{(?:approximately|about|approx)\}|approximately|about)\s*", re.I
)
RELATION = re.compile(r"(\\l(?:e|eq|t|eqslant)(?![A-Za-z])|\\g(?:e|eq|t|eqslant)(?![A-Za-z])|<=|>=|<|>)")
VARIABLE = re.compile(
    r"(?:[A-Za-z]{1,2}|\\(?:theta|alpha|beta|gamma|lambda|mu|phi|varphi|omega))(?:_(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9]))?"
)
MEMBER = re.compile(r"\s*(?:[A-Za-z]|\\theta)\s*\\in\s*(.+)", re.S)
BUILDER = re.compile(
    rf"(?:\\\{{|\\lbrace)\s*(?:{VARIABLE.pattern})(?:\s*\\in\s*\\mathbb\{{R\}})?\s*(?:\\mid|\||:)(.+)(?:\\\}}|\\rbrace)",
    re.S,
)
REALS = re.compile(r"\\mathbb\{R\}|\\mathbb R|\\R|(?:the set of )?all real numbers|all reals?", re.I)
EMPTY = re.compile(r"\\\{\s*\\\}|(?:the )?empty set|no(?: real)? solutions?", re.I)
UNEQUAL = re.compile(rf"(?:{VARIABLE.pattern})\s*\\n(?:eq?|ot\s*=)(?![A-Za-z])\s*(.+)", re.S)
JOINED = re.compile(
    r"\s*(?:\\text\{\s*(and|or)\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])|\\(lor|vee|land|wedge)(?![A-Za-z])|([,;]))\s*"
)
POINT = re.compile(
    r"(?:([A-Z]'?)\s*=?|(\\(?:vec|overrightarrow)\{[A-Za-z]{1,2}\}|[A-Za-z])\s*=|\([A-Za-z](?:,\s*[A-Za-z])+\)\s*=)\s*(?=\()"
)
"""Name before a point or vector: `P(3,4)`, `P = (3,4)`, `(x,y) = (3,4)`."""
MATRIX = re.compile(
    r"(?:[A-Za-z]\s*=\s*)?[\[(]?\s*\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*?)"
    r"(?:\\cr)?\s*\\end\{\1\}\s*[\])]?",
    re.S,
)
SET = re.compile(r"(?:\\\{|\\lbrace)(.*)(?:\\\}|\\rbrace)", re.S)
ENDS = {"\\langle": "(", "\\rangle": ")"}
APPROX = re.compile(r"\\approx|\\simeq")
BEFORE_FRACTION = re.compile(r"(?<=[0-9])\s*(?=\\frac)")
"""Place where a number and a fraction are a mixed number, or a product."""
FIGURES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([-:/])\s*([0-9]+(?:\.[0-9]+)?)(?:\s*\2\s*([0-9]+(?:\.[0-9]+)?))?")
"""A date, a time, a range or a ratio: `2020-01-02`, `10:30`, `10-20`, `3:1`. Two numbers with `/` are a fraction."""
TIME = re.compile(r"[0-9]{1,2}:[0-5][0-9]")
NESTED = re.compile(rf"(?:[\[(]\s*){{{MOST_DEPTH}}}")
EQUALS = re.compile(r"(?<![<>!\\=])=(?!=)")


@dataclass(frozen=True)
class Item:
    r"""One quantity.

    Args:
        text: tidy LaTeX of the value, without its unit.
        number: the value, if it is a plain number.
        name: name before `=`; "" without one.
        about: other values after `=` or `\approx`, which must all agree.
        is_rounded: it stands behind an exact value and `\approx`, so it may have any number of digits.
    """

    text: str
    number: Number | None = None
    unit: Unit | None = None
    name: str = ""
    about: tuple[Item, ...] = ()
    is_rounded: bool = False


@dataclass(frozen=True)
class Reading:
    """Answer as it was read.

    Args:
        text: tidy text.
        items: quantities in order; of an interval both ends.
        brackets: of a tuple or interval: `()`, `[)`, `(]`, `[]`; of figures: the sign between them; of a matrix: its
            size, `2x3`; of conditions that all hold (both): `,` if commas join them.
        parts: intervals or sets of a union; of a list, if one of them is a tuple or a set; a set and what is taken
            from it (without).
        name: of a point, `P` for `P(3,4)`.
        letter: of a choice.
        problem: why it is unclear.
        rest: what follows the letter of a choice.
    """

    kind: Kind
    text: str
    items: tuple[Item, ...] = ()
    brackets: str = ""
    parts: tuple[Reading, ...] = ()
    letter: str = ""
    problem: str = ""
    rest: Reading | None = None
    name: str = ""

    @property
    def is_ratio(self) -> bool:
        """Whether it is a ratio of two numbers. `10:30` can be a time, and is no ratio then."""
        return self.brackets == ":" and len(self.items) == 2 and not TIME.fullmatch(self.text)

    @property
    def quotient(self) -> Fraction | None:
        """Value of a ratio; None for one to 0."""
        first, second = (item.number.value if item.number is not None else Fraction(0) for item in self.items[:2])
        return first / second if second else None


@lru_cache(maxsize=4096)
def read(text: str, *, mixed: bool = True, letters: bool = True) -> Reading:
    """Return the shape of an answer.

    Args:
        text: as a person or a model wrote it, without its box.
        mixed: as in `read_number`.
        letters: as in `read_unit`.
    """
    clean = tidy(text)
    if not clean:
        return Reading("unclear", "", problem="the answer is empty")
    if not 0 <= depth_of(clean) <= MOST_DEPTH or NESTED.search(clean):
        return Reading("unclear", clean, problem="its braces do not match, or are nested too deep")
    if clean.count("_") > MOST_LOW:
        return Reading("unclear", clean, problem=f"it has more than {MOST_LOW} subscripts")
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", clean).strip()
    if EMPTY.fullmatch(plain):
        clean = plain = "\\emptyset"
    if REALS.fullmatch(plain) or UNEQUAL.fullmatch(clean) or MATRIX.fullmatch(clean):
        return _Reader(mixed, letters).shape(plain if REALS.fullmatch(plain) else clean)
    if denied := DENIED.search(clean):
        rest = clean[: denied.start()] + clean[denied.end() :]
        return Reading("denial", clean, items=(Item(rest.strip()),))
    bare = clean.replace("\\text{", "").replace("}", "") if clean.startswith("\\text{") else clean
    if choice := CHOICE.fullmatch(bare):
        letter, rest = choice.group(1) or choice.group(2), choice.group(3)
        if letter.isupper() or choice.group(1):
            after = read(rest, mixed=mixed, letters=letters) if rest and rest.strip() else None
            return Reading("choice", clean, letter=letter.upper(), rest=after)
    if WORDS.fullmatch(plain) and not (len(plain) <= 3 and plain.islower() and "\\text" not in clean):
        return Reading("words", plain)
    return _Reader(mixed, letters).shape(clean)


@dataclass(frozen=True)
class _Reader:
    mixed: bool
    letters: bool

    def shape(self, clean: str) -> Reading:
        if member := MEMBER.fullmatch(clean):
            clean = member.group(1).strip()
        if builder := BUILDER.fullmatch(clean):
            return self.shape(builder.group(1).strip())
        if REALS.fullmatch(clean):
            return Reading("tuple", clean, self._items(["-\\infty", "\\infty"]), "()")
        if unequal := UNEQUAL.fullmatch(clean):
            holes = Reading("set", clean, self._items(split_top(joined_by_commas(unequal.group(1)), (",",))))
            return Reading("without", clean, parts=(self.shape("\\mathbb{R}"), holes))
        if matrix := MATRIX.fullmatch(clean):
            rows = [split_top(row, ("&",)) for row in re.split(r"\\cr(?![A-Za-z])", matrix.group(2))]
            items = tuple(self._item(cell) for row in rows for cell in row)
            sizes = {len(row) for row in rows}
            if len(sizes) > 1 or len(items) > MOST_ITEMS:
                return Reading("unclear", clean, problem="its rows differ in length, or it is too large")
            return Reading("matrix", clean, items, f"{len(rows)}x{sizes.pop()}")
        taken = split_top(clean, ("\\setminus", "\\backslash"))
        if len(taken) == 2:
            return Reading("without", clean, parts=(self.shape(taken[0]), self.shape(taken[1])))
        if (joined := self._conditions(clean)) is not None:
            return joined
        unions = split_top(clean, ("\\cup",))
        if len(unions) > 1:
            parts = tuple(self.shape(part) for part in unions)
            return Reading("union", clean, parts=parts)
        if interval := self._inequality(clean):
            return interval
        listed = plain_thousands(joined_by_commas(clean))
        pieces = [piece for piece in split_top(listed, (",",)) if piece]
        if len(pieces) > MOST_ITEMS:
            return Reading("unclear", clean, problem=f"it has more than {MOST_ITEMS} items")
        if len(pieces) > 1:
            singles = [self._single(piece, piece) for piece in pieces]
            if any(single.kind in ("tuple", "set") for single in singles):
                return Reading("list", clean, parts=tuple(singles))
            return Reading("list", clean, self._items(pieces))
        if not pieces:
            return Reading("unclear", clean, problem="it holds only separators")
        return self._single(pieces[0], clean)

    def _single(self, text: str, clean: str) -> Reading:
        if inside := SET.fullmatch(text):
            inner = [p for p in split_top(joined_by_commas(inside.group(1)), (",",)) if p]
            return Reading("set", clean, self._items(inner))
        name = ""
        if point := POINT.match(text):
            bare, name = text[point.end() :], point.group(1) or point.group(2) or ""
            text = bare if _encloses(bare) and len(split_top(bare[1:-1], (",",))) > 1 else text
        match = re.fullmatch(r"(\\langle|[(\[\]])(.*)(\\rangle|[)\]\[])", text, re.S)
        if match and (_encloses(text) or match.group(1) == "]" or match.group(3) == "["):
            left, inner, right = match.groups()
            pieces = [p for p in split_top(joined_by_commas(inner), (",",)) if p]
            left, right = "(" if left == "]" else left, ")" if right == "[" else right  # `]1,2[` is open
            brackets = ENDS.get(left, left) + ENDS.get(right, right)
            if len(pieces) > 1:
                return Reading("tuple", clean, self._items(pieces), brackets, name=name)
            if len(pieces) == 1 and brackets == "()":
                return self._single(pieces[0], clean)
        if figures := self._figures(text, clean):
            return figures
        items = self._items([text])
        if len(items) != 1:
            return Reading("list", clean, items)
        item = items[0]
        return Reading("equation" if EQUALS.search(item.text) else "value", clean, items)

    def _figures(self, text: str, clean: str) -> Reading | None:
        """Return a date, a time, a range or a ratio; None for any other text. `brackets` is its sign."""
        value, unit = split_unit(text, letters=self.letters)
        match = FIGURES.fullmatch(value)
        if match is None or (match[2] == "/" and match[4] is None):
            return None
        items = tuple(Item(one, read_number(one), unit) for one in match.group(1, 3, 4) if one is not None)
        return Reading("figures", clean, items, match[2])

    def _items(self, texts: list[str]) -> tuple[Item, ...]:
        return tuple(self._item(one) for text in texts for one in _both_signs(text))

    def _item(self, text: str) -> Item:
        name = ""
        if match := NAMED.fullmatch(text):
            name, sign, text = (group.strip() for group in match.groups())
            text = text if sign == "=" else f"{sign} {text}"
        text = text[m.end() :] if (m := LEAD_IN.match(text)) else text
        first, *others = APPROX.split(text)
        if name or others:
            first, *equals = EQUALS.split(first)
        else:
            equals = []
            sides = EQUALS.split(first)
            if len(sides) > 1 and all(_is_constant(side) for side in sides):
                first, *equals = sides
            elif len(sides) == 2 and re.fullmatch(NAME, sides[1].strip()) and _is_constant(sides[0]):
                first, name = sides[0], sides[1].strip()
        item = replace(self._quantity(first), name=name)
        about = [self._quantity(one) for one in equals]
        about += [replace(self._quantity(one), is_rounded=True) for other in others for one in EQUALS.split(other)]
        if about and item.unit is None:
            item = replace(item, unit=about[-1].unit)
        return replace(item, about=tuple(replace(one, unit=one.unit or item.unit) for one in about))

    def _quantity(self, text: str) -> Item:
        value, unit = split_unit(text.strip(), letters=self.letters)
        value = _without_parentheses(value)
        if not self.mixed:
            value = BEFORE_FRACTION.sub(r"\\cdot", value)
        return Item(value, read_number(plain_thousands(value), mixed=self.mixed), unit)

    def _conditions(self, clean: str) -> Reading | None:
        r"""Return `x<3 \text{ or } x>5` as a union, conditions joined by `and` or commas as `both`; None for others."""
        words = JOINED.split(clean)
        texts, joints = words[::5], [next(filter(None, words[i : i + 4])) for i in range(1, len(words), 5)]
        parts = [self._inequality(text) for text in texts]
        if len(parts) < 2 or len(parts) > MOST_ITEMS or None in parts:
            return None
        intervals = tuple(part for part in parts if part is not None)
        kinds = {"or" if joint in ("or", "lor", "vee") else "," if joint in ",;" else "and" for joint in joints}
        if kinds == {"or"}:
            return Reading("union", clean, parts=intervals)
        return (
            Reading("both", clean, parts=intervals, brackets="," if kinds == {","} else "and")
            if len(kinds) == 1
            else None
        )

    def _inequality(self, text: str) -> Reading | None:
        r"""Return `1 < x \le 2` as the interval (1, 2], `x > 1` as (1, infinity); None for any other text."""
        sides = [side.strip() for side in RELATION.split(text)]
        if len(sides) == 5:
            low, first, middle, second, high = sides
            if _points_up(first) != _points_up(second) or not _is_variable(middle):
                return None
            if not _points_up(first):
                low, first, second, high = high, second, first, low
        elif len(sides) == 3 and _is_variable(sides[0]) != _is_variable(sides[2]):
            left, sign, right = sides
            is_left = _is_variable(left)
            bound, is_below = (right, _points_up(sign)) if is_left else (left, not _points_up(sign))
            low, first, second, high = ("-\\infty", "<", sign, bound) if is_below else (bound, sign, "<", "\\infty")
        else:
            return None
        brackets = ("(" if _is_strict(first) else "[") + (")" if _is_strict(second) else "]")
        return Reading("tuple", text, self._items([low, high]), brackets)


def _points_up(sign: str) -> bool:
    """Return whether a relation sign says that the left side is smaller."""
    return sign.startswith(("<", "\\l"))


def _is_variable(text: str) -> bool:
    return VARIABLE.fullmatch(text) is not None


def _is_strict(sign: str) -> bool:
    return sign in ("<", ">", "\\lt", "\\gt")


def _encloses(text: str) -> bool:
    """Return whether the first and the last bracket of a text belong together."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth == 0 and place < len(text) - 1:
            return text.startswith("\\langle")
    return True


def _without_parentheses(text: str) -> str:
    while len(text) > 2 and text[0] in "({" and text[-1] in ")}" and _is_wrapped(text):
        text = text[1:-1].strip()
    return text


def _is_wrapped(text: str) -> bool:
    depth = 0
    for place, char in enumerate(text):
        depth += (char in "({[") - (char in ")}]")
        if depth == 0:
            return place == len(text) - 1 and (text[0] == "(") == (text[-1] == ")")
    return False


def _is_constant(text: str) -> bool:
    """Return whether a text has no letters besides commands and units."""
    value, _ = split_unit(text.strip())
    return bool(value) and re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", value)) is None


def _both_signs(text: str) -> list[str]:
    r"""Return the two texts of one with a single `\pm`; else the text alone."""
    if text.count("\\pm") + text.count("\\mp") != 1:
        return [text]
    sign = "\\pm" if "\\pm" in text else "\\mp"
    before, after = text.split(sign)
    plus = f"{before}+{after}" if before.strip() and not before.rstrip().endswith("=") else f"{before}{after}"
    return [plus, f"{before}-{after}"]
