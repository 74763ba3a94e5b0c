"""Problems about areas: triangle, parallelogram, trapezoid, rectangle with its diagonal, square with a round hole."""

from __future__ import annotations

import random
from fractions import Fraction

from vlmrl.tasks.geometry.drawn.problem import Problem, letters, posed, product
from vlmrl.tasks.geometry.drawn.sketch import Point, Sketch, centre_of, direction, distance, towards


def triangle_area(rng: random.Random, values: bool) -> Problem:
    """Return a problem: base and height of a triangle are known."""
    base, height = rng.randint(6, 24), rng.randint(4, 16)
    while not 0.45 <= height / base <= 1.2:
        base, height = rng.randint(6, 24), rng.randint(4, 16)
    foot = base * rng.uniform(0.25, 0.75)
    corners: list[Point] = [(0.0, 0.0), (float(base), 0.0), (foot, float(height)), (foot, 0.0)]
    a, b, c, h = posed(rng, corners)
    names = letters(rng)
    sketch = Sketch(values)
    sketch.polygon((a, b, c), names)
    sketch.dashed.append((c, h))
    near, far = (a, b) if foot > base / 2 else (b, a)
    sketch.squares.append((h, c, near))
    sketch.length(c, h, str(height), away=near if foot > base / 2 else far)
    _whole_side(sketch, a, b, str(base), away=c)
    area = Fraction(base * height, 2)
    return Problem(
        "triangle-area",
        (base, height),
        sketch,
        f"Find the area of triangle ${names}$.",
        f"Triangle ${names}$ has the base ${names[0]}{names[1]} = {base}$, and its height over this base is ${height}$."
        " Find its area.",
        f"The area is half of base times height: $\\frac{{1}}{{2}} \\cdot {base} \\cdot {height} = {product(area)}$.",
        product(area),
    )


def parallelogram_area(rng: random.Random, values: bool) -> Problem:
    """Return a problem: base and height of a parallelogram are known."""
    base, height = rng.randint(8, 22), rng.randint(4, 14)
    while not 0.4 <= height / base <= 0.9:
        base, height = rng.randint(8, 22), rng.randint(4, 14)
    shift = rng.uniform(0.25, 0.45) * base
    corners: list[Point] = [
        (0.0, 0.0), (float(base), 0.0), (base + shift, float(height)), (shift, float(height)), (shift, 0.0),
    ]  # fmt: skip
    a, b, c, d, foot = posed(rng, corners)
    sketch = Sketch(values)
    sketch.polygon((a, b, c, d), "ABCD")
    sketch.dashed.append((d, foot))
    sketch.squares.append((foot, d, b))
    sketch.length(d, foot, str(height), away=a)
    _whole_side(sketch, a, b, str(base), away=c)
    area = base * height
    return Problem(
        "parallelogram-area",
        (base, height),
        sketch,
        "Find the area of the parallelogram $ABCD$.",
        f"The side $AB$ of the parallelogram $ABCD$ has the length ${base}$, and the height over $AB$ is ${height}$."
        " Find the area of $ABCD$.",
        f"The area is base times height: ${base} \\cdot {height} = {area}$.",
        str(area),
    )


def trapezoid_area(rng: random.Random, values: bool) -> Problem:
    """Return a problem: both parallel sides and the height of a trapezoid are known."""
    long_side, short_side = rng.randint(9, 22), rng.randint(4, 14)
    height = rng.randint(4, 12)
    while not (short_side <= 0.75 * long_side and 0.4 <= height / long_side <= 0.9):
        long_side, short_side, height = rng.randint(9, 22), rng.randint(4, 14), rng.randint(4, 12)
    shift = rng.uniform(0.25, 0.75) * (long_side - short_side)
    top = float(height)
    corners: list[Point] = [(0.0, 0.0), (float(long_side), 0.0), (shift + short_side, top), (shift, top), (shift, 0.0)]
    a, b, c, d, foot = posed(rng, corners)
    sketch = Sketch(values)
    sketch.polygon((a, b, c, d), "ABCD")
    sketch.dashed.append((d, foot))
    sketch.squares.append((foot, d, b))
    sketch.arrows += [(a, b, 1), (d, c, 1)]
    sketch.length(d, foot, str(height), away=a)
    _whole_side(sketch, a, b, str(long_side), away=c)
    sketch.length(d, c, str(short_side), away=a)
    area = Fraction((long_side + short_side) * height, 2)
    return Problem(
        "trapezoid-area",
        (long_side, short_side, height),
        sketch,
        "Find the area of the trapezoid $ABCD$.",
        f"In the trapezoid $ABCD$, $AB$ is parallel to $DC$. $AB = {long_side}$, $DC = {short_side}$, and the height is"
        f" ${height}$. Find the area of $ABCD$.",
        f"The area is the mean of the two sides times the height: $\\frac{{{long_side} + {short_side}}}{{2}} \\cdot"
        f" {height} = {product(area)}$.",
        product(area),
    )


