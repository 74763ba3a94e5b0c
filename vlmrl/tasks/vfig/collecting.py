"""Collection of figures from all sources: copies and leaks are taken out, and equal figures are in one split.

Figures are drawn, filtered, and recognised by hashes. A figure's split follows from the hash of its picture alone. So
several datasets that are prepared in the same way (one for supervised, one for reinforcement learning) have the same
figures in validation. What became of the figures of each source is counted, for people and for dataset.json.

Source of the counts of shapes and the filter: the appendix of the paper on VFig (arXiv 2603.24575). There `<line` is
counted as a text; here elements are counted, so that a `linearGradient` is no line, and what is only defined is not
counted.
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from vlmrl.data.doctor import CheckLevel
from vlmrl.data.image_scan import stored_form
from vlmrl.data.images import decode_image, encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.store.provenance import usable_cores
from vlmrl.svg.draw import Drawing, DrawJob, pixels_digest
from vlmrl.svg.parse import Node, SvgLimits, find_svg, parse_svg
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.base import NewRow
from vlmrl.tasks.dataset_assembly import first_bad, is_few, leave_out
from vlmrl.tasks.vfig.drawn.figure import draw_figure
from vlmrl.tasks.vfig.figure_sources import FigureSource, Filters, PictureSizes, Plan, SourceFigure, WrongRow
from vlmrl.tasks.vfig.truth import as_label, make_truth
from vlmrl.types import LeftOut, hash64
from vlmrl.untrusted import CodeRefused

BASIC = frozenset(("rect", "circle", "ellipse"))
CONNECTORS = frozenset(("line", "polyline"))
COMPLEX = frozenset(("path", "polygon"))
NOT_DRAWN = frozenset(("defs", "clipPath", "mask", "pattern", "marker", "symbol"))
"""Elements whose content shows only where others refer to it."""
MOST_PERIOD = 24
"""Longest sequence of tags that is searched for repetition."""
LEAST_REPEATS, LEAST_CHARS = 12, 400
"""A text repeats itself if a sequence of tags comes this often in a row, and these have this many characters."""
LONG_TEXT, LEAST_SHARE = 4_000, 0.02
"""A longer text repeats itself if zlib makes it smaller than this share."""
TAG = re.compile(r"<[^<>]*>[^<]*")
BETWEEN = re.compile(r"\s*([<>=])\s*")


@dataclass(frozen=True)
class ShapeCounts:
    """Numbers of elements that are drawn: rectangles and round shapes, lines, paths and polygons, texts."""

    basic: int
    connectors: int
    complex: int
    texts: int

    @property
    def shapes(self) -> int:
        """Number of elements that are drawn, without texts."""
        return self.basic + self.connectors + self.complex

    @property
    def simple_share(self) -> float | None:
        """Share of the shapes that are basic or connectors, in [0, 1]; None without shapes."""
        return (self.basic + self.connectors) / self.shapes if self.shapes else None


def count_shapes(svg: str) -> ShapeCounts:
    """Return the counts of a figure's code. Raises: CodeRefused for a text that is no SVG or beyond the limits."""
    numbers: dict[str, int] = dict.fromkeys(("basic", "connectors", "complex", "texts"), 0)
    kinds = {**dict.fromkeys(BASIC, "basic"), **dict.fromkeys(CONNECTORS, "connectors")}
    kinds |= {**dict.fromkeys(COMPLEX, "complex"), "text": "texts"}
    waiting: list[Node] = [parse_svg(svg)]
    while waiting:
        node = waiting.pop()
        if node.tag in kinds:
            numbers[kinds[node.tag]] += 1
        if node.tag not in NOT_DRAWN:
            waiting.extend(node.children)
    return ShapeCounts(**numbers)


