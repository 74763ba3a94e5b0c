"""Problems about lengths in triangles, about areas, and on squared paper.

On squared paper no number is printed, the squares are to be counted. A model of a million parameters, trained from
scratch in minutes, learns to count squares, and not to read small print.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

from vlmrl.tasks.geometry.drawn.problem import (
    Point,
    Problem,
    Sketch,
    Surd,
    between,
    centre_of,
    direction,
    distance,
    letters,
    numbers,
    posed,
    product,
    towards,
    triangle_of_angles,
)

TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (20, 21, 29), (28, 45, 53))
"""Whole sides of right triangles that are not too narrow to be printed."""
SHORT = "Find the value of $x$."


def pythagoras(rng: random.Random, values: bool) -> Problem:
    """Return a problem: two sides of a right triangle are known; the third one may be a surd."""
    if rng.random() < 0.6:
        short_leg, long_leg, _ = rng.choice(TRIPLES)
        factor = rng.randint(1, max(1, 60 // long_leg))
        first, second = rng.sample((short_leg * factor, long_leg * factor), 2)
    else:
        first, second = rng.randint(3, 15), rng.randint(3, 15)
    leg_asked = rng.random() < 0.5
    return _right_triangle(rng, values, first, second, leg_asked)


def _right_triangle(rng: random.Random, values: bool, first: int, second: int, leg_asked: bool) -> Problem:
    """Return the problem of a right triangle with two legs; if `leg_asked`, of a leg and a whole hypotenuse."""
    square = first**2 + second**2
    if leg_asked and math.isqrt(square) ** 2 != square:
        # the second number is the hypotenuse then
        first, second = min(first, second), max(first, second) + 1
        answer = Surd.of_square(second**2 - first**2)
        legs, hypotenuse = (float(first), answer.value), second
    else:
        root = Surd.of_square(square)
        legs, hypotenuse = (float(first), float(second)), int(root.factor) if root.root == 1 else 0
        answer = Surd(Fraction(second)) if leg_asked else root
    c, a, b = posed(rng, [(0.0, 0.0), (legs[0], 0.0), (0.0, legs[1])], upright=rng.random() < 0.5)
    names = letters(rng)
    sketch = Sketch(values)
    sketch.polygon((a, b, c), names)
    sketch.squares.append((c, a, b))
    middle = centre_of((a, b, c))
    sketch.length(c, a, str(first), away=middle)
    sketch.length(c, b, "x" if leg_asked else str(second), away=middle)
    sketch.length(a, b, str(hypotenuse) if leg_asked else "x", away=middle)
    p, q, r = names
    if leg_asked:
        full = f"${r}{p} = {first}$ and ${p}{q} = {hypotenuse}$. Find the length of ${r}{q}$."
        steps = f"$x^2 = {hypotenuse}^2 - {first}^2 = {hypotenuse**2 - first**2}$"
    else:
        full = f"${r}{p} = {first}$ and ${r}{q} = {second}$. Find the length of ${p}{q}$."
        steps = f"$x^2 = {first}^2 + {second}^2 = {square}$"
    return Problem(
        "pythagoras",
        (*sorted((first, hypotenuse if leg_asked else second)), int(leg_asked)),
        sketch,
        "Find the exact value of $x$.",
        f"Triangle ${names}$ has a right angle at ${r}$. {full}",
        f"By the theorem of Pythagoras {steps}, so $x = {answer.latex}$.",
        answer.latex,
    )


def special_triangle(rng: random.Random, values: bool) -> Problem:
    """Return a problem: one side of a triangle of 45, 45 and 90 or of 30, 60 and 90 degrees is known."""
    side = rng.randint(2, 20)
    angle = rng.choice((45, 60))
    c, a, b = posed(rng, triangle_of_angles(90, angle), upright=rng.random() < 0.5)
    # Right angle at C, `angle` at A: CA is the short leg, CB the long one.
    names = letters(rng)
    sketch = Sketch(values)
    sketch.polygon((a, b, c), names)
    sketch.squares.append((c, a, b))
    p, q, r = names
    middle = centre_of((a, b, c))
    asks_leg = rng.random() < 0.5
    if angle == 45:
        sketch.ticks += [(c, a, 1), (c, b, 1)] if not values else []
        sketch.angle(a, b, c, "45\u00b0")
        given, target = ("AB", "CA") if asks_leg else ("CA", "AB")
        answer = Surd(Fraction(side, 2), 2) if asks_leg else Surd(Fraction(side), 2)
        why = "The sides of a triangle with angles of 45, 45 and 90 degrees are as $1 : 1 : \\sqrt{2}$"
    else:
        sketch.angle(a, b, c, "60\u00b0")
        given, target = ("CA", "CB") if asks_leg else ("AB", "CB")
        answer = Surd(Fraction(side), 3) if asks_leg else Surd(Fraction(side, 2), 3)
        why = "The sides of a triangle with angles of 30, 60 and 90 degrees are as $1 : \\sqrt{3} : 2$"
    at = {"A": a, "B": b, "C": c}
    named = {"A": p, "B": q, "C": r}
    sketch.length(at[given[0]], at[given[1]], str(side), away=middle)
    sketch.length(at[target[0]], at[target[1]], "x", away=middle)
    line, other = ("".join(named[one] for one in ends) for ends in (given, target))
    return Problem(
        "special-triangle",
        (angle, side, int(asks_leg)),
        sketch,
        "Find the exact value of $x$.",
        f"Triangle ${names}$ has a right angle at ${r}$, and $\\angle {p} = {angle}^\\circ$. ${line} = {side}$. Find"
        f" the exact length of ${other}$.",
        f"{why}. So the length is ${answer.latex}$.",
        answer.latex,
    )


def similar_triangles(rng: random.Random, values: bool) -> Problem:
    """Return a problem: a line parallel to a side cuts the two others in the same ratio, in whole lengths."""
    num, den = rng.choice(((1, 2), (2, 3), (3, 4), (3, 2), (4, 3), (3, 5), (1, 1)))
    left, right = rng.randint(2, 5), rng.randint(2, 5)
    while left == right:
        right = rng.randint(2, 5)
    ad, db, ae, ec = num * left, den * left, num * right, den * right
    # Sides AB and AC have their true lengths; the angle at A is drawn.
    angle = rng.randint(48, 80)
    a, b = (0.0, 0.0), (float(ad + db), 0.0)
    c = ((ae + ec) * math.cos(math.radians(angle)), (ae + ec) * math.sin(math.radians(angle)))
    share = num / (num + den)
    d, e = between(a, b, share), between(a, c, share)
    a, b, c, d, e = posed(rng, (a, b, c, d, e))
    sketch = Sketch(values)
    middle = centre_of((a, b, c))
    sketch.polygon((a, b, c), "ABC")
    sketch.lines.append((d, e))
    sketch.arrows += [(d, e, 1), (b, c, 1)]
    sketch.names_at((d, e), "DE", away=middle)
    for first, second, text in ((a, d, str(ad)), (d, b, str(db)), (a, e, str(ae)), (e, c, "x")):
        sketch.length(first, second, text, away=middle)
    return Problem(
        "similar-triangles",
        (ad, db, ae),
        sketch,
        SHORT,
        f"In triangle $ABC$, $D$ lies on $AB$ and $E$ on $AC$, and $DE$ is parallel to $BC$. $AD = {ad}$, $DB = {db}$"
        f" and $AE = {ae}$. Find the length of $EC$.",
        f"$DE$ is parallel to $BC$, so $AD : DB = AE : EC$. $x = {db} \\cdot {ae} / {ad} = {ec}$.",
        str(ec),
    )


def midsegment(rng: random.Random, values: bool) -> Problem:
    """Return a problem: the line between the midpoints of two sides is half of the third side."""
    half = rng.randint(3, 40)
    third_asked = rng.random() < 0.5
    a, b, c = posed(rng, triangle_of_angles(rng.randint(45, 75), rng.randint(45, 75)))
    m, n = between(a, c), between(b, c)
    sketch = Sketch(values)
    sketch.polygon((a, b, c), "ABC")
    sketch.lines.append((m, n))
    middle = centre_of((a, b, c))
    sketch.names_at((m, n), "MN", away=middle)
    sketch.ticks += [(a, m, 1), (m, c, 1), (b, n, 2), (n, c, 2)]
    given, answer = (half, 2 * half) if third_asked else (2 * half, half)
    sketch.length(a, b, "x" if third_asked else str(given), away=middle)
    sketch.length(m, n, str(given) if third_asked else "x", away=c)
    known, target = ("MN", "AB") if third_asked else ("AB", "MN")
    return Problem(
        "midsegment",
        (half, int(third_asked)),
        sketch,
        SHORT,
        f"$M$ and $N$ are the midpoints of the sides $AC$ and $BC$ of triangle $ABC$. ${known} = {given}$. Find the"
        f" length of ${target}$.",
        f"A line through the midpoints of two sides is half as long as the third side. So $x = {answer}$.",
        str(answer),
    )


LENGTHS = (pythagoras, special_triangle, similar_triangles, midsegment)


def triangle_area(rng: random.Random, values: bool) -> Problem:
    """Return a problem: base and height of a triangle are known."""
    base, height = numbers(rng, (6, 24), (4, 16), fit=lambda sides: 0.45 <= sides[1] / sides[0] <= 1.2)
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
    base, height = numbers(rng, (8, 22), (4, 14), fit=lambda sides: 0.4 <= sides[1] / sides[0] <= 0.9)
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
    long_side, short_side, height = numbers(
        rng, (9, 22), (4, 14), (4, 12), fit=lambda s: s[1] <= 0.75 * s[0] and 0.4 <= s[2] / s[0] <= 0.9
    )
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
    sketch.names_at(corners, "ABCD", away=(0.0, 0.0))
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


COLUMNS, ROWS = 6, 4
"""Squares of the paper."""
FEWEST, MOST = 3, 9
"""Range of the number of shaded squares."""
DARK = 60
"""Grey value of a shaded square, between 0 (black) and 255."""


def shaded_squares(rng: random.Random, values: bool) -> Problem:
    """Return a problem: the shaded area is to be found. The figure is the same whatever `values` says."""
    squares = [(column, row) for row in range(1, ROWS + 1) for column in range(1, COLUMNS + 1)]
    shaded = sorted(rng.sample(squares, rng.randint(FEWEST, MOST)), key=squares.index)
    sketch = Sketch(values, shade=DARK)
    sketch.lines += [((float(x), 0.0), (float(x), float(ROWS))) for x in range(COLUMNS + 1)]
    sketch.lines += [((0.0, float(y)), (float(COLUMNS), float(y))) for y in range(ROWS + 1)]
    sketch.filled += [[(x - 1.0, y - 1.0), (x, y - 1.0), (x, y), (x - 1.0, y)] for x, y in shaded]
    area = len(shaded)
    places = ", ".join(f"({column}, {row})" for column, row in shaded)
    return Problem(
        "shaded-squares",
        tuple(COLUMNS * (row - 1) + column for column, row in shaded),
        sketch,
        "Each small square has an area of 1. Find the shaded area.",
        f"Squared paper has {COLUMNS} columns and {ROWS} rows of squares with an area of 1. The squares at these places"
        f" (column, row) are shaded: {places}. Find the shaded area.",
        "",
        str(area),
    )


SQUARES = (shaded_squares,)
