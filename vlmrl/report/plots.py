"""Small charts as inline SVG: axes with round ticks, interval bands, values on hover; figures that tasks add.

They need no script and no file. Colours come from the page's CSS (`--c0`, `--c1`, ... one per run), so a chart follows
the reader's light or dark theme. All text is escaped here, so a page may insert the charts unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from vlmrl.errors import DataError
from vlmrl.tasks.figure import Counted, Lines, by_label, figures_from_json, figures_to_json
from vlmrl.untrusted import visible

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
NUM_COLOURS = 6
MAX_POINTS = 400
"""Approximate maximum number of drawn points of a line.

A longer line is divided into equal stretches, and the smallest and the largest value of each stretch are drawn.
"""
MAX_HOVERS = 160
STEP, EPOCH = "step", "epoch"
SMOOTH_FROM = 30
"""Minimum number of points for which a training series gets a moving mean; its raw line is then drawn faintly."""


@dataclass(frozen=True)
class Series:
    """Series of values in a chart. NaN leaves a gap.

    Args:
        low, high: bounds of the 95% interval, drawn as a band around a line, or as whiskers on dots.
        colour: index of the run's colour.
        dots: draw a dot at each point, for sparse series such as validation.
        smooth: add a moving mean if there are enough points.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0
    dots: bool = False
    smooth: bool = False


@dataclass(frozen=True)
class Mark:
    """Vertical line at the step of an event. The text appears on hover."""

    x: float
    text: str
    colour: int = 0


@dataclass(frozen=True)
class PlotFrame:
    """Frame of a chart: ranges of the values, size of the drawing, and ticks of both axes."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int = WIDTH
    height: int = HEIGHT
    ticks_x: Sequence[float] = field(default_factory=tuple)
    ticks_y: Sequence[float] = field(default_factory=tuple)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a data point, in drawing units."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        left, right = LEFT, self.width - RIGHT
        return round(left + across * (right - left), 2), round(
            self.height - BOTTOM - up * (self.height - BOTTOM - TOP), 2
        )


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
    line: float | None = None,
    line_text: str = "",
    axis: str = STEP,
) -> Markup:
    """Return a chart of series over the step.

    Args:
        line: value of a horizontal, dashed reference line, such as a baseline or a published number.
        axis: title of the x axis. An axis of steps or epochs has only whole numbers.
    Example: line_chart("reward", [Series("train", [0, 1], [0.2, 0.4])])
    """
    drawn = [s for s in series if any(map(math.isfinite, s.y))]
    if not drawn:
        return Markup('<p class="note">no numbers</p>')
    frame = _frame(drawn, line, width, height, whole=axis in (STEP, EPOCH))
    parts = [_axes(frame, axis)]
    if line is not None:
        (x0, y), (x1, _) = frame.at(frame.x[0], line), frame.at(frame.x[1], line)
        parts.append(
            f'<line class="ref" x1="{x0}" x2="{x1}" y1="{y}" y2="{y}"/>'
            f'<text class="reftext" x="{x1 - 2}" y="{y - 4}">{_text(line_text)}</text>'
        )
    parts += [_mark(m, frame) for m in marks if frame.x[0] <= m.x <= frame.x[1]]
    parts += [_band(s, frame) for s in drawn if s.low and not s.dots]
    parts += [_line(s, frame) for s in drawn]
    parts += [_whiskers(s, frame) for s in drawn if s.low and s.dots]
    parts += [_points(s, frame, axis) for s in drawn]
    return _svg(f"{title}: {', '.join(dict.fromkeys(s.name for s in drawn))}", frame, parts)


def _svg(label: str, frame: PlotFrame, parts: Sequence[str]) -> Markup:
    size = f"{frame.width} {frame.height}"
    opening = f'<svg class="chart" viewBox="0 0 {size}" role="img" aria-label="{_text(label)}">'
    return Markup(f"{opening}{''.join(parts)}</svg>")


def interval_bar(value: float, low: float | None, high: float | None, span: tuple[float, float], colour: int) -> Markup:
    """Return a drawing for a table cell: a dot with its interval on a short scale. `span`: range of the scale."""
    width, height, pad = 120, 14, 6
    first, last = span if span[1] > span[0] else (span[0] - 0.5, span[0] + 0.5)

    def at(number: float) -> float:
        return round(pad + (number - first) / (last - first) * (width - 2 * pad), 1)

    whisker = ""
    if low is not None and high is not None:
        whisker = f'<line class="s{colour % NUM_COLOURS} whisker" x1="{at(low)}" x2="{at(high)}" y1="7" y2="7"/>'
    return Markup(
        f'<svg class="bar" viewBox="0 0 {width} {height}" aria-hidden="true">'
        f'<line class="grid" x1="{pad}" x2="{width - pad}" y1="7" y2="7"/>{whisker}'
        f'<circle class="f{colour % NUM_COLOURS}" cx="{at(value)}" cy="7" r="3.2"/></svg>'
    )


def histogram(
    title: str,
    groups: Mapping[str, Sequence[int]],
    *,
    span: tuple[float, float],
    axis: str,
    colour: int,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Markup:
    """Return a chart of the distribution of numbers over equal bins; each bar is a share of its own group.

    Args:
        groups: name of a group -> count of each bin. With two groups, the bars of the second point down.
        span: range of the numbers that the bins cover.
        axis: title of the x axis.
    """
    shares = [[count / max(1, sum(counts)) for count in counts] for counts in groups.values()]
    top = (max(share for group in shares for share in group) or 1.0) * 1.15
    frame = PlotFrame(span, (-top if len(shares) > 1 else 0.0, top), width, height)
    (left, middle), (right, _) = frame.at(span[0], 0.0), frame.at(span[1], 0.0)
    parts = [f'<line class="grid" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}"/>']
    parts += _x_axis(frame, [t for t in nice_ticks(*span) if span[0] <= t <= span[1]], axis)
    for k, ((text, counts), share) in enumerate(zip(groups.items(), shares, strict=True)):
        parts += _bars(text, counts, share, frame, f"f{colour % NUM_COLOURS}{' second' if k else ''}", down=bool(k))
        y = height - BOTTOM - 4 if k else TOP + 8
        parts.append(f'<text class="tick" x="{left}" y="{y}">{_text(text)}</text>')
    return _svg(title, frame, parts)


def _bars(
    text: str, counts: Sequence[int], shares: Sequence[float], frame: PlotFrame, style: str, *, down: bool
) -> list[str]:
    """Return the bars of one group as SVG; their counts appear on hover."""
    (low, high), bins = frame.x, len(counts)
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    _, middle = frame.at(low, 0.0)
    parts = []
    for i, share in enumerate(shares):
        (x0, y), (x1, _) = frame.at(edges[i], 0.0 if down else share), frame.at(edges[i + 1], 0.0)
        tall = round(abs(frame.at(low, share)[1] - middle), 2)
        hover = f"{text}\n{edges[i]:.2f} to {edges[i + 1]:.2f}: {counts[i]} of {sum(counts)}"
        parts.append(
            f'<rect class="{style}" x="{x0 + 0.5:g}" y="{y:g}" width="{max(0.5, x1 - x0 - 1):g}" height="{tall:g}">'
            f"<title>{_text(hover)}</title></rect>"
        )
    return parts


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of a round number (1, 2 or 5 times a power of ten) that cover [low, high].

    Example: nice_ticks(0, 0.93) -> [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].
    """
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # i * step instead of a running sum, so that rounding errors do not add up.
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def short(value: float) -> str:
    """Format a number with few characters: 0.25, 1.2k, 3e-05, 4.1M."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= 10 * scale or (size >= scale and scale > 1e3):
            return f"{value / scale:.3g}{unit}"
    return f"{value:.4g}"


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the finite values in a centred window of `width`; NaN if there are none."""
    half, out = width // 2, []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        out.append(math.fsum(near) / len(near) if near else math.nan)
    return out


