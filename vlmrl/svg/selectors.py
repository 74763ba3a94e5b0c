"""Selectors of style sheets: types, `*`, classes, ids, attributes, some pseudo-classes, and joined compounds of these.

They are joined as descendants (space), children (`>`) and siblings (`+`, `~`). Pseudo-classes are `:root`,
`:first-child`, `:last-child`, `:only-child`, `:nth-child()`, `:nth-last-child()`, and `:not()` of compounds. Those of a
state such as `:hover` select nothing, as in a picture. A list with any other selector is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tinycss2.nth import parse_nth

from vlmrl.svg.limits import Work
from vlmrl.svg.parse import Node

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
    """Elements of a document with their places.

    Args:
        root: the outermost element.
        work: counter of the comparisons.
    """

    def __init__(self, root: Node, work: Work) -> None:
        self._work = work
        self._places: dict[int, tuple[Node | None, int]] = {root.number: (None, 0)}
        for node in root.walk():
            for index, child in enumerate(node.children):
                self._places[child.number] = (node, index)

    def selects(self, selector: Selector, node: Node) -> bool:
        """Return whether a selector selects an element. Raises: SvgRefused (`limit`) for too much work."""
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
