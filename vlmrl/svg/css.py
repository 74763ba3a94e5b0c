"""Style sheets of an SVG document: their rules and `style` attributes become attributes of the elements.

A rule with an unknown selector (see selectors.py), and every at-rule, has no effect: no sheet is imported, no font is
loaded. `var()` is replaced by the value of a custom property of the element, or of one around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tinycss2

from vlmrl.svg.limits import Work
from vlmrl.svg.parse import Node
from vlmrl.svg.properties import INHERITED, PROPERTIES, SHORTHANDS
from vlmrl.svg.selectors import Selector, Tree, read_selectors

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

    Raises: SvgRefused (`limit`) for too much work.
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
