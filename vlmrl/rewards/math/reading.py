"""Shape of an answer: one value, a list, a set, a tuple or interval, a union, an option, words, or a denial; its unit.

`read` is total: every text has a shape. Whether a value can be computed is asked later (expressions.py), and only where
the shapes agree. `12 cm^2` is the value 12 and the unit cm^2. Two units agree if they measure the same: 12 cm and
0.12 m do, 12 cm and 12 in do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from vlmrl.rewards.math.latex import (
    MONEY,
    Number,
    depth_of,
    joined_by_commas,
    plain_thousands,
    read_number,
    split_top,
    tidy,
)

ANGLE, PERCENT, MONEY_KIND, RADIAN, ANY, COUNT = "angle", "percent", "money", "radian", "any", "count"


@dataclass(frozen=True)
class Unit:
    """Unit as a product of powers of what it measures.

    Args:
        name: as it was written, for people.
        powers: (what it measures, power), sorted: (("length", 2),) for an area.
        scale: its size in the base unit of what it measures.
    """

    name: str
    powers: tuple[tuple[str, int], ...]
    scale: Fraction = Fraction(1)

    @property
    def kind(self) -> str:
        """Name in the policy: `angle`, `percent`, `money`, or "" for every other unit."""
        first = self.powers[0][0] if self.powers else ""
        if first in (ANGLE, RADIAN):
            return ANGLE
        return first if first == PERCENT else MONEY_KIND if first.startswith(MONEY_KIND) else ""

    @property
    def is_vague(self) -> bool:
        """Return whether it says only how many dimensions there are: `units`, `square units`."""
        return any(what == ANY for what, _ in self.powers)


def _table() -> dict[str, tuple[str, Fraction]]:
    """Return name -> (what it measures, scale)."""
    one = Fraction
    groups: dict[str, dict[str, Fraction]] = {
        "length": {
            "mm millimeter millimetre 毫米": one(1, 1000), "cm centimeter centimetre 厘米": one(1, 100),
            "dm decimeter decimetre 分米": one(1, 10), "m meter metre 米": one(1),
            "km kilometer kilometre 千米 公里": one(1000), "nmi 海里": one(1852),
            "in inch inche": one(254, 10_000), "ft foot feet": one(3048, 10_000), "yd yard": one(9144, 10_000),
            "mi mile": one(1_609_344, 1000),
        },
        "volume": {"l liter litre 升": one(1, 1000), "ml milliliter millilitre 毫升": one(1, 1_000_000),
                   "gal gallon": one(3_785_411_784, 10**12)},
        "mass": {"mg milligram": one(1, 1000), "g gram gramme 克": one(1), "kg kilogram 千克 公斤": one(1000),
                 "t ton tonne 吨": one(1_000_000),
                 "lb pound": one(45_359_237, 100_000), "oz ounce": one(28_349_523_125, 10**9)},
        "time": {"ms millisecond": one(1, 1000), "s sec second 秒": one(1), "min minute 分钟": one(60),
                 "h hr hour 小时": one(3600), "day 天": one(86_400), "week": one(604_800),
                 "year yr 年": one(31_536_000), "month": one(2_628_000)},
        ANGLE: {"deg degree": one(1)},
        RADIAN: {"rad radian": one(1)},
        "current": {"ampere amp": one(1)}, "force": {"n newton": one(1)}, "energy": {"j joule": one(1)},
        "power": {"w watt": one(1), "kw kilowatt": one(1000)}, "voltage": {"v volt": one(1)},
        "resistance": {"ohm \\Omega": one(1)},
        "amount": {"mol mole": one(1)}, "frequency": {"hz hertz": one(1)}, "pressure": {"pa pascal": one(1)},
        "celsius": {"celsius": one(1)}, "fahrenheit": {"fahrenheit": one(1)}, "kelvin": {"kelvin": one(1)},
        PERCENT: {"% percent pct percentage": one(1)},
        f"{MONEY_KIND} dollar": {"dollar usd \\money": one(1), "cent": one(1, 100)},
        f"{MONEY_KIND} euro": {"euro eur \\euro": one(1)}, f"{MONEY_KIND} pound": {"gbp \\pounds sterling": one(1)},
        f"{MONEY_KIND} yen": {"yen jpy \\yen": one(1)},
        f"{MONEY_KIND} yuan": {"yuan rmb cny 元": one(1)}, f"{MONEY_KIND} rupee": {"rupee inr rs": one(1)},
        ANY: {"unit": one(1)},
    }  # fmt: skip
    return {
        name: (what, scale) for what, names in groups.items() for row, scale in names.items() for name in row.split()
    }


NAMES = _table()
CASED = {
    "A": "ampere",
    "M": "m",
    "L": "l",
    "N": "n",
    "J": "j",
    "W": "w",
    "V": "v",
    "C": "celsius",
    "F": "fahrenheit",
    "K": "kelvin",
}
SINGLE = {name for name in NAMES if len(name) == 1 and name.isalpha()}
"""Names of one letter, which could as well be a variable."""
SQUARE, CUBIC = ("square", "sq", "平方"), ("cubic", "cu", "立方")
PIECE = re.compile(
    r"\s*(\\money|\\euro|\\pounds|\\yen|\\Omega|%|[A-Za-z]+\.?|平方|立方|[\u4e00-\u9fff]+|\^\{?\s*-?[1-4]\s*\}?|[1-3](?![0-9])|/|\\cdot|\*|\^\{\\circ\}|'{1,2}|\")\s*"
)
NO_WORDS = {
    "not", "or", "and", "is", "no", "never", "but", "if", "approximately", "about", "less", "more", "than", "wrong",
    "true", "false", "right", "correct", "incorrect", "undefined", "none", "maybe", "either", "neither", "except", "at",
    "between", "to", "times", "minus", "plus", "over", "squared", "cubed", "option", "negative", "factorial", "below",
    "above", "under", "nope", "nor", "hardly", "otherwise", "versus", "instead", "rather", "unless", "without", "mille",
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "dozen", "dozens",
    *(word + end for word in ("hundred", "thousand", "million", "billion") for end in ("", "s", "th", "ths")),
    *(word + end for word in ("third", "fourth", "fifth", "sixth", "eighth", "tenth") for end in ("", "s")), "half",
    "halves",
}  # fmt: skip
"""Words that are no name of a thing that is counted: they deny the number before them, or change its value."""
TEXT = re.compile(r"\\text\{([^{}]*)\}")
SPEEDS = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "fps": "ft/s", "cc": "cm^3",
          "nautical mile": "nmi", "nautical miles": "nmi"}  # fmt: skip


@lru_cache(maxsize=4096)
def read_unit(text: str, *, letters: bool = True) -> Unit | None:
    """Return the unit that a tidy text is as a whole; None for any other text.

    Args:
        letters: whether bare letters may be a unit of one letter, such as `m`, or a word that is no unit; in `5m` and
            `5abc` they are variables.
    """
    marked = TEXT.sub(r" \1 ", text).strip()
    if not marked or len(marked) > 60:
        return None
    glued = not letters and marked == text.strip()
    if glued and re.match(r"[A-Za-z](?![A-Za-z])", marked):
        return None
    marked = SPEEDS.get(marked, marked)
    pieces, at = [], 0
    while at < len(marked):
        match = PIECE.match(marked, at)
        if match is None:
            return None
        pieces.append(match.group(1))
        at = match.end()
    return _product(pieces, text) or (None if glued else _counted(marked, text))


def _product(pieces: list[str], text: str) -> Unit | None:
    powers: dict[str, int] = {}
    scale, side, pending, last = Fraction(1), 1, 0, ""
    for piece in pieces:
        word = piece.rstrip(".")
        low = word.lower()
        if piece in ("/", "\\cdot", "*"):
            side = -1 if piece == "/" else side
            last = ""
        elif low == "per":
            side, last = -1, ""
        elif low in SQUARE or low in CUBIC:
            pending = 2 if low in SQUARE else 3
        elif last and ((piece[0] == "^" and "circ" not in piece) or piece.isdigit() or low in ("squared", "cubed")):
            power = {"squared": 2, "cubed": 3}.get(low) or int(re.sub(r"[^0-9-]", "", piece))
            what, size = NAMES[last]
            powers[what] = powers.get(what, 0) + side * (power - 1)
            scale *= size ** (side * (power - 1))
            last = ""
        else:
            name = _name_of(piece, word)
            if name is None:
                return None
            what, size = NAMES[name]
            power = side * (pending or 1)
            powers[what] = powers.get(what, 0) + power
            scale, pending, last = scale * size**power, 0, name
    if "volume" in powers:
        powers["length"] = powers.get("length", 0) + 3 * powers.pop("volume")
    if "celsius" in powers or "fahrenheit" in powers:
        powers.pop(ANGLE, None)
    left = tuple(sorted((what, power) for what, power in powers.items() if power))
    return Unit(TEXT.sub(r"\1", text).strip(), left, scale) if left and not pending else None


def _name_of(piece: str, word: str) -> str | None:
    """Return a unit's name in NAMES: by its letters as they are, then in lower case, then without a plural s."""
    if piece == "^{\\circ}":
        return "degree"
    if piece in ("'", "''", '"'):
        return "ft" if piece == "'" else "in"
    if len(word) == 1:
        return CASED.get(word, word) if CASED.get(word, word) in NAMES else None
    low = word.lower()
    for name in (word, low, low.removesuffix("s"), low.removesuffix("es")):
        if name in NAMES:
            return name
    return None