def rectangle_area(rng: random.Random, values: bool) -> Problem:
    """Return a problem: one side and the diagonal of a rectangle are known; both sides are whole numbers."""
    short_side, long_side, diagonal = rng.choice(((3, 4, 5), (5, 12, 13), (8, 15, 17), (20, 21, 29)))
    factor = rng.randint(1, 6 if diagonal < 15 else 2)
    short_side, long_side, diagonal = factor * short_side, factor * long_side, factor * diagonal
    a, b, c, d = posed(
        rng, [(0.0, 0.0), (float(long_side), 0.0), (float(long_side), float(short_side)), (0.0, float(short_side))]
    )
    sketch = Sketch(values)
    sketch.polygon((a, b, c, d), "ABCD")
    sketch.lines.append((a, c))
    sketch.squares += [(at, first, second) for at, first, second in ((b, a, c), (d, a, c))]
    knows_long = rng.random() < 0.5
    known, other = (long_side, short_side) if knows_long else (short_side, long_side)
    line, ends = ("AB", (a, b)) if knows_long else ("BC", (b, c))
    sketch.length(*ends, str(known), away=centre_of((a, b, c, d)))
    sketch.length(a, c, str(diagonal), away=d if rng.random() < 0.5 else b)
    area = short_side * long_side
    return Problem(
        "rectangle-area",
        (short_side, long_side, int(knows_long)),
        sketch,
        "Find the area of the rectangle $ABCD$.",
        f"The rectangle $ABCD$ has the side ${line} = {known}$ and the diagonal $AC = {diagonal}$. Find its area.",
        f"The other side is $\\sqrt{{{diagonal}^2 - {known}^2}} = {other}$. The area is ${known} \\cdot {other} ="
        f" {area}$.",
        str(area),
    )


def round_hole(rng: random.Random, values: bool) -> Problem:
    """Return a problem: a circle is cut out of the square around it; the answer holds pi."""
    half = rng.randint(1, 24)
    side = 2 * half
    corners = posed(rng, [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)], upright=rng.random() < 0.5)
    sketch = Sketch(values)
    sketch.filled.append(corners)
    sketch.holes.append(((0.0, 0.0), 1.0))
    for at, name in zip(corners, "ABCD", strict=True):
        sketch.name(at, name, away=(0.0, 0.0))
    sketch.length(*rng.choice(((corners[0], corners[1]), (corners[1], corners[2]))), str(side), away=(0.0, 0.0))
    answer = f"{side**2} - {product(half**2, chr(92) + 'pi')}"
    return Problem(
        "round-hole",
        (half,),
        sketch,
        "The circle touches all sides of the square $ABCD$. Find the exact area of the shaded part in terms of $\\pi$.",
        f"A square $ABCD$ has sides of length ${side}$. A circle touches all of its sides, and is cut out. Find the"
        " exact area of what is left, in terms of $\\pi$.",
        f"The square has the area ${side}^2 = {side**2}$. The circle has the radius ${half}$ and the area"
        f" ${product(half**2, chr(92) + 'pi')}$. The area is ${answer}$.",
        answer,
    )


def _whole_side(sketch: Sketch, a: Point, b: Point, text: str, *, away: Point) -> None:
    """Add the length of a side that the foot of a height divides: a line beside all of it, so that no part is meant."""
    if not sketch.values:
        return
    across = direction(a, b) + 90
    if distance(towards(a, across, 1.0), away) < distance(towards(a, across, -1.0), away):
        across += 180
    reach = distance(a, b)
    first, second = (towards(end, across, 0.13 * reach) for end in (a, b))
    sketch.lines.append((first, second))
    for end in (first, second):
        sketch.lines.append((towards(end, across, 0.03 * reach), towards(end, across, -0.03 * reach)))
    sketch.length(first, second, text, away=away)


AREAS = (triangle_area, parallelogram_area, trapezoid_area, rectangle_area, round_hole)