def _frame(series: Sequence[Series], line: float | None, width: int, height: int, *, whole: bool) -> PlotFrame:
    xs = [x for s in series for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)]
    ys = [v for s in series for v in (*s.y, *s.low, *s.high) if math.isfinite(v)]
    ys += [line] if line is not None else []
    # The one rule of all y axes: they contain 0, so that small changes look small. A line at 0 has the axis 0 to 1.
    low, high = min(0.0, *ys), max(0.0, *ys)
    if low == high:
        high = 1.0
    ticks = nice_ticks(low, high)
    x0, x1 = min(xs), max(xs)
    if x1 == x0:
        x0, x1 = x0 - 0.5, x1 + 0.5
    steps = [t for t in nice_ticks(x0, x1, 6) if x0 <= t <= x1 and (t == int(t) or not whole)]
    return PlotFrame((x0, x1), (min(ticks[0], low), max(ticks[-1], high)), width, height, steps, ticks)


def _axes(frame: PlotFrame, axis: str) -> str:
    parts = []
    for tick in frame.ticks_y:
        x0, y = frame.at(frame.x[0], tick)
        x1, _ = frame.at(frame.x[1], tick)
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{x0 - 7}" y="{y + 4}" text-anchor="end">{short(tick)}</text>')
    return "".join([*parts, *_x_axis(frame, frame.ticks_x, axis)])


def _x_axis(frame: PlotFrame, ticks: Sequence[float], axis: str) -> list[str]:
    """Return the numbers and the title of the x axis as SVG."""
    parts = []
    for tick in ticks:
        x, y = frame.at(tick, frame.y[0])
        parts.append(f'<text class="tick" x="{x}" y="{y + 16}" text-anchor="middle">{short(tick)}</text>')
    middle, bottom = (LEFT + frame.width - RIGHT) / 2, frame.height - 3
    return [*parts, f'<text class="axis" x="{middle}" y="{bottom}" text-anchor="middle">{_text(axis)}</text>']


