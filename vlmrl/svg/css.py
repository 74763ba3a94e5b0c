"""Styles of an SVG document: its sheets, their selectors, and the properties of an element, its own and inherited ones.

A rule with an unknown selector, and every at-rule, has no effect: no sheet is imported, no font is loaded. `var()` is
replaced by a custom property of the element, or of one around it. Selectors are types, `*`, classes, ids, attributes,
`:root`, `:first-child`, `:last-child`, `:only-child`, `:nth-child()`, `:nth-last-child()` and `:not()`, joined by
space, `>`, `+` and `~`. States such as `:hover` select nothing, as in a picture.

Source: SVG 1.1 (second edition), appendix N, and SVG 2, section 6.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tinycss2
from tinycss2.nth import parse_nth

from vlmrl.svg.geometry import Box, Lengths, rectangle
from vlmrl.svg.parse import Node, Work
from vlmrl.svg.scene import Shape, Source
from vlmrl.svg.values import Matrix, read_colour, read_length, read_paint

MOST_PARTS = 8
"""Largest number of compounds in a selector. A rule with a longer one has no effect."""
COMPARISON = 12
"""Steps of work of a comparison of a compound with an element."""
JOINS = (">", "+", "~")
ALWAYS_FALSE = (
    "hover", "active", "focus", "focus-within", "focus-visible", "visited", "link", "any-link", "target", "checked",
    "disabled", "enabled",
)  # fmt: skip
NTH = {"first-child": (0, 1, False), "last-child": (0, 1, True)}
"""Pseudo-class -> a, b of the positions a n + b, and whether they are counted from the end."""
COMPARE: dict[str, Callable[[str, str], bool]] = {
    "": lambda own, value: True,
    "=": lambda own, value: own == value,
    "~=": lambda own, value: bool(value) and value in own.split(),
    "|=": lambda own, value: own == value or own.startswith(f"{value}-"),
    "^=": lambda own, value: bool(value) and own.startswith(value),
    "$=": lambda own, value: bool(value) and own.endswith(value),
    "*=": lambda own, value: bool(value) and value in own,
}
"""Operator of an attribute selector -> whether an attribute's value fits."""


class Compound(NamedTuple):
    """Selector of one element.

    Args:
        tag: "" = any.
        attributes: (name, operator, value).
        positions: (a, b, from the end) of its place among its siblings.
        nots: compounds that must not fit.
        is_root: whether it must be the outermost element.
        is_never: whether it selects nothing.
        join: where the element of the compound before is: " " above, ">" directly above, "+" before, "~" anywhere
            before.
    """

    tag: str
    ids: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str, str], ...] = ()
    positions: tuple[tuple[int, int, bool], ...] = ()
    nots: tuple[tuple[Compound, ...], ...] = ()
    is_root: bool = False
    is_never: bool = False
    join: str = " "

    @property
    def weight(self) -> tuple[int, int, int]:
        """Number of ids, of classes and the like, and of types."""
        inner = [max(one.weight for one in group) for group in self.nots]
        classes = len(self.classes) + len(self.attributes) + len(self.positions) + self.is_root + self.is_never
        ids, more, types = (sum(one[k] for one in inner) for k in range(3))
        return len(self.ids) + ids, classes + more, bool(self.tag) + types


Selector = tuple[Compound, ...]


def read_selectors(tokens: Sequence[Any]) -> list[Selector]:
    """Return the selectors of a list; [] if one of them is not known, as CSS has it."""
    selectors = [_selector(part) for part in _split(tokens)]
    known = [selector for selector in selectors if selector is not None]
    return known if len(known) == len(selectors) else []


def _split(tokens: Sequence[Any]) -> list[list[Any]]:
    """Return the parts of tokens between commas, without comments."""
    parts: list[list[Any]] = [[]]
    for token in tokens:
        if token.type == "literal" and token.value == ",":
            parts.append([])
        elif token.type != "comment":
            parts[-1].append(token)
    return parts


def _selector(tokens: Sequence[Any]) -> Selector | None:
    """Return the compounds of one selector; None if it is not known."""
    compounds: list[Compound] = []
    part: list[Any] = []
    join, follows = " ", False
    for token in [*tokens, None]:
        is_join = token is not None and token.type == "literal" and token.value in JOINS
        if token is not None and token.type != "whitespace" and not is_join:
            part.append(token)
            continue
        if part:
            compound = _compound(part)
            if compound is None:
                return None
            compounds.append(compound._replace(join=join))
            part, join, follows = [], " ", False
        if is_join and token is not None:
            if not compounds or follows:
                return None
            join, follows = token.value, True
    return tuple(compounds) if compounds and not follows and len(compounds) <= MOST_PARTS else None


