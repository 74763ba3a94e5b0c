"""Arrows of drawn diagrams: which shapes they join, and lines that end on outlines and pass no other shape."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from vlmrl.tasks.vfig.drawn.code import reference, tag
from vlmrl.tasks.vfig.drawn.fills import DASHES
from vlmrl.tasks.vfig.drawn.plane import Box, Point, leave, moved, numbers, segments_cross
from vlmrl.tasks.vfig.drawn.shapes import Outline

LEAST_SHARE, MOST_SHARE = (0.4, 0.6), (0.6, 0.8)
"""Ranges of the smallest and the largest number of arrows per shape."""
CURVED_CHANCE = 0.4
"""Probability that an arrow is a quadratic curve."""
REVERSED_CHANCE = 0.2
"""Probability that an arrow points from the later to the earlier shape of the layout."""
BENDS = (0.15, 0.25, 0.35)
"""Distances of a curve's control point from the line between the shapes' centres, per length of this line."""
HEAD = 5.0
"""Length and width of an arrow head, in widths of the arrow."""
OVERHANG = 1.0
"""Part of the head that extends beyond the end of the arrow's line, in widths of the arrow."""
CLEARANCE = 3.0
"""Distance from the boxes of other shapes that an arrow keeps where it can, in pixels."""
SHORTEST = 20.0
"""Smallest distance of an arrow's ends, in pixels; shorter ones are drawn only where no other pair is left."""
SAMPLES = 24
"""Number of pieces into which a curve is cut to see what it crosses."""


class Site(NamedTuple):
    """Shape that arrows can join.

    Args:
        centre: the point that arrows aim at.
        outlines: closed outlines of the shape and of its copies.
        extent: smallest box around all of them.
    """

    centre: Point
    outlines: tuple[Outline, ...]
    extent: Box


class Arrow(NamedTuple):
    """Arrow between two shapes.

    Args:
        source, target: indices of the shapes.
        points: start and tip on the outlines; for a quadratic curve the control point between them.
    """

    source: int
    target: int
    points: tuple[Point, ...]

    @property
    def is_curved(self) -> bool:
        return len(self.points) == 3


class ArrowLook(NamedTuple):
    """Looks of an arrow: colour, width in pixels, border style from `DASHES`, id of its head."""

    colour: str
    width: float
    dash: str
    head: str


def edge_count(num_shapes: int, rng: random.Random) -> int:
    """Return a random number of arrows for a diagram."""
    least, most = (math.floor(num_shapes * rng.uniform(*shares)) for shares in (LEAST_SHARE, MOST_SHARE))
    return rng.randint(least, max(least, most))


def exit_of(site: Site, towards: Point) -> Point:
    """Return where the ray from the centre of a shape through a point leaves the shape for the last time."""
    exits = [leave(site.centre, towards, outline) for outline in site.outlines]
    return max(exits, key=lambda point: math.dist(site.centre, point))


def path_of(points: Sequence[Point]) -> list[Point]:
    """Return points along a straight arrow or a quadratic curve, from its start to its tip."""
    if len(points) == 2:
        return list(points)
    a, b, c = points
    shares = [i / SAMPLES for i in range(SAMPLES + 1)]
    return [
        Point(
            (1 - t) ** 2 * a.x + 2 * t * (1 - t) * b.x + t**2 * c.x,
            (1 - t) ** 2 * a.y + 2 * t * (1 - t) * b.y + t**2 * c.y,
        )
        for t in shares
    ]


def crosses(path: Sequence[Point], box: Box) -> bool:
    """Return whether a path of straight pieces has a point in a box."""
    sides = list(pairwise([box.at(*corner) for corner in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))]))
    if any(box.contains(point) for point in path):
        return True
    return any(segments_cross(a, b, c, d) for a, b in pairwise(path) for c, d in sides)


def routes(source: Site, target: Site, is_curved: bool, rng: random.Random) -> Iterator[tuple[Point, ...]]:
    """Yield the points of possible arrows between two shapes: one straight line, or curves with different bends."""
    a, b = source.centre, target.centre
    if not is_curved:
        yield exit_of(source, b), exit_of(target, a)
        return
    for bend in rng.sample([sign * bend for bend in BENDS for sign in (-1, 1)], 2 * len(BENDS)):
        control = Point((a.x + b.x) / 2 - bend * (b.y - a.y), (a.y + b.y) / 2 + bend * (b.x - a.x))
        yield exit_of(source, control), control, exit_of(target, control)