def _counted(marked: str, text: str) -> Unit | None:
    """Return words such as `red apples` as a unit that agrees with the same words only."""
    words = marked.replace("-", " ").lower().split()
    if not 0 < len(words) <= 3 or not all(word.isalpha() and len(word) > 2 and word not in NO_WORDS for word in words):
        return None
    return Unit(" ".join(words), ((f"{COUNT} {' '.join(word.removesuffix('s') for word in words)}", 1),))


DEGREE_PARTS = re.compile(r"(-?[0-9]+)\^\{\\circ\}\s*([0-9]+(?:\.[0-9]+)?)'(?:\s*([0-9]+(?:\.[0-9]+)?)(?:''|\"))?")
PREFIX = re.compile(r"^([+-]?)\s*(\\money|\\euro|\\pounds|\\yen|US\\money|Rs\.?)\s*(?=[-+.0-9])")
STARTS = re.compile(
    r"(?<=[0-9})\]])\s*(?=[A-Za-z\\%^'\"])|(?<=\\pi)\s+(?=[A-Za-z])|(?<=\\pi)(?=\\text)|(?<=[A-Za-z])(?=\\text\{)|(?<=[0-9A-Za-z})])(?=\^\{\\circ\})|(?<=[A-Za-z])(?=%)"
    r"|(?<=[0-9A-Za-z})\]])\s*(?=[\u4e00-\u9fff])"
)
TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")
"""Functions whose argument, not value, is an angle."""
MOST_STARTS = 12
DEGREE = "^{\\circ}"
DEGREE_IN_TERM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\^\{\\circ\}")


