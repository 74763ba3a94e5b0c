"""Interface of the walk that makes items, for markers, clip paths and masks, which show elements by reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vlmrl.svg.limits import Work
from vlmrl.svg.parse import Node
from vlmrl.svg.scene import Item
from vlmrl.svg.styles import Place


class Walk(Protocol):
    """Walk over a document."""

    @property
    def ids(self) -> Mapping[str, Node]:
        """Elements by their `id`."""
        ...

    @property
    def work(self) -> Work:
        """Counter of the work."""
        ...

    def count(self, node: Node) -> None:
        """Count an element that is drawn. Raises: SvgRefused (`limit`)."""
        ...

    def children(self, node: Node, place: Place, items: list[Item]) -> None:
        """Add what the children of an element paint."""
        ...

    def defined(self, node: Node, place: Place) -> Place:
        """Return the place within an element that is shown by reference: it inherits from where it is defined."""
        ...