def repetition(svg: str) -> str:
    """Return how a text repeats itself, as a broken writer's does, in words; "" if it does not.

    Time: linear in the length of the text.
    """
    tags = [tag.strip() for tag in TAG.findall(svg)]
    for period in range(1, min(MOST_PERIOD, len(tags) // LEAST_REPEATS) + 1):
        run = 0
        for i in range(period, len(tags)):
            run = run + 1 if tags[i] == tags[i - period] else 0
            if run >= period * (LEAST_REPEATS - 1):
                block = "".join(tags[i - period + 1 : i + 1])
                if "=" in block and len(block) * LEAST_REPEATS >= LEAST_CHARS:
                    return f"{period} tag{'s' * (period > 1)} come {LEAST_REPEATS} times in a row or more"
    data = svg.encode("utf-8", "replace")
    if len(data) > LONG_TEXT and len(zlib.compress(data)) < LEAST_SHARE * len(data):
        return f"zlib makes it smaller than {LEAST_SHARE:.0%}"
    return ""


def code_hash(svg: str) -> str:
    """Return a hash of a figure's code: equal for texts that differ in comments and in white space around tags."""
    text = BETWEEN.sub(r"\1", " ".join(_without_comments(svg).split()))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]


def _without_comments(svg: str) -> str:
    parts, place = [], 0
    while (start := svg.find("<!--", place)) >= 0 and (end := svg.find("-->", start)) >= 0:
        parts.append(svg[place:start])
        place = end + 3
    return "".join([*parts, svg[place:]])


WRONG = "wrong"
"""Kind of a rejected figure that cannot be read; figures of the other kinds are left out by a filter."""
COMPARED_SIDE = 32
"""Images are compared at this width and height in pixels, so that fonts and smoothing count little."""
FEW_BASIC = "few basic shapes"
"""Kind of the reason of figures that --min-basic leaves out."""
DOUBTFUL = 0.6
"""Difference of an image and the drawing of its code from which the pair is called doubtful."""
HASH_CHARS = 32


@dataclass(frozen=True)
class Screened:
    """Figure that passed.

    Args:
        svg: its code, from `<svg` to `</svg>`, unchanged.
        width, height: of its drawing in pixels.
        picture_hash, code_hash: equal figures have one of them in common.
        file: image file, PNG or as it came.
        difference: of its own image and the drawing, in [0, 1]; None = the image is the drawing.
    """

    figure: SourceFigure
    svg: str
    width: int
    height: int
    picture_hash: str
    code_hash: str
    file: bytes
    difference: float | None


@dataclass(frozen=True)
class Rejected:
    """Figure that is left out: a kind of reasons for counts, and the reason."""

    figure: SourceFigure
    kind: str
    reason: str


class _Reject(Exception):
    """Kind and reason of a `Rejected`."""


def screen(
    figures: Sequence[SourceFigure], filters: Filters, sizes: PictureSizes, renderer: SvgRenderer
) -> list[Screened | Rejected]:
    """Return for each figure what is kept of it, or why it is left out.

    Args:
        renderer: its limit of pixels is that of `sizes`.
    """
    results: list[Screened | Rejected | None] = [None] * len(figures)
    codes: dict[int, str] = {}
    for number, figure in enumerate(figures):
        try:
            codes[number] = _checked_code(figure.text, filters)
        except _Reject as reject:
            results[number] = Rejected(figure, *reject.args)
    drawings = dict(zip(codes, renderer.draw([DrawJob(svg) for svg in codes.values()]), strict=True))
    small = [
        (number, sizes.enlarged(*_size(drawing)))
        for number, drawing in drawings.items()
        if isinstance(drawing, Drawing) and sizes.enlarged(*_size(drawing)) != _size(drawing)
    ]
    again = renderer.draw([DrawJob(codes[number], size) for number, size in small])
    drawings |= {number: drawing for (number, _), drawing in zip(small, again, strict=True)}
    for number, drawing in drawings.items():
        figure = figures[number]
        try:
            results[number] = _screened(figure, codes[number], drawing, filters, sizes)
        except _Reject as reject:
            results[number] = Rejected(figure, *reject.args)
    return [result for result in results if result is not None]


def _checked_code(text: str, filters: Filters) -> str:
    """Return the code in a text, unchanged. Raises: _Reject."""
    try:
        svg = find_svg(text)
        if filters.max_chars is not None and len(svg) > filters.max_chars:
            raise _Reject("long", f"the code has {len(svg):,} characters; the limit is {filters.max_chars:,}")
        if filters.repeats and (problem := repetition(svg)):
            raise _Reject("repeats itself", f"the code repeats itself: {problem}")
        counts = count_shapes(svg)
    except CodeRefused as error:
        raise _Reject(f"not drawn ({error.kind})", error.reason) from error
    share = counts.simple_share
    if filters.min_basic is not None and (share is None or share < filters.min_basic):
        reason = "no shapes" if share is None else f"{share:.0%} of the shapes are basic or lines"
        raise _Reject(FEW_BASIC, f"{reason}; at least {filters.min_basic:.0%} are wanted")
    if filters.max_complex is not None and counts.complex > filters.max_complex:
        reason = f"{counts.complex:,} paths and polygons; the limit is {filters.max_complex:,}"
        raise _Reject("many complex shapes", reason)
    return svg


def _screened(
    figure: SourceFigure, svg: str, drawing: Drawing | CodeRefused, filters: Filters, sizes: PictureSizes
) -> Screened:
    if isinstance(drawing, CodeRefused):
        raise _Reject(f"not drawn ({drawing.kind})", drawing.reason)
    if drawing.is_blank:
        raise _Reject("blank", "its drawing is blank")
    width, height = _size(drawing)
    _check_aspect(width, height, "its drawing", filters)
    if figure.image is None:
        from PIL import Image

        file, difference = encode_png(Image.fromarray(drawing.pixels)), None
    else:
        file, difference = _own_image(figure.image, drawing, filters, sizes)
    return Screened(figure, svg, width, height, picture_hash(drawing.pixels), code_hash(svg), file, difference)


def _own_image(data: bytes, drawing: Drawing, filters: Filters, sizes: PictureSizes) -> tuple[bytes, float]:
    """Return the file of an image that came with the code, and its difference to the drawing. Raises: _Reject."""
    try:
        image = decode_image(data)
        _check_aspect(*image.size, "its image", filters)
        if filters.min_image is not None and min(image.size) < filters.min_image:
            size = f"{image.size[0]} x {image.size[1]}"
            raise _Reject("small image", f"its image has {size} pixels; a side of {filters.min_image} is the least")
        pixels = np.asarray(image)
        if (pixels == pixels[0, 0]).all():
            raise _Reject("blank", "its image is blank")
        difference = picture_difference(pixels, drawing.pixels)
        if filters.max_difference is not None and difference > filters.max_difference:
            reason = f"its image differs from the drawing of its code by {difference:.2f} of 1"
            raise _Reject("other picture", f"{reason}; the limit is {filters.max_difference:g}")
        if image.size[0] * image.size[1] > sizes.max_pixels:
            data = stored_form(data, sizes.max_pixels)[0]
    except DataError as error:
        raise _Reject(WRONG, f"its image cannot be used: {error.message}") from error
    return data, difference


def _check_aspect(width: int, height: int, what: str, filters: Filters) -> None:
    ratio = max(width, height) / min(width, height)
    if filters.max_aspect is not None and ratio > filters.max_aspect:
        raise _Reject("long and thin", f"{what} has {width} x {height} pixels, a ratio above {filters.max_aspect:g}")


def _size(drawing: Drawing) -> tuple[int, int]:
    return drawing.pixels.shape[1], drawing.pixels.shape[0]


def picture_hash(pixels: np.ndarray) -> str:
    """Return a hash of a picture without its margins, (height, width, 3) uint8. It is not blank.

    A margin is a row or column at an edge in which all pixels have the colour of the corner at the top left.
    """
    differs = (pixels != pixels[0, 0]).any(axis=2)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    inner = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] if len(rows) else pixels[:1, :1]
    return pixels_digest(inner)[:HASH_CHARS]