def split_unit(text: str, *, letters: bool = True) -> tuple[str, Unit | None]:
    """Return (value, unit) of a tidy text; the unit is the longest end that is one.

    Args:
        letters: as in `read_unit`.
    """
    if match := PREFIX.match(text):
        value, more = split_unit(text[match.end() :], letters=letters)
        money = read_unit({"Rs": "rs", "Rs.": "rs", "US\\money": MONEY.strip()}.get(match.group(2), match.group(2)))
        if more is None or (money is not None and more.powers == money.powers):
            return match.group(1) + value, money
        return text, None
    if match := DEGREE_PARTS.fullmatch(text):
        whole, minutes, seconds = match.groups()
        rest = Fraction(minutes) / 60 + Fraction(seconds or 0) / 3600
        total = Fraction(whole) + (-rest if whole.startswith("-") else rest)
        return f"{total.numerator}/{total.denominator}", read_unit("degree")
    is_sum = text.count(DEGREE) > 1 or (DEGREE in text and "\\frac" in text)
    if is_sum and not (TRIGONOMETRY.search(text) or "\\pi" in text):
        return DEGREE_IN_TERM.sub(r"(\1)", text).replace(DEGREE, ""), read_unit("degree")
    for number, match in enumerate(STARTS.finditer(text)):
        if number == MOST_STARTS:
            break
        end = text[match.end() :]
        unit = read_unit(end, letters=letters or match.end() > match.start())
        if unit is not None and not (unit.kind == ANGLE and TRIGONOMETRY.search(text)):
            return text[: match.start()].strip(), unit
    return text, None


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
        """Return whether it is a ratio of two numbers. `10:30` can be a time, and is no ratio then."""
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
