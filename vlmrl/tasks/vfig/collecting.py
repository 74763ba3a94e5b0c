"""Collection of figures from all sources: copies and leaks are taken out, and equal figures are in one split.

A figure's split follows from the hash of its picture alone. So several datasets that are prepared in the same way (one
for supervised, one for reinforcement learning) have the same figures in validation.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.store.provenance import usable_cores
from vlmrl.svg.parse import SvgLimits
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.dataset_assembly import is_few, leave_out
from vlmrl.tasks.own_prep import LeftOut, NewRow
from vlmrl.tasks.vfig.drawn.figure import draw_figure
from vlmrl.tasks.vfig.figure_sources import FigureSource, SourceFigure, WrongRow
from vlmrl.tasks.vfig.plan import Filters, Plan
from vlmrl.tasks.vfig.screening import DOUBTFUL, WRONG, Rejected, Screened, screen
from vlmrl.tasks.vfig.source_report import TEST, TRAIN, VALIDATION, FigureReport, SourceCounts
from vlmrl.tasks.vfig.truth import as_label, make_truth
from vlmrl.types import hash64
from vlmrl.untrusted import visible

TRAINED_SPLITS = (TRAIN, "start")
"""Splits of other datasets that are trained on; their other splits are held out."""
DRAWN = "synthetic"
"""Label of drawn figures."""
PAGE = '<rect width="{}" height="{}" fill="white" stroke="gray" stroke-width="4"/>'
"""Page of simple figures: without a frame, a tiny model cannot tell how far a shape is from the edge."""
PICTURE_HASH, CODE_HASH = "picture_hash", "code_hash"
BATCH = 64
SHOWN_WRONG = 5
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
        """Note the figures of another dataset. Raises: DataError for a folder that is no dataset of figures."""
        dataset = open_dataset(Data(path=str(folder)))
        for split in dataset.splits:
            hashes = self.trained if split in TRAINED_SPLITS else self.held_out
            name = f"{folder.name}@{split}"
            if split not in TRAINED_SPLITS:
                self.sets[name] = None
            for row in dataset.rows(split):
                own = [row.columns.get(PICTURE_HASH), row.columns.get(CODE_HASH)]
                if not all(isinstance(key, str) for key in own):
                    raise DataError(f"{folder} is no dataset of figures", hint="give one that `vlmrl prep` made")
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
            self._left_out.append(LeftOut(one.where, one.reason))
        if not is_few(len(wrong), total, self.plan.max_bad):
            raise _too_many(wrong, total, self.plan.max_bad)

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
        return VALIDATION if is_validation and not self._is_trained(one) else TRAIN

    def _is_trained(self, one: Screened) -> bool:
        return one.picture_hash in self.trained or one.code_hash in self.trained

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


def _too_many(wrong: Sequence[WrongRow], total: int, max_bad: float) -> DataError:
    lines = "".join(f"\n  {one.where}: {visible(one.reason)}" for one in wrong[:SHOWN_WRONG])
    more = f"\n  ... and {len(wrong) - SHOWN_WRONG:,} more" if len(wrong) > SHOWN_WRONG else ""
    return DataError(
        f"{len(wrong):,} of {total:,} rows cannot be read, more than --max-bad {max_bad:g}; nothing was written:"
        f"{lines}{more}",
        hint=f"mend the rows, give the folder of their images (--image-root), or {leave_out(len(wrong), total)}",
    )
