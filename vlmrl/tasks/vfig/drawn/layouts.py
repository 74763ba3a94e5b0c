"""Layouts of diagrams: the places of their shapes, and arrows that end on outlines and pass no other shape.

A layout gives centres in the unit square. `place` turns them into boxes of one size that do not overlap.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from vlmrl.errors import DataError
from vlmrl.tasks.vfig.drawn.shapes import (
    DASHES,
    Box,
    Outline,
    Point,
    leave,
    moved,
    numbers,
    reference,
    segments_cross,
    tag,
)

Layout = Callable[[int, random.Random], list[Point]]
"""(number of shapes, random numbers) -> their centres, as shares of the width and the height."""
ASPECTS = (1.0, 1.25, 1.5, 1.8)
"""Widths of a slot per height that are tried."""
LARGEST_SHARE = 0.3
"""Largest share of the frame's width or height that a slot takes."""
GAP = 0.06
"""Smallest distance of two slots, as a share of the frame's shorter side."""
RELATIVE_GAP = 0.12
"""Distance of two slots beyond `GAP`, as a share of the slot's side."""
SPLIT_CHANCE = 0.3
"""Probability that a diagram combines two layouts."""
FEWEST_TO_SPLIT = 4
"""Smallest number of shapes that are split over two layouts."""
LEGIBLE = (84.0, 54.0)
"""Width and height of a slot that holds a short label, in pixels; layouts with such slots are preferred."""
SMALLEST = (16.0, 16.0)
"""Smallest width and height of a slot that a shape is drawn in, in pixels."""


def spread(count: int) -> list[float]:
    """Return evenly spaced shares from 0 to 1; the middle if there is only one."""
    return [i / (count - 1) for i in range(count)] if count > 1 else [0.5]


def rows_of(counts: Sequence[int]) -> list[Point]:
    """Return the centres of rows below each other, each evenly filled and centred."""
    return [
        Point((i + 0.5) / count, v) for count, v in zip(counts, spread(len(counts)), strict=True) for i in range(count)
    ]


def swapped(points: Sequence[Point]) -> list[Point]:
    return [Point(y, x) for x, y in points]


def flipped(points: Sequence[Point]) -> list[Point]:
    return [Point(x, 1 - y) for x, y in points]


def around(count: int, start: float, radii: Sequence[float] = (0.5,)) -> list[Point]:
    """Return centres on circles around the middle, from the angle `start` in radians; the radii take turns."""
    angles = [start + 2 * math.pi * i / count for i in range(count)]
    lengths = [radii[i % len(radii)] for i in range(count)]
    return [Point(0.5 + r * math.cos(a), 0.5 + r * math.sin(a)) for a, r in zip(angles, lengths, strict=True)]


def row(count: int, rng: random.Random) -> list[Point]:
    v = rng.uniform(0.3, 0.7)
    return [Point(u, v) for u in spread(count)]