def picture_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return how much two pictures differ, (height, width, 3) uint8 of any size: 0 = not at all, 1 = nothing is shared.

    It is the sum of the differences of grey values at 32 x 32 pixels, as a share of what both pictures show beside
    their background (the median grey value). So a wrong picture counts as wrong on a large white page, too.
    """
    grey, other_grey = _grey(one), _grey(other)
    shown = sum(float(np.abs(picture - np.median(picture)).sum()) for picture in (grey, other_grey))
    difference = float(np.abs(grey - other_grey).sum())
    return min(1.0, difference / shown) if shown > 0 else float(difference > 0)


def _grey(pixels: np.ndarray) -> Any:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels)).convert("L")
    return np.asarray(image.resize((COMPARED_SIDE, COMPARED_SIDE), Image.Resampling.BOX), dtype=np.float64)


TRAIN, VALIDATION, TEST = "train", "validation", "test"
LEAKS = "of held-out sets"
KEEPS_PATHS = "--min-basic 0 keeps figures of paths, such as icons and charts"


@dataclass
class SourceCounts:
    """Counts of one source.

    Args:
        rows: rows or files that were read.
        kept: split -> rows.
        dropped: kind of reasons -> rows that a filter left out, or that cannot be read.
        duplicates: rows left out because an earlier one shows the same figure.
        leaks: rows left out of train and validation because the figure is in a held-out set.
        drawn: kept rows whose image was drawn from their code.
        doubtful: kept rows whose own image differs much from the drawing of their code.
    """

    rows: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    leaks: int = 0
    drawn: int = 0
    doubtful: int = 0

    def splits(self) -> dict[str, int]:
        """Return split -> kept rows, in the usual order; splits without rows are left out."""
        return {split: self.kept[split] for split in (TRAIN, VALIDATION, TEST) if self.kept[split]}

    def fields(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**vars(self), "kept": self.splits(), "dropped": dict(self.dropped.most_common())}

    def note(self) -> tuple[CheckLevel, str]:
        """Return the counts as a check of the data doctor."""
        kept = ", ".join(f"{count:,} {split}" for split, count in self.splits().items()) or "none kept"
        out = [f"{count:,} {kind}" for kind, count in self.dropped.most_common()]
        out += [f"{self.duplicates:,} duplicates"] if self.duplicates else []
        out += [f"{self.leaks:,} {LEAKS}"] if self.leaks else []
        text = f"{self.rows:,} rows: {kept}" + (f"; left out: {', '.join(out)}" if out else "")
        if 2 * self.dropped[FEW_BASIC] >= self.rows > 0:
            text += f"; {KEEPS_PATHS}"
        if self.doubtful:
            text += f"; {self.doubtful:,} images differ from the drawing of their code by {DOUBTFUL:g} or more"
        return ("look" if out or self.doubtful else "ok"), text


@dataclass
class FigureReport:
    """Counts of all sources.

    Args:
        sources: name -> its counts. Held-out sources have `(bench)` after their label.
        leaks: set of figures -> rows of train or validation that were left out because they are in it.
        moved: rows that were put into train because another dataset trains on them.
        trained: other dataset -> figures of the benchmarks here that are in its training rows.
    """

    sources: dict[str, SourceCounts] = field(default_factory=dict)
    leaks: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    trained: Counter[str] = field(default_factory=Counter)

    def of(self, label: str, *, is_bench: bool) -> SourceCounts:
        """Return the counts of a source."""
        return self.sources.setdefault(f"{label} (bench)" if is_bench else label, SourceCounts())

    def advice(self) -> str:
        """Return what to change if no figure is left: by the most frequent reason."""
        counts = Counter({LEAKS: sum(source.leaks for source in self.sources.values())})
        for source in self.sources.values():
            counts.update(source.dropped)
        (reason, _), *_ = counts.most_common(1)
        if reason == LEAKS:
            return "the figures are held out by --bench or --beside: name other sources"
        return (
            KEEPS_PATHS if reason == FEW_BASIC else "see the reasons above; `vlmrl prep figures --help` has the limits"
        )

    def fields(self) -> dict[str, Any]:
        """Return the counts as JSON values, for `source` in dataset.json."""
        return {
            "sources": {name: counts.fields() for name, counts in self.sources.items()},
            "leaks": dict(self.leaks),
            "moved_to_train": self.moved,
            "trained_elsewhere": dict(self.trained),
        }

    def notes(self, held_out: Iterable[str]) -> Mapping[str, tuple[CheckLevel, str]]:
        """Return the checks of the data doctor: one for each source, and one for leaks.

        Args:
            held_out: names of the sets that train was compared with.
        """
        notes = {f"source {name}": counts.note() for name, counts in self.sources.items()}
        if self.trained:
            text = ", ".join(f"{count:,} are trained on in {name}" for name, count in self.trained.items())
            return {**notes, "leakage": ("bad", f"figures of the test split: {text}")}
        if self.leaks:
            text = ", ".join(f"{count:,} of {name}" for name, count in self.leaks.items())
            return {**notes, "leakage": ("look", f"figures taken out of train and validation: {text}")}
        names = ", ".join(held_out)
        return {**notes, "leakage": ("ok", f"no figure of {names} is in train or validation")} if names else notes


TRAINED_SPLITS = (TRAIN, "start")
"""Splits of other datasets that are trained on; their other splits are held out."""
DRAWN = "synthetic"
"""Label of drawn figures."""
PAGE = '<rect width="{}" height="{}" fill="white" stroke="gray" stroke-width="4"/>'
"""Page of simple figures: without a frame, a tiny model cannot tell how far a shape is from the edge."""
PICTURE_HASH, CODE_HASH = "picture_hash", "code_hash"
BATCH = 64
TRIES = 600
"""Drawing is given up when so many figures in a row bring no new row: they are copies, or filters leave them out."""
Item = TypeVar("Item")


@dataclass
class Collector:
    """Collector of figures. `splits` does the work.

    Attributes:
        report: counts, complete when `splits` has returned.
        held_out: hash of a figure -> name of the set that holds it out; `trained` likewise for what is trained on.
    """

    plan: Plan
    report: FigureReport = field(default_factory=FigureReport)
    held_out: dict[str, str] = field(default_factory=dict)
    trained: dict[str, str] = field(default_factory=dict)
    sets: dict[str, None] = field(default_factory=dict)
    _seen: dict[str, str] = field(default_factory=dict)
    _rows: dict[str, list[NewRow]] = field(default_factory=lambda: {TRAIN: [], VALIDATION: [], TEST: []})
    _left_out: list[LeftOut] = field(default_factory=list)
    _work: TemporaryDirectory[str] | None = None

    def splits(self) -> dict[str, Iterable[NewRow | LeftOut]]:
        """Return split -> rows, in the order of their pictures' hashes; splits without rows are left out.

        Raises: DataError for a source that cannot be read, too many wrong rows, or if no figure is left.
        """
        plan = self.plan
        self._work = TemporaryDirectory(prefix="vlmrl-figures-")  # it lives as long as this collector
        for folder in plan.beside:
            self._read_beside(folder)
        renderer = SvgRenderer(plan.workers or usable_cores(), SvgLimits(pixels=plan.sizes.max_pixels))
        with renderer:
            for source in plan.benches:
                self._collect(source, Filters(), renderer, is_bench=True)
            self._collect_drawn(plan.drawn_bench, renderer, is_bench=True)
            for source in plan.sources:
                self._collect(source, plan.filters, renderer, is_bench=False)
            self._collect_drawn(plan.drawn, renderer, is_bench=False)
        wants_train = bool(plan.sources or plan.drawn)
        if (wants_train and not self._rows[TRAIN]) or not any(self._rows.values()):
            lines = "".join(f"\n  {name}: {counts.note()[1]}" for name, counts in self.report.sources.items())
            raise DataError(f"no figure is left to train on:{lines}", hint=self.report.advice())
        for rows in self._rows.values():
            # The first rows of a split (`max_rows`) stand for all: sources mix, and so do the drawn figures, of which
            # the simple ones come first, because they are repeated sooner.
            rows.sort(key=lambda row: row.columns[PICTURE_HASH])
        splits: dict[str, Iterable[NewRow | LeftOut]] = {split: rows for split, rows in self._rows.items() if rows}
        first = next(iter(splits))
        return {**splits, first: [*splits[first], *self._left_out]}

    def notes(self) -> Mapping[str, tuple[str, str]]:
        """Return the checks of the data doctor, when `splits` has returned."""
        return self.report.notes(self.sets)

    def _read_beside(self, folder: Path) -> None:
        """Note the figures of another dataset. Raises: DataError for a folder that is not a dataset of figures."""
        dataset = open_dataset(Data(path=str(folder)))
        for split in dataset.splits:
            hashes = self.trained if split in TRAINED_SPLITS else self.held_out
            name = f"{folder.name}@{split}"
            if split not in TRAINED_SPLITS:
                self.sets[name] = None
            for row in dataset.rows(split):
                own = [row.columns.get(PICTURE_HASH), row.columns.get(CODE_HASH)]
                if not all(isinstance(key, str) for key in own):
                    raise DataError(f"{folder} is not a dataset of figures", hint="give one that `vlmrl prep` made")
                for key in own:
                    hashes.setdefault(str(key), name)

    def _collect(self, source: FigureSource, filters: Filters, renderer: SvgRenderer, *, is_bench: bool) -> None:
        wrong: list[WrongRow] = []
        total, origin = 0, f"reading {source.label}"
        for batch in _batches(source.figures(), BATCH):
            total += len(batch)
            for one in batch:
                self.report.of(one.label, is_bench=is_bench).rows += 1
            wrong += [one for one in batch if isinstance(one, WrongRow)]
            figures = [one for one in batch if isinstance(one, SourceFigure)]
            for result in screen(figures, filters, self.plan.sizes, renderer):
                figure = result.figure
                if isinstance(result, Screened):
                    self._take(result, is_bench=is_bench)
                elif result.kind == WRONG:
                    wrong.append(WrongRow(figure.label, figure.where, result.reason))
                else:
                    self._reject(result, is_bench=is_bench)
            if self.plan.progress is not None:
                self.plan.progress(origin, total, total)
        for one in wrong:
            self.report.of(one.label, is_bench=is_bench).dropped[WRONG] += 1
        bad = [LeftOut(one.where, one.reason) for one in wrong]
        self._left_out += bad
        if not is_few(len(wrong), total, most := self.plan.max_bad):
            message = f"{len(wrong):,} of {total:,} rows cannot be read, more than --max-bad {most:g}"
            hint = f"fix the rows, give the folder of their images (--image-root), or {leave_out(len(wrong), total)}"
            raise DataError(f"{message}; nothing was written:{first_bad(bad)}", hint=hint)

    def _collect_drawn(self, number: int, renderer: SvgRenderer, *, is_bench: bool) -> None:
        """Draw figures until there are `number` rows for train (or for test) and as many for validation as usual."""
        if not number:
            return
        share = self.plan.val_share
        goal = {TEST: number} if is_bench else {TRAIN: number, VALIDATION: round(number * share / (1 - share))}
        if not is_bench and share:
            goal[VALIDATION] = max(1, goal[VALIDATION])
        counts = self.report.of(DRAWN, is_bench=is_bench)
        stream = _drawn_figures(self.plan, "test" if is_bench else "train")
        most = max(TRIES, round(20 / share) if share else 0)  # validation fills slowly if its share is small
        vain = 0
        for batch in _batches(stream, min(BATCH, number)):
            before = counts.kept.total()
            for result in screen(batch, self.plan.drawn_filters, self.plan.sizes, renderer):
                if isinstance(result, Rejected):
                    counts.rows += 1
                    self._reject(result, is_bench=is_bench)
                    continue
                split = self._split_of(result, is_bench=is_bench)
                if counts.kept[split] < goal.get(split, 0):
                    counts.rows += 1
                    self._take(result, is_bench=is_bench)
            if self.plan.progress is not None:
                self.plan.progress("drawing figures", counts.kept.total(), sum(goal.values()))
            if all(counts.kept[split] >= rows for split, rows in goal.items()):
                return
            vain = 0 if counts.kept.total() > before else vain + len(batch)
            if vain >= most:
                break
        raise DataError(
            f"{counts.kept.total():,} of {sum(goal.values()):,} figures were drawn, and then no new one: "
            f"{counts.note()[1]}",
            hint="draw fewer, leave out --simple, or turn filters off",
        )

    def _take(self, one: Screened, *, is_bench: bool) -> None:
        """Add a figure to its split, unless it is a copy or a leak."""
        counts = self.report.of(one.figure.label, is_bench=is_bench)
        keys = (one.picture_hash, one.code_hash)
        place = next((self.held_out[key] for key in keys if key in self.held_out), None)
        twin = next((self._seen[key] for key in keys if key in self._seen), None)
        if place is not None and not is_bench:
            counts.leaks += 1
            self.report.leaks[place] += 1
            self._left_out.append(LeftOut(one.figure.where, f"the figure is in {place}, which is held out"))
            return
        if twin is not None:
            counts.duplicates += 1
            self._left_out.append(LeftOut(one.figure.where, f"the same figure as {twin}"))
            return
        elsewhere = next((self.trained[key] for key in keys if key in self.trained), None)
        if is_bench:
            name = as_label(one.figure.label)
            self.sets[name] = None
            self.held_out |= dict.fromkeys(keys, name)
            self.report.trained.update([elsewhere] if elsewhere else [])
        self._seen |= dict.fromkeys(keys, one.figure.where)
        self._keep(one, counts, self._split_of(one, is_bench=is_bench))

    def _split_of(self, one: Screened, *, is_bench: bool) -> str:
        if is_bench:
            return TEST
        is_validation = split_point(one.picture_hash) < self.plan.val_share
        is_trained = one.picture_hash in self.trained or one.code_hash in self.trained
        return VALIDATION if is_validation and not is_trained else TRAIN

    def _keep(self, one: Screened, counts: SourceCounts, split: str) -> None:
        assert self._work is not None
        counts.kept[split] += 1
        counts.drawn += one.difference is None
        counts.doubtful += one.difference is not None and one.difference >= DOUBTFUL
        if split == TRAIN and split_point(one.picture_hash) < self.plan.val_share:
            self.report.moved += 1
        rows = self._rows[split]
        path = Path(self._work.name) / f"{split}-{len(rows)}"
        path.write_bytes(one.file)
        truth = make_truth(one.svg, one.width, one.height, one.figure.label, one.figure.metadata)
        columns = {PICTURE_HASH: one.picture_hash, CODE_HASH: one.code_hash}
        rows.append(NewRow(truth, [path], columns, origin=one.figure.where))

    def _reject(self, rejected: Rejected, *, is_bench: bool) -> None:
        self.report.of(rejected.figure.label, is_bench=is_bench).dropped[rejected.kind] += 1
        self._left_out.append(LeftOut(rejected.figure.where, f"{rejected.kind}: {rejected.reason}"))


def split_point(picture_hash: str) -> float:
    """Return the place of a figure in [0, 1); those below the share of validation are in validation."""
    return int(picture_hash[:8], 16) / 2**32


def _drawn_figures(plan: Plan, purpose: str) -> Iterator[SourceFigure]:
    for number in count():
        drawn = draw_figure(random.Random(hash64("figures", purpose, plan.seed, number)), plan.drawn_settings)
        page = PAGE.format(drawn.width, drawn.height) if plan.drawn_settings.simple else ""
        svg = drawn.svg.replace(">", f">{page}", 1)
        yield SourceFigure(DRAWN, f"{DRAWN} {purpose} {number}", svg, metadata=drawn.metadata)


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