def _compound(tokens: Sequence[Any]) -> Compound | None:
    compound, place = Compound(""), 0
    while place < len(tokens):
        token = tokens[place]
        following = tokens[place + 1] if place + 1 < len(tokens) else None
        literal = token.value if token.type == "literal" else ""
        if token.type == "ident" and place == 0:
            compound = compound._replace(tag=token.value)
        elif literal == "*" and place == 0:
            pass
        elif token.type == "hash":
            compound = compound._replace(ids=(*compound.ids, token.value))
        elif token.type == "[] block":
            attribute = _attribute([t for t in token.content if t.type not in ("whitespace", "comment")])
            if attribute is None:
                return None
            compound = compound._replace(attributes=(*compound.attributes, attribute))
        elif literal in (".", ":") and following is not None:
            changed = _dotted(compound, following) if literal == "." else _pseudo(compound, following)
            if changed is None:
                return None
            compound, place = changed, place + 1
        else:
            return None
        place += 1
    return compound


def _dotted(compound: Compound, token: Any) -> Compound | None:
    return compound._replace(classes=(*compound.classes, token.value)) if token.type == "ident" else None


def _attribute(tokens: Sequence[Any]) -> tuple[str, str, str] | None:
    if not tokens or tokens[0].type != "ident" or len(tokens) not in (1, 3):
        return None
    if len(tokens) == 1:
        return tokens[0].value, "", ""
    sign, value = tokens[1:]
    known = sign.type == "literal" and sign.value in COMPARE and value.type in ("ident", "string")
    return (tokens[0].value, sign.value, value.value) if known else None


def _pseudo(compound: Compound, token: Any) -> Compound | None:
    """Return a compound with a pseudo-class in addition; None for an unknown one."""
    if token.type == "function":
        if token.lower_name == "not":
            inner = [_selector(part) for part in _split(token.arguments)]
            nots = tuple(one[0] for one in inner if one is not None and len(one) == 1 and not one[0].nots)
            return compound._replace(nots=(*compound.nots, nots)) if len(nots) == len(inner) else None
        nth = parse_nth(token.arguments) if token.lower_name in ("nth-child", "nth-last-child") else None
        if nth is None:
            return None
        position = (*nth, token.lower_name == "nth-last-child")
        return compound._replace(positions=(*compound.positions, position))
    if token.type != "ident":
        return None
    name = token.lower_value
    if name in NTH:
        return compound._replace(positions=(*compound.positions, NTH[name]))
    if name == "only-child":
        return compound._replace(positions=(*compound.positions, *NTH.values()))
    if name == "root":
        return compound._replace(is_root=True)
    return compound._replace(is_never=True) if name in ALWAYS_FALSE else None