def _thin(s: Series) -> list[int]:
    """Return the indices of the points to draw: all, or the smallest and the largest value of each stretch."""
    if len(s.y) <= MAX_POINTS:
        return list(range(len(s.y)))
    size = math.ceil(len(s.y) / (MAX_POINTS / 2))
    kept: set[int] = {0, len(s.y) - 1}
    for start in range(0, len(s.y), size):
        stretch = [i for i in range(start, min(start + size, len(s.y))) if math.isfinite(s.y[i])]
        if stretch:
            kept |= {min(stretch, key=lambda i: s.y[i]), max(stretch, key=lambda i: s.y[i])}
    return sorted(kept)


def _path(points: Sequence[tuple[float, float]], frame: PlotFrame) -> str:
    """Return an SVG path (`M..L..`) through the points; a point that is not finite leaves a gap."""
    words, pen_down = [], False
    for x, y in points:
        if not math.isfinite(y):
            pen_down = False
            continue
        px, py = frame.at(x, y)
        words.append(f"{'L' if pen_down else 'M'}{px:g} {py:g}")
        pen_down = True
    return "".join(words)


def _line(s: Series, frame: PlotFrame) -> str:
    colour = s.colour % NUM_COLOURS
    point_indices = _thin(s)
    raw = _path([(s.x[i], s.y[i]) for i in point_indices], frame)
    if not (s.smooth and len(s.y) >= SMOOTH_FROM):
        return f'<path class="s{colour} curve" d="{raw}"/>'
    mean = moving_mean(s.y, max(5, len(s.y) // 20))
    smooth = _path([(s.x[i], mean[i]) for i in range(0, len(mean), max(1, len(mean) // MAX_POINTS))], frame)
    return f'<path class="s{colour} faint" d="{raw}"/><path class="s{colour} curve" d="{smooth}"/>'


def _band(s: Series, frame: PlotFrame) -> str:
    """Return the interval as filled areas, one per sequence of finite points."""
    stretches: list[list[int]] = [[]]
    for i in _thin(s):
        if math.isfinite(s.low[i]) and math.isfinite(s.high[i]):
            stretches[-1].append(i)
        elif stretches[-1]:
            stretches.append([])
    parts = []
    for indices in stretches:
        if len(indices) > 1:
            upper_points = [(s.x[i], s.high[i]) for i in indices]
            lower_points = [(s.x[i], s.low[i]) for i in reversed(indices)]
            parts.append(
                f'<path class="f{s.colour % NUM_COLOURS} band" d="{_path([*upper_points, *lower_points], frame)}Z"/>'
            )
    return "".join(parts)


def _whiskers(s: Series, frame: PlotFrame) -> str:
    parts = []
    for x, low, high in zip(s.x, s.low, s.high, strict=True):
        if math.isfinite(low) and math.isfinite(high):
            (px, bottom), (_, top) = frame.at(x, low), frame.at(x, high)
            parts.append(
                f'<line class="s{s.colour % NUM_COLOURS} whisker" x1="{px}" x2="{px}" y1="{bottom}" y2="{top}"/>'
            )
    return "".join(parts)


def _points(s: Series, frame: PlotFrame, axis: str) -> str:
    """Return the dots of a sparse series, and invisible dots of any series whose values appear on hover."""
    parts, colour = [], s.colour % NUM_COLOURS
    every = max(1, math.ceil(len(s.y) / MAX_HOVERS))
    for i in range(0, len(s.y), 1 if s.dots else every):
        if not math.isfinite(s.y[i]):
            continue
        px, py = frame.at(s.x[i], s.y[i])
        hover = f"{s.name}\n{axis} {s.x[i]:g}: {s.y[i]:.4g}"
        if s.low and math.isfinite(s.low[i]):
            hover += f"  [{s.low[i]:.4g}, {s.high[i]:.4g}]"
        shape = f'class="f{colour} dot" r="3.4"' if s.dots else 'class="hover" r="7"'
        parts.append(f'<circle {shape} cx="{px}" cy="{py}"><title>{_text(hover)}</title></circle>')
    return "".join(parts)


def _mark(mark: Mark, frame: PlotFrame) -> str:
    x, bottom = frame.at(mark.x, frame.y[0])
    colour = mark.colour % NUM_COLOURS
    return (
        f'<g><line class="s{colour} resume" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>'
        f'<rect class="hover" x="{x - 5}" y="{TOP}" width="10" height="{bottom - TOP}"/>'
        f"<title>{_text(mark.text)}</title></g>"
    )


def _text(text: str) -> Markup:
    return escape(visible(text))


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
