"""SVG code from anybody as the published evaluator reads it, with limits: one function for reference and response.

It reads numbers, translations and the canvas; styles (attributes, `style`, classes of style sheets, fonts); colours (a
short list of names, and a distance in RGB); gradients, patterns, fills and borders. The published cleanliness of code
is the share of its shapes that are simple ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from vlmrl.redaction.redact import excerpt

MOST_CHARACTERS = 4_000_000
"""Longest document that is read."""
MOST_ELEMENTS = 20_000
"""Largest number of elements of a document."""
MOST_ATTRIBUTE = 10_000
"""Longest value of an attribute, in characters, except for outlines and references."""
LINK = "{http://www.w3.org/1999/xlink}href"
LONG = ("d", "points", "href", LINK)
"""Attributes that may be as long as the document: outlines, and images that are written into a reference."""
DEEPEST_ENTITY = 20
"""Largest depth of entities in each other."""
DEEPEST = 150
"""Largest depth of nested elements. The published code stops at Python's limit of recursion, at about 900."""
REFERENCE = re.compile(r"&([^\s;&<]{1,200});")
MOST_WORK = 3_000_000
"""Largest number of comparisons and visits for one pair. 150 shapes and 120 arrows need about 400,000."""


class Unscorable(Exception):
    """Reason why a document is not scored: a limit of this code, or a place where the published code stops."""


def refuse(reason: str) -> NoReturn:
    """Stop the evaluation. Raises: Unscorable with the reason."""
    raise Unscorable(reason)


class Work:
    """Counter of the comparisons of one evaluation, so that no document costs unbounded time.

    Args:
        left: number of comparisons that may still be made.
    """

    def __init__(self, left: int = MOST_WORK) -> None:
        self.left = left

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises: Unscorable when more than the limit were made."""
        self.left -= steps
        if self.left < 0:
            refuse(f"the figures need more than {MOST_WORK:,} comparisons")


class _Reader:
    """Handlers of expat that build a tree and stop at the limits while they read, not after it."""

    def __init__(self, text: str) -> None:
        self.builder, self.text = TreeBuilder(), text
        self.elements = self.depth = 0
        self.entities: dict[str, str] = {}

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        self.depth += 1
        if self.elements > MOST_ELEMENTS:
            refuse(f"more than {MOST_ELEMENTS:,} elements")
        if self.depth > DEEPEST:
            refuse(f"more than {DEEPEST} nested elements")
        plain = {_full(key): value for key, value in attributes.items()}
        if any(len(value) > MOST_ATTRIBUTE and key not in LONG for key, value in plain.items()):
            refuse(f"an attribute of more than {MOST_ATTRIBUTE:,} characters")
        self.builder.start(_full(name), plain)

    def end(self, name: str) -> None:
        self.depth -= 1
        self.builder.end(_full(name))

    def declared(self, name: str, is_parameter: bool, value: str | None, *_: object) -> None:
        """Note an entity of the document type. Those of files have no value, and are unknown."""
        if not is_parameter and value is not None:
            self.entities.setdefault(name, value)

    def declared_all(self) -> None:
        """Stop if the text is too long with all entities in their places: expat would write them out."""
        sizes: dict[str, int] = {}
        for _ in range(DEEPEST_ENTITY):
            grown = {name: _written(value, sizes) for name, value in self.entities.items()}
            if grown == sizes:
                break
            sizes = grown
        else:
            refuse(f"entities are nested deeper than {DEEPEST_ENTITY}")
        if _written(self.text, sizes) > MOST_CHARACTERS:
            refuse(f"more than {MOST_CHARACTERS:,} characters with its entities")

    def unknown(self, name: str, is_parameter: bool) -> None:
        if not is_parameter:
            refuse(f"the entity {excerpt(name, 80)!r} is unknown")

    def outside(self, context: str, *_: object) -> NoReturn:
        refuse(f"the entity {excerpt(context, 80)!r} is not in the document")


def _written(text: str, sizes: Mapping[str, int]) -> int:
    """Return the length of a text with entities of these lengths in their places."""
    return len(text) + sum(sizes.get(name, 0) for name in REFERENCE.findall(text))


def _full(name: str) -> str:
    """Return a name as trees have it, {namespace}name, from expat's form with the bracket in the middle only."""
    return "{" + name if "}" in name else name