class Tree:
    """Elements of a document with their places."""

    def __init__(self, root: Node, work: Work) -> None:
        self._work = work
        self._places: dict[int, tuple[Node | None, int]] = {root.number: (None, 0)}
        for node in root.walk():
            for index, child in enumerate(node.children):
                self._places[child.number] = (node, index)

    def selects(self, selector: Selector, node: Node) -> bool:
        """Return whether a selector selects an element. Raises: CodeRefused (`limit`) for too much work."""
        compound, rest = selector[-1], selector[:-1]
        if not self._fits(compound, node):
            return False
        if not rest:
            return True
        above, index = self._places[node.number]
        if compound.join in ("+", "~"):
            first = max(0, index - 1) if compound.join == "+" else 0
            before = above.children[first:index] if above is not None else []
            return any(self.selects(rest, one) for one in before)
        while above is not None:
            if self.selects(rest, above):
                return True
            above = self._places[above.number][0] if compound.join == " " else None
        return False

    def _fits(self, compound: Compound, node: Node) -> bool:
        self._work.spend(COMPARISON + len(node.attributes.get("class", "")) if compound.classes else COMPARISON)
        if compound.is_never or (compound.tag and compound.tag != node.tag):
            return False
        attributes = node.attributes
        if any(attributes.get("id") != name for name in compound.ids):
            return False
        if compound.classes and not set(compound.classes) <= set(attributes.get("class", "").split()):
            return False
        above, index = self._places[node.number]
        if compound.is_root and above is not None:
            return False
        if not all(n in attributes and COMPARE[sign](attributes[n], v) for n, sign, v in compound.attributes):
            return False
        count = len(above.children) if above is not None else 1
        for a, b, from_end in compound.positions:
            steps = (count - index if from_end else index + 1) - b
            if (steps != 0) if a == 0 else (steps % a != 0 or steps // a < 0):
                return False
        return not any(self._fits(one, node) for group in compound.nots for one in group)


INHERITED = {
    "clip-rule": "nonzero",
    "color": "black",
    "fill": "black",
    "fill-opacity": "1",
    "fill-rule": "nonzero",
    "font-family": "",
    "font-size": "16",
    "font-style": "normal",
    "font-variant": "normal",
    "font-weight": "normal",
    "letter-spacing": "normal",
    "marker-end": "none",
    "marker-mid": "none",
    "marker-start": "none",
    "paint-order": "normal",
    "shape-rendering": "auto",
    "stroke": "none",
    "stroke-dasharray": "none",
    "stroke-dashoffset": "0",
    "stroke-linecap": "butt",
    "stroke-linejoin": "miter",
    "stroke-miterlimit": "4",
    "stroke-opacity": "1",
    "stroke-width": "1",
    "text-anchor": "start",
    "text-rendering": "auto",
    "visibility": "visible",
    "word-spacing": "normal",
}
"""Property that children take from their parent -> its first value."""
OWN = frozenset((
    "alignment-baseline", "background-color", "baseline-shift", "clip-path", "display", "dominant-baseline", "filter",
    "isolation", "mask", "mix-blend-mode", "opacity", "overflow", "stop-color", "stop-opacity", "text-decoration",
    "transform", "transform-origin",
))  # fmt: skip
"""Properties of one element alone."""
PROPERTIES = OWN | INHERITED.keys()
SHORTHANDS = {"marker": ("marker-start", "marker-mid", "marker-end"), "background": ("background-color",)}
"""Shorthand -> the properties that it sets to its value."""
BLENDS = {
    "multiply": "MULTIPLY", "screen": "SCREEN", "overlay": "OVERLAY", "darken": "DARKEN", "lighten": "LIGHTEN",
    "color-dodge": "COLOR_DODGE", "color-burn": "COLOR_BURN", "hard-light": "HARD_LIGHT", "soft-light": "SOFT_LIGHT",
    "difference": "DIFFERENCE", "exclusion": "EXCLUSION", "hue": "HSL_HUE", "saturation": "HSL_SATURATION",
    "color": "HSL_COLOR", "luminosity": "HSL_LUMINOSITY", "plus-lighter": "ADD",
}  # fmt: skip
"""Value of `mix-blend-mode` -> name of cairo's operator."""


LETTER, SETTING = 16, 5
"""Steps of work of a character of CSS, and of a declaration that an element has."""
MOST_ROUNDS, MOST_VALUE_CHARS = 8, 1000
"""Largest depth of custom properties in each other, and longest value with them. A value beyond is left out."""
VARIABLE = re.compile(r"var\(\s*(--[^\s,()]+)\s*(?:,((?:[^()]|\([^()]*\))*))?\)", re.IGNORECASE)


Variables = Mapping[str, str]
"""Custom property -> value, and the value of `color`."""


class Rule(NamedTuple):
    """One selector of a rule, with its declarations.

    Args:
        weight: ids, classes and types in the selector, then the position of the rule.
    """

    compounds: Selector
    weight: tuple[int, int, int, int]
    declarations: tuple[Declaration, ...]


class Declaration(NamedTuple):
    """Value of one property. `important`: it has precedence over those that are not."""

    name: str
    value: str
    important: bool


def apply_styles(root: Node, work: Work | None = None) -> None:
    """Replace `style` attributes and rules of `style` elements by attributes, in place. `class` attributes stay.

    A property whose value is `inherit`, `initial` or `unset` gets the value that this means, or none.

    Raises: CodeRefused (`limit`) for too much work.
    """
    work = work or Work()
    rules = sorted(_rules(root, work), key=lambda rule: rule.weight)
    tree = Tree(root, work)
    waiting: list[tuple[Node, Variables, Mapping[str, str]]] = [(root, {}, {})]
    while waiting:
        node, variables, around = waiting.pop()
        variables = _apply(node, variables, around, _declared(node, rules, tree, work), work)
        waiting += [(child, variables, node.attributes) for child in node.children]


def _declared(node: Node, rules: Sequence[Rule], tree: Tree, work: Work) -> list[Declaration]:
    """Return the declarations for an element, the strongest last."""
    declarations: list[Declaration] = []
    for rule in rules:
        if tree.selects(rule.compounds, node):
            work.spend(SETTING * len(rule.declarations))
            declarations += rule.declarations
    style = node.attributes.pop("style", "")
    work.spend(LETTER * len(style))
    declarations += read_declarations(style)
    declarations.sort(key=lambda declaration: declaration.important)  # stable: the others keep their order
    return declarations


def _apply(
    node: Node, variables: Variables, around: Mapping[str, str], declarations: Sequence[Declaration], work: Work
) -> Variables:
    """Set the attributes of an element. Return the custom properties within it.

    Args:
        around: attributes of the element around it.
    """
    own = {name: value for name, value, _ in declarations if name.startswith("--")}
    variables = {**variables, **own} if own else variables
    attributes = node.attributes
    attributes |= {name: value for name, value, _ in declarations if not name.startswith("--")}
    for name in PROPERTIES & attributes.keys():
        value: str | None = attributes[name]
        if "var(" in value:
            value = _replaced(value, variables, work)
        value = _meant(name, value, around) if value is not None else None
        if value is None:
            del attributes[name]
        else:
            attributes[name] = value
    if attributes.get("color", "currentcolor").lower() != "currentcolor":
        variables = {**variables, "color": attributes["color"]}
    if attributes.get("stop-color", "").strip().lower() == "currentcolor":
        attributes["stop-color"] = variables.get("color", "black")
    return variables


def _meant(name: str, value: str, around: Mapping[str, str]) -> str | None:
    """Return what a value means that every property can have, such as `inherit`; None for the value without it."""
    word = value.strip().lower() if len(value) < 20 else ""
    if word == "inherit" and name not in INHERITED:
        return around.get(name)
    if word == "initial":
        return INHERITED.get(name)
    return None if word in ("inherit", "unset", "revert", "revert-layer") else value


def _replaced(value: str, variables: Variables, work: Work) -> str | None:
    """Return a value with custom properties in place of `var()`; None if they refer to each other, or are too long."""
    for _ in range(MOST_ROUNDS):
        work.spend(len(value))
        if len(value) > MOST_VALUE_CHARS:
            return None
        if "var(" not in value:
            return value.strip()
        value = VARIABLE.sub(lambda match: variables.get(match[1], match[2] or ""), value)
    return None


def read_declarations(text: str) -> list[Declaration]:
    """Return the declarations of a `style` attribute that set a presentation property. What is not CSS is left out."""
    return _declarations(tinycss2.parse_blocks_contents(text, skip_comments=True, skip_whitespace=True))


def _declarations(nodes: Sequence[Any]) -> list[Declaration]:
    declarations: list[Declaration] = []
    for node in nodes:
        if node.type != "declaration":
            continue
        value = tinycss2.serialize(node.value).strip()
        if node.lower_name == "font":
            declarations += [Declaration(name, part, node.important) for name, part in _font(value)]
            continue
        names = (node.name,) if node.name.startswith("--") else SHORTHANDS.get(node.lower_name, (node.lower_name,))
        for name in names:
            # A long custom property may stand many times in a value.
            if (name.startswith("--") and len(value) <= MOST_VALUE_CHARS) or (name in PROPERTIES and value):
                declarations.append(Declaration(name, value, node.important))
    return declarations


FONT = re.compile(
    r"(?P<words>(?:(?:normal|italic|oblique|bold|bolder|lighter|small-caps|[1-9]00)\s+)*)"
    r"(?P<size>[0-9.]+[a-z%]*|(?:x{1,2}-)?(?:small|large)|medium|smaller|larger)(?:\s*/\s*[0-9.]+[a-z%]*)?\s+"
    r"(?P<family>[^/]+)",
    re.IGNORECASE,
)


def _font(value: str) -> list[tuple[str, str]]:
    """Return the properties that the shorthand `font` sets; [] for a value that is none."""
    match = FONT.fullmatch(value[:500])
    if match is None:
        return []
    words = match["words"].lower().split()
    style = next((word for word in words if word in ("italic", "oblique")), "normal")
    weight = next((word for word in words if word.startswith("bold") or word.isdecimal()), "normal")
    family = match["family"].strip()
    return [("font-style", style), ("font-weight", weight), ("font-size", match["size"]), ("font-family", family)]


def _rules(root: Node, work: Work) -> Iterator[Rule]:
    position = 0
    for node in root.walk():
        if node.tag != "style" or node.attributes.get("type", "text/css").strip().lower() not in ("", "text/css"):
            continue
        sheet = "".join(node.texts)
        work.spend(LETTER * len(sheet))
        for rule in tinycss2.parse_stylesheet(sheet, skip_comments=True, skip_whitespace=True):
            if rule.type != "qualified-rule":
                continue
            position += 1
            content = tinycss2.parse_blocks_contents(rule.content, skip_comments=True, skip_whitespace=True)
            declarations = tuple(_declarations(content))
            for compounds in read_selectors(rule.prelude):
                ids, classes, types = (sum(compound.weight[k] for compound in compounds) for k in range(3))
                yield Rule(compounds, (ids, classes, types, position), declarations)


FONT_SIZES = {
    "xx-small": 9.0, "x-small": 10.0, "small": 13.0, "medium": 16.0, "large": 18.0, "x-large": 24.0, "xx-large": 32.0,
}  # fmt: skip
RELATIVE_SIZES = {"smaller": 1 / 1.2, "larger": 1.2}
OF_CONTEXT = ("context-fill", "context-stroke")
"""Paints of a marker that are those of the line it stands on."""
MOST_FONT = 100_000.0
"""Largest size of a font, in user units."""
MOST_INHERITED_CHARS = 10_000
"""Longest value of a property that is inherited. A longer one is left out: it would be read again in each element."""
LANGUAGE = "en"
"""Language of whoever looks at a picture, for `systemLanguage`."""
EXTENSIONS = frozenset(("http://www.w3.org/1999/xhtml", "http://www.w3.org/1998/Math/MathML"))
"""Values of `requiredExtensions` that browsers know."""


AROUND = 100.0
"""Size of the page around a scene, in sizes of its box: it shows beside it too, where the picture has another shape."""


def page_of(root: Node, box: Box) -> list[Shape]:
    """Return what CSS paints below a document: its `background-color`, as browsers draw it; [] if it has none."""
    colour = read_colour(root.attributes.get("background-color", ""))
    if colour is None or not colour[3]:
        return []
    x, y = AROUND * box.width, AROUND * box.height
    page = rectangle(Box(box.x - x, box.y - y, box.width + 2 * x, box.height + 2 * y))
    return [Shape(tuple(page), Matrix(), colour, None, root.tag, root.number)]


class Place(NamedTuple):
    """Values that an element takes from the elements around it.

    Args:
        style: inherited property -> value; a missing one has its first value.
        matrix: from user space to the space of the scene.
        lengths: sizes that relative lengths refer to.
        depth: elements around it, those of `use` included.
        uses: positions of the elements that are being shown by `use` or another reference.
        context: fill and stroke of the line that a marker stands on.
        marker: whether it is within a marker.
        clip: whether it is within a clip path, of which the outlines alone count.
    """

    style: Mapping[str, str]
    matrix: Matrix
    lengths: Lengths
    depth: int = 0
    uses: tuple[int, ...] = ()
    context: tuple[Source | None, Source | None] = (None, None)
    marker: bool = False
    clip: bool = False

    def get(self, name: str) -> str:
        """Return the value of an inherited property."""
        return self.style.get(name) or INHERITED[name]


def is_hidden(node: Node) -> bool:
    """Return whether an element is left out with all that is within it."""
    return node.attributes.get("display", "").strip().lower() == "none" or fails(node)


def fails(node: Node) -> bool:
    """Return whether an element has a condition that is not met, of languages or of extensions.

    Source: SVG 2, section 5.7. No language and no extension is a condition that nobody meets.
    """
    extensions, languages = (node.attributes.get(name) for name in ("requiredExtensions", "systemLanguage"))
    if extensions is not None and not (extensions.strip() and EXTENSIONS.issuperset(extensions.split())):
        return True
    if languages is None:
        return False
    return not any(word.strip().lower().split("-")[0] == LANGUAGE for word in languages.split(","))


def inherit(node: Node, place: Place) -> Place:
    """Return the place within an element, with its own values of inherited properties. A wrong value is left out."""
    own = {name: value.strip() for name, value in node.attributes.items() if name in INHERITED}
    own = {name: value for name, value in own.items() if 0 < len(value) <= MOST_INHERITED_CHARS}
    if not own:
        return place
    for name in ("fill", "stroke"):
        value = own.get(name)
        if value is not None and value not in OF_CONTEXT and read_paint(value) is None:
            del own[name]
    if own.get("color", "").lower() == "currentcolor":
        del own["color"]
    lengths = place.lengths
    if "font-size" in own:
        size = _font_size(own.pop("font-size"), lengths.em)
        lengths = lengths._replace(em=size)
    return place._replace(style={**place.style, **own}, lengths=lengths)


def _font_size(text: str, em: float) -> float:
    word = text.lower()
    if word in FONT_SIZES:
        return FONT_SIZES[word]
    if word in RELATIVE_SIZES:
        return em * RELATIVE_SIZES[word]
    size = read_length(text, whole=em, em=em)
    return em if size is None or not 0 <= size <= MOST_FONT else size
