"""Shapes of a response that lie so much upon each other that the published evaluator takes them for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmrl.tasks.vfig.published.document import Work
from vlmrl.tasks.vfig.published.outlines import Box, area

if TYPE_CHECKING:
    from vlmrl.tasks.vfig.published.response_shapes import Drawn

GAP = 2
"""Largest gap of boxes that touch, in pixels."""
INNER_SHARE = 0.8
"""Share of the smaller box in the other from which it lies inside."""
INNER_SIZE = 0.7
"""Ratio of areas below which a box inside another is a shape of its own."""
COMMON = 0.3
"""Smallest share of either box that two boxes of one shape have in common, exclusive."""


def merged(shapes: Sequence[Drawn], work: Work) -> list[list[Drawn]]:
    """Return the shapes in groups that belong together, each group in the order of its members."""
    group_of = list(range(len(shapes)))

    def leader(i: int) -> int:
        while group_of[i] != i:
            group_of[i] = group_of[group_of[i]]
            i = group_of[i]
        return i

    for i, one in enumerate(shapes):
        work.spend(len(shapes) - i)
        for j in range(i + 1, len(shapes)):
            if belong_together(one.box, shapes[j].box):
                first, second = sorted((leader(i), leader(j)))
                group_of[second] = first
    groups: dict[int, list[Drawn]] = {}
    for i, one in enumerate(shapes):
        groups.setdefault(leader(i), []).append(one)
    return list(groups.values())


def belong_together(one: Box, other: Box) -> bool:
    """Return whether two boxes are taken for parts of one shape."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    if across <= 0 or down <= 0:
        return False
    common = across * down
    small, large = sorted((area(one), area(other)))
    if small <= 0:
        return False
    if common / small > INNER_SHARE and small / large < INNER_SIZE:
        return False
    return common / small > COMMON and common / large > COMMON
