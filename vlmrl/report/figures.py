"""Figures of evaluations that a task has added, drawn for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import DataError
from vlmrl.report.plots import NUM_COLOURS, Series, histogram, line_chart
from vlmrl.tasks.figure import Counted, Lines, by_label, figures_from_json, figures_to_json

Record = Mapping[str, Any]


@dataclass(frozen=True)
class FigureView:
    """Figure of the page.

    Args:
        svg: the drawing; empty for a table, which has `header` and `rows`.
        legend: (colour, name) of each line.
        y: what the vertical axis is.
    """

    title: str
    note: str
    svg: str = ""
    legend: Sequence[tuple[int, str]] = ()
    y: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str | float | None]] = ()


def figure_views(kept: Any, label: str, colour: int) -> list[FigureView]:
    """Return the drawn figures of a summary. In place of one that cannot be read is a sentence that says so.

    Args:
        kept: `figures` of a summary.
        label, colour: those of the run.
    """
    try:
        figures = figures_from_json(kept)
    except DataError as error:
        return [FigureView(f"{label}: figures", f"{error.message}.")]
    views = []
    for figure in figures:
        title = f"{label}: {figure.title}"
        if isinstance(figure, Counted):
            drawn = histogram(title, figure.groups, span=figure.range, axis=figure.axis, colour=colour)
            views.append(FigureView(title, figure.note, drawn))
        elif isinstance(figure, Lines):
            views.append(_lines(title, figure, colour))
        else:
            views.append(FigureView(title, figure.note, header=figure.header, rows=figure.rows))
    return views


def confidence_figures(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the figures of an evaluation whose summary has none, because an earlier version made it.

    If the answer is a probability, they show the probabilities for rows with label 1, and for rows with label 0.
    """
    texts = ("the label is 1", "the label is 0")
    return figures_to_json(by_label((r["outcome"] for r in rows), texts, "probability of the label 1"))


def _lines(title: str, figure: Lines, colour: int) -> FigureView:
    lines = [
        Series(name, [x for x, _ in points], [y for _, y in points], colour=colour + k)
        for k, (name, points) in enumerate(figure.series.items())
    ]
    drawn = line_chart(title, lines, axis=figure.x or "x")
    legend = [(s.colour % NUM_COLOURS, s.name) for s in lines] if len(lines) > 1 else []
    return FigureView(title, figure.note, drawn, legend, figure.y)
