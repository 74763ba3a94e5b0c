r"""Subsets of the real line as sorted, disjoint intervals, such as `(1,2)\cup[2,3]` and `\mathbb{R}\setminus\{3\}`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from vlmrl.rewards.math.expressions import UnreadableError, constant, same_constants
from vlmrl.rewards.math.reading import Item, Reading

INFINITY = {"\\infty": math.inf, "+\\infty": math.inf, "-\\infty": -math.inf}
End = Fraction | float


class Piece(NamedTuple):
    """Interval between two ends. `has_low`, `has_high`: whether it contains them."""

    low: End
    has_low: bool
    high: End
    has_high: bool


def region(reading: Reading) -> list[Piece] | None:
    """Return the intervals of a set of real numbers, from the lowest on; None where an end has no value."""
    try:
        return _joined(_pieces(reading))
    except UnreadableError:
        return None


def same_regions(one: list[Piece], other: list[Piece]) -> bool:
    """Return whether two regions have the same ends, which belong to both or to neither."""
    return len(one) == len(other) and all(
        _is_same(a.low, b.low) and _is_same(a.high, b.high) and a[1::2] == b[1::2]
        for a, b in zip(one, other, strict=True)
    )


def _pieces(reading: Reading) -> list[Piece]:
    if reading.kind == "tuple" and len(reading.items) == 2:
        (low, high), brackets = map(_end, reading.items), reading.brackets
        return [Piece(low, brackets[0] == "[", high, brackets[1] == "]")]
    if reading.kind in ("set", "value", "list") and not reading.parts:
        return [Piece(value, True, value, True) for value in map(_end, reading.items)]
    if reading.kind == "union":
        return [piece for part in reading.parts for piece in _pieces(part)]
    if reading.kind == "without":
        whole, holes = (_joined(_pieces(part)) for part in reading.parts)
        return _common(whole, _outside(holes))
    if reading.kind == "both":
        first, *others = (_joined(_pieces(part)) for part in reading.parts)
        for other in others:
            first = _common(first, other)
        # `x < 3, x > 5`: a comma means "and", unless nothing would be left.
        is_comma = reading.brackets == ","
        return first or ([piece for part in reading.parts for piece in _pieces(part)] if is_comma else [])
    raise UnreadableError("it is no set of real numbers")


def _end(item: Item) -> End:
    if item.text in INFINITY:
        return INFINITY[item.text]
    if item.number is not None:
        return item.number.value
    real, imaginary = constant(item.text)
    if imaginary:
        raise UnreadableError("it is no real number")
    return real


def _is_same(one: End, other: End) -> bool:
    if one == other or isinstance(one, float) or isinstance(other, float):
        return one == other
    return same_constants((Fraction(one), Fraction(0)), (Fraction(other), Fraction(0)))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces in order, with those that touch or overlap as one; empty ones are left out."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.low, not p.has_low)):
        if piece.low > piece.high or (_is_same(piece.low, piece.high) and not (piece.has_low and piece.has_high)):
            continue
        last = joined[-1] if joined else None
        touches = last is not None and _is_same(piece.low, last.high) and (piece.has_low or last.has_high)
        if last is None or not (piece.low < last.high or touches):
            joined.append(piece)
            continue
        if _is_same(piece.high, last.high):
            joined[-1] = last._replace(has_high=last.has_high or piece.has_high)
        elif piece.high > last.high:
            joined[-1] = last._replace(high=piece.high, has_high=piece.has_high)
    return joined


def _outside(pieces: list[Piece]) -> list[Piece]:
    """Return the complement of sorted, disjoint pieces."""
    outside, low, has_low = [], -math.inf, False
    for piece in pieces:
        outside.append(Piece(low, has_low, piece.low, not piece.has_low and piece.low != -math.inf))
        low, has_low = piece.high, not piece.has_high and piece.high != math.inf
    return _joined([*outside, Piece(low, has_low, math.inf, False)])


def _common(one: list[Piece], other: list[Piece]) -> list[Piece]:
    """Return the intersection of two regions."""
    common = []
    for a in one:
        for b in other:
            low, high = max(a.low, b.low), min(a.high, b.high)
            has_low = all(p.has_low for p in (a, b) if _is_same(p.low, low))
            has_high = all(p.has_high for p in (a, b) if _is_same(p.high, high))
            common.append(Piece(low, has_low, high, has_high))
    return _joined(common)