def parse(text: str) -> Element:
    """Return the root of a document, as if its text were a file in UTF-8. No other file and no address is read.

    Raises: Unscorable for text that is no XML, declares an encoding that it does not have, or is beyond a limit.
    """
    if len(text) > MOST_CHARACTERS:
        refuse(f"more than {MOST_CHARACTERS:,} characters")
    reader = _Reader(text)
    parser = expat.ParserCreate(namespace_separator="}")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = reader.builder.data
    parser.EntityDeclHandler, parser.EndDoctypeDeclHandler = reader.declared, reader.declared_all
    parser.SkippedEntityHandler, parser.ExternalEntityRefHandler = reader.unknown, reader.outside
    try:
        parser.Parse(text.encode("utf-8"), True)
    except expat.ExpatError as error:
        refuse(f"no XML: {expat.ErrorString(error.code)} in line {error.lineno}, column {error.offset + 1}")
    except UnicodeEncodeError:
        refuse("no XML: half of a surrogate pair")
    except (LookupError, ValueError) as error:
        refuse(f"no XML: {error}")
    return reader.builder.close()


def name_of(element: Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2] if "}" in element.tag else element.tag


def parents(root: Element) -> dict[Element, Element]:
    """Return the parent of every element but the root."""
    return {child: parent for parent in root.iter() for child in parent}


NUMERAL = re.compile(r"-?\d*\.?\d+(?:[eE][+-]?\d+)?")
TRANSLATION = re.compile(r"translate\(\s*([-\d.]+)[\s,]+([-\d.]+)")
FIRST_CANVAS = 800, 600
"""Width and height of a document that gives none, in pixels."""


def number(text: str | None, default: float = 0.0) -> float:
    """Return a text that is one number, else the default: `100px` and `50%` are none."""
    try:
        return float(text or "")
    except ValueError:
        return default


def numbers(text: str) -> list[float]:
    """Return every numeral of a text; a plus sign is ignored, so that `+5` is 5 and `--5` is -5."""
    return [float(numeral) for numeral in NUMERAL.findall(text)]


def distance(dx: float, dy: float) -> float:
    """Return the length of a vector. Raises: OverflowError beyond about 1e154, as the published code does."""
    return math.sqrt(dx**2 + dy**2)


def translation(transform: str | None) -> tuple[float, float]:
    """Return the first translation by two plain numbers; (0, 0) without one. Every other transform is ignored."""
    match = TRANSLATION.search(transform or "")
    if match is None:
        return 0.0, 0.0
    try:
        return float(match[1]), float(match[2])
    except ValueError:
        raise refuse(f"the translation {transform!r} has a broken number") from None


def reference_canvas(root: Element) -> tuple[float, float]:
    """Return width and height of a reference in pixels; 0 for a size with a unit."""
    box = numbers(root.get("viewBox", ""))
    if len(box) >= 4:
        return box[2], box[3]
    return number(root.get("width", str(FIRST_CANVAS[0]))), number(root.get("height", str(FIRST_CANVAS[1])))


def canvas(root: Element) -> tuple[float, float]:
    """Return width and height of a response in pixels; the first canvas instead of a size with a unit.

    Raises: Unscorable for a view box that is not four numbers with spaces between them.
    """
    box = root.get("viewBox")
    if box:
        parts = box.split()
        try:
            return float(parts[2]), float(parts[3])
        except (IndexError, ValueError):
            raise refuse(f"the view box {box!r} is not four numbers with spaces between them") from None
    return number(root.get("width"), FIRST_CANVAS[0]), number(root.get("height"), FIRST_CANVAS[1])


Classes = Mapping[str, Mapping[str, str]]
"""Class -> property -> value. A later rule replaces an earlier rule of the same class as a whole."""


