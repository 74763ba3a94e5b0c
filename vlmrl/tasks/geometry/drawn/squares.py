"""Problems on squared paper: no number is printed, the squares are to be counted.

A model of a million parameters, trained from scratch in minutes, learns to count squares, and not to read small print.
"""

from __future__ import annotations

import random

from vlmrl.tasks.geometry.drawn.problem import Problem
from vlmrl.tasks.geometry.drawn.sketch import Point, Sketch

COLUMNS, ROWS = 6, 4
"""Squares of the paper."""
FEWEST, MOST = 3, 9
"""Range of the number of shaded squares."""
DARK = 60
"""Grey value of a shaded square, between 0 (black) and 255."""
Cell = tuple[int, int]
"""(column, row) of a square, from 1, at the bottom left."""


def shaded_squares(rng: random.Random, values: bool) -> Problem:
    """Return a problem: the shaded area is to be found. The figure is the same whatever `values` says."""
    squares = [(column, row) for row in range(1, ROWS + 1) for column in range(1, COLUMNS + 1)]
    cells = sorted(rng.sample(squares, rng.randint(FEWEST, MOST)), key=squares.index)
    sketch = Sketch(values, shade=DARK)
    sketch.lines += [((float(x), 0.0), (float(x), float(ROWS))) for x in range(COLUMNS + 1)]
    sketch.lines += [((0.0, float(y)), (float(COLUMNS), float(y))) for y in range(ROWS + 1)]
    sketch.filled += [_outline(cell) for cell in cells]
    area = len(cells)
    places = ", ".join(f"({column}, {row})" for column, row in cells)
    return Problem(
        "shaded-squares",
        tuple(COLUMNS * (row - 1) + column for column, row in cells),
        sketch,
        "Each small square has an area of 1. Find the shaded area.",
        f"Squared paper has {COLUMNS} columns and {ROWS} rows of squares with an area of 1. The squares at these places"
        f" (column, row) are shaded: {places}. Find the shaded area.",
        "",
        str(area),
    )


def _outline(cell: Cell) -> list[Point]:
    right, top = float(cell[0]), float(cell[1])
    return [(right - 1, top - 1), (right, top - 1), (right, top), (right - 1, top)]


SQUARES = (shaded_squares,)
