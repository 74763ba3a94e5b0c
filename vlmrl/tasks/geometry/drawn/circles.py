"""Problems about circles: inscribed and central angles, Thales, tangents, chords, sectors."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from vlmrl.tasks.geometry.drawn.problem import DEGREE, Problem, Surd, angle_name, product
from vlmrl.tasks.geometry.drawn.sketch import Sketch, between, centre_of, towards

O = (0.0, 0.0)  # noqa: E741
"""Centre of every circle."""
R = 5.0
SHORT = "Find the value of $x$."
UNKNOWN = f"x{DEGREE}"


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
    for at, name in ((a, "A"), (b, "B"), (c, "C")):
        sketch.name(at, name, away=O)
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
    for at, name in ((a, "A"), (b, "B"), (c, "C")):
        sketch.name(at, name, away=O)
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
    for at, name in ((O, "O"), (t, "T"), (p, "P")):
        sketch.name(at, name, away=middle)
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
    for at, name in ((a, "A"), (b, "B")):
        sketch.name(at, name, away=O)
    sketch.name(m, "M", away=O)
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