def sheet_text(root: Element) -> list[str]:
    """Return the text of every style sheet of a document."""
    return [element.text for element in root.iter() if name_of(element) == "style" and element.text]


def classes(root: Element) -> dict[str, dict[str, str]]:
    """Return the rules for classes, for shapes: of a list of classes only the last has the rule."""
    rules: dict[str, dict[str, str]] = {}
    for text in sheet_text(root):
        plain = text.replace("<![CDATA[", "").replace("]]>", "")
        for name, body in _rules(plain, _class_before, allow_empty=False):
            declared: dict[str, str] = {}
            for declaration in body.split(";"):
                key, colon, value = declaration.partition(":")
                if colon:
                    declared[key.strip()] = value.strip()
            if declared:
                rules[name] = declared
    return rules


def arrow_classes(root: Element) -> dict[str, dict[str, str]]:
    """Return the rules for classes, for arrows: another reader, which takes names of elements for classes, too."""
    rules: dict[str, dict[str, str]] = {}
    for text in sheet_text(root):
        for name, body in _rules(text, _word_before, allow_empty=True):
            rules[name] = dict(_declarations(body))
    return rules


def _rules(text: str, name_before: Callable[[str], str], *, allow_empty: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, body) of the rules of a sheet, in linear time: `name_before` reads the end of what precedes `{`."""
    begin = opening = closing = 0
    while (opening := text.find("{", opening)) >= 0:
        closing = closing if closing > opening else text.find("}", opening)
        if closing < 0:
            return
        name = name_before(text[begin:opening].rstrip())
        if name and (allow_empty or closing > opening + 1):
            yield name, text[opening + 1 : closing]
            opening = closing
        opening += 1
        begin = opening


def _class_before(text: str) -> str:
    """Return what follows the first full stop of the last word; commas divide words, too."""
    words = text.replace(",", " ").split()
    return "" if not words or text.endswith(",") else words[-1].partition(".")[2]


def _word_before(text: str) -> str:
    """Return the letters, digits, `_` and `-` that end a text, with a `#` before them."""
    begin = len(text)
    while begin and (text[begin - 1].isalnum() or text[begin - 1] in "_-"):
        begin -= 1
    return text[begin - 1 :] if 0 < begin < len(text) and text[begin - 1] == "#" else text[begin:]


def _declarations(body: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each part between semicolons that has a word before a colon and something behind it."""
    for part in body.split(";"):
        begin = colon = 0
        while (colon := part.find(":", colon)) >= 0:
            key = _word_before(part[begin:colon].rstrip()).lstrip("#")
            if key and colon + 1 < len(part):
                yield key, part[colon + 1 :].strip()
                break
            colon += 1
            begin = colon


def style_property(element: Element, name: str, rules: Classes) -> str:
    """Return a property: the attribute, else `style`, else the first class that has it; "" without any."""
    value = element.get(name)
    if value:
        return value
    for declaration in element.get("style", "").split(";"):
        key, colon, value = declaration.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    for class_name in element.get("class", "").split():
        if name in rules.get(class_name, ()):
            return rules[class_name][name]
    return ""


class Fonts:
    """Font families of a document; those of groups are looked up once."""

    def __init__(self, parent_of: Mapping[Element, Element], rules: Classes) -> None:
        self.parent_of, self.rules = parent_of, rules
        self._above: dict[Element, str] = {}

    def of(self, text: Element) -> str:
        """Return the family of a text: its own, else of the first tspan with one, else of the nearest ancestor."""
        for element in (text, *(child for child in text if name_of(child) == "tspan")):
            if font := style_property(element, "font-family", self.rules):
                return font
        above = self.parent_of.get(text)
        return self._of_group(above) if above is not None else ""

    def _of_group(self, group: Element) -> str:
        if group not in self._above:
            font, above = style_property(group, "font-family", self.rules), self.parent_of.get(group)
            self._above[group] = font or (self._of_group(above) if above is not None else "")
        return self._above[group]


