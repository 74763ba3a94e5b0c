"""Drawing of the figures that a task adds to its evaluations."""

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
    """Figure on the page.

    Args:
        svg: the drawing; "" for a table, which has `header` and `rows`.
        legend: (colour, name) of each line.
        y: title of the vertical axis.
    """

    title: str
    note: str
    svg: str = ""
    legend: Sequence[tuple[int, str]] = ()
    y: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str | float | None]] = ()


def figure_views(kept: Any, label: str, colour: int) -> list[FigureView]:
    """Return the drawn figures of a summary. A figure that cannot be read is replaced by a sentence about it.

    Args:
        kept: the value `figures` of a summary.
        label, colour: label and colour of the run.
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
    """Return the figures for an evaluation of an earlier version, whose summary has no figures.

    If answers are probabilities, they are histograms: of the answers to rows with label 1, and to rows with label 0.
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
