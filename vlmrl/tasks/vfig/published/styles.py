"""Style of elements as the published evaluator finds it: attributes, `style`, and classes of style sheets; fonts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import name_of

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
    """Font families of a document; those of groups are looked up once.

    Args:
        parent_of: parents of its elements.
        rules: style sheets.
    """

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
