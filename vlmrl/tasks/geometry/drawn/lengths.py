"""Problems about lengths in triangles: Pythagoras, special right triangles, similar triangles, the midsegment."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from vlmrl.tasks.geometry.drawn.problem import Problem, Surd, letters, posed
from vlmrl.tasks.geometry.drawn.sketch import Sketch, between, centre_of, triangle_of_angles

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
    sketch.name(d, "D", away=middle)
    sketch.name(e, "E", away=middle)
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
    sketch.name(m, "M", away=middle)
    sketch.name(n, "N", away=middle)
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