class Router:
    """Router of the arrows of a diagram: each avoids the shapes, the edge of the canvas and earlier arrows.

    Args:
        sites: the shapes.
        frame: the part of the canvas in which arrows are drawn.
    """

    def __init__(self, sites: Sequence[Site], frame: Box) -> None:
        self.sites, self.frame = sites, frame
        self.paths: list[list[Point]] = []

    def faults(self, source: int, target: int, points: tuple[Point, ...]) -> float:
        """Return how bad an arrow is; 0 if it crosses nothing, and at least 100 if it crosses a shape."""
        path = path_of(points)
        others = [site.extent for i, site in enumerate(self.sites) if i not in (source, target)]
        # A curve that begins on the far side of its own shape, or comes back to it, runs through it.
        own = [self.sites[i].extent.grown(-2) for i in (source, target)] if len(points) == 3 else []
        through = sum(crosses(path, box.grown(CLEARANCE)) for box in others)
        through += sum(crosses(path[2:-2], box) for box in own)
        outside = sum(not self.frame.contains(point) for point in path)
        is_short = math.dist(points[0], points[-1]) < SHORTEST
        crossings = sum(
            segments_cross(a, b, c, d) for a, b in pairwise(path) for other in self.paths for c, d in pairwise(other)
        )
        return 100 * through + 100 * outside + 30 * is_short + 10 * crossings

    def join(self, pairs: Sequence[tuple[int, int]], is_curved: bool, rng: random.Random) -> Arrow:
        """Return an arrow between one of the pairs: the first without a fault, else one with the fewest faults."""
        best, fewest = None, math.inf
        for source, target in pairs:
            for points in routes(self.sites[source], self.sites[target], is_curved, rng):
                faults = self.faults(source, target, points)
                if faults < fewest:
                    best, fewest = Arrow(source, target, points), faults
                if faults == 0:
                    break
            if fewest == 0:
                break
        assert best is not None, "there is no pair to join"
        self.paths.append(path_of(best.points))
        return best


def connect(sites: Sequence[Site], frame: Box, rng: random.Random) -> list[Arrow]:
    """Return random arrows between different pairs of shapes, mostly neighbours."""
    router = Router(sites, frame)
    free = list(combinations(range(len(sites)), 2))
    arrows: list[Arrow] = []
    for _ in range(min(edge_count(len(sites), rng), len(free))):
        is_curved = rng.random() < CURVED_CHANCE
        lengths = {p: math.dist(sites[p[0]].centre, sites[p[1]].centre) * rng.uniform(0.7, 1.6) for p in free}
        ordered = sorted(free, key=lengths.__getitem__)
        pairs = [(b, a) if rng.random() < REVERSED_CHANCE else (a, b) for a, b in ordered]
        arrow = router.join(pairs, is_curved, rng)
        free.remove((min(arrow.source, arrow.target), max(arrow.source, arrow.target)))
        arrows.append(arrow)
    return arrows


def head_code(identity: str, colour: str) -> str:
    """Return the code of a marker: a triangle whose tip is `OVERHANG` beyond the end of the line."""
    size: dict[str, str | float] = {
        "refX": HEAD - OVERHANG,
        "refY": HEAD / 2,
        "markerWidth": HEAD,
        "markerHeight": HEAD,
    }
    triangle = [Point(0, 0), Point(HEAD, HEAD / 2), Point(0, HEAD)]
    view = f"0 0 {HEAD:g} {HEAD:g}"
    marker: dict[str, str | float] = {"id": identity, "viewBox": view, **size, "orient": "auto"}
    return tag("marker", marker, tag("polygon", {"points": numbers(triangle), "fill": colour}))


def arrow_code(identity: str, arrow: Arrow, look: ArrowLook) -> str:
    """Return the code of an arrow: a line, or a path with a quadratic curve to the base of the head.

    The last piece of the path is straight, below the head. Renderers differ in the direction of a marker at the end of
    a curve; at the end of a straight piece they agree.
    """
    stroke: dict[str, str | float] = {"stroke": look.colour, "stroke-width": look.width}
    dashes = " ".join(f"{length * look.width:g}" for length in DASHES[look.dash])
    stroke |= {"stroke-dasharray": dashes} if dashes else {}
    stroke["marker-end"] = reference(look.head)
    *before, tip = arrow.points
    end = moved(tip, before[-1], OVERHANG * look.width)
    if not arrow.is_curved:
        (x1, y1), (x2, y2) = before[0], end
        return tag("line", {"id": identity, "x1": x1, "y1": y1, "x2": x2, "y2": y2, **stroke})
    base = moved(tip, before[-1], HEAD * look.width)
    start, control, base, end = (numbers([point]) for point in (*before, base, end))
    return tag("path", {"id": identity, "d": f"M{start} Q{control} {base} L{end}", "fill": "none", **stroke})