def text_of(element: Element) -> str:
    """Return the text of an element: its pieces, each stripped, with spaces between them."""
    return " ".join(piece for raw in element.itertext() if (piece := raw.strip()))


def normal(text: str | None) -> str:
    """Return a label as labels are compared: lower case, with single spaces."""
    return " ".join((text or "").lower().split())


NAMED = {
    "aliceblue": "f0f8ff", "aqua": "00ffff", "beige": "f5f5dc", "black": "000000", "blue": "0000ff", "brown": "a52a2a",
    "coral": "ff7f50", "crimson": "dc143c", "cyan": "00ffff", "darkblue": "00008b", "darkgray": "a9a9a9",
    "darkgreen": "006400", "darkgrey": "a9a9a9", "darkorange": "ff8c00", "darkred": "8b0000", "deepskyblue": "00bfff",
    "dimgray": "696969", "dimgrey": "696969", "dodgerblue": "1e90ff", "floralwhite": "fffaf0", "fuchsia": "ff00ff",
    "ghostwhite": "f8f8ff", "gold": "ffd700", "gray": "808080", "green": "008000", "grey": "808080",
    "honeydew": "f0fff0", "hotpink": "ff69b4", "indigo": "4b0082", "ivory": "fffff0", "khaki": "f0e68c",
    "lavender": "e6e6fa", "lightblue": "add8e6", "lightgray": "d3d3d3", "lightgreen": "90ee90", "lightgrey": "d3d3d3",
    "lightyellow": "ffffe0", "lime": "00ff00", "linen": "faf0e6", "magenta": "ff00ff", "maroon": "800000",
    "mintcream": "f5fffa", "navy": "000080", "oldlace": "fdf5e6", "olive": "808000", "orange": "ffa500",
    "pink": "ffc0cb", "purple": "800080", "red": "ff0000", "royalblue": "4169e1", "salmon": "fa8072",
    "seashell": "fff5ee", "silver": "c0c0c0", "slategray": "708090", "slategrey": "708090", "snow": "fffafa",
    "steelblue": "4682b4", "tan": "d2b48c", "teal": "008080", "tomato": "ff6347", "turquoise": "40e0d0",
    "violet": "ee82ee", "white": "ffffff", "whitesmoke": "f5f5f5", "yellow": "ffff00",
}  # fmt: skip
"""The 64 names that the published code knows. CSS has 148; a colour by another name scores 0, even against itself."""
TRIPLE = re.compile(r"rgba?\(\s*([\d.]+%?)\s*,\s*([\d.]+%?)\s*,\s*([\d.]+%?)", re.IGNORECASE)
FARTHEST = 255 * math.sqrt(3)
"""Distance of black and white."""
PER_CENT = 2.55
"""Step of a per cent; multiplied and cut, so that 100% is 254."""


def rgb(text: str) -> tuple[int, int, int] | None:
    """Return a colour in 0 to 255; None for what the published code cannot read, transparent colours among them."""
    text = text.strip()
    triple = TRIPLE.match(text)
    if triple is not None:
        values = [_channel(part) for part in triple.groups()]
        return None if None in values else tuple(values)  # type: ignore[return-value]
    digits = (NAMED.get(text.lower()) or text).lstrip("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    if len(digits) != 6:
        return None
    try:
        return int(digits[0:2], 16), int(digits[2:4], 16), int(digits[4:6], 16)
    except ValueError:
        return None


def _channel(text: str) -> int | None:
    try:
        # A number of 400 digits is infinite.
        return int(float(text[:-1]) * PER_CENT) if text.endswith("%") else round(float(text))
    except (ValueError, OverflowError):
        return None


def is_reference(text: str) -> bool:
    """Return whether a colour is a reference to a gradient or a pattern."""
    return text.strip().lower().startswith("url(")


def is_nothing(text: str) -> bool:
    """Return whether a colour is absent, `none` or `transparent`."""
    return text.strip().lower() in ("", "none", "transparent")


def colour_score(one: str | None, other: str | None) -> float:
    """Return how near two colours are, in [0, 1].

    1 - distance in RGB / 441.67; 1 if both are none, 0 if one is; 0.5 for two references, 0.3 for one; 0 for a colour
    that is not understood.
    """
    one, other = one or "", other or ""
    references = is_reference(one) + is_reference(other)
    if references:
        return 0.5 if references == 2 else 0.3
    if is_nothing(one) or is_nothing(other):
        return float(is_nothing(one) and is_nothing(other))
    first, second = rgb(one), rgb(other)
    if first is None or second is None:
        return 0.0
    away = math.sqrt(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)))
    return max(0.0, 1.0 - away / FARTHEST)


