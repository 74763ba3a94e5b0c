"""Counts of what became of the figures of each source, for people and for dataset.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.data.doctor import Verdict
from vlmrl.tasks.vfig.screening import DOUBTFUL, FEW_BASIC

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
        return {
            "rows": self.rows,
            "kept": self.splits(),
            "dropped": dict(self.dropped.most_common()),
            "duplicates": self.duplicates,
            "leaks": self.leaks,
            "drawn": self.drawn,
            "doubtful": self.doubtful,
        }

    def note(self) -> tuple[Verdict, str]:
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

    def notes(self, held_out: Iterable[str]) -> Mapping[str, tuple[Verdict, str]]:
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
