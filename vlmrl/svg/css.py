"""Style sheets of an SVG document: their rules and `style` attributes become attributes of the elements.

Selectors: types, `*`, classes, ids, and compounds of these, with descendants (space) and children (`>`), in lists. A
rule with any other selector, and every at-rule, has no effect: no sheet is imported, no font is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tinycss2

from vlmrl.svg.limits import SvgRefused
from vlmrl.svg.parse import Node
from vlmrl.svg.properties import PROPERTIES, SHORTHANDS

MOST_RULES = 500
MOST_CHECKS = 2_000_000
"""Largest number of selectors times elements."""
MOST_PARTS = 8
"""Largest number of compounds in a selector. A rule with a longer one has no effect."""


class Compound(NamedTuple):
    """Selector of one element: it has this type ("" = any), these ids and these classes.

    Args:
        is_child: whether the element is a child of one that the compound before selects; else any descendant.
    """

    tag: str
    ids: tuple[str, ...]
    classes: tuple[str, ...]
    is_child: bool


class Rule(NamedTuple):
    """One selector of a rule, with its declarations.

    Args:
        weight: ids, classes and types in the selector, then the position of the rule.
    """

    compounds: tuple[Compound, ...]
    weight: tuple[int, int, int, int]
    declarations: tuple[Declaration, ...]


class Declaration(NamedTuple):
    """Value of one property. `important`: it has precedence over those that are not."""

    name: str
    value: str
    important: bool


def apply_styles(root: Node) -> None:
    """Replace `style` attributes and rules of `style` elements by attributes, in place. `class` attributes stay.

    Raises: SvgRefused (`limit`) for too many rules or too much work.
    """
    rules = sorted(_rules(root), key=lambda rule: rule.weight)
    elements = sum(1 for _ in root.walk())
    if len(rules) * elements > MOST_CHECKS:
        raise SvgRefused("limit", f"{len(rules):,} style rules for {elements:,} elements are too many")
    waiting: list[tuple[Node, tuple[Node, ...]]] = [(root, ())]
    while waiting:
        node, above = waiting.pop()
        _apply(node, above, rules)
        waiting += [(child, (*above, node)) for child in node.children]


def _apply(node: Node, above: tuple[Node, ...], rules: Sequence[Rule]) -> None:
    declarations = [d for rule in rules if _selects(rule.compounds, node, above) for d in rule.declarations]
    declarations += read_declarations(node.attributes.pop("style", ""))
    declarations.sort(key=lambda declaration: declaration.important)  # stable: the others keep their order
    for name, value, _ in declarations:
        node.attributes[name] = value


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
        for name in SHORTHANDS.get(node.lower_name, (node.lower_name,)):
            if name in PROPERTIES and value:
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


def _rules(root: Node) -> Iterator[Rule]:
    position = 0
    for node in root.walk():
        if node.tag != "style" or node.attributes.get("type", "text/css").strip().lower() not in ("", "text/css"):
            continue
        for rule in tinycss2.parse_stylesheet("".join(node.texts), skip_comments=True, skip_whitespace=True):
            if rule.type != "qualified-rule":
                continue
            position += 1
            if position > MOST_RULES:
                raise SvgRefused("limit", f"it has more than {MOST_RULES} style rules")
            content = tinycss2.parse_blocks_contents(rule.content, skip_comments=True, skip_whitespace=True)
            declarations = tuple(_declarations(content))
            for compounds in read_selectors(rule.prelude):
                ids = sum(len(compound.ids) for compound in compounds)
                classes = sum(len(compound.classes) for compound in compounds)
                types = sum(bool(compound.tag) for compound in compounds)
                yield Rule(compounds, (ids, classes, types, position), declarations)


def read_selectors(tokens: Sequence[Any]) -> list[tuple[Compound, ...]]:
    """Return the selectors of a list; [] if one of them is not known, as CSS has it."""
    selectors: list[tuple[Compound, ...]] = []
    part: list[Any] = []
    for token in [*tokens, None]:
        if token is not None and not (token.type == "literal" and token.value == ","):
            part.append(token)
            continue
        selector = _selector(part)
        if selector is None:
            return []
        selectors.append(selector)
        part = []
    return selectors


def _selector(tokens: Sequence[Any]) -> tuple[Compound, ...] | None:
    """Return the compounds of one selector; None if it is not known."""
    compounds: list[Compound] = []
    part: list[Any] = []
    is_child, follows = False, False
    for token in [*tokens, None]:
        if token is not None and token.type == "comment":
            continue
        separates = token is None or token.type == "whitespace" or (token.type == "literal" and token.value == ">")
        if not separates:
            part.append(token)
            continue
        if part:
            compound = _compound(part, is_child)
            if compound is None:
                return None
            compounds.append(compound)
            part, is_child, follows = [], False, False
        if token is not None and token.type == "literal":
            if not compounds or follows:
                return None
            is_child = follows = True
    return tuple(compounds) if compounds and not follows and len(compounds) <= MOST_PARTS else None


def _compound(tokens: Sequence[Any], is_child: bool) -> Compound | None:
    tag, ids, classes, place = "", list[str](), list[str](), 0
    while place < len(tokens):
        token = tokens[place]
        following = tokens[place + 1] if place + 1 < len(tokens) else None
        if token.type == "ident" and place == 0:
            tag = token.value
        elif token.type == "literal" and token.value == "*" and place == 0:
            tag = ""
        elif token.type == "hash":
            ids.append(token.value)
        elif token.type == "literal" and token.value == "." and following is not None and following.type == "ident":
            classes.append(following.value)
            place += 1
        else:
            return None
        place += 1
    return Compound(tag, tuple(ids), tuple(classes), is_child)


def _selects(compounds: Sequence[Compound], node: Node, above: Sequence[Node]) -> bool:
    """Return whether a selector selects an element, given its ancestors from the root on."""
    if not _fits(compounds[-1], node):
        return False
    if len(compounds) == 1:
        return True
    if compounds[-1].is_child:
        return bool(above) and _selects(compounds[:-1], above[-1], above[:-1])
    return any(_selects(compounds[:-1], above[i], above[:i]) for i in range(len(above)))


def _fits(compound: Compound, node: Node) -> bool:
    if compound.tag and compound.tag != node.tag:
        return False
    attributes: Mapping[str, str] = node.attributes
    if any(attributes.get("id") != name for name in compound.ids):
        return False
    return not compound.classes or set(compound.classes) <= set(attributes.get("class", "").split())
