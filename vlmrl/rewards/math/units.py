r"""Units of an answer: lengths, areas, masses, times, angles, percent, money, and words such as "apples".

`12 cm^2` is the value 12 and the unit cm^2. Two units agree if they measure the same: 12 cm and 0.12 m do, 12 cm and
12 in do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from vlmrl.rewards.math.latex import MONEY

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
            "mm millimeter millimetre": one(1, 1000), "cm centimeter centimetre": one(1, 100),
            "dm decimeter decimetre": one(1, 10), "m meter metre": one(1), "km kilometer kilometre": one(1000),
            "in inch inche": one(254, 10_000), "ft foot feet": one(3048, 10_000), "yd yard": one(9144, 10_000),
            "mi mile": one(1_609_344, 1000),
        },
        "volume": {"l liter litre": one(1, 1000), "ml milliliter millilitre": one(1, 1_000_000),
                   "gal gallon": one(3_785_411_784, 10**12)},
        "mass": {"mg milligram": one(1, 1000), "g gram gramme": one(1), "kg kilogram": one(1000),
                 "t ton tonne": one(1_000_000),
                 "lb pound": one(45_359_237, 100_000), "oz ounce": one(28_349_523_125, 10**9)},
        "time": {"ms millisecond": one(1, 1000), "s sec second": one(1), "min minute": one(60), "h hr hour": one(3600),
                 "day": one(86_400), "week": one(604_800), "year yr": one(31_536_000), "month": one(2_628_000)},
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
        f"{MONEY_KIND} yuan": {"yuan rmb cny": one(1)}, f"{MONEY_KIND} rupee": {"rupee inr rs": one(1)},
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
SQUARE, CUBIC = ("square", "sq"), ("cubic", "cu")
PIECE = re.compile(
    r"\s*(\\money|\\euro|\\pounds|\\yen|\\Omega|%|[A-Za-z]+\.?|\^\{?\s*-?[1-4]\s*\}?|[1-3](?![0-9])|/|\\cdot|\*|\^\{\\circ\}|'{1,2}|\")\s*"
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
SPEEDS = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "fps": "ft/s", "cc": "cm^3"}


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
