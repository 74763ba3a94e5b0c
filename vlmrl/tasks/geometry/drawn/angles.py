"""Problems about angles and circles. All answers are whole degrees, or follow from them.

Triangles, crossing and parallel lines, quadrilaterals; inscribed and central angles, Thales, tangents, chords, sectors.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

from vlmrl.tasks.geometry.drawn.problem import (
    DEGREE,
    Point,
    Problem,
    Sketch,
    Surd,
    angle_name,
    between,
    centre_of,
    direction,
    letters,
    numbers,
    posed,
    product,
    towards,
    triangle_of_angles,
    turned,
)

SHORT = "Find the value of $x$."
UNKNOWN = f"x{DEGREE}"


def _size(degrees: int) -> str:
    return f"{degrees}{DEGREE}"


def third_angle(rng: random.Random, values: bool) -> Problem:
    """Return a problem: two angles of a triangle are known."""
    first, second = numbers(rng, (28, 95), (28, 95), fit=lambda pair: 28 <= 180 - sum(pair) <= 110)
    third = 180 - first - second
    a, b, c = posed(rng, triangle_of_angles(first, second))
    names = letters(rng)
    sketch = Sketch(values)
    sketch.polygon((a, b, c), names)
    for at, others, text in ((a, (b, c), _size(first)), (b, (a, c), _size(second)), (c, (a, b), UNKNOWN)):
        sketch.angle(at, *others, text)
    n = names
    return Problem(
        "third-angle",
        tuple(sorted((first, second))),
        sketch,
        SHORT,
        f"In triangle ${n}$, $\\angle {n[0]} = {first}^\\circ$ and $\\angle {n[1]} = {second}^\\circ$. Find the size of"
        f" $\\angle {n[2]}$ in degrees.",
        "The angles of a triangle add up to $180^\\circ$. So the third angle is"
        f" $180^\\circ - {first}^\\circ - {second}^\\circ = {third}^\\circ$.",
        str(third),
    )


def isosceles(rng: random.Random, values: bool) -> Problem:
    """Return a problem: one angle of an isosceles triangle is known, at the apex or at the base."""
    apex = 2 * rng.randint(16, 58)
    base = (180 - apex) // 2
    a, b, c = posed(rng, triangle_of_angles(base, base))
    names = letters(rng)
    from_apex = rng.random() < 0.5
    sketch = Sketch(values)
    sketch.polygon((a, b, c), names[1] + names[2] + names[0])
    sketch.ticks += [(a, c, 1), (b, c, 1)]
    sketch.angle(c, a, b, _size(apex) if from_apex else UNKNOWN)
    sketch.angle(a, b, c, UNKNOWN if from_apex else _size(base))
    top, left, right = names
    given, size = (top, apex) if from_apex else (left, base)
    unknown_name, answer = (left, base) if from_apex else (top, apex)
    way = (
        f"Each of them is $(180^\\circ - {apex}^\\circ) / 2 = {base}^\\circ$"
        if from_apex
        else f"The third angle is $180^\\circ - 2 \\cdot {base}^\\circ = {apex}^\\circ$"
    )
    return Problem(
        "isosceles",
        (apex, int(from_apex)),
        sketch,
        SHORT,
        f"In triangle ${top}{left}{right}$, ${top}{left} = {top}{right}$ and $\\angle {given} = {size}^\\circ$. Find"
        f" the size of $\\angle {unknown_name}$ in degrees.",
        f"Two sides are equal, so the angles opposite to them are equal. {way}.",
        str(answer),
    )


def exterior_angle(rng: random.Random, values: bool) -> Problem:
    """Return a problem: one side of a triangle is extended, and the exterior angle is to be found."""
    first, second = numbers(rng, (30, 85), (35, 85), fit=lambda pair: 30 <= 180 - sum(pair) <= 105)
    corners = triangle_of_angles(first, 180 - first - second)
    a, b, c, d = posed(rng, [*corners, towards(corners[1], 0, 6)])
    names = letters(rng)
    outside = "D" if "D" not in names else "G"
    sketch = Sketch(values)
    sketch.lines += [(a, d), (a, c), (b, c)]
    for at, name, away in ((a, names[0], b), (c, names[2], between(a, b)), (d, outside, b)):
        sketch.name(at, name, away=away)
    sketch.name(b, names[1], away=c)
    sketch.angle(a, b, c, _size(first))
    sketch.angle(c, a, b, _size(second))
    sketch.angle(b, c, d, UNKNOWN)
    answer = first + second
    return Problem(
        "exterior-angle",
        tuple(sorted((first, second))),
        sketch,
        SHORT,
        f"In triangle ${names}$, side ${names[0]}{names[1]}$ is extended to ${outside}$."
        f" $\\angle {names[0]} = {first}^\\circ$ and $\\angle {names[2]} = {second}^\\circ$. Find the size of"
        f" {angle_name(names[2], names[1], outside)} in degrees.",
        "An exterior angle of a triangle equals the sum of the two angles opposite to it:"
        f" ${first}^\\circ + {second}^\\circ = {answer}^\\circ$.",
        str(answer),
    )


def crossing_lines(rng: random.Random, values: bool) -> Problem:
    """Return a problem: two lines cross; the vertical or the adjacent angle is to be found."""
    size = rng.choice([n for n in range(32, 149) if abs(n - 90) > 6])
    vertical = rng.random() < 0.5
    turn = rng.uniform(-20, 20)
    ends = [towards((0.0, 0.0), turn + angle, 6) for angle in (0, size, 180, 180 + size)]
    a, c, b, d = ends
    sketch = Sketch(values)
    sketch.lines += [(a, b), (c, d)]
    sketch.names_at((a, b, c, d), "ABCD", away=(0.0, 0.0))
    sketch.name((0.0, 0.0), "O", away=_opposite((0.0, 0.0), direction((0.0, 0.0), d), direction((0.0, 0.0), a)))
    sketch.angle((0.0, 0.0), a, c, _size(size))
    first, second, name = (b, d, "BOD") if vertical else (c, b, "COB")
    sketch.angle((0.0, 0.0), first, second, UNKNOWN, radius=2.0 if vertical else 1.5)
    answer = size if vertical else 180 - size
    why = (
        f"The two angles are vertical angles, so they are equal: ${size}^\\circ$."
        if vertical
        else f"The two angles form a straight line: $180^\\circ - {size}^\\circ = {answer}^\\circ$."
    )
    return Problem(
        "crossing-lines",
        (size, int(vertical)),
        sketch,
        SHORT,
        f"The lines $AB$ and $CD$ cross at $O$. {angle_name('A', 'O', 'C')} is ${size}^\\circ$. Find the size of"
        f" {angle_name(*name)} in degrees.",
        why,
        str(answer),
    )


def parallel_lines(rng: random.Random, values: bool) -> Problem:
    """Return a problem: a line crosses two parallel lines; one of the angles at the other crossing is unknown."""
    size = rng.choice([n for n in range(40, 141) if abs(n - 90) > 8])
    which = rng.choice(("alternate", "corresponding", "co-interior"))
    lean = 1 if rng.random() < 0.5 else -1
    high, low = (0.0, 5.0), towards((0.0, 5.0), 180 + size, 5 / math.sin(math.radians(size)))
    shift = -low[0] / 2
    high, low = (high[0] + shift, 5.0), (low[0] + shift, 0.0)
    top, bottom = towards(high, size, 2.6), towards(low, 180 + size, 2.6)
    a, b = (-6.0, 5.0), (6.0, 5.0)
    c, d = (-6.0, 0.0), (6.0, 0.0)
    points = [(lean * x, y) for x, y in (a, b, c, d, high, low, top, bottom)]
    a, b, c, d, high, low, top, bottom = turned(points, rng.uniform(-10, 10))
    sketch = Sketch(values)
    sketch.lines += [(a, b), (c, d), (top, bottom)]
    sketch.arrows += [(high, b, 1), (low, d, 1)]
    for at, name, away in ((a, "A", b), (b, "B", a), (c, "C", d), (d, "D", c), (top, "E", low), (bottom, "F", high)):
        sketch.name(at, name, away=away)
    sketch.name(high, "G", away=_opposite(high, direction(high, b), direction(high, bottom)))
    rays_of_name = (d, bottom) if which == "co-interior" else (c, top)
    sketch.name(low, "H", away=_opposite(low, *(direction(low, end) for end in rays_of_name)))
    # The angle at G between GA and GF is `size`: it is vertical to the one between GB and GE.
    sketch.angle(high, a, bottom, _size(size))
    rays = {"alternate": (d, top, "DHE"), "corresponding": (c, bottom, "CHF"), "co-interior": (c, top, "CHE")}
    first, second, name = rays[which]
    sketch.angle(low, first, second, UNKNOWN)
    answer = 180 - size if which == "co-interior" else size
    why = {
        "alternate": f"The lines are parallel, so alternate angles are equal: ${size}^\\circ$.",
        "corresponding": f"The lines are parallel, so corresponding angles are equal: ${size}^\\circ$.",
        "co-interior": "The lines are parallel, so co-interior angles add up to $180^\\circ$:"
        f" $180^\\circ - {size}^\\circ = {answer}^\\circ$.",
    }
    return Problem(
        "parallel-lines",
        (size, ("alternate", "corresponding", "co-interior").index(which)),
        sketch,
        SHORT,
        "The line $EF$ meets the parallel lines $AB$ and $CD$ at $G$ and $H$."
        f" {angle_name('A', 'G', 'F')} is ${size}^\\circ$. Find the size of {angle_name(*name)} in degrees.",
        why[which],
        str(answer),
    )


def quadrilateral(rng: random.Random, values: bool) -> Problem:
    """Return a problem: three angles of a quadrilateral are known."""
    while True:
        sizes = [rng.randint(62, 125) for _ in range(3)]
        fourth = 360 - sum(sizes)
        if not 62 <= fourth <= 125:
            continue
        a, b = (0.0, 0.0), (8.0, 0.0)
        d = towards(a, sizes[0], rng.uniform(5, 8))
        # C is where the ray from B (angle 1) meets the ray from D, whose angle (3) is the third of the list.
        c = _meet(b, 180 - sizes[1], d, direction(d, a) + sizes[2])
        if c is not None and c[1] > 2.5 and c[0] > d[0] + 2.5:
            break
    corners = posed(rng, (a, b, c, d))
    names = rng.choice(("ABCD", "PQRS", "KLMN"))
    sketch = Sketch(values)
    sketch.polygon(corners, names)
    texts = (_size(sizes[0]), _size(sizes[1]), UNKNOWN, _size(sizes[2]))
    for i, text in enumerate(texts):
        sketch.angle(corners[i], corners[i - 1], corners[(i + 1) % 4], text)
    return Problem(
        "quadrilateral",
        tuple(sorted(sizes)),
        sketch,
        SHORT,
        f"In the quadrilateral ${names}$, $\\angle {names[0]} = {sizes[0]}^\\circ$, $\\angle {names[1]} ="
        f" {sizes[1]}^\\circ$ and $\\angle {names[3]} = {sizes[2]}^\\circ$. Find the size of $\\angle {names[2]}$ in"
        " degrees.",
        "The angles of a quadrilateral add up to $360^\\circ$. So the fourth angle is"
        f" $360^\\circ - {sizes[0]}^\\circ - {sizes[1]}^\\circ - {sizes[2]}^\\circ = {fourth}^\\circ$.",
        str(fourth),
    )


def _opposite(at: Point, first: float, second: float) -> Point:
    """Return a point such that a name away from it is between two directions."""
    middle = first + ((second - first + 180) % 360 - 180) / 2
    return towards(at, middle + 180, 1.0)


def _meet(a: Point, first: float, b: Point, second: float) -> Point | None:
    """Return where the ray from `a` in one direction meets the ray from `b` in another; None = nowhere."""
    ux, uy = towards((0.0, 0.0), first, 1.0)
    vx, vy = towards((0.0, 0.0), second, 1.0)
    cross = ux * vy - uy * vx
    if abs(cross) < 1e-6:
        return None
    along = ((b[0] - a[0]) * vy - (b[1] - a[1]) * vx) / cross
    back = ((b[0] - a[0]) * uy - (b[1] - a[1]) * ux) / cross
    return towards(a, first, along) if along > 0 and back > 0 else None


ANGLES = (third_angle, isosceles, exterior_angle, crossing_lines, parallel_lines, quadrilateral)


O = (0.0, 0.0)  # noqa: E741
"""Centre of every circle."""
R = 5.0


def _circle(values: bool) -> Sketch:
    sketch = Sketch(values)
    sketch.circles.append((O, R))
    sketch.dots.append(O)
    return sketch


def inscribed_angle(rng: random.Random, values: bool) -> Problem:
    """Return a problem: the angle at the circle is half of the angle at the centre over the same arc."""
    half = rng.randint(28, 68)
    from_centre = rng.random() < 0.5
    turn = rng.uniform(0, 360)
    a, b = towards(O, turn, R), towards(O, turn + 2 * half, R)
    c = towards(O, turn + half + 180 + rng.uniform(-22, 22), R)
    sketch = _circle(values)
    sketch.lines += [(O, a), (O, b), (c, a), (c, b)]
    sketch.names_at((a, b, c), "ABC", away=O)
    sketch.name(O, "O", away=between(a, b))
    sketch.angle(O, a, b, f"{2 * half}{DEGREE}" if from_centre else UNKNOWN)
    sketch.angle(c, a, b, UNKNOWN if from_centre else f"{half}{DEGREE}")
    given, size = (2 * half, half) if from_centre else (half, 2 * half)
    known, unknown = ("AOB", "ACB") if from_centre else ("ACB", "AOB")
    return Problem(
        "inscribed-angle",
        (half, int(from_centre)),
        sketch,
        "$O$ is the centre of the circle. " + SHORT,
        f"$A$, $B$ and $C$ lie on a circle with centre $O$. {angle_name(*known)} is ${given}^\\circ$. Find the size of"
        f" {angle_name(*unknown)} in degrees.",
        f"The angle at the centre is twice the angle at the circle over the same arc. So it is ${size}^\\circ$.",
        str(size),
    )


def thales(rng: random.Random, values: bool) -> Problem:
    """Return a problem: a triangle over a diameter has a right angle."""
    first = rng.randint(26, 64)
    turn = rng.uniform(-30, 30)
    a, b = towards(O, turn + 180, R), towards(O, turn, R)
    c = towards(O, turn + 2 * first, R)
    sketch = _circle(values)
    sketch.polygon((a, b, c))
    sketch.names_at((a, b, c), "ABC", away=O)
    sketch.name(O, "O", away=c)
    sketch.angle(a, b, c, f"{first}{DEGREE}")
    sketch.angle(b, a, c, UNKNOWN)
    answer = 90 - first
    return Problem(
        "thales",
        (first,),
        sketch,
        "$AB$ is a diameter of the circle. " + SHORT,
        f"$AB$ is a diameter of a circle, and $C$ lies on the circle. {angle_name('B', 'A', 'C')} is ${first}^\\circ$."
        f" Find the size of {angle_name('A', 'B', 'C')} in degrees.",
        "The angle at $C$ is an angle in a semicircle: $90^\\circ$. So the angle is"
        f" $90^\\circ - {first}^\\circ = {answer}^\\circ$.",
        str(answer),
    )


def tangent(rng: random.Random, values: bool) -> Problem:
    """Return a problem: a tangent and the radius make a right triangle."""
    radius, far = rng.choice([(r, d) for r in range(3, 16) for d in range(r + 2, 31) if 1.5 <= d / r <= 2.6])
    answer = Surd.of_square(far**2 - radius**2)
    asks_tangent = answer.root > 1 or rng.random() < 0.3  # labels hold whole numbers alone
    turn = rng.uniform(-20, 20) + rng.choice((0, 180))
    p = towards(O, turn, R * far / radius)
    lean = math.degrees(math.acos(radius / far)) * rng.choice((-1, 1))
    t = towards(O, turn + lean, R)
    sketch = _circle(values)
    sketch.lines += [(O, t), (t, p), (O, p)]
    sketch.squares.append((t, O, p))
    middle = centre_of((O, t, p))
    sketch.names_at((O, t, p), "OTP", away=middle)
    sketch.length(O, t, str(radius), away=middle)
    # The circle cuts OP: a label there could be read as the length of a part, so the question names OP.
    sketch.length(t, p, "x" if asks_tangent else answer.latex, away=middle)
    if asks_tangent:
        known, line, shown = f"$OP = {far}$", "PT", answer.latex
        short = f"$OP = {far}$. Find the exact value of $x$."
        steps = f"x^2 = {far}^2 - {radius}^2 = {far**2 - radius**2}"
    else:
        known, line, shown = f"$PT = {answer.latex}$", "OP", str(far)
        short = "Find the length of $OP$."
        steps = f"x^2 = {radius}^2 + {answer.latex}^2 = {far**2}"
    return Problem(
        "tangent",
        (radius, far, int(asks_tangent)),
        sketch,
        f"$PT$ touches the circle with centre $O$ at $T$. {short}",
        f"$PT$ is a tangent to a circle with centre $O$ and radius ${radius}$; it touches the circle at $T$. {known}."
        f" Find the length of ${line}$.",
        f"The radius $OT$ is perpendicular to the tangent, so ${steps}$ and the length is ${shown}$.",
        shown,
    )


def chord(rng: random.Random, values: bool) -> Problem:
    """Return a problem: the perpendicular from the centre halves a chord."""
    radius, apart = rng.choice([(r, d) for r in range(5, 26) for d in range(2, r) if 0.3 <= d / r <= 0.75])
    half = Surd.of_square(radius**2 - apart**2)
    answer = Surd(2 * half.factor, half.root)
    turn = rng.choice((270, 90)) + rng.uniform(-25, 25)
    m = towards(O, turn, R * apart / radius)
    spread = math.degrees(math.acos(apart / radius))
    a, b = towards(O, turn - spread, R), towards(O, turn + spread, R)
    sketch = _circle(values)
    sketch.lines += [(a, b), (O, m), (O, a)]
    sketch.squares.append((m, O, b))
    sketch.names_at((a, b, m), "ABM", away=O)
    sketch.name(O, "O", away=m)
    sketch.length(O, a, str(radius), away=between(O, b))
    sketch.length(O, m, str(apart), away=a)
    return Problem(
        "chord",
        (radius, apart),
        sketch,
        "$O$ is the centre of the circle, and $OM$ is perpendicular to $AB$. Find the exact length of $AB$.",
        f"A chord $AB$ of a circle with centre $O$ and radius ${radius}$ has the distance $OM = {apart}$ from the"
        " centre. Find the exact length of $AB$.",
        f"$AM^2 = {radius}^2 - {apart}^2 = {radius**2 - apart**2}$, so $AM = {half.latex}$. $M$ halves the chord:"
        f" $AB = {answer.latex}$.",
        answer.latex,
    )


def sector(rng: random.Random, values: bool) -> Problem:
    """Return a problem: the area of a sector, a multiple of pi."""
    size = rng.choice((30, 36, 40, 45, 60, 72, 80, 90, 120, 135, 150))
    radius = rng.randint(2, 18)
    factor = Fraction(radius**2 * size, 360)
    turn = rng.uniform(0, 360)
    a, b = towards(O, turn, R), towards(O, turn + size, R)
    sketch = Sketch(values)
    sketch.dots.append(O)
    sketch.filled.append([O, *(towards(O, turn + size * i / 60, R) for i in range(61))])
    sketch.circles.append((O, R))
    for at, name, away in ((a, "A", O), (b, "B", O), (O, "O", between(a, b))):
        sketch.name(at, name, away=away)
    sketch.length(O, a, str(radius), away=between(O, b))
    sketch.angle(O, a, b, f"{size}{DEGREE}")
    shown = product(factor, "\\pi")
    return Problem(
        "sector",
        (radius, size),
        sketch,
        "$O$ is the centre of the circle. Find the exact area of the shaded sector, in terms of $\\pi$.",
        f"A sector $OAB$ of a circle with centre $O$ and radius ${radius}$ has the angle ${size}^\\circ$ at $O$. Find"
        " its exact area, in terms of $\\pi$.",
        f"The sector is $\\frac{{{size}}}{{360}}$ of the disc: $\\frac{{{size}}}{{360}} \\cdot \\pi \\cdot {radius}^2 ="
        f" {shown}$.",
        shown,
    )


CIRCLES = (inscribed_angle, thales, tangent, chord, sector)