def grid(count: int, rng: random.Random) -> list[Point]:
    columns = min(count, max(1, round(math.sqrt(count * rng.uniform(0.8, 1.6)))))
    lines = math.ceil(count / columns)
    us, vs = spread(columns), spread(lines)
    return [Point(us[i % columns], vs[i // columns]) for i in range(count)]


def checkerboard(count: int, rng: random.Random) -> list[Point]:
    columns = max(2, round(math.sqrt(count * rng.uniform(1.4, 2.4))))
    fields = [(line, place) for line in range(count) for place in range(columns) if (line + place) % 2 == 0][:count]
    us, vs = spread(columns), spread(fields[-1][0] + 1)
    return [Point(us[place], vs[line]) for line, place in fields]


def two_rows(count: int, rng: random.Random) -> list[Point]:
    upper = (count + rng.randrange(2)) // 2
    return rows_of([part for part in (upper, count - upper) if part])


def ring(count: int, rng: random.Random) -> list[Point]:
    return around(count, rng.uniform(0, 2 * math.pi))


def arc(count: int, rng: random.Random) -> list[Point]:
    points = [Point(0.5 - 0.5 * math.cos(math.pi * u), 1 - math.sin(math.pi * u)) for u in spread(count)]
    return points if rng.random() < 0.5 else flipped(points)


def star(count: int, rng: random.Random) -> list[Point]:
    """Return a middle and rays that are long and short by turns."""
    return [Point(0.5, 0.5), *around(count - 1, rng.choice([0, math.pi / 4, math.pi / 2]), (0.5, 0.36))][:count]


def cross(count: int, rng: random.Random) -> list[Point]:
    """Return a middle and four arms of equal steps."""
    longest = max(1, math.ceil((count - 1) / 4))
    turned = rng.randrange(4)
    points = [Point(0.5, 0.5)]
    for i in range(count - 1):
        length, angle = 0.5 * (i // 4 + 1) / longest, (i + turned) % 4 * math.pi / 2
        points.append(Point(0.5 + length * round(math.cos(angle)), 0.5 + length * round(math.sin(angle))))
    return points[:count]


def tree_down(count: int, rng: random.Random) -> list[Point]:
    branches, counts, rest = rng.choice([2, 3]), [], count
    while rest:
        counts.append(min(rest, branches ** len(counts)))
        rest -= counts[-1]
    return rows_of(counts)


def pyramid(count: int, rng: random.Random) -> list[Point]:
    """Return rows of 1, 2, 3, ... centres; the last row takes the rest."""
    counts, rest = [], count
    while rest:
        counts.append(min(rest, len(counts) + 1))
        rest -= counts[-1]
    return rows_of(counts)


def layers(count: int, rng: random.Random) -> list[Point]:
    """Return columns of random numbers of centres, as networks are drawn."""
    num_layers = min(count, rng.choice([2, 3, 4]))
    counts = [1] * num_layers
    for _ in range(count - num_layers):
        counts[rng.randrange(num_layers)] += 1
    return swapped(rows_of(counts))


def zigzag(count: int, rng: random.Random) -> list[Point]:
    low, high = rng.uniform(0, 0.2), rng.uniform(0.8, 1)
    points = [Point(u, (low, high)[i % 2]) for i, u in enumerate(spread(count))]
    return points if rng.random() < 0.5 else swapped(points)


def diagonal(count: int, rng: random.Random) -> list[Point]:
    points = [Point(u, u) for u in spread(count)]
    return points if rng.random() < 0.5 else flipped(points)


def swim_lanes(count: int, rng: random.Random) -> list[Point]:
    """Return horizontal lanes; time runs to the right and a random lane acts at each time."""
    lanes = spread(rng.choice([2, 3]))
    lane = rng.randrange(len(lanes))
    points = []
    for u in spread(count):
        points.append(Point(u, lanes[lane]))
        lane = (lane + rng.randrange(1, len(lanes))) % len(lanes)
    return points


LAYOUTS: dict[str, Layout] = {
    "row": row,
    "column": lambda count, rng: swapped(row(count, rng)),
    "grid": grid,
    "checkerboard": checkerboard,
    "two-rows": two_rows,
    "two-columns": lambda count, rng: swapped(two_rows(count, rng)),
    "ring": ring,
    "arc": arc,
    "hub-and-spokes": lambda n, rng: [Point(0.5, 0.5), *around(n - 1, rng.uniform(0, 2 * math.pi))][:n],
    "star": star,
    "cross": cross,
    "tree-down": tree_down,
    "tree-right": lambda count, rng: swapped(tree_down(count, rng)),
    "pyramid": pyramid,
    "funnel": lambda count, rng: flipped(pyramid(count, rng))[::-1],
    "layers": layers,
    "zigzag": zigzag,
    "diagonal": diagonal,
    "swim-lanes": swim_lanes,
}


def place(centres: Sequence[Point], frame: Box) -> list[Box]:
    """Return boxes of one size in the frame, as large as the centres allow. They do not overlap.

    The outermost centres are moved inwards so that their boxes touch the frame. A box of width w then has its centre at
    w / 2 + u (W - w), and two boxes with the distance du are side by side if du (W - w) >= w (1 + RELATIVE_GAP) + gap.
    This gives the largest w of a pair; the largest height follows in the same way. A pair needs only one of the two.

    Args:
        centres: in the unit square; boxes of equal centres have no size.
    """
    gap = GAP * min(frame.width, frame.height)

    def largest(share: float, side: float) -> float:
        return max(0.0, (share * side - gap) / (1 + RELATIVE_GAP + share))

    limits = [
        (largest(abs(a.x - b.x), frame.width), largest(abs(a.y - b.y), frame.height))
        for i, a in enumerate(centres)
        for b in centres[:i]
    ]

    def size(aspect: float) -> tuple[float, float]:
        height = min(LARGEST_SHARE * frame.height, LARGEST_SHARE * frame.width / aspect)
        height = min([height, *(max(w / aspect, h) for w, h in limits)])
        return aspect * height, height

    width, height = max(map(size, ASPECTS), key=lambda sides: sides[0] * sides[1])
    corners = [(frame.x1 + u * (frame.width - width), frame.y1 + v * (frame.height - height)) for u, v in centres]
    return [Box(x, y, x + width, y + height) for x, y in corners]


class Placed(NamedTuple):
    """Boxes of the shapes of a diagram, in the order of its layouts, and the layouts' names."""

    layouts: tuple[str, ...]
    slots: list[Box]


def fits(slots: Sequence[Box], size: tuple[float, float]) -> bool:
    """Return whether every slot has at least this width and height, in pixels."""
    return all(slot.width >= size[0] and slot.height >= size[1] for slot in slots)


def lay_out(count: int, frame: Box, rng: random.Random) -> Placed:
    """Place shapes with one random layout, preferably one whose slots hold a label.

    Raises: DataError if the frame is too small for every layout.
    """
    names = rng.sample(sorted(LAYOUTS), len(LAYOUTS))
    tried = [Placed((name,), place(LAYOUTS[name](count, rng), frame)) for name in names]
    legible = [placed for placed in tried if fits(placed.slots, LEGIBLE)]
    if legible:
        return legible[0]
    best = max(tried, key=lambda placed: min(placed.slots[0].width / LEGIBLE[0], placed.slots[0].height / LEGIBLE[1]))
    if not fits(best.slots, SMALLEST):
        message = f"{count} shapes do not fit on {frame.width:.0f} x {frame.height:.0f} pixels"
        raise DataError(message, hint="choose larger canvases, or fewer shapes")
    return best


def arrange(count: int, frame: Box, rng: random.Random) -> Placed:
    """Place shapes with one layout, or with two on the halves of a split frame.

    Args:
        count: number of shapes, at least 1.
    Raises: DataError if the frame is too small.
    """
    if rng.random() >= SPLIT_CHANCE or count < FEWEST_TO_SPLIT:
        return lay_out(count, frame, rng)
    share, gap = rng.uniform(0.4, 0.6), GAP * min(frame.width, frame.height)
    first = min(count - 1, max(1, round(count * share)))
    if rng.random() < 0.5:
        cut = frame.x1 + share * frame.width
        halves = frame._replace(x2=cut - gap / 2), frame._replace(x1=cut + gap / 2)
    else:
        cut = frame.y1 + share * frame.height
        halves = frame._replace(y2=cut - gap / 2), frame._replace(y1=cut + gap / 2)
    parts = [lay_out(n, half, rng) for n, half in zip((first, count - first), halves, strict=True)]
    return Placed(parts[0].layouts + parts[1].layouts, parts[0].slots + parts[1].slots)


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
        assert best is not None, "there is not a pair to join"
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