GRADIENTS = {"linearGradient": "gradient-linear", "radialGradient": "gradient-radial"}
STROKE_START = re.compile(r"M\s*([-\d.]+)[\s,]+([-\d.]+)", re.IGNORECASE)
STROKE_END = re.compile(r"L\s*([-\d.]+)[\s,]+([-\d.]+)", re.IGNORECASE)
STOP_COLOUR = re.compile(r"stop-color\s*:([^;]+)")
ANGLE_STEP = 15
"""Angles of strokes count as equal when they are rounded to the same multiple, in degrees."""
SHORTEST = 0.1
"""Change of x and of y up to which a stroke has no direction, in pixels."""
FLAT = 1
"""Largest change of height of a line that is horizontal, in pixels."""
DOTTED = 3
"""Longest first dash of a dotted border, in pixels."""


def reference(paint: str) -> str | None:
    """Return the id that a paint refers to; None for a plain colour, and for an id in quotation marks.

    The last character is taken for the bracket, so that `url(#a) red` refers to `a) re`.
    """
    return paint[5:-1] if paint.startswith("url(#") else None


def fill_styles(root: Element) -> dict[str, str]:
    """Return id -> style of the gradients and patterns in `defs`."""
    styles: dict[str, str] = {}
    for definitions in root.iter():
        if name_of(definitions) != "defs":
            continue
        for child in definitions:
            name = name_of(child)
            if name in GRADIENTS:
                styles[child.get("id", "")] = GRADIENTS[name]
            elif name == "pattern":
                styles[child.get("id", "")] = pattern_style(child)
    return styles


def pattern_style(pattern: Element) -> str:
    """Return what a pattern draws: dots, crosshatch, hatching, horizontal-lines, or `pattern` for anything else."""
    names = [name_of(child) for child in pattern]
    lines = [child for child, name in zip(pattern, names, strict=True) if name == "line"]
    if "circle" in names:
        return "dots"
    if len(lines) > 1:
        return "crosshatch"
    if lines:
        rise = number(lines[0].get("y2")) - number(lines[0].get("y1"))
        return "hatching" if abs(rise) > FLAT else "horizontal-lines"
    paths = [child.get("d", "") for child, name in zip(pattern, names, strict=True) if name == "path"]
    angles = {angle for path in paths for angle in _angles(path)}
    return "pattern" if not angles else "hatching" if len(angles) == 1 else "crosshatch"


def _angles(path: str) -> set[int]:
    """Return the rounded angles of the straight strokes of a path, in [0, 180).

    Raises: Unscorable for a number such as 1.2.3.
    """
    angles: set[int] = set()
    for stroke in _strokes(path):
        try:
            x1, y1, x2, y2 = map(float, stroke)
            if abs(x2 - x1) > SHORTEST or abs(y2 - y1) > SHORTEST:
                angle = math.atan2(y2 - y1, x2 - x1) * 180 / math.pi
                angles.add(round(angle / ANGLE_STEP) * ANGLE_STEP % 180)
        except ValueError:
            refuse(f"a pattern has a stroke with a broken number: {excerpt(path, 80)!r}")
    return angles


