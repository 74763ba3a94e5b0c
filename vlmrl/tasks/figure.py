"""Figures that a task adds to its evaluations in a report: the summary stores their data, the report draws them.

A summary may come from somebody else's machine. Figures that are read from a summary are therefore checked like any
untrusted input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from vlmrl.errors import DataError
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.untrusted import encodable

MAX_FIGURES = 8
MAX_SERIES = 6
MAX_POINTS = 2_000
MAX_ROWS = 200
MAX_COLUMNS = 20
MAX_TEXT = 500
MAX_INTEGER = 2**63
"""Limit of integers in a figure: larger ones are stored as floats."""


@dataclass(frozen=True)
class Histogram:
    """Histogram with equal bins, for one group of numbers or for two groups back to back.

    Args:
        groups: name of a group -> its numbers, one or two groups; the second is drawn downwards. Each bar is a share of
            its own group. A number outside `range` counts in the nearest bin.
        axis: label of the horizontal axis: the quantity that is counted.
        range: smallest and largest number on the axis.
        bins: number of bins, 1 to 100.
        note: a sentence below the histogram.
    """

    title: str
    groups: Mapping[str, Sequence[float]]
    axis: str = ""
    range: tuple[float, float] = (0.0, 1.0)
    bins: int = 20
    note: str = ""

    def counts(self) -> dict[str, list[int]]:
        """Return group -> how many of its numbers are in each bin."""
        low, high = self.range
        counts_of: dict[str, list[int]] = {}
        for group, numbers in self.groups.items():
            counts_of[group] = [0] * self.bins
            for number in numbers:
                place = (min(high, max(low, number)) - low) / (high - low) * self.bins
                counts_of[group][min(self.bins - 1, int(place))] += 1
        return counts_of


def by_label(
    outcomes: Iterable[Mapping[str, float | None]], texts: tuple[str, str], axis: str, note: str = ""
) -> list[Histogram]:
    """Return a histogram of the confidence with one group per label; [] unless both labels have answers.

    Args:
        outcomes: each has `label` (1 or 0) and `confidence`: the stated probability of label 1, None if not stated.
        texts: the meaning of label 1 and of label 0.
        axis, note: see `Histogram`.
    """
    said = [(one.get("label"), one.get("confidence")) for one in outcomes]
    ones, zeros = ([c for y, c in said if y == label and c is not None] for label in (1.0, 0.0))
    if not (ones and zeros):
        return []
    return [Histogram("probability answered", dict(zip(texts, (ones, zeros), strict=True)), axis, note=note)]


@dataclass(frozen=True)
class Counted:
    """Histogram as a summary stores it: counts in place of numbers; see `Histogram`."""

    title: str
    groups: Mapping[str, Sequence[int]]
    axis: str
    range: tuple[float, float]
    note: str


@dataclass(frozen=True)
class Lines:
    """Lines through points, such as precision over recall.

    Args:
        series: name -> points (x, y) in the order in which the line joins them; up to 6 lines.
        x, y: labels of the axes.
        note: a sentence below the figure.
    """

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    x: str = ""
    y: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Small table, such as a confusion matrix.

    Args:
        rows: cells of each row: texts, numbers, or None for an empty cell.
        note: a sentence below the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    note: str = ""


Figure = Histogram | Lines | Table
Kept = Counted | Lines | Table
KINDS = {"histogram": Counted, "lines": Lines, "table": Table}


def figures_to_json(figures: Iterable[Any]) -> list[dict[str, Any]]:
    """Return figures as JSON values, as a summary stores them.

    Raises: DataError for anything but a Histogram, Lines or Table, and for figures beyond the limits of this module.
    """
    kept: list[dict[str, Any]] = []
    for figure in islice(figures, MAX_FIGURES + 1):
        one = _counted(figure) if isinstance(figure, Histogram) else figure
        kind = next((name for name, cls in KINDS.items() if type(one) is cls), None)
        if kind is None:
            hint = "return vlmrl.Histogram, vlmrl.Lines or vlmrl.Table"
            raise DataError(f"a figure is a {type(figure).__name__}", hint=hint)
        try:
            kept.append({"kind": kind, **_plain(asdict(one))})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(f"the figure {quoted(one.title)} cannot be stored: {error}") from error
    figures_from_json(kept)
    return kept


def figures_from_json(kept: Any) -> list[Kept]:
    """Return the figures that a summary stores. Raises: DataError for a value that is no valid figure."""
    if not isinstance(kept, list) or len(kept) > MAX_FIGURES:
        raise DataError(f"the figures of an evaluation are not a list of at most {MAX_FIGURES}")
    return [_checked(one) for one in kept]


def _counted(figure: Histogram) -> Counted:
    hint = "1 to 100 bins, a range of two increasing numbers, and numbers that are finite"
    try:
        low, high = map(float, figure.range)
        numbers = [float(number) for group in figure.groups.values() for number in group]
        sound = isinstance(figure.bins, int) and 1 <= figure.bins <= 100 and 0 < high - low < math.inf
        if not sound or not all(map(math.isfinite, numbers)):
            raise DataError(f"the histogram `{excerpt(str(figure.title), 80)}` cannot be counted", hint=hint)
        return Counted(figure.title, figure.counts(), figure.axis, (low, high), figure.note)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(
            f"the histogram `{excerpt(str(figure.title), 80)}` cannot be counted: {error}", hint=hint
        ) from error


def _plain(value: Any) -> Any:
    """Return a value as JSON types: numbers of numpy and torch as floats, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, str)):
        return encodable(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return value if abs(value) < MAX_INTEGER else float(value)
    number = float(value) if hasattr(value, "__float__") else None
    return str(value) if number is None else number


def _checked(one: Any) -> Kept:
    what = f"the figure {quoted(one.get('title'))}" if isinstance(one, dict) else "a figure"
    try:
        kind, fields = one["kind"], {key: value for key, value in one.items() if key != "kind"}
        figure: Kept = KINDS[kind](**fields)
        if isinstance(figure, Counted):
            texts, sound = [figure.axis, *figure.groups], _sound_counts(figure)
        elif isinstance(figure, Lines):
            texts, sound = [figure.x, figure.y, *figure.series], _sound_lines(figure)
        else:
            texts, sound = list(figure.header), _sound_table(figure)
        texts += [figure.title, figure.note]
        sound &= all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
    if not sound:
        hint = (
            f"a histogram has 1 or 2 groups; lines are at most {MAX_SERIES} of {MAX_POINTS:,} finite points; a table "
            f"has at most {MAX_ROWS} rows as long as its header, of {MAX_COLUMNS} columns at most, with texts, finite "
            f"numbers and None; a text has at most {MAX_TEXT} characters"
        )
        raise DataError(f"{what} is not within the limits of a report", hint=hint)
    return figure


def _sound_counts(figure: Counted) -> bool:
    groups = list(figure.groups.values())
    low, high = figure.range
    return (
        1 <= len(groups) <= 2
        and 1 <= len(groups[0]) <= 100
        and len({len(counts) for counts in groups}) == 1
        and all(isinstance(n, int) and n >= 0 for counts in groups for n in counts)
        and -math.inf < low < high < math.inf
    )


def _sound_lines(figure: Lines) -> bool:
    lines = list(figure.series.values())
    return (
        1 <= len(lines) <= MAX_SERIES
        and all(len(points) <= MAX_POINTS for points in lines)
        and all(math.isfinite(x) and math.isfinite(y) for points in lines for x, y in points)
    )


def _sound_table(figure: Table) -> bool:
    cells = [cell for row in figure.rows for cell in row]
    return (
        1 <= len(figure.header) <= MAX_COLUMNS
        and len(figure.rows) <= MAX_ROWS
        and all(len(row) == len(figure.header) for row in figure.rows)
        and all(cell is None or isinstance(cell, (str, int)) or _is_finite(cell) for cell in cells)
        and all(len(cell) <= MAX_TEXT for cell in cells if isinstance(cell, str))
    )


def _is_finite(cell: Any) -> bool:
    return isinstance(cell, float) and math.isfinite(cell)