def _strokes(path: str) -> Iterator[tuple[str, ...]]:
    """Yield the four numbers of the strokes of a path, all read as absolute.

    A stroke is a move and the next line after it in the same row of text, whatever stands between.
    """
    at, end = 0, None
    while start := STROKE_START.search(path, at):
        if end is None or end.start() < start.end():
            end = STROKE_END.search(path, start.end())
        if end is None:
            return
        row_end = path.find("\n", start.end(), end.start())
        if row_end < 0:
            yield (*start.groups(), *end.groups())
        # A move without a line in its row may still be part of the next match.
        at = end.end() if row_end < 0 else start.start() + 1


def stop_colours(root: Element) -> dict[str, str]:
    """Return id -> colour of the gradients anywhere in a document."""
    colours: dict[str, str] = {}
    for gradient in root.iter():
        if (key := gradient.get("id")) and name_of(gradient) in GRADIENTS and (colour := _first_stop(gradient)):
            colours[key] = colour
    return colours


def reference_colours(root: Element) -> dict[str, str]:
    """Return id -> colour of the gradients and patterns of a reference; a pattern's is that of its first rectangle."""
    colours: dict[str, str] = {}
    for element in root.iter():
        name, colour = name_of(element), ""
        if name in GRADIENTS:
            colour = _first_stop(element)
        elif name == "pattern":
            colour = next((c.get("fill", "") for c in element if name_of(c) == "rect"), "")
        if (key := element.get("id")) and not is_none(colour):
            colours[key] = colour
    return colours


def is_none(paint: str) -> bool:
    """Return whether a paint is absent or `none`; spaces around it are not removed."""
    return len(paint) <= 4 and paint.lower() in ("", "none")


def _first_stop(gradient: Element) -> str:
    """Return the colour of the first stop that has one; "" without any. Classes do not count."""
    colours = (_stop_colour(child) for child in gradient if name_of(child) == "stop")
    return next((colour for colour in colours if not is_none(colour)), "")


def _stop_colour(stop: Element) -> str:
    match = None if stop.get("stop-color") else STOP_COLOUR.search(stop.get("style", ""))
    return match[1].strip() if match is not None else stop.get("stop-color", "")


def resolved(paint: str, colours: Mapping[str, str]) -> str:
    """Return the colour that a paint refers to; the paint itself if it is a colour or the reference is unknown."""
    key = reference(paint)
    return colours.get(key, paint) if key is not None else paint


def fill_style(element: Element, styles: Mapping[str, str], rules: Classes) -> str:
    """Return the fill style of an element: none, solid, or the style of the gradient or pattern."""
    fill = style_property(element, "fill", rules)
    if is_none(fill):
        return "none"
    key = reference(fill)
    return "solid" if key is None else styles.get(key, "pattern")


def border_style(element: Element, rules: Classes) -> str:
    """Return solid, dotted, dashed or dash-dot, from the dashes of a border."""
    return dash_style(style_property(element, "stroke-dasharray", rules))


def dash_style(dashes: str) -> str:
    """Return the style of a list of dashes: four or more are dash-dot, a short first one is dotted."""
    if is_none(dashes):
        return "solid"
    lengths = numbers(dashes)
    if len(lengths) >= 4:
        return "dash-dot"
    return "solid" if not lengths else "dotted" if lengths[0] <= DOTTED else "dashed"


SIMPLE = ("rect", "circle", "ellipse", "line", "polyline")
"""Elements that count as simple."""
COMPLEX = ("path", "polygon")
"""Elements that count as complex."""
TINY = 1e-9
"""Addend of the divisor, as published: code with n simple shapes only scores n / (n + 1e-9)."""


def published_cleanliness(svg: str) -> float | None:
    """Return simple shapes / all shapes, in [0, 1); None for code without a shape or text, 0 with text only.

    Names are counted as pieces of text, in upper and lower case: `linearGradient` is a line, and comments count.
    """
    lower = svg.lower()
    simple, others = (sum(lower.count(f"<{name}") for name in names) for names in (SIMPLE, COMPLEX))
    if not simple + others and "<text" not in svg:
        return None
    return simple / (simple + others + TINY)
